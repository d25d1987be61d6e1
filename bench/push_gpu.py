"""Times a whole push between two processes on GPUs, from `client.push` to the version published.

A trainer process holds block-FP8 experts on its GPU; this process is the engine and serves the control routes over
HTTP. Every case is checked: after the pushes, the engine's bytes equal a cold load of the same checkpoint and nothing
moved. The floor is measured in the same run: one copy of the bytes (CUDA IPC), or their raw NCCL broadcast.

    python bench/push_gpu.py                                              # one GPU, CUDA IPC
    python bench/push_gpu.py --engine-device cuda:1 --transport nccl      # two GPUs
    python bench/push_gpu.py --record --peer "vLLM 0.33 packed IPC" --peer-seconds 0.26
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import gc
import json
import os
import pstats
import shlex
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # on a GPU machine the packages may not be installed

from bench.expert_model import ExpertModel, Sizes, checkpoint
from weightsync import Receiver, TrainerClient, fingerprint
from weightsync.trainer.sources import TensorSource
from weightsync.worker.server import BackgroundServer

RESULTS = Path(__file__).parent / "results" / "push_gpu.jsonl"
NUM_TIMED = 7


@dataclass(frozen=True)
class Case:
    """One row of the results; seconds are medians."""

    case: str
    ours_seconds: float
    floor_seconds: float
    peer: str
    peer_seconds: float | None
    bytes: int
    tensors: int
    extra_bytes: int
    hardware: str
    date: str
    command: str


def median(values: list[float]) -> float:
    """The middle value."""
    return sorted(values)[len(values) // 2]


def trainer(device: str, sizes: Sizes, orders: Any, answers: Any) -> None:
    """The trainer process: makes the weights, then pushes on demand."""
    try:
        torch.cuda.set_device(device)
        weights: dict[str, torch.Tensor] = {}
        client: TrainerClient | None = None
        while (order := orders.get()) is not None:
            verb, value = order
            if verb == "weights":
                for name, tensor in checkpoint(sizes, value, device):
                    if name in weights:
                        weights[name].copy_(tensor)  # as an optimiser does: in place
                    else:
                        weights[name] = tensor.clone()
                torch.cuda.synchronize()
                answers.put((sum(t.nbytes for t in weights.values()), len(weights)))
            elif verb == "connect":
                client = TrainerClient(TensorSource(weights), **value)
                answers.put(None)
            elif verb == "push" and client is not None:
                start = time.perf_counter()
                report = client.push(version=value)
                seconds = time.perf_counter() - start
                stages = report.seconds | report.ranks[0]["targets"]["model"]["seconds"]
                answers.put((seconds, stages, report.transport, report.reason, report.copied_bytes))
            elif verb == "split push" and client is not None:
                version, scales_first = value
                scales = [name for name in weights if name.endswith("scale_inv")]
                rest = [name for name in weights if not name.endswith("scale_inv")]
                client.start(version=version)
                for names in (scales, rest) if scales_first else (rest, scales):
                    client.update(names)
                client.finish()
                answers.put(None)
            elif verb == "close" and client is not None:
                client.close()
                answers.put(torch.cuda.memory_allocated(device))
            elif verb == "broadcast":
                answers.put(raw_broadcast(device, 0, *value))
    except BaseException:
        answers.put(RuntimeError(traceback.format_exc()))


def raw_broadcast(device: str, rank: int, port: int, num_bytes: int) -> float:
    """Seconds of a bare NCCL broadcast of `num_bytes` in messages of at most 1 GiB; the floor of a push over NCCL."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=datetime.timedelta(seconds=60))
    group = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
    flat = torch.empty(min(num_bytes, 1 << 30), dtype=torch.uint8, device=device)
    times = []
    for _ in range(NUM_TIMED):
        group.barrier().wait()
        torch.cuda.synchronize()
        start = time.perf_counter()
        left = num_bytes
        while left > 0:
            group.broadcast([flat[: min(left, flat.numel())]]).wait()
            left -= flat.numel()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def copy_seconds(num_bytes: int, source: str, target: str) -> float:
    """Seconds of one copy of `num_bytes` from device to device; the floor of a push over CUDA IPC."""
    a = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=source)
    b = torch.empty(num_bytes, dtype=torch.uint8, device=target)
    times = []
    for _ in range(NUM_TIMED + 2):
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        start = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        times.append(time.perf_counter() - start)
    return median(times[2:])


