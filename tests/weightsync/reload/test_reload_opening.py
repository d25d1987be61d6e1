"""A reload that cannot be opened leaves the model exactly as it was, and a later one opens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from toys import MODES, Layer, Net, cold, full, push, push_in_chunks, zeros

from weightsync.errors import ReloadError
from weightsync.reload import transaction
from weightsync.reload.hooks.post_load import HOOK, HookGuards
from weightsync.reload.session import reload_state, start_reload

A = {"a.w": full(2, 3), "b.w": full(3, 3)}
B = {"a.w": full(5, 3), "b.w": full(7, 3)}


def doubled() -> Net:
    model = Net(a=Layer(hook=lambda layer: layer.w.data.mul_(2), w=zeros(3)), b=Layer(w=zeros(3)))
    cold(model, A)
    model.forward = lambda: model.a.w.clone()
    return model


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["close_gate", "enter"])
def test_an_interrupt_while_opening_is_undone(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    model = doubled()
    with monkeypatch.context() as patch:
        if where == "close_gate":
            real = transaction.close_gate
            patch.setattr(transaction, "close_gate", lambda *models: (real(*models), interrupt()))
        else:
            enter = HookGuards.__enter__
            patch.setattr(HookGuards, "__enter__", lambda self: (enter(self), interrupt()))
        with pytest.raises(KeyboardInterrupt):
            start_reload(model)
    assert reload_state(model) == "live"
    assert HOOK not in vars(model.a.quant_method)
    assert torch.equal(model(), full(4, 3))
    push(model, B, "direct")
    assert torch.equal(model(), full(10, 3))


class Slotted:
    """A quantisation method that takes no further attribute."""

    __slots__ = ()

    def process_weights_after_loading(self, layer: Layer) -> None:
        layer.w.data.mul_(2)


def test_a_hook_owner_that_takes_no_attribute_is_refused_and_nothing_stays_behind() -> None:
    model = Net(a=Layer(hook=lambda layer: layer.w.data.mul_(2), w=zeros(3)), b=Layer(w=zeros(3)))
    cold(model, A)
    model.b.quant_method = Slotted()
    model.forward = lambda: model.a.w.clone()
    with pytest.raises(ReloadError, match=r"b\.quant_method.*takes no attribute"):
        start_reload(model)
    assert HOOK not in vars(model.a.quant_method)
    assert torch.equal(model(), full(4, 3))
    del model.b.quant_method
    push(model, B, "direct")
    assert torch.equal(model(), full(10, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_that_is_an_instance_attribute_is_there_again_afterwards(mode: str) -> None:
    def hook() -> None:
        layer.w.data.mul_(2)

    layer = Layer(w=zeros(3))
    vars(layer)[HOOK] = hook
    model = Net(a=layer, b=Layer(w=zeros(3)))
    cold(model, A)
    for _ in range(2):
        push(model, B, mode)
        assert vars(layer)[HOOK] is hook
        assert torch.equal(layer.w, full(10, 3))


def with_buffer(hook: Callable[[Layer], object] | None) -> Net:
    layer = Layer(hook=hook, w=zeros(3))
    layer.register_buffer("s", zeros(3))
    return Net(a=layer, b=Layer(w=zeros(3)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hook", [None, lambda layer: layer.w.data.mul_(2) + layer.s.mul_(3)])
def test_a_buffer_that_comes_after_its_module_is_staged_is_loaded(mode: str, hook: Callable[..., object]) -> None:
    model = with_buffer(hook)
    cold(model, {**A, "a.s": full(1, 3)})
    push_in_chunks(model, {**B, "a.s": full(9, 3)}, mode, 1)
    assert torch.equal(model.a.w, full(10 if hook else 5, 3))
    assert torch.equal(model.a.s, full(27 if hook else 9, 3))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 2])
def test_what_a_loader_computes_after_its_loop_is_complete(mode: str, chunk: int) -> None:
    class PostLoop(Net):
        def load_weights(self, weights: object) -> set[str]:
            loaded = super().load_weights(weights)
            self.neg = self.b.w.data - self.a.w.data
            return loaded

    model = PostLoop(a=Layer(w=zeros(3)), b=Layer(w=zeros(3)))
    cold(model, A)
    push_in_chunks(model, B, mode, chunk)
    assert torch.equal(model.neg, full(2, 3))


def test_models_that_share_a_module_are_reloaded_one_after_the_other() -> None:
    shared = Layer(w=zeros(3))
    first, second = (Net(a=shared, b=Layer(w=zeros(3))) for _ in range(2))
    session = start_reload(first)
    with pytest.raises(ReloadError, match="a belong to another model too"):
        start_reload(second)
    session.abort()
    push(second, B, "direct")
    assert torch.equal(shared.w, full(5, 3))
    push(first, A, "direct")
    assert torch.equal(shared.w, full(2, 3))
