"""Whose a value is, where one look at a reload does not tell."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hook_worlds import A, B
from toys import MODES, Layer, Net, QuantMethod, cold, full, push, state_bytes, zeros

from weightsync import ReloadError, start_reload

both_modes = pytest.mark.parametrize("mode", MODES)


def net(hook: Callable[[Any], None], **attributes: Any) -> Net:
    layer = Layer(hook, w=zeros(3))
    for name, value in attributes.items():
        setattr(layer, name, value)
    return Net(a=layer, b=Layer(w=zeros(3)))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a.w": full(value, 3), "b.w": full(1, 3)}


@both_modes
def test_a_hooks_own_error_is_an_error_and_no_verdict_on_its_latch(mode: str) -> None:
    def hook(layer: Layer) -> None:
        if layer.done:
            return
        if bool((layer.w.data < 0).any()):
            raise ValueError("negative")
        layer.w.data.mul_(2)
        layer.done = True

    model = cold(net(hook, done=False), A)
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            push(model, weights(-1), mode, rollback="host")
        for value in (5, 2):
            push(model, weights(value), mode)
            assert model.a.w.tolist() == [2 * value] * 3


@both_modes
def test_models_that_share_a_quantisation_method_are_reloaded_one_after_the_other(mode: str) -> None:
    method = QuantMethod(lambda layer: layer.w.data.mul_(2))
    first, second = (net(lambda layer: None) for _ in range(2))
    first.a.quant_method = second.a.quant_method = method
    cold(first, A)
    cold(second, A)
    session = start_reload(first, mode=mode)
    with pytest.raises(ReloadError, match="a.quant_method.* shared with another model.* finish or abort"):
        start_reload(second, mode=mode)
    session.load_weights(B.items())
    session.finish()
    push(second, B, mode)
    assert first.a.w.tolist() == second.a.w.tolist() == [10, 10, 10]
    assert "process_weights_after_loading" not in vars(method)


@dataclasses.dataclass
class Config:
    size: int = 1


@both_modes
def test_types_are_what_they_were_while_hooks_run(mode: str) -> None:
    reference, seen = Config(), []

    class Own(Layer):
        runs = 0

        def process_weights_after_loading(self) -> None:
            seen.append((type(self) is Own, self.config == reference, "__setattr__" in vars(type(self.config))))
            type(self).runs += 1
            self.config.size = 1
            self.w.data.mul_(2)

    model = Net(a=Own(w=zeros(3)), b=Layer(w=zeros(3)))
    model.a.config = Config()
    cold(model, A)
    for _ in range(2):
        push(model, B, mode)
    assert {row[:2] for row in seen} == {(True, True)}
    assert Own.runs == len(seen)
    assert "__setattr__" not in vars(Own)
    assert "__setattr__" not in vars(Config)


@both_modes
@pytest.mark.parametrize("place", ["attribute", "closure"])
def test_a_first_push_that_shows_nothing_is_no_verdict(mode: str, place: str) -> None:
    state = {"runs": 0}

    def hook(layer: Layer) -> None:
        if place == "closure":
            if state["runs"] == 0:
                layer.w.data.mul_(2)
            state["runs"] += 1
        else:
            if layer.runs == 0:
                layer.w.data.mul_(2)
            layer.runs += 1

    model = cold(net(hook, runs=0), A)
    for value in (0, 5, 2):  # doubled zeros are zeros
        push(model, weights(value), mode)
        assert model.a.w.tolist() == [2 * value] * 3


@both_modes
@pytest.mark.parametrize("values", [(5, 2, 5, 2), (2, 5, 2, 5)])
def test_what_a_hook_sets_for_some_weights_alone_does_not_stay_for_others(mode: str, values: tuple[int, ...]) -> None:
    def hook(layer: Layer) -> None:
        if float(layer.w.data.max()) > 4:
            layer.big = True
        layer.t = layer.w.data * (2 if layer.big else 1)

    def make() -> Net:
        return net(hook, big=False)

    model = cold(make(), weights(values[0]))
    for value in values[1:]:
        push(model, weights(value), mode)
        fresh = cold(make(), weights(value))
        assert model.a.big == fresh.a.big
        assert state_bytes(model) == state_bytes(fresh)


class Kind(enum.Enum):
    PLAIN = 1
    TIMES_TEN = 10


@both_modes
@pytest.mark.parametrize(
    ("old", "new"), [(Kind.PLAIN, Kind.TIMES_TEN), (frozenset({1}), frozenset({10})), (False, True), (None, 10.0)]
)
def test_what_an_engine_sets_after_the_first_load_is_heeded(mode: str, old: Any, new: Any) -> None:
    def hook(layer: Layer) -> None:
        layer.t = layer.w.data * (10 if layer.kind == new else 1)

    model = cold(net(hook, kind=old), A)
    push(model, A, mode)
    model.a.kind = new
    for value in (5, 2):
        push(model, weights(value), mode)
        assert model.a.t.tolist() == [10 * value] * 3
        assert model.a.kind == new


@both_modes
def test_a_tensor_processed_for_some_weights_alone_never_compounds_in_silence(mode: str) -> None:
    def hook(layer: Layer) -> None:
        if float(layer.w.data.max()) > 4:
            layer.scale.mul_(2)
        layer.t = layer.w.data * 1

    model = cold(net(hook, scale=full(1, 2)), weights(5))
    push(model, weights(2), mode)
    try:
        push(model, weights(5), mode)
    except ReloadError:
        push(model, weights(5), mode)  # known now
    assert model.a.scale.tolist() == [2, 2]
