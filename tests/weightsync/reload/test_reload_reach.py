"""Attributes of loaders, tied and read siblings in partial pushes, compiled submodules, hooks that hook and tie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_hook_worlds import A, B
from toys import MODES, Captured, HookedNet, Layer, Net, cold, full, param, push, state_bytes, zeros

from weightsync import Manifest, record_layouts, reload

both_modes = pytest.mark.parametrize("mode", MODES)


@both_modes
def test_what_a_loader_notes_on_a_parameter_reaches_the_live_one(mode: str) -> None:
    def loader(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        parameter.data.copy_(loaded)
        parameter.amax = float(loaded.abs().max())  # type: ignore[attr-defined]

    def make() -> Net:
        return Net(a=Layer(lambda layer: layer.w.data.mul_(2), w=param(zeros(3), weight_loader=loader)))

    model = cold(make(), {"a.w": full(2, 3)})
    assert model.a.w.amax == 2
    live = model.a.w
    for value in (5, 3, 3):
        push(model, {"a.w": full(value, 3)}, mode)
        assert model.a.w is live
        assert (model.a.w.amax, model.a.w.tolist()) == (value, [2 * value] * 3)


@both_modes
def test_what_a_hook_notes_on_a_parameter_reaches_the_live_one(mode: str) -> None:
    def hook(layer: Layer) -> None:
        layer.w.amax = float(layer.w.data.max())
        layer.w.data.mul_(2)

    model = cold(Net(a=Layer(hook, w=zeros(3))), {"a.w": full(2, 3)})
    for value in (5, 3, 3):
        push(model, {"a.w": full(value, 3)}, mode)
        assert (model.a.w.amax, model.a.w.tolist()) == (value, [2 * value] * 3)


@both_modes
def test_a_partial_push_runs_the_hook_of_a_tied_parameters_other_module(mode: str) -> None:
    def make() -> Net:
        head = Layer(lambda layer: setattr(layer, "t", layer.w.data.t() * 2), w=zeros(2, 3))
        model = Net(embed=Layer(w=zeros(2, 3)), head=head, c=Layer(w=zeros(3)))
        model.head.w = model.embed.w
        return model

    a, b = ({"embed.w": full(x, 2, 3), "c.w": full(x, 3)} for x in (1, 5))
    model = cold(make(), a)
    graph = Captured(model)
    push(model, {"embed.w": b["embed.w"]}, mode, scope="partial")
    push(model, {"c.w": b["c.w"]}, mode, scope="partial")
    graph.check(model)
    assert state_bytes(model) == state_bytes(cold(make(), b))


@both_modes
def test_a_partial_push_runs_a_hook_that_reads_a_sibling(mode: str) -> None:
    def make() -> Net:
        b = Layer(w=zeros(3))
        return Net(a=Layer(lambda layer: setattr(layer, "t", layer.w.data * b.w.data), w=zeros(3)), b=b)

    model = cold(make(), A)
    push(model, A, mode)  # shows what the hook reads
    push(model, {"b.w": B["b.w"]}, mode, scope="partial")
    push(model, {"a.w": B["a.w"]}, mode, scope="partial")
    assert state_bytes(model) == state_bytes(cold(make(), B))


@both_modes
@pytest.mark.parametrize("when", ["before recording", "after the first load"])
def test_a_compiled_submodule_with_a_hook_is_reloaded(mode: str, when: str) -> None:
    def make() -> Net:
        return Net(a=Layer(lambda layer: layer.w.data.mul_(2), w=zeros(3)), b=Layer(w=zeros(3)))

    names = {"a._orig_mod.w": "a.w", "b.w": "b.w"}

    def prefixed(weights: Any) -> Any:
        return {name: weights[plain] for name, plain in names.items()}

    model = make()
    if when == "before recording":
        model.a = torch.compile(model.a)
        cold(model, prefixed(A))
    else:
        cold(model, A)
        model.a = torch.compile(model.a)
    for weights in (B, A, B):
        push(model, prefixed(weights), mode)
        assert model.a._orig_mod.w.tolist() == (weights["a.w"] * 2).tolist()
        assert model.b.w.tolist() == weights["b.w"].tolist()


class OwnHook(Layer):
    def process_weights_after_loading(self) -> None:
        self.w.data.mul_(2)


@both_modes
def test_a_compiled_submodule_whose_own_method_is_a_hook_is_reloaded(mode: str) -> None:
    model = Net(a=OwnHook(w=zeros(3)), b=Layer(w=zeros(3)))
    cold(model, A)
    model.a = torch.compile(model.a)
    for weights in (B, A, B):
        report = push(model, {"a._orig_mod.w": weights["a.w"], "b.w": weights["b.w"]}, mode)
        assert report.hooks == ["a._orig_mod.process_weights_after_loading"]
        assert model.a._orig_mod.w.tolist() == (weights["a.w"] * 2).tolist()


@both_modes
def test_a_hook_that_ties_parameters_leaves_them_tied(mode: str) -> None:
    def hook(model: Net) -> None:
        model.head.w = model.embed.w

    def make() -> HookedNet:
        return HookedNet(hook, embed=Layer(w=zeros(3)), head=Layer(w=param(zeros(3), weight_loader_numel=0)))

    model = cold(make(), {"embed.w": full(2, 3)})
    assert model.head.w is model.embed.w
    for value in (5, 3):
        push(model, {"embed.w": full(value, 3)}, mode)
        assert model.head.w is model.embed.w
        assert model.head.w.tolist() == [value] * 3


@both_modes
def test_a_source_that_aliases_live_memory_is_an_identity_push(mode: str) -> None:
    def make() -> Net:
        return Net(a=Layer(lambda layer: setattr(layer, "t", layer.w.data + 1), w=zeros(2, 2)), b=Layer(w=zeros(3)))

    model = cold(make(), {"a.w": full(2, 2, 2), "b.w": full(3, 3)})
    before = state_bytes(model)
    push(model, {"a.w": model.a.w.data, "b.w": model.b.w.data}, mode)
    assert state_bytes(model) == before


class ScaledLayer(torch.nn.Module):
    """As attention layers keep a scale: a number for the kernel's caller and a tensor on the host, set by one hook."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.scale_number = 1.0
        self.scale_host = torch.ones(())

    def process_weights_after_loading(self):
        self.scale_number = float(self.weight[0])
        self.scale_host.mul_(self.weight[0])


class PlainLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)

    def process_weights_after_loading(self):
        self.weight.data = self.weight.data * 2


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.scaled = PlainLayer(), ScaledLayer()

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)

    def run_hooks(self):
        self.plain.process_weights_after_loading()
        self.scaled.process_weights_after_loading()


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_a_number_and_a_tensor_that_one_hook_sets_make_no_other_hook_wait(mode):
    def checkpoint(value):
        return {"plain.weight": torch.full((2,), value), "scaled.weight": torch.full((2,), value + 1)}

    model = TwoLayers()
    record_layouts(model)
    model.load_weights(checkpoint(0.0).items())  # the scales come out as they were constructed
    model.run_hooks()
    for value in (1.0, 0.0, 3.0, 0.0):
        with reload(model, mode=mode, manifest=Manifest.from_tensors(checkpoint(value).items())) as session:
            for pair in checkpoint(value).items():
                session.load_weights([pair])
        assert model.plain.weight.tolist() == [2 * value, 2 * value]
        assert (model.scaled.scale_number, model.scaled.scale_host.item()) == (value + 1, value + 1)
