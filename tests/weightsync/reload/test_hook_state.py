"""Wherever a hook keeps state of its own, every reload finds it as the first load did.

A latch left set makes the hook do nothing; a tensor that a hook computes from its own value compounds. Both are tried
in every place that Python offers, for hooks of a module and of the model, in both modes, whole and in pieces.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hook_worlds import A, B, each_way, pushes_like_a_first_load
from torch import nn
from toys import MODES, HookedNet, Layer, Net, QuantMethod, cold, full, param, push, state_bytes, zeros


class Box:
    """An engine's helper object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class SlotBox:
    """The same without a dict."""

    __slots__ = ("done", "q")


@dataclasses.dataclass
class DataBox:
    done: bool = False
    names: set[str] = dataclasses.field(default_factory=set)


def once(holder: Any, is_set: Callable[[Any], bool], set_it: Callable[[Any], Any]) -> Callable[[Layer], None]:
    def hook(layer: Layer) -> None:
        if not is_set(holder):
            layer.w.data.mul_(2)
            set_it(holder)

    return hook


def latch_in_event() -> Net:
    layer = Layer(w=zeros(3))
    layer.quant_method = QuantMethod(once(threading.Event(), lambda e: e.is_set(), lambda e: e.set()))
    return Net(a=layer, b=Layer(w=zeros(3)))


def latch_in_attribute_event() -> Net:
    layer = Layer(lambda layer: once(layer.done, lambda e: e.is_set(), lambda e: e.set())(layer), w=zeros(3))
    layer.done = threading.Event()
    return Net(a=layer, b=Layer(w=zeros(3)))


