"""Kinds D, G and H: every name has a destination, every destination a source, every bit is the one that was sent."""

import pytest
import torch
from toys import (
    MODES,
    Layer,
    LoraLinear,
    MoENet,
    Net,
    codes,
    cold,
    full,
    push,
    push_in_chunks,
    state_bytes,
    zeros,
)

from weightsync import CoverageError, LayoutError, Manifest, ReloadError, abort_reload, finish_reload, reload_state
from weightsync import start_reload as start

both_modes = pytest.mark.parametrize("mode", MODES)


def two(hook=None):
    return cold(Net(l=Layer(hook, left=zeros(4), right=zeros(4))), {"l.left": full(1, 4), "l.right": full(2, 4)})


@both_modes
@pytest.mark.parametrize("one_call", [True, False])
def test_a_tensor_that_comes_twice_is_refused_and_its_sibling_keeps_its_value(mode, one_call):
    model = two()
    session = start(model, mode=mode, rollback="host")
    pair = ("l.left", full(9, 4))
    if not one_call:
        session.load_weights([pair])
    with pytest.raises(CoverageError) as caught:
        session.load_weights([pair, pair] if one_call else [pair])
    assert caught.value.duplicated == ("l.left",)
    abort_reload(model)
    assert (model.l.left.tolist(), model.l.right.tolist()) == ([1] * 4, [2] * 4)


@both_modes
def test_a_tensor_that_comes_twice_in_one_call_is_refused_with_a_manifest_too(mode):
    model = two()
    weights = [("l.left", full(9, 4)), ("l.right", full(9, 4))]
    session = start(model, mode=mode, manifest=Manifest.from_tensors(weights))
    with pytest.raises(CoverageError) as caught:
        session.load_weights([weights[0], weights[0]])
    assert caught.value.duplicated == ("l.left",)
    session.abort()
    assert (reload_state(model), model.l.left.tolist()) == ("live", [1] * 4)


@both_modes
def test_a_tensor_for_two_modules_is_kept_until_both_are_staged(mode):
    class Split(Net):
        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "both":
                    self.m.w.data.copy_(tensor[:2])
                    self.n.w.data.copy_(tensor[2:])
                else:
                    self.get_parameter(name).data.copy_(tensor)

    def hook(layer):
        layer.w.data.mul_(2)

    model = Split(
        l=Layer(hook, w=zeros(2), b=zeros(2)), m=Layer(hook, w=zeros(2)), n=Layer(hook, w=zeros(2), b=zeros(2))
    )
    sent = {"l.w": full(1, 2), "both": codes(1, 4), "n.b": full(5, 2), "l.b": full(6, 2)}
    cold(model, {name: torch.zeros_like(value) for name, value in sent.items()})
    for limit in (0, 1000):
        for name, value in sent.items():
            sent[name] = value + 1
        push(model, sent, mode, max_held_bytes=limit)
        both = [value * 2 for value in sent["both"].tolist()]
        assert (model.m.w.tolist(), model.n.w.tolist()) == (both[:2], both[2:])
        assert model.n.b.tolist() == sent["n.b"].tolist()


@both_modes
def test_a_missing_scale_fails_at_start_with_a_manifest_and_keeps_the_pair(mode):
    model = cold(Net(l=Layer(weight=zeros(4), scale=zeros(1))), {"l.weight": full(1, 4), "l.scale": full(2, 1)})
    before = state_bytes(model)
    with pytest.raises(CoverageError) as caught:
        start(model, mode=mode, manifest=Manifest.from_tensors([("l.weight", full(9, 4))]))
    assert caught.value.missing == ("l.scale",)
    assert (reload_state(model), state_bytes(model)) == ("live", before)


