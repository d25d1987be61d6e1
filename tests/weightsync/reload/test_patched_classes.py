"""What is patched on a class, or read off it, between two pushes is seen, though no object of the model changed."""

from __future__ import annotations

import pytest
import torch
from toys import MODES

from weightsync import Manifest, reload

both_modes = pytest.mark.parametrize("mode", MODES)


def parameter(*shape):
    return torch.nn.Parameter(torch.zeros(*shape), requires_grad=False)


def push(model, weights, mode):
    with reload(model, mode=mode, manifest=Manifest.from_tensors(weights.items())) as session:
        session.load_weights(weights.items())


def load(self, weights):
    for name, tensor in weights:
        self.get_parameter(name).data.copy_(tensor)


class Scaling:
    supports_direct_reload = True

    def __init__(self, factor):
        self.factor = factor

    def process_weights_after_loading(self, layer):
        layer.scaled = layer.w.data * self.factor


@both_modes
def test_a_quantisation_method_on_the_class(mode):
    class Layer(torch.nn.Module):
        quant_method = Scaling(2.0)

        def __init__(self):
            super().__init__()
            self.w, self.scaled = parameter(2), torch.zeros(2)

        load_weights = load

    model = Layer()
    for _ in range(3):
        push(model, {"w": torch.ones(2)}, mode)
        assert model.scaled.tolist() == [2.0, 2.0]
    Layer.quant_method = Scaling(10.0)
    push(model, {"w": torch.ones(2)}, mode)
    assert model.scaled.tolist() == [10.0, 10.0]


@both_modes
def test_a_loader_patched_on_the_class_or_on_its_base(mode):
    class Base(torch.nn.Module):
        load_weights = load

    class Model(Base):
        def __init__(self):
            super().__init__()
            self.w = parameter(2)

    model, weights = Model(), {"w": torch.tensor([1.0, 2.0])}
    for _ in range(3):
        push(model, weights, mode)
    Base.load_weights = lambda self, weights: load(self, [(name, tensor.flip(0)) for name, tensor in weights])
    push(model, weights, mode)
    assert model.w.tolist() == [2.0, 1.0]
    del Base.load_weights
    Model.load_weights = load
    push(model, weights, mode)
    assert model.w.tolist() == [1.0, 2.0]


@both_modes
def test_a_class_attribute_that_a_loader_reads(mode):
    class Model(torch.nn.Module):
        order = (0, 1)

        def __init__(self):
            super().__init__()
            self.w = parameter(2)

        def load_weights(self, weights):
            for _, tensor in weights:
                for place, index in enumerate(self.order):
                    self.w.data[place : place + 1].copy_(tensor[index : index + 1])

    model, weights = Model(), {"w": torch.tensor([1.0, 2.0])}
    for order, expected in (((0, 1), [1.0, 2.0]), ((1, 0), [2.0, 1.0]), ((0, 1), [1.0, 2.0])):
        Model.order = order
        push(model, weights, mode)
        push(model, weights, mode)
        assert model.w.tolist() == expected


@both_modes
def test_a_forward_patched_on_the_class_that_builds_a_cache(mode):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.cache = parameter(2), None

        load_weights = load

        def forward(self):
            return self.w * 2

    def with_cache(self):
        if self.cache is None:
            self.cache = self.w * 2
        return self.cache

    model = Model()
    push(model, {"w": torch.ones(2)}, mode)
    model()
    Model.forward = with_cache
    assert model().tolist() == [2.0, 2.0]
    push(model, {"w": torch.full((2,), 4.0)}, mode)
    assert model().tolist() == [8.0, 8.0]