def latch_in_function() -> Net:
    def hook(layer: Layer) -> None:
        if not getattr(hook, "done", False):
            layer.w.data.mul_(2)
            hook.done = True  # type: ignore[attr-defined]

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_default_argument() -> Net:
    def hook(layer: Layer, seen: list[int] = []) -> None:  # noqa: B006
        if not seen:
            layer.w.data.mul_(2)
            seen.append(1)

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_closed_over_dict() -> Net:
    hook = once({}, lambda d: d.get("done", False), lambda d: d.update(done=True))
    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_closed_over_list() -> Net:
    hook = once([False], lambda d: d[0], lambda d: d.__setitem__(0, True))
    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_partial() -> Net:
    def run(state: dict[str, bool], layer: Layer) -> None:
        once(state, lambda d: d["done"], lambda d: d.update(done=True))(layer)

    return Net(a=Layer(functools.partial(run, {"done": False}), w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_slots() -> Net:
    box = SlotBox()
    box.done = False
    layer = Layer(once(box, lambda x: x.done, lambda x: setattr(x, "done", True)), w=zeros(3))
    layer.box = box
    return Net(a=layer, b=Layer(w=zeros(3)))


def latch_in_nested_helpers() -> Net:
    box = Box(inner=Box(state=[{"done": None}]))
    layer = Layer(w=zeros(3))
    layer.box = box
    layer.quant_method = QuantMethod(
        once(box, lambda x: x.inner.state[0]["done"], lambda x: x.inner.state[0].update(done="yes"))
    )
    return Net(a=layer, b=Layer(w=zeros(3)))


def latch_in_namespace() -> Net:
    hook = once(types.SimpleNamespace(done=False), lambda x: x.done, lambda x: setattr(x, "done", True))
    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_dataclass() -> Net:
    hook = once(DataBox(), lambda x: x.done, lambda x: setattr(x, "done", True))
    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


class Shared:
    """One quantisation method for all layers, with a set of those that are done."""

    def __init__(self, box: Any) -> None:
        self.box = box

    def process_weights_after_loading(self, layer: Layer) -> None:
        if layer.name not in self.box:
            layer.w.data.mul_(2)
            self.box.add(layer.name)


def latch_in_a_shared_method(box: Any) -> Net:
    method = Shared(box)
    layers = {}
    for name in ("a", "b"):
        layers[name] = Layer(w=zeros(3))
        layers[name].name = name
        layers[name].quant_method = method
    return Net(**layers)


def latch_in_a_shared_set() -> Net:
    return latch_in_a_shared_method(set())


class Names(collections.UserDict):
    def add(self, name: str) -> None:
        self[name] = True


def latch_in_a_shared_user_dict() -> Net:
    return latch_in_a_shared_method(Names())


def latch_in_child() -> Net:
    layer = Layer(once_on("flags"), w=zeros(3))
    layer.flags = nn.Identity()
    layer.flags.done = False
    return Net(a=layer, b=Layer(w=zeros(3)))


def once_on(name: str) -> Callable[[Layer], None]:
    return lambda layer: once(getattr(layer, name), lambda x: x.done, lambda x: setattr(x, "done", True))(layer)


def latch_in_child_buffer() -> Net:
    layer = Layer(lambda layer: once(layer.flags, lambda x: x.done, lambda x: x.done.fill_(True))(layer), w=zeros(3))
    layer.flags = nn.Identity()
    layer.flags.register_buffer("done", torch.tensor(False))
    return Net(a=layer, b=Layer(w=zeros(3)))


def latch_in_parent() -> Net:
    model = Net(a=Layer(w=zeros(3)), b=Layer(w=zeros(3)))
    model.done = False
    model.a.quant_method = QuantMethod(once(model, lambda x: x.done, lambda x: setattr(x, "done", True)))
    return model


def latch_in_sibling() -> Net:
    b = Layer(w=zeros(3))
    b.done = False
    return Net(a=Layer(once(b, lambda x: x.done, lambda x: setattr(x, "done", True)), w=zeros(3)), b=b)


def latch_in_sibling_with_hook() -> Net:
    b = Layer(lambda layer: layer.w.data.add_(1), w=zeros(3))
    b.done = False
    return Net(a=Layer(once(b, lambda x: x.done, lambda x: setattr(x, "done", True)), w=zeros(3)), b=b)


def latch_in_added_module() -> Net:
    def hook(layer: Layer) -> None:
        if not hasattr(layer, "packed"):
            layer.w.data.mul_(2)
            layer.packed = Layer(p=layer.w.data + 1)
            layer.packed.p.weight_loader_numel = 0

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def latch_in_model_over_children() -> Net:
    def hook(model: Net) -> None:
        for child in (model.a, model.b):
            once(child, lambda x: x.done, lambda x: setattr(x, "done", True))(child)

    model = HookedNet(hook, a=Layer(w=zeros(3)), b=Layer(w=zeros(3)))
    model.a.done = model.b.done = False
    return model


def latch_in_model_dict() -> Net:
    def hook(model: Net) -> None:
        for name in ("a", "b"):
            if not model.done.get(name):
                getattr(model, name).w.data.mul_(2)
                model.done[name] = True

    model = HookedNet(hook, a=Layer(w=zeros(3)), b=Layer(w=zeros(3)))
    model.done = {}
    return model


_NOT_ALONE = ("latch_in_a_shared_method", "latch_in_copied")
LATCHED = [
    value for name, value in sorted(globals().items()) if name.startswith("latch_in_") and name not in _NOT_ALONE
]


@each_way
@pytest.mark.parametrize("make", LATCHED)
def test_a_latch_is_open_wherever_it_is(make: Callable[[], Net], mode: str, size: int) -> None:
    pushes_like_a_first_load(make, mode, size)


# Tensors that hooks compute from their own value


def doubled_in_list() -> Net:
    layer = Layer(lambda layer: layer.q[0].mul_(2), w=zeros(3))
    layer.q = [full(3, 3)]
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_list_anew() -> Net:
    layer = Layer(lambda layer: layer.q.__setitem__(0, layer.q[0] * 2), w=zeros(3))
    layer.q = [full(3, 3)]
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_dict() -> Net:
    layer = Layer(lambda layer: layer.q.update(k=layer.q["k"] * 2), w=zeros(3))
    layer.q = {"k": full(3, 3)}
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_tuple() -> Net:
    layer = Layer(lambda layer: setattr(layer, "q", (layer.q[0] * 2, 1)), w=zeros(3))
    layer.q = (full(3, 3), 1)
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_closure() -> Net:
    q = full(3, 3)

    def hook(layer: Layer) -> None:
        q.mul_(2)
        layer.t = q + layer.w.data

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def doubled_in_partial() -> Net:
    def run(q: torch.Tensor, layer: Layer) -> None:
        q.mul_(2)
        layer.t = q + layer.w.data

    return Net(a=Layer(functools.partial(run, full(3, 3)), w=zeros(3)), b=Layer(w=zeros(3)))


def doubled_in_parameter_list() -> Net:
    def hook(layer: Layer) -> None:
        layer.q[0].data.mul_(2)

    layer = Layer(hook, w=zeros(3))
    layer.q = nn.ParameterList([param(full(3, 3), weight_loader_numel=0)])
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_through_data() -> Net:
    def hook(layer: Layer) -> None:
        layer.q.data = layer.q.data * 2

    layer = Layer(hook, w=zeros(3), q=param(full(3, 3), weight_loader_numel=0))
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_buffer_through_data() -> Net:
    def hook(layer: Layer) -> None:
        layer.q.data = layer.q.data * 2

    layer = Layer(hook, w=zeros(3))
    layer.register_buffer("q", full(3, 3))
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_helper() -> Net:
    layer = Layer(lambda layer: layer.box.q.mul_(2), w=zeros(3))
    layer.box = Box(q=full(3, 3))
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_slots() -> Net:
    layer = Layer(lambda layer: setattr(layer.box, "q", layer.box.q * 2), w=zeros(3))
    layer.box = SlotBox()
    layer.box.q = full(3, 3)
    return Net(a=layer, b=Layer(w=zeros(3)))


def doubled_in_child_by_model(**more: Any) -> Net:
    model = HookedNet(lambda model: model.a.q.mul_(2), a=Layer(w=zeros(3), **more), b=Layer(w=zeros(3)))
    if not more:
        model.a.register_buffer("q", full(3, 3))
    return model


def doubled_child_parameter_by_model() -> Net:
    return doubled_in_child_by_model(q=param(full(3, 3), weight_loader_numel=0))


def doubled_sum_in_child_by_model() -> Net:
    def hook(model: Net) -> None:
        model.a.q = model.a.q * 2 + model.a.w.data

    model = HookedNet(hook, a=Layer(w=zeros(3)), b=Layer(w=zeros(3)))
    model.a.q = full(3, 3)
    return model


def negated_exp() -> Net:
    def hook(layer: Layer) -> None:
        layer.parts["A"] = -torch.exp(layer.parts["A"])

    layer = Layer(hook, w=zeros(3))
    layer.parts = {"A": torch.tensor([0.1, 0.2])}
    return Net(a=layer, b=Layer(w=zeros(3)))


class Doubling(Layer):
    """A layer whose own method is its hook, so that a copy of it is bound to the copy."""

    def process_weights_after_loading(self) -> None:
        self.q[0].mul_(2)
        if not self.box.done:
            self.w.data.mul_(3)
            self.box.done = True


def latch_in_copied() -> Net:
    layer = Doubling(w=zeros(3))
    layer.q, layer.box = [full(3, 3)], Box(done=False)
    return Net(a=layer, b=Layer(w=zeros(3)))


DOUBLED = [value for name, value in sorted(globals().items()) if name.startswith("doubled_") or name == "negated_exp"]


@each_way
@pytest.mark.parametrize("make", DOUBLED)
def test_a_tensor_does_not_compound_wherever_it_is(make: Callable[[], Net], mode: str, size: int) -> None:
    pushes_like_a_first_load(make, mode, size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [m for m in (*DOUBLED, *LATCHED) if not m.__name__.startswith("latch_in_model")])
def test_partial_pushes_of_a_hooked_module_are_like_a_first_load(make: Callable[[], Net], mode: str) -> None:
    """Sends all of `a`, twice in a row, then all of `b`; what was pushed together is as a first load leaves it."""
    model = cold(make(), A)
    for _ in range(2):
        push(model, {"a.w": B["a.w"]}, mode, scope="partial")
    push(model, {"b.w": B["b.w"]}, mode, scope="partial")
    assert state_bytes(model) == state_bytes(cold(make(), B))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [latch_in_copied, doubled_in_parameter_list])
def test_a_copy_of_a_model_keeps_its_record(make: Callable[[], Net], mode: str) -> None:
    model = cold(make(), A)
    copied = copy.deepcopy(model)
    for weights in (B, A, B):
        push(copied, weights, mode)
        assert state_bytes(copied) == state_bytes(cold(make(), weights))
    assert state_bytes(model) == state_bytes(cold(make(), A))
