"""What the first load's hooks changed is theirs in every reload, of whatever kind and wherever; all else is live."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_hook_worlds import A, B
from toys import MODES, Layer, Net, QuantMethod, cold, full, param, push, state_bytes, zeros

from weightsync import record_layouts
from weightsync.reload.state import state_of

both_modes = pytest.mark.parametrize("mode", MODES)
orders = pytest.mark.parametrize("order", [list, reversed], ids=["in_order", "backwards"])


def like_a_cold_load(make: Callable[[], Net], mode: str, a: Any = A, b: Any = B, order: Any = list) -> None:
    """Pushes a, b, a, b after a first load of a; each time all is as a first load of the same weights leaves it."""
    model = cold(make(), a)
    for weights in (a, b, a, b):
        push(model, dict(order(list(weights.items()))), mode)
        assert state_bytes(model) == state_bytes(cold(make(), weights))


def latch_tensor_of_several_elements() -> Net:
    def hook(layer: Layer) -> None:
        if not layer.done.any():
            layer.w.data.mul_(2)
            layer.done.copy_(torch.ones(2))

    layer = Layer(hook, w=zeros(3))
    layer.register_buffer("done", zeros(2))
    return Net(a=layer, b=Layer(w=zeros(3)))


def latch_tensor_in_a_closure() -> Net:
    done = zeros(2)

    def hook(layer: Layer) -> None:
        if not done.any():
            layer.w.data.mul_(2)
            done.data.fill_(1)

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def closure(start: Any, end: Callable[[], Any]) -> Net:
    state = start

    def hook(layer: Layer) -> None:
        nonlocal state
        if state is start or state == start:
            layer.w.data.mul_(2)
        state = end()

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def object_in_a_closure() -> Net:
    return closure(None, object)


def tuple_in_a_closure() -> Net:
    return closure((), lambda: (1, "done"))


def tuple_instead_of_none_in_a_closure() -> Net:
    return closure(None, lambda: (1, "done"))


def packed_tensors_in_a_closure() -> Net:
    packed = None

    def hook(layer: Layer) -> None:
        nonlocal packed
        if packed is None:
            packed = (layer.w.data * 2, layer.w.data + 1)

    return Net(a=Layer(hook, w=zeros(3)), b=Layer(w=zeros(3)))


def work_list_in_a_closure() -> Net:
    pending = ["a", "b"]

    def hook(layer: Layer) -> None:
        if layer.name in pending:
            layer.w.data.mul_(2)
            pending.remove(layer.name)

    model = Net(a=Layer(hook, w=zeros(3)), b=Layer(hook, w=zeros(3)))
    model.a.name, model.b.name = "a", "b"
    return model


def work_set_that_loaders_fill() -> Net:
    class Method:
        def __init__(self) -> None:
            self.pending: Any = None

        def process_weights_after_loading(self, layer: Layer) -> None:
            layer.w.data.mul_(2 if self.pending == "raw" else 1)
            self.pending = "done"

    layer = Layer(w=zeros(3))
    layer.quant_method = Method()

    class Loading(Net):
        def load_weights(self, weights: Any) -> set[str]:
            if layer.quant_method.pending is None:
                layer.quant_method.pending = "raw"
            return super().load_weights(weights)

    return Loading(a=layer, b=Layer(w=zeros(3)))


class Countdown:
    """Does its work once the last layer is there."""

    def __init__(self, layers: dict[str, Layer]) -> None:
        self.left = len(layers)
        self.layers = layers

    def process_weights_after_loading(self, layer: Layer) -> None:
        self.left -= 1
        if self.left == 0:
            for each in self.layers.values():
                each.w.data.mul_(2)


def count_down_together() -> Net:
    layers = {name: Layer(w=zeros(3)) for name in ("a", "b")}
    method = Countdown(layers)
    for layer in layers.values():
        layer.quant_method = method
    return Net(**layers)


def count_down_in_a_closure() -> Net:
    left, layers = 2, []

    def hook(layer: Layer) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            for each in layers:
                each.w.data.mul_(2)

    layers += [Layer(hook, w=zeros(3)) for _ in range(2)]
    return Net(a=layers[0], b=layers[1])


def count_in_the_model() -> Net:
    model = Net()

    def hook(layer: Layer) -> None:
        layer.t = layer.w.data + model.num_done
        model.num_done += 1

    model.num_done = 0
    for name in ("a", "b"):
        setattr(model, name, Layer(hook, w=zeros(3)))
    return model


def list_in_a_neighbour() -> Net:
    b = Layer(w=zeros(3))
    b.names = []

    def hook(layer: Layer) -> None:
        layer.t = layer.w.data * (1 + len(b.names))
        b.names.append(1)

    b.quant_method = QuantMethod(hook)
    return Net(a=Layer(hook, w=zeros(3)), b=b)


def flag_that_comes_up_in_the_model() -> Net:
    model = Net()

    def hook(layer: Layer) -> None:
        if not getattr(model, "is_ready", False):
            layer.w.data.mul_(2)
            model.is_ready = True

    for name in ("a", "b"):
        setattr(model, name, Layer(hook, w=zeros(3)))
    return model


def scale_for_some_weights() -> Net:
    def hook(layer: Layer) -> None:
        if float(layer.w.data.max()) > 4:
            layer.scale.mul_(2)
        layer.t = layer.w.data * 1

    layer = Layer(hook, w=zeros(3))
    layer.scale = full(1, 2)
    return Net(a=layer, b=Layer(w=zeros(3)))


def scale_bound_for_some_weights() -> Net:
    def hook(layer: Layer) -> None:
        if float(layer.w.data.max()) > 4:
            layer.scale = layer.scale * 2
        layer.t = layer.w.data * 1

    layer = Layer(hook, w=zeros(3))
    layer.scale = full(1, 2)
    return Net(a=layer, b=Layer(w=zeros(3)))


def helper_replaced_by_another() -> Net:
    class Raw:
        def run(self, w: torch.Tensor) -> torch.Tensor:
            return w * 2

    class Done:
        def run(self, w: torch.Tensor) -> torch.Tensor:
            return w

    def hook(layer: Layer) -> None:
        layer.w.data.copy_(layer.kernel.run(layer.w.data))
        layer.kernel = Done()

    layer = Layer(hook, w=zeros(3))
    layer.kernel = Raw()
    return Net(a=layer, b=Layer(w=zeros(3)))


class Locked(dict):
    """Can only grow."""

    def clear(self) -> None:
        raise TypeError("it cannot be emptied")

    def __delitem__(self, key: Any) -> None:
        raise TypeError("it only grows")


def latch_in_a_dict_that_cannot_be_emptied() -> Net:
    def hook(layer: Layer) -> None:
        if "done" not in layer.flags:
            layer.w.data.mul_(2)
            layer.flags["done"] = True

    layer = Layer(hook, w=zeros(3))
    layer.flags = Locked(kind="x")
    return Net(a=layer, b=Layer(w=zeros(3)))


def nested(depth: int, inner: Any) -> Any:
    return [nested(depth - 1, inner)] if depth else inner


def latch_deep_within_lists() -> Net:
    def hook(layer: Layer) -> None:
        inner = layer.deep
        for _ in range(12):
            inner = inner[0]
        if not inner["done"]:
            layer.w.data.mul_(2)
            inner["done"] = True

    layer = Layer(hook, w=zeros(3))
    layer.deep = nested(12, {"done": False})
    return Net(a=layer, b=Layer(w=zeros(3)))


CASES = [
    latch_in_a_dict_that_cannot_be_emptied,
    latch_deep_within_lists,
    latch_tensor_of_several_elements,
    latch_tensor_in_a_closure,
    object_in_a_closure,
    tuple_in_a_closure,
    tuple_instead_of_none_in_a_closure,
    packed_tensors_in_a_closure,
    work_list_in_a_closure,
    work_set_that_loaders_fill,
    count_down_together,
    count_down_in_a_closure,
    count_in_the_model,
    list_in_a_neighbour,
    flag_that_comes_up_in_the_model,
    scale_for_some_weights,
    scale_bound_for_some_weights,
    helper_replaced_by_another,
]


@both_modes
@orders
@pytest.mark.parametrize("make", CASES)
def test_what_hooks_changed_is_as_the_first_load_found_it(make: Callable[[], Net], mode: str, order: Any) -> None:
    like_a_cold_load(make, mode, order=order)


@both_modes
@pytest.mark.parametrize("make", CASES)
def test_the_same_from_a_first_load_of_the_other_weights(make: Callable[[], Net], mode: str) -> None:
    like_a_cold_load(make, mode, B, A)


def twice(w: torch.Tensor) -> torch.Tensor:
    return w * 2


def tenfold(w: torch.Tensor) -> torch.Tensor:
    return w * 10


class Scaler:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.factor


@both_modes
@pytest.mark.parametrize(("old", "new"), [(twice, tenfold), (Scaler(2), Scaler(10)), (twice, Scaler(10))])
def test_functions_and_objects_that_an_engine_puts_in_place_are_heeded(mode: str, old: Any, new: Any) -> None:
    def hook(layer: Layer) -> None:
        layer.t = layer.act(layer.w.data)

    layer = Layer(hook, w=zeros(3))
    layer.act = old
    model = cold(Net(a=layer, b=Layer(w=zeros(3))), A)
    model.a.act = new
    for weights in (A, B, A, B):
        push(model, weights, mode)
        assert model.a.t.tolist() == (weights["a.w"] * 10).tolist()
        assert model.a.act is new


@both_modes
def test_a_count_goes_on_beside_random_outcomes(mode: str) -> None:
    def hook(layer: Layer) -> None:
        layer.num_runs += 1
        layer.noise = torch.full((2,), random.random())

    layer = Layer(hook, w=zeros(3))
    layer.num_runs = 0
    model = cold(Net(a=layer, b=Layer(w=zeros(3))), A)
    for num_runs, weights in enumerate((A, B, A, B), 2):
        push(model, weights, mode)
        assert model.a.num_runs == num_runs


@both_modes
def test_hooks_run_once_in_the_first_reload_too(mode: str) -> None:
    runs: list[str] = []

    class Method:
        done = False

        def process_weights_after_loading(self, layer: Layer) -> None:
            with_side_effects(layer)
            self.done = True
            self.config = {"factor": layer.factor}

    def with_side_effects(layer: Layer) -> None:
        runs_of(layer).append("ran")

    def runs_of(layer: Layer) -> list[str]:
        return SEEN

    SEEN.clear()
    layer = Layer(w=zeros(3))
    layer.factor = 1
    layer.quant_method = Method()
    model = cold(Net(a=layer, b=Layer(w=zeros(3))), A)
    model.a.factor, model.num_steps = 3, 7
    push(model, B, mode)
    assert len(SEEN) == 2
    assert model.a.quant_method.config == {"factor": 3}
    del runs


SEEN: list[str] = []


@both_modes
def test_a_count_that_forward_asks_for_is_as_a_cold_load_leaves_it(mode: str) -> None:
    class Packing(Layer):
        num_packed = 0

        def process_weights_after_loading(self) -> None:
            self.num_packed += 1

        def forward(self) -> int:
            return self.num_packed

    model = cold(Net(a=Packing(w=zeros(3)), b=Layer(w=zeros(3))), A)
    for weights in (A, B, A, B):
        push(model, weights, mode)
        assert model.a() == 1


def test_the_first_load_finds_its_hooks_and_no_observer_stays() -> None:
    seen = []

    class Own(Layer):
        def process_weights_after_loading(self) -> None:
            seen.append(vars(self).get("process_weights_after_loading"))

    layer = Layer(lambda layer: seen.append(vars(layer.quant_method).get("process_weights_after_loading")), w=zeros(3))
    model = Net(a=Own(w=zeros(3)), b=layer)
    record_layouts(model)
    model.load_weights(A.items())
    model.b.quant_method.process_weights_after_loading(model.b)
    model.a.process_weights_after_loading()
    assert seen == [None, None]
    assert "process_weights_after_loading" not in vars(model.a)
    assert "process_weights_after_loading" not in vars(model.b.quant_method)


class Registering(Layer):
    """Registers hooks of torch's own in every load, and a module-wide one by a bound method."""

    def process_weights_after_loading(self) -> None:
        scale = float(self.w.data.max())
        self.register_forward_hook(lambda module, args, output: output * scale)
        self.register_forward_pre_hook(self.add_one, with_kwargs=True)

    def add_one(self, module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] + 1,), kwargs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@both_modes
