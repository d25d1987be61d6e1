"""Arrivals and finish: separate updates, partial updates, refusals before any shard is touched, no compounding."""

import itertools
import random
import warnings

import pytest
import torch
from expert_checkpoints import PAIRS, Checkpoint, assert_same_bytes, byte_image, bytes_of, sizes_of

from megamoe_adapter import requantize
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.requantize import RoundingWarning
from megamoe_adapter.shared_experts import SharedExpert

quiet = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS = 3
LAYER = "layers.4.mlp.experts"
SCALED = [pair for pair in PAIRS if pair[1] != "bf16"]
REQUANTISED = ("sm100_mxfp8", "block_fp8")


def build(fmt, source, **kwargs):
    hidden, intermediate = sizes_of(fmt)
    return MegaMoEExperts(
        NUM_EXPERTS, 2, hidden, intermediate, fmt=fmt, source=source, backend="reference", prefix=LAYER, **kwargs
    )


def checkpoint(fmt, source, *, shared=False, **kwargs):
    experts = [*range(NUM_EXPERTS), *(["shared"] if shared else [])]
    return Checkpoint(source, *sizes_of(fmt), experts, **kwargs).tensors


def load(module, tensors):
    for name, tensor in tensors.items():
        assert module.load(name, tensor) is True


def cold(fmt, source, tensors, **kwargs):
    module = build(fmt, source, **kwargs)
    load(module, tensors)
    module.finish()
    return byte_image(module)


def is_weight(name):
    return name.endswith((".weight", ".weight_packed"))


def weights(tensors):
    return {name: tensor for name, tensor in tensors.items() if is_weight(name)}


def scales(tensors):
    return {name: tensor for name, tensor in tensors.items() if not is_weight(name)}


@quiet
@pytest.mark.parametrize(("fmt", "source"), SCALED)
@pytest.mark.parametrize("order", [(weights, scales), (scales, weights)])
def test_weights_and_scales_in_separate_updates_equal_a_cold_load(fmt, source, order):
    old, new = checkpoint(fmt, source, seed=1), checkpoint(fmt, source, seed=2)
    module = build(fmt, source)
    for tensors in (old, new):
        for part in order:
            load(module, part(tensors))
        module.finish()
        assert_same_bytes(byte_image(module), cold(fmt, source, tensors))
    assert byte_image(module)["w13_weight"].ne(cold(fmt, source, old)["w13_weight"]).any(), "the two differ"


@quiet
@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_repeated_pushes_never_compound(fmt, source):
    a, b = checkpoint(fmt, source, seed=1), checkpoint(fmt, source, seed=2)
    images = {id(tensors): cold(fmt, source, tensors) for tensors in (a, b)}
    module = build(fmt, source)
    for tensors in (a, b, a, a, b):
        load(module, tensors)
        module.finish()
        assert_same_bytes(byte_image(module), images[id(tensors)])


@quiet
@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_a_partial_update_leaves_other_shards_alone(fmt, source):
    old, new = checkpoint(fmt, source, seed=1), checkpoint(fmt, source, seed=2)
    module = build(fmt, source)
    load(module, old)
    module.finish()
    changed = {name: tensor for name, tensor in new.items() if ".experts.1." in name}
    load(module, changed)
    assert module.finish() == 3
    assert_same_bytes(byte_image(module), cold(fmt, source, old | changed))


@quiet
def test_finishing_again_without_new_data_changes_nothing():
    tensors = checkpoint(*REQUANTISED)
    module = build(*REQUANTISED)
    load(module, tensors)
    assert module.finish() == 9
    before = byte_image(module)
    assert module.finish() == 0
    assert module.requantize_block_fp8() == 0
    assert_same_bytes(byte_image(module), before)


@quiet
@pytest.mark.parametrize(("fmt", "source"), SCALED)
@pytest.mark.parametrize("part", ["weight", "scale"])
def test_one_part_without_the_other_is_refused_by_name_and_nothing_is_touched(fmt, source, part):
    module = build(fmt, source)
    load(module, checkpoint(fmt, source, seed=1))
    module.finish()
    update = {name: t for name, t in checkpoint(fmt, source, seed=2).items() if ".experts.1." in name}
    shard = [name for name in update if ".up_proj." in name or ".w3." in name]
    held = [name for name in shard if is_weight(name) is (part == "scale")]
    assert held
    load(module, {name: tensor for name, tensor in update.items() if name not in shard or name not in held})
    before = byte_image(module)
    missing = "scale" if part == "weight" else "weight"
    with pytest.raises(ValueError, match=rf"{LAYER}: 1 of 9 shards .* expert 1 \(slot 1\) w3: {missing} missing"):
        module.finish()
    assert_same_bytes(byte_image(module), before)
    load(module, {name: update[name] for name in held})
    assert module.finish() == 3, "what had arrived was not forgotten"
    assert_same_bytes(byte_image(module), cold(fmt, source, checkpoint(fmt, source, seed=1) | update))


