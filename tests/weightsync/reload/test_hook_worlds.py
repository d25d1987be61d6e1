"""A reload's hooks find the model as the first load's hooks found it, and leave what a first load leaves."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import MODES, Layer, Net, cold, full, param, push, push_in_chunks, state_bytes, zeros

from weightsync.errors import LayoutError, ReloadError

A = {"a.w": full(2, 3), "b.w": full(3, 3)}
B = {"a.w": full(5, 3), "b.w": full(7, 3)}


def pushes_like_a_first_load(make: Callable[[], nn.Module], mode: str, size: int, a: Any = A, b: Any = B) -> None:
    """Pushes b, a, b after a first load of a; each with a manifest (size 0) or `size` tensors per call without one."""
    model = make()
    cold(model, a)
    for weights in (b, a, b):
        if size:
            push_in_chunks(model, weights, mode, size)
        else:
            push(model, weights, mode)
        fresh = make()
        cold(fresh, weights)
        assert state_bytes(model) == state_bytes(fresh)


each_way = pytest.mark.parametrize(("mode", "size"), [(mode, size) for mode in MODES for size in (0, 1, 2)])


def remove(layer: Layer) -> None:
    layer.quant_method = None


def delete(layer: Layer) -> None:
    del layer.quant_method


class Idle:
    def process_weights_after_loading(self, layer: Layer) -> None:
        pass


def replace(layer: Layer) -> None:
    layer.quant_method = Idle()


@each_way
@pytest.mark.parametrize("end", [remove, delete, replace])
def test_a_hook_that_removes_itself_runs_in_every_reload(mode: str, size: int, end: Callable[[Layer], None]) -> None:
    def hook(layer: Layer) -> None:
        layer.w.data.mul_(2)
        end(layer)

    pushes_like_a_first_load(lambda: Net(a=Layer(hook=hook, w=zeros(3)), b=Layer(w=zeros(3))), mode, size)


class Once(nn.Module):
    """Puts an idle method in place of its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.w = param(zeros(3))

    def process_weights_after_loading(self) -> None:
        self.w.data.mul_(2)
        self.process_weights_after_loading = lambda: None  # type: ignore[method-assign]


@each_way
def test_a_method_that_replaces_itself_runs_in_every_reload(mode: str, size: int) -> None:
    pushes_like_a_first_load(lambda: Net(a=Once(), b=Layer(w=zeros(3))), mode, size)


class Attention(nn.Module):
    """Folds its child, and deletes the child's quantisation method."""

    def __init__(self) -> None:
        super().__init__()
        self.w = param(zeros(3))
        self.c = Layer(hook=lambda layer: layer.w.data.mul_(2), w=zeros(3))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.t = self.c.w.data * self.w.data
        self.c.quant_method = None


@each_way
def test_a_hook_that_its_parent_removes_runs_in_every_reload(mode: str, size: int) -> None:
    a, b = ({"a.w": full(x, 3), "a.c.w": full(x + 2, 3)} for x in (2, 5))
    pushes_like_a_first_load(lambda: Net(a=Attention()), mode, size, a, b)


def beside(hook: Callable[[Layer, Layer], None], other: Callable[[Layer], Any] | None = None) -> Net:
    """`a`, whose hook is given its neighbour `b` too."""
    b = Layer(hook=other, w=zeros(3))
    return Net(a=Layer(hook=lambda layer: hook(layer, b), w=zeros(3)), b=b)


def derive(layer: Layer, neighbour: Layer) -> None:
    layer.t = layer.w.data * neighbour.w.data


def fold(layer: Layer, neighbour: Layer) -> None:
    neighbour.w.data.mul_(layer.w.data)


@each_way
@pytest.mark.parametrize("hook", [derive, fold])
def test_a_hook_that_looks_at_its_neighbour_waits_for_it(mode: str, size: int, hook: Any) -> None:
    pushes_like_a_first_load(lambda: beside(hook), mode, size)


@each_way
def test_a_hook_that_looks_at_a_neighbour_sees_it_as_in_the_first_load(mode: str, size: int) -> None:
    pushes_like_a_first_load(lambda: beside(derive, lambda layer: layer.w.data.mul_(10)), mode, size)


@pytest.mark.parametrize("mode", MODES)
def test_a_neighbour_that_was_processed_too_early_is_an_error_once(mode: str) -> None:
    def make() -> Net:
        return beside(derive, lambda layer: layer.w.data.mul_(10))

    model = make()
    cold(model, A)
    backwards = dict(reversed(B.items()))
    with pytest.raises(ReloadError, match=r"looked into b, .* start again"):
        push(model, backwards, mode)
    push(model, backwards, mode)
    assert state_bytes(model) == state_bytes(cold(make(), B))


class Latch(nn.Module):
    """Doubles `w` once, which it remembers in `kept`; writes a log besides."""

    def __init__(self, kept: Any, is_set: Callable[[Any], bool], set_it: Callable[[Any], Any]) -> None:
        super().__init__()
        self.w = param(zeros(3))
        self.log: list[str] = []
        if isinstance(kept, torch.Tensor):
            self.register_buffer("kept", kept)
        else:
            self.kept = kept
        self.is_set, self.set_it = is_set, set_it

    def process_weights_after_loading(self) -> None:
        self.log.append("ran")
        self.t = self.w.data.clone()
        if not self.is_set(self):
            self.w.data.mul_(2)
            self.set_it(self)


LATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], bool], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.tensor(False), lambda m: bool(m.kept), lambda m: m.kept.fill_(True)),
    "count": (lambda: 0, lambda m: m.kept > 0, lambda m: setattr(m, "kept", m.kept + 1)),
    "list": (list, lambda m: bool(m.kept), lambda m: m.kept.append(1)),
    "deque": (collections.deque, lambda m: bool(m.kept), lambda m: m.kept.append(1)),
    "ordered dict": (collections.OrderedDict, lambda m: "k" in m.kept, lambda m: m.kept.update(k=1)),
    "default dict": (lambda: collections.defaultdict(int), lambda m: m.kept["k"], lambda m: m.kept.update(k=1)),
    "counter": (collections.Counter, lambda m: m.kept["k"], lambda m: m.kept.update("k")),
}


@each_way
@pytest.mark.parametrize("kind", LATCHES)
def test_a_latch_is_open_for_every_reload(mode: str, size: int, kind: str) -> None:
    kept, is_set, set_it = LATCHES[kind]
    pushes_like_a_first_load(lambda: Net(a=Latch(kept(), is_set, set_it), b=Layer(w=zeros(3))), mode, size)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["count", "tensor"])
def test_a_setting_that_the_engine_changed_is_not_taken_for_a_latch(mode: str, kind: str) -> None:
    def hook(layer: Layer) -> None:
        layer.t = layer.w.data * int(layer.factor)

    def factor(value: int) -> Any:
        return value if kind == "count" else torch.tensor(value)

    layer = Layer(hook=hook, w=zeros(3))
    layer.factor = factor(1)
    model = Net(a=layer, b=Layer(w=zeros(3)))
    cold(model, A)
    if kind == "count":
        layer.factor = 10
    else:
        layer.factor.fill_(10)
    for weights, expected in ((B, 50), (A, 20)):
        push(model, weights, mode)
        assert torch.equal(layer.t, full(expected, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_large_buffer_that_a_hook_scales_is_refused_as_its_start_was_not_kept(mode: str) -> None:
    layer = Layer(hook=lambda layer: layer.rope.mul_(2), w=zeros(3))
    layer.register_buffer("rope", torch.arange(20000.0) + 1)
    model = Net(a=layer, b=Layer(w=zeros(3)))
    cold(model, A)
    with pytest.raises(LayoutError, match=r"a\.rope: a post-load hook computes it from its own value"):
        push(model, B, mode)


@each_way
def test_a_latch_in_a_closure_is_open_for_every_reload(mode: str, size: int) -> None:
    def make() -> Net:
        done = False

        def hook(layer: Layer) -> None:
            nonlocal done
            if not done:
                layer.w.data.mul_(2)
                done = True

        return Net(a=Layer(hook=hook, w=zeros(3)), b=Layer(w=zeros(3)))

    pushes_like_a_first_load(make, mode, size)


class Counted(Layer):
    """Counts its runs from the first on, doubles, and fails when told to."""

    fails = False

    def process_weights_after_loading(self) -> None:
        self.num_runs = getattr(self, "num_runs", 0) + 1
        self.w.data.mul_(2)
        if self.fails:
            raise RuntimeError("told to fail")


@pytest.mark.parametrize("mode", MODES)
def test_a_count_goes_on_and_a_flag_that_is_set_later_is_heeded(mode: str) -> None:
    model = cold(Net(a=Counted(w=zeros(3)), b=Layer(w=zeros(3))), A)
    assert model.a.num_runs == 1
    push(model, B, mode)
    assert model.a.num_runs == 2
    model.a.fails = True
    with pytest.raises(RuntimeError, match="told to fail"):
        push(model, A, mode, rollback="host")
    assert (model.a.num_runs, model.a.w.tolist()) == (2, [10, 10, 10])
    model.a.fails = False
    push(model, A, mode)
    assert (model.a.num_runs, model.a.w.tolist()) == (3, [4, 4, 4])


@pytest.mark.parametrize("mode", MODES)
def test_a_log_that_hooks_share_is_told_of_each_run_and_makes_none_wait(mode: str) -> None:
    runs: list[str] = []

    def make() -> Net:
        def hook(layer: Layer) -> None:
            runs.append("ran")
            layer.w.data.mul_(2)

        return Net(**{f"l{index}": Layer(hook, w=zeros(64)) for index in range(6)})

    weights = {f"l{index}.w": full(index + 1, 64) for index in range(6)}
    model = cold(make(), weights)
    for num_pushes in (1, 2, 3):
        report = push(model, weights, mode)
        assert len(runs) == 6 * (num_pushes + 1)
        assert report.peak_staged_bytes == 64 * 4
    assert state_bytes(model) == state_bytes(cold(make(), weights))
