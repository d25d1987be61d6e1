"""The reference forward against a dense computation from the checkpoint, with a wrong layout that has to fail."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from expert_checkpoints import PAIRS, Checkpoint, dense_moe, relative_l2, sizes_of

from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.formats import FORMATS
from megamoe_adapter.reference import Numerics
from megamoe_adapter.shared_experts import SharedExpert

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS, TOP_K = 4, 2
# Relative L2 of a layer's output to float32 from the checkpoint's values. "exact" leaves the weights' own rounding
# and the bfloat16 output; "kernel" adds the rounding of tokens and of the second GEMM's input. A wrong layout gives
# about 1.
TOLERANCE = {
    "sm100_bf16": {"exact": 0.004, "kernel": 0.01},
    "sm100_mxfp8": {"exact": 0.004, "kernel": 0.06},
    "sm100_mxfp4": {"exact": 0.004, "kernel": 0.06},
    "sm100_nvfp4": {"exact": 0.004, "kernel": 0.2},
    "sm90_fp8": {"exact": 0.004, "kernel": 0.06},
}
WEIGHT_ROUNDING = 0.06  # on top, where the weights are rounded on their way into the format
WRONG = 0.5


def build(fmt, source, **kwargs):
    kwargs = {"backend": "reference", **kwargs}
    return MegaMoEExperts(NUM_EXPERTS, TOP_K, *sizes_of(fmt), fmt=fmt, source=source, **kwargs)


def loaded(fmt, source, data, **kwargs):
    module = build(fmt, source, **kwargs)
    for name, tensor in data.tensors.items():
        module.load(name, tensor)
    module.finish()
    return module


def inputs(hidden, num_tokens=24, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K, -1)
    return x, ids, weights / weights.sum(-1, keepdim=True) * 2.5


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
@pytest.mark.parametrize("precision", ["exact", "kernel"])
def test_output_agrees_with_the_checkpoint(fmt, source, precision):
    data = Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS))
    module = loaded(fmt, source, data, precision=precision)
    x, ids, weights = inputs(module.hidden)
    expected = dense_moe(data.values, x, ids, weights)
    y = module(x, ids, weights)
    assert y.dtype == torch.bfloat16
    rounding = WEIGHT_ROUNDING if PAIRS[fmt, source] else 0.0
    assert relative_l2(y, expected) < TOLERANCE[fmt][precision] + rounding


def swap_gate_and_up(module):
    rows = module.w13_weight.data.view(torch.uint8).view(NUM_EXPERTS, -1, 2, 8, module.w13_weight.shape[-1])
    rows.copy_(rows.flip(2).clone())


def drop_the_interleave(module):
    raw = module.w13_weight.data.view(torch.uint8)
    rows = raw.view(NUM_EXPERTS, -1, 2, 8, raw.shape[-1])
    raw.copy_(rows.transpose(1, 2).reshape(raw.shape).clone())


def shift_experts(module):
    raw = module.w2_weight.data.view(torch.uint8)
    raw.copy_(raw.roll(1, 0).clone())


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
@pytest.mark.parametrize("damage", [swap_gate_and_up, drop_the_interleave, shift_experts])
def test_a_wrong_layout_does_not_pass(fmt, source, damage):
    data = Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS))
    module = loaded(fmt, source, data, precision="kernel")
    damage(module)
    x, ids, weights = inputs(module.hidden)
    assert relative_l2(module(x, ids, weights), dense_moe(data.values, x, ids, weights)) > WRONG


@pytest.mark.parametrize(
    ("fmt", "source"), [("sm100_mxfp8", "block_fp8"), ("sm100_mxfp8", "mxfp8"), ("sm100_mxfp4", "mxfp4_ct")]
)
def test_scales_in_the_wrong_rows_do_not_pass(fmt, source):
    data = Checkpoint(source, *sizes_of(fmt), range(NUM_EXPERTS), seed=5)
    module = loaded(fmt, source, data, precision="exact")
    # Plain order instead of the permuted one, on top of scales that differ from row to row.
    module.w13_weight_scale.data.add_(
        torch.arange(module.w13_weight_scale.shape[1], dtype=torch.int32)[None, :, None] % 4
    )
    x, ids, weights = inputs(module.hidden)
    assert relative_l2(module(x, ids, weights), dense_moe(data.values, x, ids, weights)) > 0.3


@pytest.mark.parametrize(
    ("fmt", "source", "shared_source"),
    [
        ("sm100_mxfp8", "block_fp8", "block_fp8"),
        ("sm100_mxfp4", "mxfp4_dsv4", "block_fp8_ue8m0"),
        ("sm100_nvfp4", "nvfp4_modelopt", "bf16"),
        ("sm100_bf16", "bf16", "bf16"),
    ],
)
@pytest.mark.parametrize("precision", ["exact", "kernel"])
def test_a_fused_shared_expert_is_added_unscaled(fmt, source, shared_source, precision):
    hidden, intermediate = sizes_of(fmt)
    data = Checkpoint(source, hidden, intermediate, range(NUM_EXPERTS))
    shared = Checkpoint(shared_source, hidden, 2 * intermediate, ["shared"], seed=9)
    data.tensors |= shared.tensors
    module = loaded(fmt, source, data, precision=precision, shared=SharedExpert(shared_source, 2 * intermediate))
    x, ids, weights = inputs(hidden)
    expected = dense_moe(data.values | shared.values, x, ids, weights)
    rounding = WEIGHT_ROUNDING if "block_fp8" in (source, shared_source) else 0.0
    assert relative_l2(module(x, ids, weights), expected) < TOLERANCE[fmt][precision] + rounding


def test_an_id_of_minus_one_adds_nothing():
    data = Checkpoint("block_fp8", 512, 256, range(NUM_EXPERTS))
    module = loaded("sm90_fp8", "block_fp8", data)
    x, ids, weights = inputs(512)
    ids[3:9, 1] = -1
    ids[5] = -1
    y = module(x, ids, weights)
    assert not y[5].any()
    expected = dense_moe(data.values, x, ids, weights)
    rows = [row for row in range(len(x)) if row != 5]
    assert relative_l2(y[rows], expected[rows]) < TOLERANCE["sm90_fp8"]["kernel"]


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_zero_tokens_give_zero_rows(fmt, source):
    module = build(fmt, source)
    module.accept_present_weights()
    empty = torch.empty(0, module.hidden).bfloat16()
    y = module(empty, torch.empty(0, TOP_K, dtype=torch.int64), torch.empty(0, TOP_K))
    assert tuple(y.shape) == (0, module.hidden)
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("fmt", ["sm90_fp8", "sm100_mxfp8"])
def test_the_clamp_limits_gate_from_above_and_up_on_both_sides(fmt):
    data = Checkpoint("block_fp8", *sizes_of(fmt), range(NUM_EXPERTS), pow2=True)
    module = loaded(fmt, "block_fp8", data, activation=MegaMoEActivation.from_limit(0.4), precision="exact")
    x, ids, weights = inputs(module.hidden)
    clamped = dense_moe(data.values, x, ids, weights, clamp=0.4)
    y = module(x, ids, weights)
    assert relative_l2(y, clamped) < 0.005
    assert relative_l2(y, dense_moe(data.values, x, ids, weights)) > 0.1, "the clamp bites"


def test_the_topk_weight_enters_before_the_second_gemm_is_quantised():
    """A power of two commutes with the rounding; another weight gives another rounding than weighting afterwards."""
    data = Checkpoint("block_fp8", 512, 256, range(NUM_EXPERTS))
    module = loaded("sm90_fp8", "block_fp8", data)
    x, ids, _ = inputs(512)
    ids = ids[:, :1].expand(-1, 2).clone()
    ids[:, 1] = -1
    one = module(x, ids, torch.ones(len(x), 2)).float()
    assert torch.equal(module(x, ids, torch.full((len(x), 2), 0.5)).float(), one * 0.5)
    fmt = FORMATS["sm90_fp8"]
    assert Numerics.of(fmt).weight_before_hidden
    assert not Numerics.of(FORMATS["sm100_nvfp4"]).weight_before_hidden


def test_the_second_gemms_group_is_what_the_build_says():
    x = torch.randn(4, 128)
    x[:, :64] *= 1e-6  # beside the other half it is below the smallest E4M3 value
    fmt = FORMATS["sm90_fp8"]
    narrow, wide = Numerics.of(fmt, l2_group=64).hidden(x), Numerics.of(fmt, l2_group=128).hidden(x)
    assert relative_l2(narrow[:, :64], x[:, :64]) < 0.04
    assert not wide[:, :64].any()
    assert relative_l2(narrow[:, 64:], x[:, 64:]) < 0.04
    assert relative_l2(wide[:, 64:], x[:, 64:]) < 0.04


def test_between_its_gemms_the_older_hopper_kernel_scales_by_powers_of_two():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1] = 300.0, 17.3
    x[0, 64], x[0, 65] = 560.0, 17.3
    by_powers, by_amax = (Numerics.of(FORMATS["sm90_fp8"], l2_group=group).hidden(x) for group in (64, 128))
    assert by_powers[0, :2].tolist() == [288.0, 18.0], "300/448 rounds up to 1: steps of 32 and of 2"
    assert by_powers[0, 64:66].tolist() == [576.0, 17.0 + 1.0], "560/448 rounds up to 2: 280 -> 288, 8.65 -> 9"
    assert by_amax[0, 64] == 560.0, "amax itself is exact where the scale is amax/448"


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="unknown precision"):
        Numerics.of(FORMATS["sm90_fp8"], precision="fp4")


# Over two processes


def run_rank(rank, world, file, results):
    dist.init_process_group("gloo", store=dist.FileStore(file, world), rank=rank, world_size=world)
    data = Checkpoint("block_fp8", 512, 256, range(NUM_EXPERTS))
    module = loaded("sm90_fp8", "block_fp8", data, ep_size=world, ep_rank=rank, ep_group=dist.group.WORLD)
    whole = loaded("sm90_fp8", "block_fp8", data)
    for num_tokens in (5 + 2 * rank, 3 * rank):  # ranks differ, and rank 0 once has none
        x, ids, weights = inputs(512, num_tokens=num_tokens, seed=20 + rank)
        y, expected = module(x, ids, weights), whole(x, ids, weights)
        ok = tuple(y.shape) == (num_tokens, 512) and (num_tokens == 0 or relative_l2(y, expected) < 0.005)
        results.put((rank, num_tokens, ok))
    dist.destroy_process_group()


def test_experts_over_two_processes_give_the_whole_layers_output(tmp_path):
    context = mp.get_context("spawn")
    results, file = context.Queue(), str(tmp_path / "ranks")
    processes = [context.Process(target=run_rank, args=(rank, 2, file, results)) for rank in range(2)]
    for process in processes:
        process.start()
    got = sorted(results.get(timeout=150) for _ in range(4))
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert got == [(0, 0, True), (0, 5, True), (1, 3, True), (1, 7, True)]


def test_a_forward_over_ranks_without_a_group_is_refused():
    module = build("sm90_fp8", "block_fp8", ep_size=2, ep_rank=0)
    module.accept_present_weights()
    with pytest.raises(ValueError, match="needs an ep_group"):
        module(*inputs(512))
