"""The Triton kernels give the bytes of the torch reference: on a GPU, and without one in Triton's interpreter.

Whether a kernel is interpreted is settled when it is defined, so the interpreter runs in a process of its own: this
file as a program, which runs every function in `CASES` on CPU tensors.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from megamoe_adapter import layout, requantize
from megamoe_adapter.layout import GATE, UP, allocate_scale
from megamoe_adapter.requantize import StagedShards, requantize_layer_, requantize_shard_

GOLDEN = Path(__file__).parents[1] / "golden"
E4M3 = torch.float8_e4m3fn


def make_stack(device, halves, shards=None, experts=2, rows=128, cols=128, seed=0):
    """Random finite codes with a zero group, under scales from 2**-130 to 2**119 and one that is zero."""
    generator = torch.Generator().manual_seed(seed)
    shards = shards or [(slot, half) for slot in range(experts) for half in halves]
    codes = torch.randint(256, (experts, rows * len(halves), cols), dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    codes[0, 3, :32] = 0x80
    blocks = (experts, rows * len(halves) // 128, cols // 128)
    exponent = torch.randint(-130, 120, blocks, generator=generator).float()
    scale = (1 + torch.rand(blocks, generator=generator)) * torch.exp2(exponent)
    scale[-1, -1, -1] = 0
    packed = allocate_scale(experts, rows * len(halves), cols // 128).fill_(-1)
    return StagedShards(codes.view(E4M3).to(device), scale.to(device), to_device(packed, device), shards)


def to_device(scale, device):
    return layout.restore_scale_strides(scale.to(device))


def requantize_without_faults(*stacks):
    from megamoe_adapter import requantize_triton

    flags = requantize_triton.inspect(stacks)
    assert not flags[-1]
    requantize_triton.requantize_(stacks, flags)


def reference_(stack):
    for slot, half in stack.shards:
        blocks = layout.block_scale_rows(stack.block_scale, slot, half)
        requantize_shard_(stack.weight, stack.scale, slot, half, blocks)


def assert_same(got, expected):
    assert torch.equal(got.weight.view(torch.uint8).cpu(), expected.weight.view(torch.uint8).cpu())
    assert torch.equal(got.scale.cpu(), expected.scale.cpu())


def case_random_shards(device):
    for halves, options in (
        ((GATE, UP), {"rows": 256}),
        ((GATE, UP), {"cols": 384, "shards": [(1, UP), (0, GATE)]}),
        ((None,), {"cols": 256}),
        ((None,), {"experts": 3, "shards": [(2, None)]}),
    ):
        stack, expected = make_stack(device, halves, **options), make_stack("cpu", halves, **options)
        requantize_without_faults(stack)
        reference_(expected)
        assert_same(stack, expected)


def case_golden_w2(device):
    golden = load_file(GOLDEN / "layout.safetensors")
    for case in ("general", "pow2"):
        weight = golden[f"sm90_fp8.{case}.w2_weight"].view(E4M3).to(device)
        blocks = golden[f"sm90_fp8.{case}.w2_weight_scale_inv"].to(device)
        packed = to_device(allocate_scale(2, 256, 1).fill_(-1), device)
        requantize_without_faults(StagedShards(weight, blocks, packed, [(0, None), (1, None)]))
        assert torch.equal(weight.view(torch.uint8).cpu(), golden[f"sm100_mxfp8.{case}.w2_weight"])
        assert torch.equal(packed.cpu(), golden[f"sm100_mxfp8.{case}.w2_weight_scale"])


def case_golden_w13(device):
    golden = load_file(GOLDEN / "layout.safetensors")
    weight = golden["sm90_fp8.general.w13_weight"].view(E4M3).to(device)
    blocks = golden["sm90_fp8.general.w13_weight_scale_inv"].to(device)
    packed = to_device(allocate_scale(2, 256, 2).fill_(-1), device)
    shards = [(1, UP), (0, GATE), (1, GATE), (0, UP)]
    requantize_without_faults(StagedShards(weight, blocks, packed, shards))
    assert torch.equal(weight.view(torch.uint8).cpu(), golden["sm100_mxfp8.general.w13_weight"])
    assert torch.equal(packed.cpu(), golden["sm100_mxfp8.general.w13_weight_scale"])


def case_every_code_is_exact_under_a_power_of_two(device):
    codes = torch.arange(254, dtype=torch.uint8)
    codes[127:] += 1  # 0x7F and 0xFF left out
    codes = torch.nn.functional.pad(codes, (0, 2))
    shuffled = torch.stack([codes[torch.randperm(256, generator=torch.Generator().manual_seed(i))] for i in range(128)])
    for exponent in (-126, -119, -1, 0, 100, 127):
        weight = shuffled[None].clone().view(E4M3).to(device)
        packed = to_device(allocate_scale(1, 128, 2), device)
        stack = StagedShards(weight, torch.full((1, 1, 2), 2.0**exponent, device=device), packed, [(0, None)])
        requantize_without_faults(stack)
        scale = layout.read_packed_scales(packed.cpu(), 0, None).double() - 127
        got = weight[0].cpu().double() * torch.exp2(scale).repeat_interleave(32, 1)
        assert torch.equal(got, shuffled.view(E4M3).double() * 2.0**exponent), exponent


def case_ties_and_peaks_at_the_limit(device):
    """Codes half way between two others, above the even one (17/16) and below it (3/2), normal and tiny; and peaks one
    float32 step below, at and above 448 times a power of two."""
    limit = torch.tensor([1.75]).view(torch.int32)
    steps = [(limit + step).view(torch.float32).item() for step in (-1, 0, 1)]
    for factor in (1.0625, 1.5, 1.5 * 2.0**-127, 2.0**-130, 2.0**-133, *steps, steps[2] * 2.0**-60, steps[2] * 2.0**90):
        stack, expected = make_stack(device, (None,)), make_stack("cpu", (None,))
        for each in (stack, expected):
            each.block_scale.fill_(factor)
            codes = each.weight.view(torch.uint8)
            codes[1, :, ::8] = 0x78  # a power of two, the peak of its group: the factor is the mantissa
            codes[1].masked_fill_((codes[1] & 0x7F) > 0x78, 0)
        requantize_without_faults(stack)
        reference_(expected)
        assert_same(stack, expected)


def case_flags(device):
    from megamoe_adapter import requantize_triton

    stack = make_stack(device, (GATE, UP), experts=3, cols=256)
    stack.block_scale.fill_(0.5)
    assert requantize_triton.inspect([stack]).tolist()[:-1] == [0] * 6
    codes = stack.weight.view(torch.uint8)
    codes[0, 8, 0] = 0x7F  # expert 0, row 0 of up
    codes[1, 255 - 8, 255] = 0xFF  # expert 1, the last row of gate
    for index, value in enumerate((float("nan"), float("inf"), -1e-40, 1.8e38)):
        stack.block_scale[2, 0, 1] = value
        stack.block_scale[1, 1, 0] = 0.75  # expert 1, up
        flags = requantize_triton.inspect([stack]).tolist()[:-1]
        assert flags == requantize.inspect_shards(stack), index
        assert flags[:4] == [0, requantize.NAN_CODE, requantize.NAN_CODE, requantize.ROUNDS]
        assert flags[4] & requantize.BAD_SCALE
        assert flags[5] == 0


def case_a_fault_in_one_stack_leaves_all_of_them_alone(device):
    from megamoe_adapter import requantize_triton

    stacks = [make_stack(device, (GATE, UP)), make_stack(device, (None,), cols=256)]
    stacks[0].block_scale.fill_(0.75)
    for spoil, fault in ((lambda: None, 0), (lambda: stacks[1].block_scale[0].fill_(-1.0), requantize.BAD_SCALE)):
        spoil()
        before = [(stack.weight.view(torch.uint8).clone(), stack.scale.clone()) for stack in stacks]
        flags = requantize_triton.inspect(stacks)
        assert flags[:4].tolist() == [requantize.ROUNDS] * 4
        assert [flag & ~requantize.ROUNDS for flag in flags[4:6].tolist()] == [fault, 0]
        requantize_triton.requantize_(stacks, flags)
        for stack, (weight, scale) in zip(stacks, before, strict=True):
            assert torch.equal(stack.weight.view(torch.uint8), weight) == bool(fault)
            assert torch.equal(stack.scale, scale) == bool(fault)


def case_layers_of_one_shape_are_one_launch(device):
    """Two layers of two stacks each: two shapes. Every flag is at its shard's place, whatever launch it came from."""
    from megamoe_adapter import requantize_triton

    stacks, expected = (
        [make_stack(where, halves, seed=seed) for seed in (0, 1) for halves in ((GATE, UP), (None,))]
        for where in (device, "cpu")
    )
    assert len(requantize_triton._tables(stacks)) == 2
    for each in (stacks, expected):
        for stack in each:
            stack.block_scale.fill_(0.5)
        each[2].block_scale[1, 0, 0] = 0.75  # the second layer's w13, expert 1: the fifth of its shards after 6 others
    flags = requantize_triton.inspect(stacks).tolist()
    assert flags == [flag for stack in expected for flag in requantize.inspect_shards(stack)] + [0]
    assert [index for index, flag in enumerate(flags) if flag] == [8]
    requantize_without_faults(*stacks)
    for stack, want in zip(stacks, expected, strict=True):
        reference_(want)
        assert_same(stack, want)


