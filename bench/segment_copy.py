"""Times the segment copy and the digest against one device copy and one device read of the same bytes.

The bytes are block-FP8 experts (E4M3 with one float32 scale per 128x128) of a DeepGEMM SM90 MegaMoE layer: per layer
w13 with gate and up interleaved by 8 rows, w2, and their scales; six tensors per expert, all in one packed uint8 arena.
On a GPU: 12 layers x 64 experts, hidden 2048, intermediate 1024, which is 4.5 GiB in 4,608 tensors. On a CPU: the same
in small. Every case compares its bytes to torch's own copies before it is timed; times are medians of whole calls,
launch included.

    python bench/segment_copy.py               # a table
    python bench/segment_copy.py --record      # and a line per case in bench/results/segment_copy.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # on the GPU machine the packages are not installed

from weightsync.kernels.digest import digest_many
from weightsync.kernels.segment_copy import SegmentCopy
from weightsync.manifest import Manifest
from weightsync.plan.regions import Region
from weightsync.plan.replay import Replay
from weightsync.plan.segments import compile_segments
from weightsync.plan.writes import Write
from weightsync.transport.buckets import plan_buckets

RESULTS = Path(__file__).parent / "results" / "segment_copy.jsonl"
BLOCK = 128
SHA_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """One row of the results; seconds are medians."""

    case: str
    ours_seconds: float
    floor_seconds: float
    peer: str
    peer_seconds: float
    bytes: int
    tensors: int
    extra_bytes: int | None


class Experts:
    """Live tensors in kernel layout, the wire tensors as views of one arena, and the writes between them."""

    def __init__(self, num_layers: int, num_experts: int, hidden: int, intermediate: int, device: torch.device) -> None:
        fp8, f32, k, n = torch.float8_e4m3fn, torch.float32, hidden, intermediate
        blocks_k, blocks_n = k // BLOCK, n // BLOCK
        self.live: list[torch.Tensor] = []
        plan: list[tuple[str, torch.dtype, tuple[int, int], int, torch.Tensor]] = []
        for layer in range(num_layers):
            w13 = torch.zeros(num_experts, 2 * n, k, dtype=fp8, device=device)
            w13_scale = torch.zeros(num_experts, 2 * blocks_n, blocks_k, dtype=f32, device=device)
            w2 = torch.zeros(num_experts, k, n, dtype=fp8, device=device)
            w2_scale = torch.zeros(num_experts, blocks_k, blocks_n, dtype=f32, device=device)
            first = len(self.live)
            self.live += [w13, w13_scale, w2, w2_scale]
            for expert in range(num_experts):
                halves = w13[expert].view(n // 8, 2, 8, k)
                prefix = f"layers.{layer}.experts.{expert}."
                for half, name in enumerate(("w1", "w3")):
                    scale = w13_scale[expert, half * blocks_n : (half + 1) * blocks_n]
                    plan.append((prefix + name, fp8, (n, k), first, halves[:, half]))
                    plan.append((prefix + name + "_scale", f32, (blocks_n, blocks_k), first + 1, scale))
                plan.append((prefix + "w2", fp8, (k, n), first + 2, w2[expert]))
                plan.append((prefix + "w2_scale", f32, (blocks_k, blocks_n), first + 3, w2_scale[expert]))
        manifest = Manifest.from_tensors((name, torch.empty(s, dtype=d, device="meta")) for name, d, s, _, _ in plan)
        (self.bucket,) = plan_buckets(manifest.entries, 1 << 40)
        self.arena = torch.empty(self.bucket.num_bytes, dtype=torch.uint8, device=device)
        self.num_bytes = manifest.num_bytes
        self.wire: list[tuple[str, torch.Tensor]] = []
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.writes: list[Write] = []
        for chunk, (name, dtype, shape, key, to) in zip(self.bucket.chunks, plan, strict=True):
            tensor = self.arena[chunk.offset : chunk.offset + chunk.num_bytes].view(dtype).view(shape)
            self.wire.append((name, tensor))
            self.pairs.append((to, tensor.view(to.shape)))
            alone = torch.empty(shape, dtype=dtype, device="meta").view(to.shape)
            self.writes.append(Write(name, key, Region.of(to), Region.of(alone)))
        for start in range(0, self.arena.nbytes, 1 << 28):
            self.arena[start : start + (1 << 28)].random_(0, 127)

    def storages(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(self.live))

    def copy_per_tensor(self) -> None:
        for to, from_ in self.pairs:
            to.copy_(from_)

    def check(self, copy: Callable[[], object]) -> None:
        """Refuses to time code that writes other bytes than torch does."""
        for tensor in self.live:
            tensor.view(torch.uint8).fill_(255)
        copy()
        for to, from_ in self.pairs:
            if not torch.equal(to.contiguous().view(torch.uint8), from_.contiguous().view(torch.uint8)):
                raise SystemExit("the bytes differ from torch's own copies: not timed")


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def extra_bytes(build_and_run: Callable[[], object], device: torch.device) -> int | None:
    """Peak of device memory on top of what is allocated already; None on a CPU."""
    if device.type != "cuda":
        build_and_run()
        return None
    wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = build_and_run()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kept
    return peak


def device_copy_seconds(tensor: torch.Tensor, repeats: int) -> float:
    other = torch.empty_like(tensor)
    return seconds(lambda: other.copy_(tensor), tensor.device, repeats)


def measure_copies(experts: Experts, device: torch.device, repeats: int) -> list[Case]:
    floor = device_copy_seconds(experts.arena, repeats)
    peer = seconds(experts.copy_per_tensor, device, max(repeats // 4, 2))

    def case(name: str, copy: Callable[[], object], build_and_run: Callable[[], object]) -> Case:
        experts.check(copy)
        ours = seconds(copy, device, repeats)
        extra = extra_bytes(build_and_run, device)
        return Case(name, ours, floor, "torch copy_ per tensor", peer, experts.num_bytes, len(experts.wire), extra)

    def fresh(copy: Callable[[Replay], None]) -> Replay:
        replay = Replay(experts.writes, experts.storages())
        copy(replay)
        return replay

    replay = Replay(experts.writes, experts.storages())
    from_bucket: Callable[[Replay], None] = lambda r: r.copy_bucket(experts.bucket, experts.arena)  # noqa: E731
    from_tensors: Callable[[Replay], None] = lambda r: r.copy_tensors(experts.wire)  # noqa: E731
    cases = [
        case("segment copy from one buffer", lambda: from_bucket(replay), lambda: fresh(from_bucket)),
        case("segment copy from one tensor each", lambda: from_tensors(replay), lambda: fresh(from_tensors)),
    ]
    if device.type == "cuda":
        graph, copy = captured(experts)
        cases.append(case("segment copy in a CUDA graph", graph.replay, lambda: captured(experts)))
        del graph, copy
    return cases


def captured(experts: Experts) -> tuple[torch.cuda.CUDAGraph, SegmentCopy]:
    copy = SegmentCopy(compile_segments(experts.writes, [experts.bucket.chunks]), experts.storages())
    copy.run([experts.arena])
    copy.bind_sources([experts.arena])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.launch()
    return graph, copy


def measure_digest(experts: Experts, device: torch.device, repeats: int) -> Case:
    tensors = experts.live
    on_host = [tensors[0][:1].cpu(), tensors[1][:1].cpu()]
    if digest_many(on_host) != digest_many([tensors[0][:1], tensors[1][:1]]):
        raise SystemExit("host and device digests differ: not timed")
    words = [tensor.view(-1).view(torch.int32) for tensor in tensors]
    floor = seconds(lambda: [tensor.amax() for tensor in words], device, repeats)
    ours = seconds(lambda: digest_many(tensors), device, repeats)
    sample = experts.arena[:SHA_BYTES].cpu().numpy()
    sha = seconds(lambda: hashlib.sha256(sample).digest(), torch.device("cpu"), 2) * experts.num_bytes / sample.nbytes
    extra = extra_bytes(lambda: digest_many(tensors), device)
    return Case("digest", ours, floor, "SHA-256 on one core", sha, experts.num_bytes, len(tensors), extra)


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return f"CPU, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = (12, 64, 2048, 1024) if device.type == "cuda" else (12, 64, 256, 128)
    experts = Experts(*sizes, device)
    cases = [*measure_copies(experts, device, options.repeats), measure_digest(experts, device, options.repeats)]
    print(f"{hardware(device)}: {experts.num_bytes / 2**30:.2f} GiB in {len(experts.wire):,} tensors")
    for c in cases:
        print(
            f"{c.case:36} {c.ours_seconds * 1e3:9.3f} ms  floor {c.floor_seconds * 1e3:8.3f} ms "
            f"({c.ours_seconds / c.floor_seconds:6.2f}x, {c.bytes / c.ours_seconds / 2**30:6.0f} GiB/s)  "
            f"{c.peer} {c.peer_seconds * 1e3:9.3f} ms  extra "
            + ("-" if c.extra_bytes is None else f"{c.extra_bytes / 2**20:.1f} MiB")
        )
    if options.record:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            for c in cases:
                line = vars(c) | {
                    "hardware": hardware(device),
                    "date": datetime.date.today().isoformat(),
                    "command": "bench/segment_copy.py --record",
                }
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
