"""Requantisation: golden bytes, an independent oracle, exactness, refusals, and nothing touched on error."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe_adapter import layout, quantize, requantize
from megamoe_adapter.layout import GATE, UP, allocate_scale
from megamoe_adapter.requantize import RoundingWarning, StagedShards, requantize_block_fp8, requantize_layer_

GOLDEN = Path(__file__).parents[1] / "golden"
E4M3 = torch.float8_e4m3fn
FINITE = [code for code in range(256) if code & 0x7F != 0x7F]
PROJECTIONS = (("gate_proj", GATE), ("up_proj", UP), ("down_proj", None))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "layout.safetensors") | load_file(GOLDEN / "requant.safetensors")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Each test may see the warning that a process gives once."""
    monkeypatch.setattr(requantize, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        yield


def random_codes(*shape, seed=0):
    codes = torch.tensor(FINITE, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    return codes[torch.randint(len(FINITE), shape, generator=generator)].view(E4M3)


def random_scales(*shape, seed=0, exponents=(-12, -4)):
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(*exponents, shape, generator=generator).float()
    return (1 + torch.rand(shape, generator=generator)) * torch.exp2(exponent)


def expand(scale, rows, cols):
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


def mx_values(weight, scale_bytes):
    """float64 values of MXFP8."""
    exponent = scale_bytes.to(torch.float64) - 127
    return weight.to(torch.float64) * torch.exp2(exponent).repeat_interleave(32, 1)


# An oracle that shares nothing with the code: E4M3 decoded from its definition, float64, nearest by search.


def decode_e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


POSITIVE = np.array([decode_e4m3(code) for code in range(0x7F)])


def nearest_even(values):
    """E4M3 code of each float64 by distance to all codes, ties to the even code."""
    distance = np.abs(np.abs(values)[..., None] - POSITIVE)
    tied = distance == distance.min(-1, keepdims=True)
    first = tied.argmax(-1)
    code = np.where((first % 2 == 1) & (tied.sum(-1) == 2), first + 1, first)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def oracle(real):
    """MXFP8 (codes, scale bytes) of float32 values, one group of 32 at a time."""
    groups = real.numpy().astype(np.float64).reshape(-1, 32)
    scale = np.zeros(len(groups), dtype=np.uint8)
    for index, group in enumerate(groups):
        scale[index] = next(b for b in range(255) if np.abs(group).max() <= 448 * 2.0 ** (b - 127))
    codes = nearest_even(groups / np.exp2(scale.astype(np.float64) - 127)[:, None])
    return codes.reshape(real.shape), scale.reshape(real.shape[0], -1)


def assert_codes(weight, scale, expected):
    assert weight.dtype == E4M3
    assert scale.dtype == torch.uint8
    assert np.array_equal(scale.numpy(), expected[1])
    assert np.array_equal(weight.view(torch.uint8).numpy(), expected[0])


# Bytes


@pytest.mark.parametrize("case", ["general", "pow2"])
def test_golden_bytes_of_every_shard(golden, case):
    for expert in range(2):
        for projection, _ in PROJECTIONS:
            key = f"{case}.experts.{expert}.{projection}"
            weight, scale = requantize_block_fp8(golden[f"{key}.weight"].view(E4M3), golden[f"{key}.weight_scale_inv"])
            assert torch.equal(weight.view(torch.uint8), golden[f"{key}.requant_weight"])
            assert torch.equal(scale, golden[f"{key}.requant_scale"])


def stage(golden, case):
    """The layer as loaders leave it: E4M3 codes in kernel row order, float32 scales as they came."""
    w13, w2 = torch.empty(2, 256, 256, dtype=E4M3), torch.empty(2, 256, 128, dtype=E4M3)
    s13, s2 = torch.empty(2, 2, 2), torch.empty(2, 2, 1)
    for expert in range(2):
        for projection, half in PROJECTIONS:
            key = f"{case}.experts.{expert}.{projection}"
            view = layout.weight_view(w2 if half is None else w13, expert, half).view(torch.uint8)
            view.copy_(golden[f"{key}.weight"].view(view.shape))
            layout.block_scale_rows(s2 if half is None else s13, expert, half).copy_(golden[f"{key}.weight_scale_inv"])
    gated = [(expert, half) for expert in range(2) for half in (GATE, UP)]
    return (
        StagedShards(w13, s13, allocate_scale(2, 256, 2).fill_(-1), gated),
        StagedShards(w2, s2, allocate_scale(2, 256, 1).fill_(-1), [(0, None), (1, None)]),
    )


@pytest.mark.parametrize("case", ["general", "pow2"])
def test_golden_bytes_of_a_layer_in_place(golden, case):
    stacks = stage(golden, case)
    addresses = [(stack.weight.data_ptr(), stack.scale.data_ptr()) for stack in stacks]
    requantize_layer_("layer", stacks)
    for name, stack in zip(("w13", "w2"), stacks, strict=True):
        expected = golden[f"sm100_mxfp8.{case}.{name}_weight"]
        assert torch.equal(stack.weight.view(torch.uint8), expected)
        assert torch.equal(stack.scale, golden[f"sm100_mxfp8.{case}.{name}_weight_scale"])
    assert addresses == [(stack.weight.data_ptr(), stack.scale.data_ptr()) for stack in stacks]


def test_random_shards_match_the_oracle():
    weight, scale = random_codes(130, 160), random_scales(2, 2)
    assert_codes(*requantize_block_fp8(weight, scale), oracle(weight.float() * expand(scale, 130, 160)))


def test_peaks_next_to_448_times_a_power_of_two_match_the_oracle():
    """Scales one and two float32 steps around 2**k put 448 * scale just below, at and just above the limit."""
    near = torch.tensor([1.0]).view(torch.int32) + torch.arange(-2, 3, dtype=torch.int32)
    scale = near.view(torch.float32)[None]
    weight = torch.full((1, 640), 0x7E, dtype=torch.uint8).view(E4M3)
    got, exponent = requantize_block_fp8(weight, scale)
    assert exponent[0, ::4].tolist() == [127, 127, 127, 128, 128]
    assert_codes(got, exponent, oracle(weight.float() * expand(scale, 1, 640)))


def test_bf16_is_rounded_once():
    x = (torch.randn(8, 256, generator=torch.Generator().manual_seed(3)) * 0.02).bfloat16()
    x[0, :32] = 0
    x[1, :32] = torch.tensor([448.0, 449.0], dtype=torch.bfloat16).repeat(16)
    x[2, :32] = 2.0**-133  # the smallest bfloat16
    x[3, :32] = torch.finfo(torch.bfloat16).max
    assert_codes(*quantize.quantize_mxfp8(x), oracle(x.float()))
    via_block = requantize_block_fp8(*quantize.quantize_block_fp8(x[4:]))
    once = mx_values(*quantize.quantize_mxfp8(x[4:])) - x[4:].double()
    assert once.norm() < (mx_values(*via_block) - x[4:].double()).norm()


# Exactness and error


def test_every_code_under_every_normal_power_of_two_is_exact():
    codes = torch.tensor(FINITE, dtype=torch.uint8)
    shuffled = torch.stack([codes[torch.randperm(254, generator=torch.Generator().manual_seed(s))] for s in range(3)])
    rows = torch.nn.functional.pad(torch.cat((shuffled, codes.sort().values[None])), (0, 2)).view(E4M3)
    exponents = range(-126, 128)
    for exponent in exponents:
        weight, scale = requantize_block_fp8(rows, torch.full((1, 2), 2.0**exponent))
        assert torch.equal(mx_values(weight, scale), rows.double() * 2.0**exponent), exponent
        assert torch.equal(torch.signbit(weight.float()), torch.signbit(rows.float())), exponent


def test_a_zero_group_has_byte_zero_whatever_its_scale_and_keeps_its_signs():
    weight = torch.tensor([0x00, 0x80] * 64, dtype=torch.uint8)[None].view(E4M3)
    for value in (0.0, 1e-45, 0.37, 3.0, 2.0**127):
        got, scale = requantize_block_fp8(weight, torch.full((1, 1), value))
        assert not scale.any()
        assert torch.equal(got.view(torch.uint8), weight.view(torch.uint8))


def test_a_zero_scale_makes_zeros_of_any_code():
    weight, scale = requantize_block_fp8(random_codes(4, 128), torch.zeros(1, 1))
    assert not scale.any()
    assert not weight.float().any()


def test_tiny_groups_beside_large_ones_keep_their_own_exponent():
    weight = torch.full((2, 128), 0x7E, dtype=torch.uint8)
    weight[1, 32:64] = 0x01  # 2**-9
    got, scale = requantize_block_fp8(weight.view(E4M3), torch.full((1, 1), 2.0**-7))
    assert scale.tolist() == [[120] * 4, [120, 103, 120, 120]]
    assert got[1, 32:64].float().unique().tolist() == [256.0]


def test_relative_error_stays_below_three_percent():
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    weight, scale = quantize.quantize_block_fp8(x)
    real = weight.double() * expand(scale, 256, 512)
    error = mx_values(*requantize_block_fp8(weight, scale)) - real
    assert 0.01 < error.norm() / real.norm() < 0.03


@pytest.mark.parametrize("steps", [-2, -1, 0, 1, 2])
def test_no_cast_sees_a_value_that_torch_versions_treat_differently(steps):
    """Torch up to 2.11 makes NaN of what exceeds 464, from 2.13 on 448: neither may ever be asked."""
    top = (torch.tensor([448.0]).view(torch.int32) + steps).view(torch.float32).expand(1, 32)
    _, scale = quantize.quantize_mxfp8(top)
    assert top.max() / 2.0 ** (int(scale[0, 0]) - 127) <= 448
    for factor in (1.0, 0.77, 3e-38, 1e-45, 1e30):
        x = (top * factor).contiguous()
        _, block = quantize.quantize_block_fp8(x)
        assert x.max() / block[0, 0] < 449


# Blocks from BF16, coarse and widened scales


def test_block_fp8_divides_by_the_peak_of_each_block_even_partial_ones():
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[128:, 256:] = 0
    weight, scale = quantize.quantize_block_fp8(x)
    assert weight.shape == x.shape
    assert weight.is_contiguous()
    assert scale.shape == (2, 3)
    assert scale[0, 1] == x[:128, 128:256].abs().max().float() / 448
    real = weight.float() * expand(scale, 200, 300)
    assert (real - x.float()).norm() / x.float().norm() < 0.03
    assert not real[128:, 256:].any()


def test_engine_and_trainer_make_the_same_block_fp8():
    from weightsync.trainer.quantize import quantize_block_fp8

    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(6)).bfloat16()
    x[:128, :128] = 0
    x[128:, :128] *= 1e-30
    for ours, theirs in zip(quantize.quantize_block_fp8(x), quantize_block_fp8(x), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_coarse_ue8m0_scales_expand_without_a_change_of_value(dtype):
    coarse = torch.arange(100, 106, dtype=torch.uint8).view(2, 3).view(dtype)
    fine = quantize.expand_scale_bytes(coarse, 256, 12)
    weight = random_codes(256, 384)
    wide = quantize.ue8m0_to_float32(coarse)
    assert torch.equal(mx_values(weight, fine), weight.double() * expand(wide, 256, 384).double())
    scale = allocate_scale(1, 256, 3)
    layout.write_packed_scales(scale, 0, None, fine)
    assert set(scale[0, :128, 0].tolist()) == {0x64646464}


@pytest.mark.parametrize(("rows", "groups"), [(255, 12), (256, 10), (1, 12)])
def test_scales_that_do_not_tile_are_refused(rows, groups):
    with pytest.raises(ValueError, match=rf"scale shape \(2, 3\) does not tile \({rows}, {groups}\)"):
        quantize.expand_scale_bytes(torch.zeros(2, 3, dtype=torch.uint8), rows, groups)
    with pytest.raises(ValueError, match=r"UE8M0 scales must be uint8"):
        quantize.expand_scale_bytes(torch.zeros(2, 3), 256, 12)


def test_every_ue8m0_byte_widens_to_its_power_of_two():
    scale = quantize.ue8m0_to_float32(torch.arange(256, dtype=torch.uint8))
    assert scale[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(scale[255])


# Refusals


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-30, 1.8e38])
def test_a_bad_scale_is_refused(value):
    scale = random_scales(1, 3)
    scale[0, 1] = value
    with pytest.raises(ValueError, match=r"negative, not finite or above 2\*\*127"):
        requantize_block_fp8(random_codes(8, 384), scale)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_refused(code):
    weight = random_codes(8, 128)
    weight.view(torch.uint8)[7, 127] = code
    with pytest.raises(ValueError, match="NaN among its E4M3 codes"):
        requantize_block_fp8(weight, random_scales(1, 1))


@pytest.mark.parametrize("function", [quantize.quantize_mxfp8, quantize.quantize_block_fp8])
def test_sources_that_fp8_cannot_hold_are_refused(function):
    for value in (math.nan, math.inf):
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        x[1, 5] = value
        with pytest.raises(ValueError, match="1 of 128 values are not finite"):
            function(x)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        function(torch.ones(2, 64, dtype=torch.float16))


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.zeros(128, 48), torch.ones(1, 1)),
        (torch.zeros(128, 48).to(E4M3), torch.ones(1, 1)),
        (torch.zeros(128, 64).to(E4M3), torch.ones(2, 1)),
        (torch.zeros(128, 64).to(E4M3), torch.ones(1, 1, dtype=torch.bfloat16)),
        (torch.zeros(2, 128, 64).to(E4M3), torch.ones(1, 1)),
    ],
)
def test_other_shapes_and_dtypes_are_refused(weight, scale):
    with pytest.raises(ValueError, match="must be float"):
        requantize_block_fp8(weight, scale)