def case_a_table_is_kept_until_an_address_or_the_choice_of_shards_changes(device):
    from megamoe_adapter import requantize_triton

    stack = make_stack(device, (GATE, UP))
    first = requantize_triton._tables([stack])
    again = StagedShards(stack.weight, stack.block_scale, stack.scale, list(stack.shards))
    assert requantize_triton._tables([again]) is first
    for changes in (
        {"weight": stack.weight.clone()},
        {"block_scale": stack.block_scale.clone()},
        {"scale": to_device(stack.scale.clone(), device)},
        {"shards": [(1, UP), (0, GATE)]},
    ):
        fields = {
            "weight": stack.weight,
            "block_scale": stack.block_scale,
            "scale": stack.scale,
            "shards": stack.shards,
        }
        other = StagedShards(**(fields | changes))
        assert requantize_triton._tables([other]) is not first, changes.keys()
        other.block_scale.fill_(0.5)
        other.block_scale[1, 1, 0] = -1.0  # expert 1, up
        want = [requantize.BAD_SCALE * (shard == (1, UP)) for shard in other.shards]
        assert requantize_triton.inspect([other]).tolist() == [*want, requantize.BAD_SCALE]
    for seed in range(requantize_triton.NUM_KEPT + 1):
        requantize_triton._tables([make_stack(device, (None,), experts=1, shards=[(0, None)], seed=seed)])
    assert len(requantize_triton._kept) <= requantize_triton.NUM_KEPT