@quiet
@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_a_first_load_with_a_shard_missing_is_refused(fmt, source):
    tensors = checkpoint(fmt, source)
    module = build(fmt, source)
    load(module, {name: t for name, t in tensors.items() if ".experts.2." not in name or ".up_proj." not in name})
    if source == "mxfp4_dsv4":
        module = build(fmt, source)
        load(module, {name: t for name, t in tensors.items() if ".experts.2.w3." not in name})
    with pytest.raises(ValueError, match=r"expert 2 \(slot 2\) w3: weight and scale missing"):
        module.finish()


@quiet
def test_random_splits_into_updates_give_the_cold_bytes():
    tensors = checkpoint(*REQUANTISED, shared=True)
    shared = SharedExpert("block_fp8", 128)
    expected = cold(*REQUANTISED, tensors, shared=shared)
    module = build(*REQUANTISED, shared=shared)
    for seed in range(5):
        chance = random.Random(seed)
        names = list(tensors)
        chance.shuffle(names)
        while names:
            size = chance.randrange(1, 9)
            load(module, {name: tensors[name] for name in names[:size]})
            names = names[size:]
        module.finish()
        assert_same_bytes(byte_image(module), expected)


# Values


def spoil(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value
    return tensor


def spoil_byte(tensor, byte):
    raw = tensor.clone().view(torch.uint8)
    raw.view(-1)[raw.numel() // 2] = byte
    return raw.view(tensor.dtype)


UNUSABLE = [
    ("sm100_mxfp8", "block_fp8", "weight_scale_inv", lambda t: spoil(t, float("nan"))),
    ("sm100_mxfp8", "block_fp8", "weight_scale_inv", lambda t: spoil(t, float("inf"))),
    ("sm100_mxfp8", "block_fp8", "weight_scale_inv", lambda t: spoil(t, -0.5)),
    ("sm100_mxfp8", "block_fp8", "weight", lambda t: spoil_byte(t, 0x7F)),
    ("sm100_mxfp8", "block_fp8", "weight", lambda t: spoil_byte(t, 0xFF)),
    ("sm90_fp8", "block_fp8", "weight_scale_inv", lambda t: spoil(t, float("nan"))),
    ("sm90_fp8", "block_fp8", "weight_scale_inv", lambda t: spoil(t, -0.5)),
    ("sm90_fp8", "block_fp8", "weight_scale_inv", lambda t: spoil(t, float("inf"))),
    ("sm90_fp8", "block_fp8", "weight", lambda t: spoil_byte(t, 0xFF)),
    ("sm90_fp8", "block_fp8", "weight", lambda t: spoil_byte(t, 0x7F)),
    ("sm90_fp8", "block_fp8_ue8m0", "scale", lambda t: spoil_byte(t, 255)),
    ("sm100_mxfp8", "mxfp8", "weight", lambda t: spoil_byte(t, 0x7F)),
    ("sm100_mxfp8", "mxfp8", "weight_scale", lambda t: spoil_byte(t, 255)),
    ("sm100_mxfp4", "mxfp4_ct", "weight_scale", lambda t: spoil_byte(t, 255)),
    ("sm100_nvfp4", "nvfp4_modelopt", "weight_scale", lambda t: spoil_byte(t, 0x7F)),
    ("sm100_nvfp4", "nvfp4_modelopt", "weight_scale", lambda t: spoil_byte(t, 0x81)),
    ("sm100_bf16", "bf16", "weight", lambda t: spoil(t, float("nan"))),
    ("sm100_bf16", "bf16", "weight", lambda t: spoil(t, float("-inf"))),
    ("sm100_mxfp8", "bf16", "weight", lambda t: spoil(t, float("nan"))),
    ("sm100_mxfp8", "bf16", "weight", lambda t: spoil(t, float("inf"))),
    ("sm90_fp8", "bf16", "weight", lambda t: spoil(t, float("nan"))),
    ("sm90_fp8", "bf16", "weight", lambda t: spoil(t, float("inf"))),
]


@quiet
@pytest.mark.parametrize(("fmt", "source", "suffix", "spoiled"), UNUSABLE)
@pytest.mark.parametrize("scope", ["full", "partial"])
def test_values_that_would_make_garbage_are_refused_by_name_before_any_shard_is_touched(
    fmt, source, suffix, spoiled, scope
):
    module = build(fmt, source)
    tensors = checkpoint(fmt, source, seed=1)
    load(module, tensors)
    module.finish()
    update = checkpoint(fmt, source, seed=2)
    if scope == "partial":
        update = {name: tensor for name, tensor in update.items() if ".experts.2." not in name}
    bad = f"mlp.experts.1.down_proj.{suffix}"
    load(module, update | {bad: spoiled(update[bad])})
    before = byte_image(module)
    with pytest.raises(ValueError, match=rf"{LAYER}: .*expert 1 \(slot 1\) w2"):
        module.finish()
    assert_same_bytes(byte_image(module), before)
    load(module, update)
    module.finish()
    assert_same_bytes(byte_image(module), cold(fmt, source, tensors | update))


def test_zero_scales_are_legal():
    tensors = checkpoint(*REQUANTISED, pow2=True)
    tensors["mlp.experts.0.up_proj.weight_scale_inv"] = torch.zeros(1, 2)
    module = build(*REQUANTISED)
    load(module, tensors)
    module.finish()
    assert not module.expert_values(0).w3.any()


def test_rounding_is_said_once_and_exact_requantisation_never(monkeypatch):
    monkeypatch.setattr(requantize, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cold(*REQUANTISED, checkpoint(*REQUANTISED, pow2=True))
        cold("sm90_fp8", "block_fp8", checkpoint("sm90_fp8", "block_fp8"))
    with pytest.warns(RoundingWarning, match=LAYER):
        cold(*REQUANTISED, checkpoint(*REQUANTISED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cold(*REQUANTISED, checkpoint(*REQUANTISED))


# A reload that puts the old bytes back


@quiet
def test_discarding_arrivals_forgets_an_aborted_update():
    tensors = checkpoint(*REQUANTISED, seed=1)
    module = build(*REQUANTISED)
    load(module, tensors)
    module.finish()
    before = {name: param.detach().clone() for name, param in module.named_parameters()}
    load(module, weights(checkpoint(*REQUANTISED, seed=2)))
    for name, param in module.named_parameters():
        param.data.copy_(before[name])
    module.discard_arrivals()
    assert module.finish() == 0
    assert_same_bytes(byte_image(module), cold(*REQUANTISED, tensors))


# The shared expert


@quiet
@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_the_fused_shared_expert_is_tracked_like_the_others(part):
    shared = SharedExpert("block_fp8", 128)
    tensors = checkpoint(*REQUANTISED, shared=True)
    module = build(*REQUANTISED, shared=shared)
    held = f"mlp.shared_experts.up_proj.{part}"
    load(module, {name: tensor for name, tensor in tensors.items() if name != held})
    missing = "weight" if part == "weight" else "scale"
    with pytest.raises(ValueError, match=f"shared expert w3: {missing} missing"):
        module.finish()
    load(module, {held: tensors[held]})
    assert module.finish() == 12
    assert_same_bytes(byte_image(module), cold(*REQUANTISED, tensors, shared=shared))


@quiet
def test_a_bad_routed_shard_leaves_the_shared_expert_untouched_and_the_other_way_round():
    shared = SharedExpert("block_fp8", 128)
    tensors = checkpoint("sm100_mxfp4", "mxfp4_ct")
    tensors |= {name: t for name, t in checkpoint(*REQUANTISED, shared=True).items() if "shared" in name}
    for bad in ("mlp.experts.2.gate_proj.weight_scale", "mlp.shared_experts.down_proj.weight_scale_inv"):
        module = build("sm100_mxfp4", "mxfp4_ct", shared=shared)
        spoiled = spoil_byte(tensors[bad], 255) if "mlp.experts" in bad else spoil(tensors[bad], -1.0)
        load(module, tensors | {bad: spoiled})
        before = byte_image(module)
        with pytest.raises(ValueError, match="expert 2|shared expert w2"):
            module.finish()
        assert_same_bytes(byte_image(module), before)


# NVFP4's scalars

NVFP4 = ("sm100_nvfp4", "nvfp4_modelopt")


def test_scalars_may_arrive_in_updates_of_their_own_in_any_order():
    tensors = checkpoint(*NVFP4)
    kinds = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    expected = cold(*NVFP4, tensors)
    module = build(*NVFP4)
    for order in itertools.permutations(kinds):
        for kind in order:
            load(module, {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == kind})
        module.finish()
        assert_same_bytes(byte_image(module), expected)


def test_what_a_launch_needs_of_the_scalars():
    tensors = checkpoint(*NVFP4)
    module = build(*NVFP4, ep_size=3, ep_rank=2)
    for name, tensor in tensors.items():
        assert module.load(name, tensor) is (".experts.2." in name or "scale_2" in name or "input_scale" in name)
    module.finish()
    largest = max(tensors[f"mlp.experts.{e}.down_proj.input_scale"].item() for e in range(NUM_EXPERTS))
    assert module.l2_activation_scale_value == largest == module.l2_activation_scale.item()
    assert module.l1_alpha.tolist() == [tensors["mlp.experts.2.gate_proj.weight_scale_2"].item()]
    down = tensors["mlp.experts.2.down_proj.weight_scale_2"]
    assert torch.equal(module.l2_alpha, (down * torch.tensor(largest)).view(1))


def test_gate_and_up_scalars_that_differ_are_refused_wherever_and_whenever_they_arrive():
    tensors = checkpoint(*NVFP4)
    module = build(*NVFP4, ep_size=3, ep_rank=0)  # expert 1 lives elsewhere, and every rank must still agree
    for name, tensor in tensors.items():
        module.load(name, tensor)
    module.finish()
    before = byte_image(module)
    up = "mlp.experts.1.up_proj.weight_scale_2"
    module.load(up, tensors[up] * 1.2)
    with pytest.raises(ValueError, match=r"w1 and w3 weight_scale_2 differ for experts 1; expert 1: w1 .*, w3 "):
        module.finish()
    gate = "mlp.experts.1.gate_proj.weight_scale_2"
    module.load(gate, tensors[gate] * 1.2)
    module.finish()
    assert bytes_of(module.l1_alpha).equal(before["l1_alpha"])
    module.load(up, tensors[up] * 1.2 * (1 + 1e-6))
    module.finish()


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("weight_scale_2", float("nan"), "w13_weight_scale_2 is negative or not finite for experts 0"),
        ("input_scale", -1.0, "w2_input_scale is negative or not finite for experts 0"),
    ],
)
def test_unusable_scalars_are_refused(suffix, value, message):
    tensors = checkpoint(*NVFP4)
    projection = "gate_proj" if suffix == "weight_scale_2" else "down_proj"
    tensors[f"mlp.experts.0.{projection}.{suffix}"] = torch.tensor(value)
    module = build(*NVFP4)
    load(module, tensors)
    with pytest.raises(ValueError, match=message):
        module.finish()


def test_missing_scalars_are_named():
    tensors = checkpoint(*NVFP4)
    module = build(*NVFP4)
    load(module, {name: t for name, t in tensors.items() if name != "mlp.experts.1.down_proj.input_scale"})
    with pytest.raises(ValueError, match="1 NVFP4 scales did not arrive: expert 1 w2 input_scale"):
        module.finish()
    load(module, tensors)
    module.finish()
    load(module, {name: t for name, t in tensors.items() if ".experts.0." in name and not name.endswith("scale_2")})
    with pytest.raises(ValueError, match="3 NVFP4 scales did not arrive: expert 0 w1 weight_scale_2"):
        module.finish()
    module.discard_arrivals()
    load(module, {name: t for name, t in tensors.items() if ".experts.0." in name and name.endswith("scale_2")})
    with pytest.raises(ValueError, match="3 weight_scale_2 arrived without their weight and block scale: expert 0 w1"):
        module.finish()


def test_a_changed_activation_scale_is_said_since_a_captured_graph_holds_the_old_one(caplog):
    tensors = checkpoint(*NVFP4)
    module = build(*NVFP4)
    load(module, tensors)
    module.finish()
    module.load("mlp.experts.0.down_proj.input_scale", torch.tensor(0.25))
    with caplog.at_level("WARNING"):
        module.finish()
    assert "l2_activation_scale changed" in caplog.text
    assert module.l2_activation_scale_value == 0.25
