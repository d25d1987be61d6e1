"""Times the host's side of a whole push on a CPU: everything but what a GPU would do.

Two processes, as bench/push_gpu.py has them: a trainer whose 4,620 tensors lie in 230 allocations of shared memory, and
an engine that serves HTTP. The engine takes the way of a GPU (tables, one launch for the copies or, layerwise, one per
unit, one per shape of shards for the check), but each launch does nothing, nor does a copy of whole tensors into or out
of a staged unit: what is left is Python, JSON and HTTP. The figure is the processor time of both processes per push,
since they take turns and these machines are shared; the least wall time is shown beside it. Launches and such copies
are counted, so that a push which leaves one out cannot look fast. Whether the bytes are right, the tests tell.

    .venv/bin/python bench/push_cpu.py             # a table
    .venv/bin/python bench/push_cpu.py --record    # and a line per case in bench/results/push_cpu.jsonl
    .venv/bin/python bench/push_cpu.py --profile   # where the engine's time goes
    .venv/bin/python bench/push_cpu.py --modes layerwise
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import multiprocessing as mp
import os
import platform
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.expert_model import ExpertModel, Sizes, checkpoint
from weightsync import Receiver, TrainerClient
from weightsync.trainer.sources import TensorSource
from weightsync.transport.shared_memory import Arena
from weightsync.worker.server import BackgroundServer

RESULTS = Path(__file__).with_name("results") / "push_cpu.jsonl"
NUM_ALLOCATIONS = 230  # as many as torch's allocator makes on an H200 for the model of bench/push_gpu.py
SIZES = Sizes(hidden=512, intermediate=256)  # the smallest that the kernels' layouts take: nothing of them is copied
FORMATS = {"sm90_fp8": 2, "sm100_mxfp8": 4}  # and the launches of a push: checks and requantisation, two shapes
NUM_UNITS, NUM_STAGED = 2 * SIZES.num_layers, 5 * SIZES.num_layers  # modules, and their tensors
MODES = {"direct": 1, "layerwise": NUM_UNITS + 2 * NUM_STAGED}  # the copies: one; per unit one, per tensor in and out
NUM_DERIVED = {"sm90_fp8": 0, "sm100_mxfp8": 2 * SIZES.num_layers}  # packed scales: staged too, but no push brings them
WAIT_SECONDS = 300


class Launches:
    """Stands for every kernel: counts its launches."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def __getitem__(self, grid: Any) -> Launches:
        return self


def take_the_way_of_a_gpu() -> Launches:
    """Makes this process run what it would run beside a GPU, up to the launch of a kernel."""
    import weightsync.kernels.segment_copy as segment_copy
    import weightsync.kernels.segment_copy_triton as copy_kernel
    import weightsync.plan.replay as replay
    from megamoe_adapter import finish, requantize_triton
    from weightsync.reload.hooks.runner import HookRunner
    from weightsync.reload.records import Block

    launches: Any = Launches()

    def start_staged(block: Any, device: Any) -> torch.Tensor:
        launches()
        return torch.empty(block.num_bytes, dtype=torch.uint8, device=device or block.device)

    def write_back(runner: Any, path: str, live: torch.Tensor, value: torch.Tensor) -> None:
        launches()
        runner.about_to_write(live)

    Block.allocate, HookRunner.write = start_staged, write_back  # type: ignore[method-assign]
    segment_copy.choose_backend = replay.choose_backend = lambda device, backend="auto": "triton"  # type: ignore[assignment]
    copy_kernel.copy_tiles = launches
    requantize_triton._inspect = requantize_triton._requantize = launches
    finish.inspect_stacks = requantize_triton.inspect
    finish.requantize_stacks_ = requantize_triton.requantize_
    finish.is_deferred = lambda stacks: True
    return launches


