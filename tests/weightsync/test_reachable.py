"""Every place that holds a tensor is found, can be written, and comes back after a run that went wrong."""

import collections
import functools
import types
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

from weightsync.errors import LayoutError
from weightsync.python_state import PythonState
from weightsync.reachable import python_state, replace, walk, walk_module


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    scale: torch.Tensor


class Slotted:
    __slots__ = ("__hidden", "table", "unset")

    def __init__(self, table):
        self.table = table
        self.__hidden = torch.full((1,), 17.0)


class Kernel:
    def __init__(self, owner):
        self.owner = owner  # a cycle back to the module
        self.scales = {"w13": torch.full((1,), 1.0), 3: [torch.full((1,), 2.0)]}


class Holder(nn.Module):
    """One tensor in every kind of place; the value says which."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 20.0))
        self.weight.master = torch.full((1,), 21.0)
        self.register_buffer("table", torch.full((1,), 22.0), persistent=False)
        self.kernel = Kernel(self)
        self.pair = Pair(torch.full((1,), 3.0), torch.full((1,), 4.0))
        self.nested = ([torch.full((1,), 5.0)], (torch.full((1,), 6.0), "text"))
        self.frozen = Frozen(torch.full((1,), 7.0))
        self.slotted = Slotted(torch.full((1,), 8.0))
        self.partial = functools.partial(torch.add, torch.full((1,), 9.0), other=torch.full((1,), 10.0))
        self.members = {torch.full((1,), 11.0)}
        self.frozen_members = frozenset([torch.full((1,), 12.0)])
        self.queue = collections.deque([torch.full((1,), 13.0)])
        self.space = types.SimpleNamespace(x=torch.full((1,), 14.0))
        cell = torch.full((1,), 15.0)
        self.closure = lambda x, y=torch.full((1,), 16.0): x + cell + y  # noqa: B008  # a default that holds a tensor is the case
        self.unregistered = [nn.Linear(1, 1, bias=False)]
        self.inner = nn.Linear(1, 1)


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Holder()
        self.all_modules = [self.first]  # reached first through an attribute of the root
        self.tied = nn.Linear(2, 1, bias=False)
        self.tied.weight = self.first.weight


EVERY_PATH = {
    "first.weight": 20, "first.weight.master": 21, "first.table": 22, "first.kernel.scales['w13']": 1,
    "first.kernel.scales[3][0]": 2, "first.pair[0]": 3, "first.pair[1]": 4, "first.nested[0][0]": 5,
    "first.nested[1][0]": 6, "first.frozen.scale": 7, "first.slotted.table": 8, "first.slotted._Slotted__hidden": 17,
    "first.partial.args[0]": 9, "first.partial.keywords['other']": 10, "first.members{0}": 11,
    "first.frozen_members{0}": 12, "first.queue[0]": 13, "first.space.x": 14, "first.closure.<cell>": 15,
    "first.closure.__defaults__[0]": 16, "tied.weight": 20,
}  # fmt: skip


def test_every_kind_of_place_is_found_under_its_own_path():
    model = Root()
    found = {slot.path: slot for slot in walk(model)}
    values = {path: slot.tensor.view(-1)[0].item() for path, slot in found.items() if path in EVERY_PATH}
    assert values == EVERY_PATH
    assert set(found) - set(EVERY_PATH) == {"first.unregistered[0].weight", "first.inner.weight", "first.inner.bias"}
    assert found["first.table"].kind == "buffer"
    assert found["first.weight"].kind == found["first.unregistered[0].weight"].kind == "parameter"
    assert found["first.kernel.scales['w13']"].kind == "attribute"
    assert found["first.kernel.scales['w13']"].module == "first"
    assert found["first.unregistered[0].weight"].module == "first.unregistered[0]"
    assert found["tied.weight"].tensor is found["first.weight"].tensor


def test_own_slots_leave_out_every_other_module():
    model = Root()
    paths = {slot.path for slot in walk_module(model.first, "first")}
    assert paths == {path for path in EVERY_PATH if path.startswith("first.")}


@pytest.mark.parametrize("path", sorted(EVERY_PATH))
def test_replace_reaches_every_place_and_no_other(path):
    model = Root()
    before = {slot.path: slot.tensor for slot in walk(model)}
    new = torch.full_like(before[path], 99.0)
    if path.endswith("weight"):
        new = nn.Parameter(new)
    replace(model, path, new)
    after = {slot.path: slot.tensor for slot in walk(model)}
    gone = {"first.weight.master"} if path == "first.weight" else set()
    if gone:  # hung on the old parameter
        before["tied.weight.master"] = before.pop("first.weight.master")
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] is not before[name]} == {path}
    assert after[path] is new


def test_closures_and_partials_see_the_replacement():
    model = Root()
    closure, partial = model.first.closure, model.first.partial
    replace(model, "first.closure.<cell>", torch.full((1,), 100.0))
    replace(model, "first.partial.args[0]", torch.full((1,), 50.0))
    assert closure(torch.zeros(1)).item() == 116.0
    assert partial().item() == 60.0


def test_what_cannot_be_replaced_is_an_error_with_the_path():
    model = Root()
    with pytest.raises(LayoutError, match=r"first\.nothing: no such place"):
        replace(model, "first.nothing", torch.zeros(1))
    with pytest.raises(LayoutError, match=r"first\.weight: a parameter can only be replaced by a parameter"):
        replace(model, "first.weight", torch.zeros(1))
    model.view = types.MappingProxyType({"a": torch.zeros(1)})
    with pytest.raises(LayoutError, match=r"view\['a'\]: a mappingproxy") as caught:
        replace(model, "view['a']", torch.zeros(1))
    assert caught.value.names == ("view['a']",)


def _everything(model):
    slots = walk(model)
    return [
        (s.path, id(s.tensor), s.tensor.data_ptr(), tuple(s.tensor.shape), tuple(s.tensor.view(-1).tolist()))
        for s in slots
    ]


def test_state_comes_back_into_the_same_objects():
    model = Root()
    holder = model.first
    before, keys = _everything(model), [list(vars(m)) for m in model.modules()]
    scales, partial, closure, registry = holder.kernel.scales, holder.partial, holder.closure, holder._parameters
    state = PythonState.capture(model)

    holder.weight.data = torch.zeros(3)
    holder.weight.requires_grad_(False)
    holder.weight.note = "left behind"
    del holder.weight.master
    holder.late = nn.Parameter(torch.zeros(1))
    holder.inner = nn.Identity()
    holder.kernel.scales = {}
    scales.clear()
    holder.kernel.count = 1
    holder.slotted.unset = 5
    holder.slotted.table = None
    object.__setattr__(holder.frozen, "scale", None)
    holder.nested[0].append(torch.zeros(1))
    holder.queue.clear()
    holder.members.clear()
    holder.partial.__setstate__((torch.sub, (), {}, {}))
    closure.__closure__[0].cell_contents = None
    closure.__defaults__ = ()
    del model.all_modules
    holder._buffers = {}
    model.training = False

    state.restore()
    assert _everything(model) == before
    assert [list(vars(m)) for m in model.modules()] == keys
    assert holder.kernel.scales is scales
    assert holder.partial is partial
    assert holder._parameters is registry
    assert holder.weight.requires_grad
    assert not hasattr(holder.weight, "note")
    assert not hasattr(holder.kernel, "count")
    assert not hasattr(holder.slotted, "unset")
    assert model.training
    assert model.all_modules == [holder]


def test_restore_writes_no_bytes():
    model = Root()
    state = PythonState.capture(model)
    with torch.no_grad():
        model.first.weight.fill_(-1.0)
    state.restore()
    assert model.first.weight.tolist() == [-1.0, -1.0]


def test_hooks_registered_meanwhile_are_gone_after_a_restore():
    model = Root()
    state = PythonState.capture(model)
    model.first.register_forward_hook(lambda *args: None)
    model.register_buffer("late", torch.zeros(1), persistent=False)
    state.restore()
    assert not model.first._forward_hooks
    assert not model._non_persistent_buffers_set


def test_a_tensor_can_be_swapped_after_a_walk_and_is_then_seen_anew():
    layer = nn.Linear(2, 2)
    walk(layer)
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(3, 2)))
    state = python_state(layer)
    assert [slot.tensor.shape for slot in walk(layer)] == [(3, 2), (2,)]
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(2, 2)))
    assert python_state(layer) is not state