CASES = {name.removeprefix("case_"): run for name, run in list(globals().items()) if name.startswith("case_")}


def test_every_case_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_case_on_a_gpu(case):
    CASES[case]("cuda")


@pytest.mark.gpu
def test_a_layer_on_a_gpu_equals_the_cpu_without_device_temporaries():
    sizes = {"experts": 4, "rows": 1024, "cols": 1024}
    stacks = [make_stack("cuda", (GATE, UP), **sizes), make_stack("cuda", (None,), **sizes, seed=1)]
    expected = [make_stack("cpu", (GATE, UP), **sizes), make_stack("cpu", (None,), **sizes, seed=1)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    requantize_layer_("layer", stacks)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    for got, want in zip(stacks, expected, strict=True):
        reference_(want)
        assert_same(got, want)


@pytest.mark.gpu
def test_a_bad_shard_on_a_gpu_leaves_the_layer_alone():
    stacks = [make_stack("cuda", (GATE, UP)), make_stack("cuda", (None,))]
    stacks[1].weight.view(torch.uint8)[1, 100, 100] = 0x7F
    before = [(stack.weight.view(torch.uint8).clone(), stack.scale.clone()) for stack in stacks]
    with pytest.raises(ValueError, match="slot 1 w2 has NaN"):
        requantize_layer_("layer", stacks)
    for stack, (weight, scale) in zip(stacks, before, strict=True):
        assert torch.equal(stack.weight.view(torch.uint8), weight)
        assert torch.equal(stack.scale, scale)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, run in CASES.items():
        run("cpu")
        print(name)