@both_modes
@pytest.mark.parametrize("rollback", ["none", "host"])
def test_a_missing_scale_without_a_manifest_fails_at_finish(mode, rollback):
    model = cold(Net(l=Layer(weight=zeros(4), scale=zeros(1))), {"l.weight": full(1, 4), "l.scale": full(2, 1)})
    before = state_bytes(model)
    session = start(model, mode=mode, rollback=rollback)
    session.load_weights({"l.weight": full(9, 4)})
    with pytest.raises(CoverageError) as caught:
        session.finish()
    assert caught.value.missing == ("l.scale",)
    if mode == "layerwise" or rollback == "host":
        assert (reload_state(model), state_bytes(model)) == ("live", before)
    else:
        assert reload_state(model) == "torn"


@both_modes
def test_a_name_of_the_manifest_that_never_comes_fails_at_finish(mode):
    model = two()
    weights = {"l.left": full(9, 4), "l.right": full(9, 4)}
    session = start(model, mode=mode, manifest=Manifest.from_tensors(weights.items()), rollback="host")
    session.load_weights({"l.left": weights["l.left"]})
    with pytest.raises(CoverageError) as caught:
        session.finish()
    assert caught.value.missing == ("l.right",)
    assert (reload_state(model), model.l.left.tolist()) == ("live", [1] * 4)


@both_modes
@pytest.mark.parametrize("quantised", [False, True])
def test_completeness_does_not_depend_on_quantisation(mode, quantised):
    model = Net(l=Layer(lambda layer: None, a=zeros(2), b=zeros(2), c=zeros(2)))
    model.quantization = "fp8" if quantised else None
    cold(model, {f"l.{name}": full(1, 2) for name in "abc"})
    with pytest.raises(CoverageError) as caught:
        push_in_chunks(model, {"l.a": full(5, 2)}, mode)
    assert set(caught.value.missing) == {"l.b", "l.c"}


@both_modes
def test_an_empty_reload_fails_unless_it_is_allowed(mode):
    model = two(lambda layer: layer.left.data.mul_(2))
    before = state_bytes(model)
    start(model, mode=mode)
    with pytest.raises(CoverageError, match="nothing was loaded"):
        finish_reload(model)
    start(model, mode=mode, allow_empty=True)
    assert finish_reload(model).num_names == 0
    assert (reload_state(model), state_bytes(model)) == ("live", before)


@both_modes
def test_writing_the_parameters_by_hand_loads_nothing(mode):
    model = two()
    start(model, mode=mode)
    model.l.left.data.copy_(full(9, 4))
    with pytest.raises(CoverageError, match="nothing was loaded"):
        finish_reload(model)


@both_modes
def test_unknown_names_are_refused_before_anything_that_came_with_them_is_written(mode):
    model = two()
    before = state_bytes(model)
    session = start(model, mode=mode)
    with pytest.raises(CoverageError) as caught:
        session.load_weights({"l.left": full(9, 4), "l.wrong": full(9, 4)})
    assert caught.value.unexpected == ("l.wrong",)
    session.abort()
    assert (reload_state(model), state_bytes(model)) == ("live", before)


@both_modes
def test_a_wrong_shape_is_refused_before_anything_that_came_with_it_is_written(mode):
    model = two()
    before = state_bytes(model)
    session = start(model, mode=mode)
    with pytest.raises(LayoutError, match=r"l\.right"):
        session.load_weights({"l.left": full(9, 4), "l.right": full(9, 5)})
    session.abort()
    assert state_bytes(model) == before
    push(model, {"l.left": full(3, 4), "l.right": full(3, 4)}, mode)
    session = start(model, mode=mode)
    with pytest.raises(LayoutError, match=r"l\.right.*\(4,\).*\(1,\)"):
        session.load_weights({"l.left": full(9, 4), "l.right": full(9, 1)})
    session.abort()


@both_modes
def test_a_tensor_other_than_the_manifest_says_is_refused(mode):
    model = two()
    weights = {"l.left": full(9, 4), "l.right": full(9, 4)}
    session = start(model, mode=mode, manifest=Manifest.from_tensors(weights.items()))
    with pytest.raises(LayoutError, match=r"l\.left: expected torch\.float32 \(4,\), got torch\.float16 \(4,\)"):
        session.load_weights({"l.left": full(9, 4).half()})
    session.abort()


