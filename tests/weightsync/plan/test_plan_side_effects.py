"""A loader that also changes Python state of the model is run at push time: a replayed copy would not repeat that."""

import types

import numpy as np
import pytest
import torch
from planning_toys import assert_replays, plan_for, treatments, wire_tensor
from test_plan_cache import dry_runs  # noqa: F401  # a fixture
from test_plan_loaders import zeros
from torch import nn

WEIGHTS = [(name, wire_tensor((4, 2), seed=seed)) for seed, name in enumerate("abc")]


class Books(nn.Module):
    """Copies three weights; the loader of `b` does something else too."""

    def __init__(self, effect, order="lazy"):
        super().__init__()
        for name in "abc":
            self.register_parameter(name, nn.Parameter(zeros(4, 2), requires_grad=False))
        self.names, self.seen, self.flag, self.log = set(), {}, False, []
        self.space, self.array, self.raw = types.SimpleNamespace(n=0), np.zeros(2), bytearray(2)
        self.effect, self.order = effect, order

    def load_weights(self, weights):
        for name, tensor in sorted(weights) if self.order == "sorted" else weights:
            if name == "b" and self.order == "before":
                self.effect(self, self.b, tensor)
            getattr(self, name).data.copy_(tensor)
            if name == "b" and self.order != "before":
                self.effect(self, self.b, tensor)
        self.done = True


EFFECTS = {
    "names": lambda m, p, t: m.names.add("b"),
    "seen['b']": lambda m, p, t: m.seen.update(b=1),
    "flag": lambda m, p, t: setattr(m, "flag", True),
    "shape": lambda m, p, t: setattr(m, "shape", t.shape),
    "log": lambda m, p, t: m.log.append(1),
    "space": lambda m, p, t: setattr(m.space, "n", t.numel()),
    "array": lambda m, p, t: m.array.__setitem__(0, 1),
    "raw": lambda m, p, t: m.raw.__setitem__(0, 1),
    "attribute of the parameter": lambda m, p, t: setattr(p, "loaded", True),
}


@pytest.mark.parametrize("order", ["lazy", "before", "sorted"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_name_with_a_side_effect_is_interpreted(effect, order):
    plan = plan_for(Books(EFFECTS[effect], order), WEIGHTS)
    assert plan.names["b"].treatment == "opaque"
    assert plan.names["b"].reason.startswith("its loader also changes Python state of the model: ")
    if order != "sorted":
        assert treatments(plan) == {"a": "copy", "b": "opaque", "c": "copy"}
    assert_replays(lambda: Books(EFFECTS[effect], order), WEIGHTS)


def test_what_changes_is_named_by_its_path():
    model = nn.Sequential(Books(EFFECTS["space"]))
    model.load_weights = model[0].load_weights
    assert plan_for(model, WEIGHTS).names["b"].reason.endswith("model: 0.space")


def test_what_a_loader_does_after_the_last_weight_blames_no_name(dry_runs):  # noqa: F811
    plan = plan_for(Books(lambda m, p, t: None), WEIGHTS)
    assert set(treatments(plan).values()) == {"copy"}
    assert dry_runs == [1]


def test_books_that_are_told_separately_do_not_count():
    model = Books(EFFECTS["log"])
    model.weights_replayed = lambda calls: None
    assert set(treatments(plan_for(model, WEIGHTS)).values()) == {"copy"}


def test_each_of_many_names_is_blamed_for_its_own_parameter():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            for index in range(200):
                self.register_parameter(f"w{index}", nn.Parameter(zeros(1), requires_grad=False))

        def load_weights(self, weights):
            for name, tensor in weights:
                parameter = getattr(self, name)
                parameter.data.copy_(tensor)
                if int(name[1:]) % 2:
                    parameter.loaded = True

    plan = plan_for(Many(), [(f"w{index}", wire_tensor((1,), seed=index)) for index in range(200)])
    assert {name: how == "opaque" for name, how in treatments(plan).items()} == {
        f"w{index}": index % 2 == 1 for index in range(200)
    }


@pytest.mark.parametrize("write", ["array", "raw"])
def test_a_dry_run_leaves_no_trace_in_arrays(write):
    model = Books(EFFECTS[write])
    plan_for(model, WEIGHTS)
    assert (model.array.tolist(), bytes(model.raw)) == ([0.0, 0.0], b"\0\0")


def test_a_dry_run_puts_back_the_length_of_a_bytearray():
    model = Books(lambda m, p, t: m.raw.extend(b"xyz"))
    plan_for(model, WEIGHTS)
    assert bytes(model.raw) == b"\0\0"
    assert torch.equal(model.b, zeros(4, 2))
