"""Requantising a layer of block-FP8 experts to MXFP8, in place in kernel layout, against one device copy of the bytes.

    python bench/requantize.py                      # on a GPU: 0.9 GiB of experts, GLM and DeepSeek-V3 widths
    python bench/requantize.py --out run.jsonl      # JSON lines go there instead of bench/results/requantize.jsonl

Everything is measured in the same process, back to back as the layers of a model follow each other (host time between
calls counts, what the GPU hides does not):

    floor      one device copy of the weights' bytes: each read once, written once
    kernel     the Triton launches alone (w13 and w2)
    checked    `requantize_layer_`: first reads every code and scale to refuse NaN and bad scales, then the kernel
    eager      plain torch per expert shard, out of place, checkpoint order: the usual way
    compiled   the same function under torch.compile

`eager` and `compiled` do less (no kernel layout, no checks, no in-place result). On CPU there is no kernel: the torch
path runs at a small size, and the output says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megamoe_adapter.layout import GATE, UP, allocate_scale, block_scale_rows, weight_view
from megamoe_adapter.requantize import RoundingWarning, StagedShards, requantize_layer_, requantize_shard_

E4M3 = torch.float8_e4m3fn
CALLS = 5  # per timed round
RESULTS = Path(__file__).parent / "results" / "requantize.jsonl"


def make_layer(experts: int, hidden: int, intermediate: int, device: str) -> list[StagedShards]:
    stacks = []
    for rows, cols, halves in ((2 * intermediate, hidden, (GATE, UP)), (hidden, intermediate, (None,))):
        weight = torch.empty(experts, rows, cols, dtype=E4M3, device=device)
        scale = (1 + torch.rand(experts, rows // 128, cols // 128, device=device)) * 2.0**-12
        packed = allocate_scale(experts, rows, cols // 128, device=device)
        stacks.append(StagedShards(weight, scale, packed, [(e, half) for e in range(experts) for half in halves]))
    return stacks


def draw(stacks: list[StagedShards]) -> None:
    """Random finite codes of both signs."""
    for stack in stacks:
        codes = stack.weight.view(torch.uint8)
        codes.random_(0, 0x7F).bitwise_or_(torch.randint_like(codes[:1], 0, 2) << 7)


def plain(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual way in plain torch: dequantise, find the exponents, quantise; one shard, checkpoint order."""
    rows, cols = weight.shape
    real = weight.float().view(rows // 128, 128, cols // 128, 128) * scale[:, None, :, None]
    groups = real.view(rows, cols // 32, 32)
    bits = (groups.abs().amax(-1) / 448).view(torch.int32)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).clamp(1, 254)
    factor = ((254 - exponent) << 23).view(torch.float32)
    return (groups * factor[..., None]).view(rows, cols).to(E4M3), exponent.to(torch.uint8)


def timed(run: Callable[[], object], device: str, repeat: int) -> float:
    """Median over `repeat` rounds of the mean seconds of `CALLS` calls in a row, as the layers of a model follow."""

    def round_seconds() -> float:
        if device != "cuda":
            begin = time.perf_counter()
            for _ in range(CALLS):
                run()
            return (time.perf_counter() - begin) / CALLS
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(CALLS):
            run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / CALLS

    run()  # compiles and warms up
    return statistics.median(round_seconds() for _ in range(repeat))


def extra_bytes(run: Callable[[], object], device: str) -> int | None:
    """Peak device memory above what was allocated before; None on CPU, where torch does not count."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_bytes(stacks: list[StagedShards]) -> int:
    """Runs the layer and the torch reference on copies; returns the number of shards, raises if a byte differs."""
    copies = [
        StagedShards(s.weight.clone(), s.block_scale, s.scale.clone(memory_format=torch.preserve_format), s.shards)
        for s in stacks
    ]
    requantize_layer_("bench", stacks)
    for stack, copy in zip(stacks, copies, strict=True):
        for slot, half in copy.shards:
            requantize_shard_(copy.weight, copy.scale, slot, half, block_scale_rows(copy.block_scale, slot, half))
        same = torch.equal(stack.weight.view(torch.uint8), copy.weight.view(torch.uint8))
        if not same or not torch.equal(stack.scale, copy.scale):
            raise SystemExit("the kernel's bytes differ from the torch reference's")
    return sum(len(stack.shards) for stack in stacks)


def copy_floor(stacks: list[StagedShards], device: str, repeat: int) -> float:
    source = [stack.weight.view(torch.uint8).clone() for stack in stacks]
    target = [torch.empty_like(codes) for codes in source]
    return timed(lambda: [a.copy_(b) for a, b in zip(target, source, strict=True)], device, repeat)


def run_kernel(stacks: list[StagedShards], flags: torch.Tensor) -> None:
    from megamoe_adapter import requantize_triton

    requantize_triton.requantize_(stacks, flags)


def run_each(function: Callable[..., object], shards: list[tuple[torch.Tensor, ...]]) -> None:
    for shard in shards:
        function(*shard)


def measure_peers(stacks: list[StagedShards], device: str, repeat: int) -> dict[str, float]:
    """Seconds of each peer over the same shards, each contiguous and in checkpoint order."""
    shards = [
        (
            weight_view(stack.weight, *shard).flatten(0, -2).contiguous(),
            block_scale_rows(stack.block_scale, *shard).contiguous(),
        )
        for stack in stacks
        for shard in stack.shards
    ]
    functions = {"eager": plain}
    if device == "cuda":
        functions["compiled"] = torch.compile(plain, dynamic=False)
    return {peer: timed(partial(run_each, function, shards), device, repeat) for peer, function in functions.items()}


def measure(
    name: str, experts: int, hidden: int, intermediate: int, device: str, repeat: int
) -> list[dict[str, object]]:
    stacks = make_layer(experts, hidden, intermediate, device)
    draw(stacks)
    num_bytes = sum(stack.weight.nbytes for stack in stacks)
    tensors = check_bytes(stacks)
    print(f"{name}: {num_bytes / 2**30:.2f} GiB in {tensors} shards, bytes equal to the torch reference", flush=True)
    floor = copy_floor(stacks, device, repeat)
    draw(stacks)
    peers = measure_peers(stacks, device, max(2, repeat // 3))
    ours = {"checked": lambda: requantize_layer_("bench", stacks)}
    if device == "cuda":
        no_faults = torch.zeros(1, dtype=torch.int32, device=device)
        ours["kernel"] = lambda: run_kernel(stacks, no_faults)
    rows: list[dict[str, object]] = []
    for case, run in ours.items():
        draw(stacks)
        seconds = timed(run, device, repeat)
        extra = extra_bytes(run, device)
        for peer, peer_seconds in peers.items():
            rows.append(
                {
                    "case": f"requantise {name} {case}", "ours_seconds": seconds, "floor_seconds": floor, "peer": peer,
                    "peer_seconds": peer_seconds, "bytes": num_bytes, "tensors": tensors, "extra_bytes": extra,
                }
            )  # fmt: skip
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print(f"{'case':<44}{'ours':>11}{'x floor':>9}{'extra MiB':>11}   {'peer':<10}{'peer':>11}{'x floor':>9}")
    for row in rows:
        floor = row["floor_seconds"]
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.2f}"
        print(
            f"{row['case']:<44}{row['ours_seconds'] * 1e3:>8.3f} ms{row['ours_seconds'] / floor:>9.2f}{extra:>11}   "
            f"{row['peer']:<10}{row['peer_seconds'] * 1e3:>8.3f} ms{row['peer_seconds'] / floor:>9.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.9, help="GiB of expert weights on a GPU")
    parser.add_argument("--repeat", type=int, default=7, help="timed rounds per row")
    parser.add_argument(
        "--out", type=Path, help="append JSON lines here; without a GPU nothing is written unless given"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore", RoundingWarning)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, hidden, intermediate in (("6144x2048", 6144, 2048), ("7168x2048", 7168, 2048), ("2048x1024", 2048, 1024)):
        if device == "cpu":
            name, hidden, intermediate = "512x256", 512, 256
        per_expert = 3 * hidden * intermediate
        experts = 4 if device == "cpu" else round(options.gib * 2**30 / per_expert)
        rows += measure(name, experts, hidden, intermediate, device, options.repeat)
        if device == "cpu":
            print("no GPU: the torch path at a small size; these figures say nothing about the kernel")
            break
    show(rows)
    facts = {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": f"python bench/requantize.py --gib {options.gib} --repeat {options.repeat}",
    }
    out = options.out or (RESULTS if device == "cuda" else None)
    if out is not None:
        with out.open("a") as file:
            file.writelines(json.dumps(row | facts) + "\n" for row in rows)


if __name__ == "__main__":
    main()