def make_stack(halves, shards=None, seed=0, experts=2, rows=128, cols=256):
    shards = shards or [(slot, half) for slot in range(experts) for half in halves]
    weight = random_codes(experts, rows * len(halves), cols, seed=seed)
    scale = random_scales(experts, rows * len(halves) // 128, cols // 128, seed=seed)
    return StagedShards(weight, scale, allocate_scale(experts, rows * len(halves), cols // 128).fill_(-1), shards)


def stack_bytes(stack):
    return stack.weight.view(torch.uint8).clone(), stack.scale.clone()


def test_all_shards_are_checked_before_any_is_touched():
    stacks = make_stack((GATE, UP)), make_stack((None,), rows=256)
    stacks[1].block_scale[1, 1, 0] = -1.0
    stacks[0].weight.view(torch.uint8)[1, 15, 3] = 0x7F  # expert 1, row 7 of up
    before = [stack_bytes(stack) for stack in stacks]
    with pytest.raises(ValueError, match=r"layers\.3: .*slot 1 w3 has NaN.*slot 1 w2 has a block scale") as caught:
        requantize_layer_("layers.3", stacks)
    assert "w1" not in str(caught.value)
    for stack, (weight, scale) in zip(stacks, before, strict=True):
        assert torch.equal(stack.weight.view(torch.uint8), weight)
        assert torch.equal(stack.scale, scale)


def test_labels_name_the_shards_in_errors():
    stack = make_stack((None,))
    stack.block_scale[1] = math.nan
    labelled = StagedShards(stack.weight, stack.block_scale, stack.scale, stack.shards, ["expert 8 w2", "expert 9 w2"])
    with pytest.raises(ValueError, match="nothing was changed: expert 9 w2 has a block scale"):
        requantize_layer_("layer", [labelled])


@pytest.mark.parametrize("halves", [(GATE, UP), (None,)])
def test_only_listed_shards_change(halves):
    shards = [(1, halves[-1])]
    stack, untouched = make_stack(halves, shards), make_stack(halves)
    expected = requantize_block_fp8(
        layout.weight_view(untouched.weight, *shards[0]).reshape(-1, 256),
        layout.block_scale_rows(untouched.block_scale, *shards[0]),
    )
    requantize_layer_("layer", [stack, make_stack((None,), [])])
    for shard in untouched.shards:
        weight = layout.weight_view(stack.weight, *shard).reshape(-1, 256).view(torch.uint8)
        scale = layout.read_packed_scales(stack.scale, *shard)
        if shard in shards:
            assert torch.equal(weight, expected[0].view(torch.uint8))
            assert torch.equal(scale, expected[1])
        else:
            assert torch.equal(weight, layout.weight_view(untouched.weight, *shard).reshape(-1, 256).view(torch.uint8))
            assert set(scale.flatten().tolist()) == {255}


def test_a_repeated_push_of_the_same_source_gives_the_same_bytes():
    stack, source = make_stack((GATE, UP)), make_stack((GATE, UP))
    requantize_layer_("layer", [stack])
    first = stack_bytes(stack)
    for _ in range(3):
        stack.weight.view(torch.uint8).copy_(source.weight.view(torch.uint8))
        requantize_layer_("layer", [stack])
    assert all(torch.equal(a, b) for a, b in zip(first, stack_bytes(stack), strict=True))


def test_a_shard_larger_than_a_slab_equals_its_parts_and_needs_no_large_temporary(monkeypatch):
    class Largest(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            owned = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in owned:
                self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
            return out

    for halves in ((GATE, UP), (None,)):
        stack = make_stack(halves, experts=1, rows=640)
        expected = [
            requantize_block_fp8(
                layout.weight_view(stack.weight, *shard).reshape(-1, 256).clone(),
                layout.block_scale_rows(stack.block_scale, *shard),
            )
            for shard in stack.shards
        ]
        with monkeypatch.context() as patch, Largest() as largest:
            patch.setattr(requantize, "_SLAB_ELEMENTS", 1 << 15)
            requantize_layer_("layer", [stack])
        assert largest.num_bytes <= 4 << 15
        for shard, (weight, scale) in zip(stack.shards, expected, strict=True):
            got = layout.weight_view(stack.weight, *shard).reshape(-1, 256)
            assert torch.equal(got.view(torch.uint8), weight.view(torch.uint8))
            assert torch.equal(layout.read_packed_scales(stack.scale, *shard), scale)


# The warning


def test_rounding_is_said_once_and_powers_of_two_say_nothing():
    exact = make_stack((None,))
    exact.block_scale.copy_(torch.tensor([0.0, 2.0**-126, 0.5, 2.0**127]).view(2, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        requantize_layer_("layer", [exact])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            requantize_layer_("layers.5", [make_stack((None,))])
    assert [warning.category for warning in caught] == [RoundingWarning]
    assert "layers.5" in str(caught[0].message)


# What a stack may be


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 128, 256, dtype=E4M3)}, "N a multiple of 256"),
        ({"weight": torch.zeros(2, 256, 256, dtype=torch.uint8)}, "must be float8_e4m3fn"),
        ({"weight": torch.zeros(2, 256, 512, dtype=E4M3)[:, :, ::2]}, "contiguous"),
        ({"block_scale": torch.ones(2, 2, 1)}, "block scales must be float32"),
        ({"block_scale": torch.ones(2, 2, 2, dtype=torch.bfloat16)}, "block scales must be float32"),
        ({"block_scale": torch.ones(2, 2, 4)[:, :, ::2]}, "block scales must be float32"),
        ({"scale": torch.zeros(2, 256, 4, dtype=torch.int32)}, r"packed scales must be \(2, 256, 2\)"),
        ({"scale": torch.zeros(2, 256, 2, dtype=torch.int32)}, "MN-major"),
        ({"shards": [(2, GATE)]}, "shards must be distinct"),
        ({"shards": [(0, GATE), (0, None)]}, "shards must be distinct"),
        ({"shards": [(0, UP), (0, UP)]}, "shards must be distinct"),
        ({"labels": ["one"]}, "4 shards need as many labels, got 1"),
    ],
)
def test_a_stack_of_another_layout_is_refused(change, message):
    stack = make_stack((GATE, UP))
    fields = {"weight": stack.weight, "block_scale": stack.block_scale, "scale": stack.scale, "shards": stack.shards}
    with pytest.raises(ValueError, match=message):
        StagedShards(**(fields | change))