@both_modes
def test_float32_values_arrive_bit_for_bit(mode):
    value = torch.tensor([1.00390625, -0.0, float("nan"), float("inf"), 1e-45])
    model = cold(Net(l=Layer(router=zeros(5))), {"l.router": zeros(5)})
    push(model, {"l.router": value}, mode)
    assert model.l.router.view(torch.int32).tolist() == value.view(torch.int32).tolist()


@both_modes
def test_a_narrowing_copy_is_refused_unless_casts_are_allowed(mode):
    model = cold(Net(l=Layer(w=zeros(2).bfloat16())), {"l.w": zeros(2).bfloat16()})
    with pytest.raises(LayoutError, match=r"float32"):
        push(model, {"l.w": full(1.00390625, 2)}, mode)
    push(model, {"l.w": full(1.00390625, 2)}, mode, casts="allow")
    assert model.l.w.tolist() == [1.0, 1.0]


@both_modes
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.bool, torch.int64])
def test_every_dtype_moves_as_bytes(mode, dtype):
    raw = torch.arange(16, dtype=torch.uint8).view(2, 8)
    value = (raw % 2).view(torch.bool) if dtype is torch.bool else raw.view(dtype)
    model = cold(Net(l=Layer(w=torch.zeros_like(value.view(torch.uint8)).view(dtype))), {"l.w": value})
    changed = torch.flip(value.view(torch.uint8), [0]).view(dtype)
    push(model, {"l.w": changed}, mode)
    assert state_bytes(model)["l.w"] == bytes(changed.view(torch.uint8).flatten().tolist())


@both_modes
def test_non_contiguous_and_expanded_tensors_arrive_whole(mode):
    model = cold(Net(l=Layer(a=zeros(3, 2), b=zeros(4))), {"l.a": zeros(3, 2), "l.b": zeros(4)})
    push(model, {"l.a": codes(1, 2, 3).t(), "l.b": full(5, 1).expand(4)}, mode)
    assert (model.l.a.tolist(), model.l.b.tolist()) == ([[1, 4], [2, 5], [3, 6]], [5] * 4)


@both_modes
def test_a_buffer_that_the_caller_reuses_after_each_call_does_not_matter(mode):
    model = two(lambda layer: None)
    session = start(model, mode=mode)
    buffer = zeros(4)
    for name, value in (("l.left", 10), ("l.right", 20)):
        session.load_weights([(name, buffer.fill_(value))])
    session.finish()
    assert (model.l.left.tolist(), model.l.right.tolist()) == ([10] * 4, [20] * 4)


@both_modes
def test_an_iterator_that_reuses_one_buffer_is_drawn_one_by_one(mode):
    model = MoENet(2, 3)
    weights = model.checkpoint(1)
    cold(model, weights)
    wanted = model.checkpoint(2)
    buffers = {(3, 2): zeros(3, 2), (2, 3): zeros(2, 3)}
    session = start(model, mode=mode)
    session.load_weights((name, buffers[tuple(value.shape)].copy_(value)) for name, value in wanted.items())
    session.finish()
    fresh = MoENet(2, 3)
    assert state_bytes(model) == state_bytes(cold(fresh, wanted))


@both_modes
def test_names_inside_an_adapter_wrapper_land_in_the_base_layer(mode):
    class Lora(Net):
        def load_weights(self, weights):
            parameters = dict(self.named_parameters())
            for name, tensor in weights:
                parameters[name].data.copy_(tensor)

    model = Lora(fc=LoraLinear(Layer(weight=zeros(2))))
    model.fc.base_layer.weight.data.fill_(1)
    push(model, {"fc.weight": full(5, 2)}, mode)
    assert model.fc.base_layer.weight.tolist() == [5, 5]