def test_what_a_hook_registers_again_takes_the_place_of_the_older(mode: str) -> None:
    layer = Registering(w=zeros(3))
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(1))
    model = cold(Net(a=layer, b=Layer(w=zeros(3))), A)
    profiled = []
    model.a.register_forward_hook(lambda module, args, output: profiled.append(1))
    for number, weights in enumerate((A, B, A, B), 1):
        push(model, weights, mode)
        assert model.a(torch.ones(1)).tolist() == [2 * float(weights["a.w"][0])]
        assert (len(model.a._forward_hooks), len(model.a._forward_pre_hooks)) == (3, 1)
        assert len(model.a._forward_pre_hooks_with_kwargs) == 1
        assert len(seen) == len(profiled) == number


@both_modes
def test_padding_that_is_not_known_any_more_is_reported(mode: str) -> None:
    def make(start: torch.Tensor) -> Net:
        def load(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
            parameter.data[: len(tensor)].copy_(tensor)

        layer = Layer(lambda layer: layer.w.data.add_(0), w=param(start.clone(), weight_loader=load))
        return Net(a=layer, b=Layer(w=zeros(3)))

    weights = {"a.w": full(1, 20000), "b.w": full(1, 3)}
    random_start, simple_start = torch.randn(20008), zeros(20008)
    simple_start[20000:] = -torch.inf
    for start, zeroed in ((random_start, ["a.w"]), (simple_start, [])):
        model = cold(make(start), weights)
        for _ in range(2):
            assert push(model, weights, mode).zeroed == zeroed
        assert model.a.w[20000:].tolist() == ([0] * 8 if zeroed else [-torch.inf] * 8)


@both_modes
def test_hooks_that_nobody_saw_are_reported_once(mode: str) -> None:
    class Own(Layer):
        done = False

        def process_weights_after_loading(self) -> None:
            if not self.done:
                self.w.data.mul_(2)
                self.done = True

    model = Net(a=Own(w=zeros(3)), b=Layer(w=zeros(3)))
    record_layouts(model)
    model.load_weights(A.items())
    Own.process_weights_after_loading(model.a)  # past the instance, where nobody sees it
    model.limit = 3
    assert push(model, B, mode).unobserved == ["a.process_weights_after_loading"]
    assert model.a.w.tolist() == [10, 10, 10]
    assert push(model, A, mode).unobserved == []
    assert model.a.w.tolist() == [4, 4, 4]


class Folding(Layer):
    """Folds its child, whose own hook leaves a flag and a tensor of its own."""

    def process_weights_after_loading(self) -> None:
        self.folded = self.w.data * 3


@both_modes
def test_a_partial_push_leaves_alone_what_the_hooks_that_do_not_run_left(mode: str) -> None:
    def hook(layer: Layer) -> None:
        layer.t, layer.done, layer.count = layer.w.data * 2, True, {"n": 1}

    model = Net(a=Folding(w=zeros(3)), b=Layer(w=zeros(3)))
    model.a.child = Layer(hook, w=zeros(3))
    weights = A | {"a.child.w": full(4, 3)}
    cold(model, weights)
    for value in (5, 6):
        push(model, {"a.w": full(value, 3)}, mode, scope="partial")
        assert model.a.folded.tolist() == [3 * value] * 3
        assert (model.a.child.t.tolist(), model.a.child.done, model.a.child.count) == ([8] * 3, True, {"n": 1})
    push(model, weights, mode)
    push(model, {"a.w": full(7, 3)}, mode, scope="partial")
    assert (model.a.child.t.tolist(), model.a.child.done, model.a.child.count) == ([8] * 3, True, {"n": 1})


def test_a_record_keeps_no_tensor_alive_however_deep() -> None:
    layer = Layer(lambda layer: setattr(layer, "deep", None), w=zeros(3))
    layer.deep = nested(12, {"t": zeros(3)})
    inner = layer.deep
    for _ in range(12):
        inner = inner[0]
    tensor = weakref.ref(inner["t"])
    del inner
    cold(Net(a=layer, b=Layer(w=zeros(3))), A)
    gc.collect()
    assert tensor() is None


class OnceForAll(Layer):
    done = False

    def process_weights_after_loading(self) -> None:
        if not self.done:
            self.w.data.mul_(2)
            self.done = True


@both_modes
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("is_loaded", [True, False], ids=["after", "before"])
def test_a_copy_made_before_or_after_the_first_load_is_loaded_and_reloaded(
    mode: str, copied: Any, is_loaded: bool
) -> None:
    model = Net(a=OnceForAll(w=zeros(3)), b=Layer(w=zeros(3)))
    record_layouts(model)
    if is_loaded:
        cold(model, A)
    other = copied(model)
    if not is_loaded:
        cold(model, A)
        cold(other, A)
    if not state_of(other).records:  # a pickle takes no record along
        return
    for each in (model, other, model):
        for weights in (B, A):
            push(each, weights, mode)
            assert each.a.w.tolist() == (weights["a.w"] * 2).tolist()
    assert not any("process_weights_after_loading" in vars(layer) for layer in (model.a, model.b))


@both_modes
def test_models_that_share_a_method_are_each_observed(mode: str) -> None:
    class Method:
        def __init__(self) -> None:
            self.seen: set[int] = set()

        def process_weights_after_loading(self, layer: Layer) -> None:
            if id(layer) not in self.seen:
                layer.w.data.mul_(2)
                self.seen.add(id(layer))

    method = Method()
    models = [Net(a=Layer(w=zeros(3)), b=Layer(w=zeros(3))) for _ in range(2)]
    for model in models:
        model.a.quant_method = method
        record_layouts(model)
    for model in models:
        cold(model, A)
    assert "process_weights_after_loading" not in vars(method)
    for weights in (B, A, B):
        for model in models:
            assert push(model, weights, mode).unobserved == []
            assert model.a.w.tolist() == (weights["a.w"] * 2).tolist()


def first_of(config: Any) -> Any:
    return config["f"] if isinstance(config, dict) else next(iter(config))


@both_modes
@pytest.mark.parametrize(
    ("old", "new"), [((1, 1), (10, 1)), ([1], [10]), ({"f": 1}, {"f": 10}), ({1}, {10}), ((1,), [10])]
)
def test_containers_that_an_engine_puts_in_place_are_heeded(mode: str, old: Any, new: Any) -> None:
    def hook(layer: Layer) -> None:
        layer.t = layer.w.data * first_of(layer.config)

    layer = Layer(hook, w=zeros(3))
    layer.config = copy.copy(old)
    model = cold(Net(a=layer, b=Layer(w=zeros(3))), A)
    model.a.config = copy.copy(new)
    for weights in (A, B, A, B):
        push(model, weights, mode)
        assert model.a.t.tolist() == (weights["a.w"] * 10).tolist()
        assert model.a.config == new
