"""Kernel layout: index maps against views, against bytes from DeepGEMM, and what must be refused."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamoe_adapter import layout
from megamoe_adapter.formats import FORMATS, SOURCES
from megamoe_adapter.layout import GATE, UP, allocate_scale, check_shapes, kernel_tensors, write_packed_scales

GOLDEN = Path(__file__).parents[1] / "golden"
E, INTER, H = 2, 128, 256
SHARDS = (("gate_proj", GATE), ("up_proj", UP), ("down_proj", None))


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "layout.safetensors") | load_file(GOLDEN / "requant.safetensors")


def poisoned(*shape, dtype):
    """A tensor in which a byte that nobody wrote shows as 0xA5."""
    return torch.full(shape, 0xA5, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype)


def load_weights(shard, dtype, values_per_element=1):
    """`shard(expert, projection)` for every shard into (w13, w2)."""
    w13 = poisoned(E, 2 * INTER, H // values_per_element, dtype=dtype)
    w2 = poisoned(E, H, INTER // values_per_element, dtype=dtype)
    for expert in range(E):
        for projection, half in SHARDS:
            view = layout.weight_view(w2 if half is None else w13, expert, half)
            view.copy_(shard(expert, projection).view(view.shape))
    return w13, w2


def load_scales(shard, groups_of):
    w13 = allocate_scale(E, 2 * INTER, H // (4 * groups_of)).fill_(-1)
    w2 = allocate_scale(E, H, INTER // (4 * groups_of)).fill_(-1)
    for expert in range(E):
        for projection, half in SHARDS:
            write_packed_scales(w2 if half is None else w13, expert, half, shard(expert, projection))
    return w13, w2


def assert_same_bytes(got, expected):
    assert tuple(got.shape) == tuple(expected.shape)
    assert torch.equal(got.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


# Index maps


@pytest.mark.parametrize(
    ("forward", "inverse"),
    [(layout.utccp_row, layout.utccp_row_inverse), (layout.w2_scale_row, layout.w2_scale_row_inverse)],
)
def test_row_maps_are_bijections_with_inverses(forward, inverse):
    rows = range(1280)
    assert sorted(map(forward, rows)) == list(rows)
    assert all(inverse(forward(row)) == row and forward(inverse(row)) == row for row in rows)


@pytest.mark.parametrize(
    ("forward", "inverse"),
    [(layout.w13_row, layout.w13_row_inverse), (layout.w13_scale_row, layout.w13_scale_row_inverse)],
)
def test_half_and_row_maps_are_bijections_with_inverses(forward, inverse):
    keys = [(half, row) for half in (GATE, UP) for row in range(640)]
    assert sorted(forward(*key) for key in keys) == list(range(1280))
    assert all(inverse(forward(*key)) == key for key in keys)
    assert all(forward(*inverse(row)) == row for row in range(1280))


def test_the_w13_scale_row_is_the_permuted_weight_row():
    for half in (GATE, UP):
        for row in range(1024):
            assert layout.w13_scale_row(half, row) == layout.utccp_row(layout.w13_row(half, row))


def test_worked_example():
    assert (layout.w13_row(GATE, 75), layout.w13_scale_row(GATE, 75)) == (147, 204)
    assert (layout.w13_row(UP, 75), layout.w13_scale_row(UP, 75)) == (155, 236)
    assert layout.w2_scale_row(75) == 46
    assert [layout.w13_row_inverse(n) for n in (0, 7, 8, 16)] == [(0, 0), (0, 7), (1, 0), (0, 8)]


def test_scale_byte_offsets_cover_the_storage_once_and_invert():
    rows, words = 128, 3
    keys = [(e, row, group) for e in range(2) for row in range(rows) for group in range(4 * words)]
    offsets = [layout.scale_byte_offset(*key, rows, words) for key in keys]
    assert sorted(offsets) == list(range(2 * rows * words * 4))
    assert [layout.scale_byte_offset_inverse(offset, rows, words) for offset in offsets] == keys


def test_closed_forms_agree_with_the_views_at_random_addresses():
    rng = random.Random(0)
    experts, inter, hidden = 3, 192, 640
    w13 = torch.arange(experts * 2 * inter * hidden, dtype=torch.int32).view(experts, 2 * inter, hidden)
    scales = {GATE: allocate_scale(experts, 2 * inter, hidden // 128), None: allocate_scale(experts, hidden, 3)}
    scales[UP] = scales[GATE]
    storages = {}
    for half, scale in scales.items():
        scale.copy_(torch.randint(-(2**31), 2**31, scale.shape, dtype=torch.int32))
        storages[half] = scale.transpose(-1, -2).contiguous().view(torch.uint8).flatten()
    for _ in range(3000):
        expert, half, row = rng.randrange(experts), rng.randrange(2), rng.randrange(inter)
        column = rng.randrange(hidden)
        shard = layout.w13_weight_rows(w13, expert, half).reshape(inter, hidden)
        assert shard[row, column] == (expert * 2 * inter + layout.w13_row(half, row)) * hidden + column
        half = rng.choice((GATE, UP, None))
        row = rng.randrange(hidden if half is None else inter)
        scale_row = layout.w2_scale_row(row) if half is None else layout.w13_scale_row(half, row)
        rows, words = scales[half].shape[1:]
        group = rng.randrange(4 * words)
        shard = layout.read_packed_scales(scales[half], expert, half)
        assert shard[row, group] == storages[half][layout.scale_byte_offset(expert, scale_row, group, rows, words)]


def test_four_scales_pack_little_endian():
    scale = allocate_scale(1, 128, 1)
    write_packed_scales(scale, 0, None, torch.arange(4, dtype=torch.uint8).expand(128, 4).contiguous())
    assert set(scale.flatten().tolist()) == {0x03020100}
    write_packed_scales(scale, 0, None, torch.full((128, 4), 120, dtype=torch.uint8))
    assert set(scale.flatten().tolist()) == {0x78787878}


# Golden bytes


@pytest.mark.parametrize("case", ["general", "pow2"])
def test_sm100_mxfp8_matches_deepgemm(golden, case):
    def shard(kind):
        return lambda expert, projection: golden[f"{case}.experts.{expert}.{projection}.{kind}"]

    weights = load_weights(shard("requant_weight"), torch.uint8)
    scales = load_scales(shard("requant_scale"), 32)
    for name, weight, scale in zip(("w13", "w2"), weights, scales, strict=True):
        assert_same_bytes(weight, golden[f"sm100_mxfp8.{case}.{name}_weight"])
        assert_same_bytes(scale, golden[f"sm100_mxfp8.{case}.{name}_weight_scale"])


@pytest.mark.parametrize("case", ["general", "pow2"])
def test_sm90_fp8_matches_deepgemm_and_keeps_the_scales(golden, case):
    weights = load_weights(lambda e, p: golden[f"{case}.experts.{e}.{p}.weight"], torch.uint8)
    scales = torch.full((E, 2 * INTER // 128, H // 128), torch.nan), torch.full((E, H // 128, INTER // 128), torch.nan)
    for expert in range(E):
        for projection, half in SHARDS:
            view = layout.block_scale_rows(scales[half is None], expert, half)
            view.copy_(golden[f"{case}.experts.{expert}.{projection}.weight_scale_inv"])
    for name, weight, scale in zip(("w13", "w2"), weights, scales, strict=True):
        assert_same_bytes(weight, golden[f"sm90_fp8.{case}.{name}_weight"])
        assert_same_bytes(scale, golden[f"sm90_fp8.{case}.{name}_weight_scale_inv"])
        assert scale.is_contiguous()


def test_sm100_bf16_matches_deepgemm(golden):
    w13, w2 = load_weights(lambda e, p: golden[f"bf16.{p}"][e], torch.bfloat16)
    assert_same_bytes(w13, golden["sm100_bf16.w13_weight"])
    assert_same_bytes(w2, golden["sm100_bf16.w2_weight"])


def test_sm100_mxfp4_matches_deepgemm(golden):
    w13, w2 = load_weights(lambda e, p: golden[f"mxfp4.{p}.weight_packed"][e].view(torch.int8), torch.int8, 2)
    scales = load_scales(lambda e, p: golden[f"mxfp4.{p}.weight_scale"][e].view(torch.float8_e8m0fnu), 32)
    assert_same_bytes(w13, golden["sm100_mxfp4.w13_weight"])
    assert_same_bytes(w2, golden["sm100_mxfp4.w2_weight"])
    assert_same_bytes(scales[0], golden["sm100_mxfp4.w13_weight_scale"])
    assert_same_bytes(scales[1], golden["sm100_mxfp4.w2_weight_scale"])


def test_a_swapped_half_does_not_match(golden):
    swapped = {"gate_proj": "up_proj", "up_proj": "gate_proj", "down_proj": "down_proj"}
    w13, _ = load_weights(lambda e, p: golden[f"bf16.{swapped[p]}"][e], torch.bfloat16)
    assert not torch.equal(w13, golden["sm100_bf16.w13_weight"])


# Round trips and aliasing


@pytest.mark.parametrize("half", [GATE, UP, None])
@pytest.mark.parametrize("words", [1, 3])
def test_scales_round_trip_and_leave_every_other_byte_alone(half, words):
    scale = allocate_scale(2, 256, words)
    before = torch.randint(-(2**31), 2**31, scale.shape, dtype=torch.int32)
    scale.copy_(before)
    rows = 256 if half is None else 128
    written = torch.randint(0, 256, (rows, 4 * words), dtype=torch.uint8)
    others = {h: layout.read_packed_scales(scale, 1, h) for h in (GATE, UP) if half is not None and h != half}
    write_packed_scales(scale, 1, half, written)
    assert torch.equal(layout.read_packed_scales(scale, 1, half), written)
    assert torch.equal(scale[0], before[0])
    assert all(torch.equal(layout.read_packed_scales(scale, 1, h), other) for h, other in others.items())


def test_a_load_never_copies_a_strided_source():
    fused = torch.randn(E, 2 * INTER, H)
    w13 = torch.empty(E, 2 * INTER, H)
    view = layout.w13_weight_rows(w13, 1, UP)
    source = fused[1, INTER:]
    assert source.view(view.shape).data_ptr() == source.data_ptr()
    assert view.untyped_storage().data_ptr() == w13.untyped_storage().data_ptr()
    columns = fused[1, :INTER, 16 : 16 + 32]
    assert columns.view(INTER // 8, 8, 32).data_ptr() == columns.data_ptr()


def test_views_exist_on_the_meta_device():
    with torch.device("meta"):
        assert layout.w13_weight_rows(torch.empty(2, 256, 64), 1, UP).shape == (16, 8, 64)
        assert layout.scale_view(allocate_scale(2, 256, 1), 1, GATE).shape == (2, 4, 2, 8, 1, 4)


# Strides


@pytest.mark.parametrize(("experts", "words"), [(1, 1), (1, 5), (3, 1), (3, 5)])
def test_packed_scales_are_mn_major_and_tma_aligned_even_with_one_word(experts, words):
    scale = allocate_scale(experts, 384, words)
    assert scale.stride() == (384 * words, 1, 384)
    assert scale.stride(-1) * scale.element_size() % 16 == 0
    assert not scale.count_nonzero()


def test_strides_that_torch_lost_are_put_back_without_a_copy():
    lost = torch.arange(2 * 128, dtype=torch.int32).view(2, 128, 1)
    assert lost.stride() == (128, 1, 1)
    restored = layout.restore_scale_strides(lost)
    assert restored.stride() == (128, 1, 128)
    assert restored.data_ptr() == lost.data_ptr()
    assert torch.equal(restored, lost)
    expected, got = allocate_scale(2, 128, 1), lost.clone()
    written = torch.randint(0, 256, (128, 4), dtype=torch.uint8)
    for scale in (expected, got):
        scale.fill_(7)
        write_packed_scales(scale, 1, None, written)
    assert torch.equal(expected, got)


def test_a_view_into_a_larger_storage_keeps_its_offset():
    scale = allocate_scale(3, 128, 2)[1:]
    restored = layout.restore_scale_strides(scale)
    assert restored.data_ptr() == scale.data_ptr()


@pytest.mark.parametrize(
    "scale",
    [
        torch.zeros(2, 128, 2, dtype=torch.int32),
        torch.zeros(2, 128, 1, dtype=torch.uint8),
        torch.zeros(2, 64, 1, dtype=torch.int32),
        torch.zeros(128, 1, dtype=torch.int32),
    ],
)
def test_a_scale_tensor_in_another_layout_is_refused(scale):
    with pytest.raises(ValueError, match="packed scales must be"):
        layout.restore_scale_strides(scale)


@pytest.mark.parametrize("scale", [torch.zeros(127, 4), torch.zeros(128, 4), torch.zeros(128, 2, dtype=torch.uint8)])
def test_scales_of_another_shape_or_width_are_refused(scale):
    with pytest.raises(ValueError, match=r"one-byte dtype of shape \(128, 4\)"):
        write_packed_scales(allocate_scale(1, 256, 1), 0, UP, scale)


def test_another_half_is_refused():
    with pytest.raises(ValueError, match="half must be"):
        layout.w13_weight_rows(torch.zeros(1, 256, 8), 0, 2)
    with pytest.raises(ValueError, match="blocks of 128"):
        allocate_scale(1, 96, 1)


# Shapes


@pytest.mark.parametrize(
    ("fmt", "version", "hidden", "intermediate"),
    [
        ("sm90_fp8", None, 6144, 2048),
        ("sm90_fp8", None, 512, 256),
        ("sm90_fp8", "2026-10", 5120, 2304),
        ("sm100_mxfp8", None, 128, 128),
        ("sm100_mxfp4", "2026-10", 256, 128),
        ("sm100_mxfp4", "2026-06", 7168, 2048),
        ("sm100_mxfp8", "2026-10", 5120, 2304),
    ],
)
def test_shapes_of_real_models_pass(fmt, version, hidden, intermediate):
    check_shapes(fmt, hidden, intermediate, version)


@pytest.mark.parametrize(
    ("fmt", "version", "hidden", "intermediate", "limit"),
    [
        ("sm90_fp8", None, 768, 256, "hidden % 512 == 0, got hidden 768"),
        ("sm90_fp8", "2026-06", 512, 128, "intermediate % 256 == 0, got intermediate 128"),
        ("sm90_fp8", None, 512, 4352, "intermediate <= 4096, got intermediate 4352"),
        ("sm100_mxfp8", None, 192, 128, "hidden % 128 == 0, got hidden 192"),
        ("sm100_mxfp4", "2026-10", 384, 128, "hidden % 256 == 0, got hidden 384"),
        ("sm100_mxfp4", "2026-06", 5120, 2304, "intermediate % 512 == 0, got intermediate 2304"),
        ("sm100_bf16", None, 0, 128, "hidden % 128 == 0, got hidden 0"),
    ],
)
def test_a_broken_limit_is_named(fmt, version, hidden, intermediate, limit):
    with pytest.raises(ValueError, match=f"{fmt} needs .*{limit}"):
        check_shapes(fmt, hidden, intermediate, version)


def test_all_broken_limits_are_named_at_once_and_the_release_must_be_known():
    with pytest.raises(ValueError, match=r"hidden % 512.* and intermediate % 256.* and intermediate <= 4096"):
        check_shapes("sm90_fp8", 100, 5000)
    with pytest.raises(ValueError, match=r"unknown DeepGEMM release '3.0'.*'2026-10'"):
        check_shapes("sm100_bf16", 128, 128, "3.0")


def test_kernel_tensors_of_every_supported_pair():
    sizes = {"num_experts": 4, "hidden": 1024, "intermediate": 512}
    mxfp8 = kernel_tensors("sm100_mxfp8", "block_fp8", **sizes)
    assert mxfp8["w13_weight"].shape == (4, 1024, 1024)
    assert mxfp8["w2_weight_scale"] == layout.TensorSpec((4, 1024, 4), (4096, 1, 1024), torch.int32, loaded=False)
    assert mxfp8["w13_weight_scale_inv"] == layout.TensorSpec((4, 8, 8), (64, 8, 1), torch.float32)
    assert "w13_weight_scale_inv" not in kernel_tensors("sm100_mxfp8", "mxfp8", **sizes)
    assert kernel_tensors("sm100_mxfp8", "mxfp8", **sizes)["w13_weight_scale"].loaded
    assert set(kernel_tensors("sm100_bf16", "bf16", **sizes)) == {"w13_weight", "w2_weight"}
    assert kernel_tensors("sm100_mxfp4", "mxfp4_ct", **sizes)["w2_weight"].shape == (4, 1024, 256)
    sm90 = kernel_tensors("sm90_fp8", "block_fp8", **sizes)
    assert set(sm90) == {"w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"}
    assert all(spec.loaded for spec in sm90.values())
    nvfp4 = kernel_tensors("sm100_nvfp4", "nvfp4_modelopt", **sizes)
    assert nvfp4["w13_weight_scale"].shape == (4, 1024, 16)
    assert nvfp4["w2_input_scale"].shape == nvfp4["w13_weight_scale_2"].shape == (4,)
    assert kernel_tensors("sm90_fp8", "bf16", **sizes)["w2_weight_scale_inv"].loaded is False


def test_a_spec_describes_what_allocate_scale_makes():
    spec = kernel_tensors(FORMATS["sm100_mxfp4"], SOURCES["mxfp4_dsv4"].name, 2, 128, 128)["w2_weight_scale"]
    scale = allocate_scale(2, 128, 1)
    assert (spec.shape, spec.stride, spec.dtype) == (tuple(scale.shape), scale.stride(), scale.dtype)
    assert spec.num_bytes == scale.nbytes