def serve_engine(pipe: Any, fmt: str, is_profiled: bool) -> None:
    """The engine process: serves, then says how much processor time it took and what it launched."""
    torch.set_num_threads(1)
    model = ExpertModel(SIZES, fmt, "cpu")
    model.cold_load(checkpoint(SIZES, 1, "cpu"))
    launches = take_the_way_of_a_gpu()
    receiver = Receiver(model)
    profile = cProfile.Profile()
    if is_profiled:
        receiver.call = lambda *arguments: profile.runcall(Receiver.call, receiver, *arguments)  # type: ignore[method-assign]
    with BackgroundServer(receiver) as server:
        pipe.send(server.url)
        for is_first in (True, False):
            pipe.recv()
            pipe.send((time.process_time(), launches.count))
            if is_first:
                profile.clear()  # the first pushes are not what is looked for
        pipe.recv()
    if is_profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def in_allocations(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[Arena]]:
    """The tensors, in wire order, in shared memory."""
    names = list(tensors)
    per_arena = -(-len(names) // NUM_ALLOCATIONS)
    placed: dict[str, torch.Tensor] = {}
    arenas = []
    for start in range(0, len(names), per_arena):
        part = names[start : start + per_arena]
        arena = Arena(sum(-(-tensors[name].nbytes // 512) * 512 for name in part))
        used = 0
        for name in part:
            tensor = tensors[name]
            view = arena.buffer[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            placed[name] = view.copy_(tensor)
            used += -(-tensor.nbytes // 512) * 512
        arenas.append(arena)
    return placed, arenas


def measure(fmt: str, mode: Any, repeats: int, is_profiled: bool) -> dict[str, Any]:
    """One line of the results."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    engine = context.Process(target=serve_engine, args=(there, fmt, is_profiled), daemon=True)
    engine.start()
    tensors, arenas = in_allocations(dict(checkpoint(SIZES, 2, "cpu")))
    if not here.poll(WAIT_SECONDS):
        raise SystemExit("the engine did not come up")

    def engine_now() -> tuple[float, int]:
        here.send("what")
        answer: tuple[float, int] = here.recv()
        return answer

    source = TensorSource(tensors)
    options = {"transport": "shared_memory", "mode": mode, "deadline_seconds": WAIT_SECONDS}
    with TrainerClient(source, here.recv(), **options) as client:
        start = time.perf_counter()
        client.push()
        first = time.perf_counter() - start
        client.push()
        engine_before, launched_before = engine_now()
        mine_before = time.process_time()
        seconds, stages = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            report = client.push()
            seconds.append(time.perf_counter() - start)
            stages.append(report.seconds | report.ranks[0]["targets"]["model"]["seconds"])
        mine = time.process_time() - mine_before
        engine_after, launched = engine_now()
    here.send("end")
    engine.join(WAIT_SECONDS)
    expected = FORMATS[fmt] + MODES[mode] + (NUM_DERIVED[fmt] if mode == "layerwise" else 0)
    if launched - launched_before != expected * repeats:
        raise SystemExit(f"{launched - launched_before} launches in {repeats} pushes, {expected} each are expected")
    best = min(range(repeats), key=seconds.__getitem__)
    num_bytes, num_tensors = sum(t.nbytes for t in tensors.values()), len(tensors)
    case = f"host side of a push, {mode} into {fmt}"
    per_push = {"trainer": mine / repeats, "engine": (engine_after - engine_before) / repeats}
    total = sum(per_push.values())
    print(
        f"{case}: {total * 1e3:.2f} ms = {total / num_tensors * 1e6:.2f} us/tensor ("
        + ", ".join(f"{side} {value * 1e3:.2f} ms" for side, value in per_push.items())
        + f"); least wall time {seconds[best] * 1e3:.2f} ms; first push {first:.2f} s; "
        + ", ".join(f"{stage} {value * 1e3:.2f} ms" for stage, value in stages[best].items())
        + f"; {len(arenas)} allocations",
        flush=True,
    )
    return {
        "case": f"{case}, 12x64 experts, processor time",
        "ours_seconds": total,
        "floor_seconds": None,
        "peer": None,
        "peer_seconds": None,
        "bytes": num_bytes,
        "tensors": num_tensors,
        "extra_bytes": None,
        "us_per_tensor": total / num_tensors * 1e6,
        "least_wall_seconds": seconds[best],
        "trainer_cpu_seconds": per_push["trainer"],
        "engine_cpu_seconds": per_push["engine"],
        "first_push_seconds": first,
        "hardware": f"CPU, {mp.cpu_count()} cores, {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "bench/push_cpu.py", *sys.argv[1:]]),
    }


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print where the engine's time goes; times are larger")
    parser.add_argument("--record", action="store_true", help="append to bench/results/push_cpu.jsonl")
    args = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels can then be imported without a GPU; the engine inherits it
    torch.set_num_threads(1)
    lines = [measure(fmt, mode, args.repeats, args.profile) for fmt in args.formats for mode in args.modes]
    if args.record:
        with RESULTS.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
