"""A plan is made anew when anything that a loader could branch on changes, and only then."""

import collections
import fractions
import functools
import pathlib
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from planning_toys import wire_tensor
from test_plan_cache import dry_runs  # noqa: F401  # a fixture
from test_plan_loaders import Toy, zeros
from torch import nn

from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload

MANIFEST = Manifest.from_tensors([("w", wire_tensor((4, 2)))])


@dataclass(slots=True)
class SlottedRank:
    rank: int = 0


class SlotsOnly:
    __slots__ = ("rank",)

    def __init__(self):
        self.rank = 0


class Callable:
    def __init__(self):
        self.rank = 0

    def __call__(self):
        return self.rank

    def method(self):
        return self.rank


def sets(name, old, new):
    return lambda m: setattr(m, name, old), lambda m: setattr(m, name, new)


def held(make, change):
    """Puts what `make` gives on the model, and changes it in place."""
    return lambda m: setattr(m, "x", make()), lambda m: change(m.x)


def closure(rank):
    def where():
        return rank

    return where


def objects(*items):
    array = np.empty(len(items), object)
    array[:] = items
    return array


CHANGES = {
    "attribute of a parameter": (lambda m: None, lambda m: setattr(m.w, "tp_rank", 1)),
    "changed attribute of a parameter": (lambda m: setattr(m.w, "r", 0), lambda m: setattr(m.w, "r", 1)),
    "loader of a parameter": (
        lambda m: setattr(m.w, "weight_loader", lambda p, t: p.data.copy_(t)),
        lambda m: setattr(m.w, "weight_loader", lambda p, t: (None, p.data.copy_(t))),
    ),
    "float": sets("x", 0.5, 1.5),
    "bool for an int": sets("x", 1, True),
    "numpy scalar": sets("x", np.int64(0), np.int64(1)),
    "fraction": sets("x", fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "range": sets("x", range(2), range(3)),
    "path": sets("x", pathlib.Path("a"), pathlib.Path("b")),
    "slots dataclass": held(SlottedRank, lambda x: setattr(x, "rank", 1)),
    "slots": held(SlotsOnly, lambda x: setattr(x, "rank", 1)),
    "deque": held(lambda: collections.deque([0, 1]), lambda x: x.rotate()),
    "ordered dict": held(lambda: collections.OrderedDict(a=0, b=1), lambda x: x.move_to_end("a")),
    "bytearray": held(lambda: bytearray(b"ab"), lambda x: x.reverse()),
    "array": held(lambda: np.arange(3), lambda x: x.__setitem__(0, 5)),
    "object array": held(lambda: objects(1, "a"), lambda x: x.__setitem__(0, 2)),
    "array in an object array": held(lambda: objects(np.zeros(1)), lambda x: x[0].fill(1)),
    "mapping proxy": sets("x", types.MappingProxyType({"a": 0}), types.MappingProxyType({"a": 1})),
    "argument of a partial": sets("x", functools.partial(max, 0), functools.partial(max, 1)),
    "keyword of a partial": held(lambda: functools.partial(max, key=0), lambda x: x.keywords.update(key=1)),
    "object with __call__": held(Callable, lambda x: setattr(x, "rank", 1)),
    "owner of a bound method": held(lambda: Callable().method, lambda x: setattr(x.__self__, "rank", 1)),
    "closure cell": held(lambda: closure(0), lambda x: setattr(x.__closure__[0], "cell_contents", 1)),
    "other closure": sets("x", closure(0), closure(1)),
    "code of a function": sets("x", lambda: 0, lambda: 1),
    "default of a function": held(lambda: lambda a=0: a, lambda x: setattr(x, "__defaults__", (1,))),
    "attribute of a function": held(lambda: closure(0), lambda x: setattr(x, "rank", 1)),
    "module in a list": held(lambda: [nn.Module()], lambda x: setattr(x[0], "rank", 1)),
    "training": (lambda m: m.train(), lambda m: m.eval()),
    "requires_grad": (lambda m: None, lambda m: m.w.requires_grad_(not m.w.requires_grad)),
    "shape of a plain tensor": sets("x", zeros(2), zeros(3)),
    "dtype of a plain tensor": sets("x", zeros(2), zeros(2).int()),
    "shape of a plain tensor in place": held(lambda: zeros(2), lambda x: setattr(x, "data", zeros(1, 2))),
    "class": sets("x", int, float),
    "module of Python": sets("x", types, functools),
    "slice": sets("x", slice(0, 1), slice(1, 2)),
    "dtype": sets("x", torch.int8, torch.uint8),
    "which object is shared": (
        lambda m: setattr(m, "x", [SlotsOnly(), SlotsOnly()]) or setattr(m, "y", m.x[0]),
        lambda m: setattr(m, "y", m.x[1]),
    ),
    "members of a set": held(lambda: {"a", "b"}, lambda x: x.add("c")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_loader_could_branch_on_makes_a_new_plan(what, dry_runs):  # noqa: F811
    prepare, change = CHANGES[what]
    model = Toy({"w": zeros(4, 2)})
    prepare(model)
    plan_reload(model, MANIFEST)
    plan_reload(model, MANIFEST)
    assert dry_runs == [1]
    change(model)
    plan_reload(model, MANIFEST)
    plan_reload(model, MANIFEST)
    assert dry_runs == [2]


def test_a_value_that_takes_the_place_of_a_freed_one_is_seen(dry_runs):  # noqa: F811
    model = Toy({"w": zeros(4, 2)})
    for count in range(6):
        model.x, model.y = float(f"{count}.5"), fractions.Fraction(count, 7)
        plan_reload(model, MANIFEST)
        assert dry_runs == [count + 1]


def test_what_is_no_difference_keeps_the_plan(dry_runs):  # noqa: F811
    model = Toy({"w": zeros(4, 2)})
    model.table, model.names, model.rank = zeros(3), {"a", "b"}, np.arange(3)
    model.helper = SlotsOnly()
    plan_reload(model, MANIFEST)
    model.table = zeros(3) + 1
    model.names, model.rank, model.helper = {"b", "a"}, np.arange(3), SlotsOnly()
    plan_reload(model, MANIFEST)
    assert dry_runs == [1]