class Trainer:
    """Handle on the trainer process."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        context = mp.get_context("spawn")
        self._orders, self._answers = context.Queue(), context.Queue()
        self._process = context.Process(target=trainer, args=(device, sizes, self._orders, self._answers), daemon=True)
        self._process.start()

    def tell(self, verb: str, value: Any = None) -> None:
        """Sends an order without waiting."""
        self._orders.put((verb, value))

    def answer(self) -> Any:
        """Waits for the answer to the last order."""
        answer = self._answers.get(timeout=300)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ask(self, verb: str, value: Any = None) -> Any:
        """Sends an order and waits for the answer."""
        self.tell(verb, value)
        return self.answer()

    def stop(self) -> None:
        """Ends the process."""
        self._orders.put(None)
        self._process.join(30)


def timed_case(
    name: str, fmt: str, mode: str, link: Trainer, sizes: Sizes, args: argparse.Namespace, floor: float, size: Any
) -> Case:
    """Pushes, checks the bytes against a cold load, and times."""
    device = args.engine_device
    num_bytes, num_tensors = size
    gc.collect()  # models of earlier cases: freed later, they would hide what a push allocates
    model = ExpertModel(sizes, fmt, device)
    model.cold_load(checkpoint(sizes, 1, device))
    torch.cuda.synchronize(device)
    receiver = Receiver(model)
    profile = cProfile.Profile()
    if args.profile:
        receiver.call = lambda *arguments: profile.runcall(Receiver.call, receiver, *arguments)  # type: ignore[method-assign]
    with BackgroundServer(receiver) as server:
        link.ask("connect", {"url": server.url, "transport": args.transport, "mode": mode, "deadline_seconds": 120.0})
        link.ask("weights", 2)
        before = fingerprint(model)
        base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        first = link.ask("push", 1)[0]
        link.ask("push", 2)
        profile.clear()
        timed = [link.ask("push", 3 + k) for k in range(NUM_TIMED)]
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        link.ask("weights", 3)
        link.ask("split push", (50, True))
        extra = torch.cuda.max_memory_allocated(device) - base
        after = fingerprint(model)
        link.ask("close")
    cold = ExpertModel(sizes, fmt, device)
    cold.cold_load(checkpoint(sizes, 3, device))
    differing, moved = after.diff(fingerprint(cold)).differing, after.diff(before).moved
    if differing or moved or not after.diff(before).differing:
        raise SystemExit(f"{name}: differing from a cold load {differing[:3]}, moved {moved[:3]}")
    seconds = median([push[0] for push in timed])
    stages = {stage: median([push[1][stage] for push in timed]) * 1e3 for stage in timed[0][1]}
    print(
        f"{name}: {seconds * 1e3:.2f} ms = {seconds / floor:.2f}x floor; first push {first:.2f} s; "
        + ", ".join(f"{stage} {value:.2f} ms" for stage, value in stages.items())
        + f"; {timed[0][2]} ({timed[0][3]}), copied {timed[0][4]} bytes; extra {extra / 2**20:.0f} MiB; "
        f"{seconds / num_tensors * 1e6:.2f} us/tensor",
        flush=True,
    )
    return Case(
        f"{name}, {sizes.num_layers}x{sizes.num_experts} experts {sizes.hidden}x{sizes.intermediate}",
        seconds,
        floor,
        args.peer,
        args.peer_seconds,
        num_bytes,
        num_tensors,
        extra,
        torch.cuda.get_device_name(device),
        datetime.date.today().isoformat(),
        shlex.join(["python", "bench/push_gpu.py", *sys.argv[1:]]),
    )


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer-device", default="cuda:0")
    parser.add_argument("--engine-device", default="cuda:0")
    parser.add_argument("--transport", default="ipc")
    parser.add_argument("--formats", nargs="+", default=["sm90_fp8", "sm100_mxfp8"])
    parser.add_argument("--modes", nargs="+", default=["direct", "layerwise"])
    parser.add_argument("--peer", default="")
    parser.add_argument("--peer-seconds", type=float, default=None)
    parser.add_argument("--profile", action="store_true", help="print where the engine's time goes; times are larger")
    parser.add_argument("--record", action="store_true")
    for field, default in asdict(Sizes()).items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; bench/transport_cpu.py times the CPU transports")
    sizes = Sizes(**{field: getattr(args, field) for field in asdict(Sizes())})
    torch.cuda.set_device(args.engine_device)
    link = Trainer(args.trainer_device, sizes)
    size = link.ask("weights", 1)
    if args.transport == "nccl":
        port = 20000 + os.getpid() % 20000
        link.tell("broadcast", (port, size[0]))
        raw_broadcast(args.engine_device, 1, port, size[0])
        floor, what = link.answer(), "raw NCCL broadcast"
    else:
        floor, what = copy_seconds(size[0], args.trainer_device, args.engine_device), "one copy"
    gib = size[0] / 2**30
    print(
        f"{gib:.2f} GiB in {size[1]} tensors; floor ({what}) {floor * 1e3:.2f} ms = {gib / floor:.0f} GiB/s", flush=True
    )
    torch.cuda.empty_cache()
    cases, failed = [], []
    for fmt in args.formats:
        for mode in args.modes:
            name = f"{args.transport} {mode} into {fmt}"
            try:
                cases.append(timed_case(name, fmt, mode, link, sizes, args, floor, size))
            except Exception as error:  # the other cases still run; the exit code tells
                traceback.print_exc()
                failed.append(f"{name}: {error}")
            torch.cuda.empty_cache()
    link.stop()
    if args.record:
        with RESULTS.open("a") as out:
            out.writelines(json.dumps(asdict(case)) + "\n" for case in cases)
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
    main()