@both_modes
def test_a_compiled_wrapper_stands_for_its_model(mode):
    model = cold(Net(l=Layer(w=zeros(2))), {"l.w": full(1, 2)})
    compiled = torch.compile(model, backend="eager")
    push(compiled, {"l.w": full(5, 2)}, mode)
    assert model.l.w.tolist() == [5, 5]
    assert reload_state(compiled) == reload_state(model) == "live"
    session = start(compiled, mode=mode)
    with pytest.raises(ReloadError, match="open"):
        start(model, mode=mode)
    session.abort()


@both_modes
def test_a_prefix_mapper_runs_once_and_leaves_mapped_names_alone(mode):
    class Mapped(Net):
        def load_weights(self, weights):
            prefix = "model.language_model."
            return super().load_weights(
                (n.replace(prefix, "model.", 1) if n.startswith(prefix) else n, t) for n, t in weights
            )

    for sent in ("model.language_model.l.w", "model.l.w"):
        model = cold(Mapped(model=Net(l=Layer(w=zeros(2)))), {"model.language_model.l.w": full(1, 2)})
        push(model, {sent: full(5, 2)}, mode)
        assert model.model.l.w.tolist() == [5, 5]


@both_modes
def test_packed_experts_split_gate_first(mode):
    class Packed(Net):
        def load_weights(self, weights):
            for _, tensor in weights:
                for expert in range(2):
                    gate, up = tensor[expert].chunk(2)
                    self.l.w13.data[expert, :3].copy_(gate)
                    self.l.w13.data[expert, 3:].copy_(up)

    model = cold(Packed(l=Layer(w13=zeros(2, 6, 2))), {"gate_up_proj": codes(0, 2, 6, 2)})
    push(model, {"gate_up_proj": codes(100, 2, 6, 2)}, mode)
    assert model.l.w13.tolist() == codes(100, 2, 6, 2).tolist()


@both_modes
def test_loaders_that_compute_read_values_or_hold_tensors_are_run(mode):
    class Computing(Net):
        def __init__(self, **children):
            super().__init__(**children)
            self.pending = {}

        def load_weights(self, weights):
            for name, tensor in weights:
                if name == "scaled":
                    self.l.a.data.copy_(tensor * 2)
                elif name == "valued":
                    self.l.b.data.copy_(tensor if tensor.sum().item() > 0 else -tensor)
                else:
                    self.pending[name] = tensor
                    if len(self.pending) == 2:
                        self.l.c.data.copy_(torch.cat([self.pending.pop("first"), self.pending.pop("second")]))

    for hook in (None, lambda layer: layer.c.data.add_(0)):
        model = Computing(l=Layer(hook, a=zeros(2), b=zeros(2), c=zeros(2)))
        weights = {"scaled": full(3, 2), "valued": full(-4, 2), "first": full(5, 1), "second": full(6, 1)}
        cold(model, {name: torch.zeros_like(value) for name, value in weights.items()})
        report = push(model, weights, mode)
        assert set(report.interpreted) == set(weights)
        assert [getattr(model.l, name).tolist() for name in "abc"] == [[6, 6], [4, 4], [5, 6]]
        buffers = {1: zeros(1), 2: zeros(2)}
        session = start(model, mode=mode)
        for name, value in reversed(weights.items()):
            session.load_weights([(name, buffers[len(value)].copy_(value))])
        session.finish()
        assert model.l.c.tolist() == [5, 6]


@both_modes
def test_ignored_names_change_nothing_and_are_reported(mode):
    model = two()
    weights = {"l.left": full(9, 4), "l.right": full(9, 4), "rotary.inv_freq": full(1, 2)}
    report = push(model, weights, mode, ignore=["rotary.*"])
    assert report.dropped == ["rotary.inv_freq"]
    assert model.l.left.tolist() == [9] * 4
