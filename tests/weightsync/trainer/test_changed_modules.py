"""A trainer whose module changes between pushes: what is pushed is what the module holds now, never what it held."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync import ManifestError, Receiver, TensorSource, TrainerClient
from weightsync.errors import CoverageError
from weightsync.trainer.sources import ModuleSource

TRANSPORTS = ("memory", "shared_memory", "gloo")


class Net(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.fc, self.out = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=bias)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def wire(module):
    return {name: tensor.clone() for name, tensor in ModuleSource(module).iter_full()}


def same(engine, trainer):
    return all(torch.equal(engine.get_parameter(name), tensor) for name, tensor in wire(trainer).items())


def replace_child(net):
    net.fc = nn.Linear(2, 2, bias=False)


def replace_twice(net):
    for _ in range(20):  # old modules are freed, and their identities used again
        net.fc = nn.Linear(2, 2, bias=False)


def replace_table(net):
    net.fc._parameters = {"weight": nn.Parameter(torch.full((2, 2), 7.0))}


def replace_parameter(net):
    net.fc.weight = nn.Parameter(torch.full((2, 2), 8.0))


def replace_data(net):
    net.fc.weight.data = torch.full((2, 2), 9.0)


CHANGES = (replace_child, replace_twice, replace_table, replace_parameter, replace_data)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_new_modules_tables_parameters_and_data_arrive(change, transport):
    trainer, engine = Net(), Net()
    with TrainerClient(trainer, Receiver(engine), transport=transport, deadline_seconds=30) as client:
        for _ in range(3):
            client.push()
            assert same(engine, trainer)
            change(trainer)
        client.push()
        assert same(engine, trainer)


def wrap(net):
    net.fc = nn.Sequential(net.fc)


def remove(net):
    del net.fc


def add(net):
    net.new = nn.Linear(2, 2)


def give_a_bias(net):
    net.out.bias = nn.Parameter(torch.ones(2))


def rename(net):
    net.fc._parameters["other"] = net.fc._parameters.pop("weight")


def tie(net):
    net.out.weight = net.fc.weight


@pytest.mark.parametrize("change", [wrap, remove, add, give_a_bias, rename, tie], ids=lambda change: change.__name__)
def test_other_names_are_told_and_an_engine_without_them_refuses(change):
    trainer, engine = Net(), Net()
    with TrainerClient(trainer, Receiver(engine), transport="memory") as client:
        client.push()
        client.push()
        before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        change(trainer)
        assert set(wire(trainer)) == {row.name for row in client._sources["model"].metadata}
        with torch.no_grad():
            for tensor in trainer.parameters():
                tensor.add_(1)
        with pytest.raises(CoverageError):
            client.push()
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())


def test_what_was_tied_and_is_not_any_more_travels_under_both_names():
    trainer, engine = Net(), Net()
    trainer.out.weight, engine.out.weight = trainer.fc.weight, engine.fc.weight
    with TrainerClient(trainer, Receiver(engine), transport="memory") as client:
        client.push()
        trainer.out.weight = nn.Parameter(torch.full((2, 2), 5.0))
        engine.out.weight = nn.Parameter(torch.zeros(2, 2))
        client.push()
    assert same(engine, trainer)
    assert engine.out.weight.unique().tolist() == [5.0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_negated_view_arrives_with_its_values(transport):
    engine = Net()
    values = {"fc.weight": torch.ones(2, 2), "out.weight": torch.full((2, 2), 3.0)}
    with TrainerClient(TensorSource(values), Receiver(engine), transport=transport, deadline_seconds=30) as client:
        client.push()
        client.push()
        values["fc.weight"] = torch._neg_view(torch.ones(2, 2))
        client.push()
        assert engine.fc.weight.unique().tolist() == [-1.0]
        assert engine.out.weight.unique().tolist() == [3.0]
        values["fc.weight"] = torch.full((2, 2), 4.0)
        client.push()
    assert engine.fc.weight.unique().tolist() == [4.0]


@pytest.mark.parametrize("value", [None, [1.0], 3])
def test_what_is_no_tensor_is_named(value):
    with pytest.raises(ManifestError, match=rf"out.weight is a {type(value).__name__}"):
        _ = TensorSource({"fc.weight": torch.ones(2, 2), "out.weight": value}).metadata
