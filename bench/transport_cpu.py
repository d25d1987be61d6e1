"""Times a whole push between two processes on CPUs, from `client.push` to the version published, against its floor.

Shared memory is compared with one memcpy of the same bytes, gloo with a raw gloo broadcast of them between the same
kind of processes; both floors are measured in the same run, on one thread, and the least of several times is taken on
both sides (these machines are shared, and noise only adds). The engine's bytes are compared after every
case, so a push that moves nothing cannot look fast.

    .venv/bin/python bench/transport_cpu.py             # a table
    .venv/bin/python bench/transport_cpu.py --record    # and a line per case in bench/results/transport_cpu.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing as mp
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightsync.trainer.client import TrainerClient
from weightsync.transport.shared_memory import share_parameters
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

RESULTS = Path(__file__).with_name("results") / "transport_cpu.jsonl"
WAIT_SECONDS = 120
BROADCAST_BYTES = 16 << 20


@dataclass(frozen=True)
class Shape:
    """A model of equal matrices."""

    num_tensors: int
    tensor_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_tensors * self.tensor_bytes


SHAPES = {"large": Shape(64, 16 << 20), "small": Shape(4096, 64 << 10)}


class Matrices(nn.Module):
    """Loads by name into live storage."""

    supports_direct_reload = True

    def __init__(self, shape: Shape, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index in range(shape.num_tensors):
            data = torch.randint(-99, 99, (shape.tensor_bytes // 2,), generator=generator, dtype=torch.int16)
            self.register_parameter(f"w{index}", nn.Parameter(data.view(torch.bfloat16), requires_grad=False))

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


def digest(module: nn.Module) -> str:
    whole = hashlib.sha256()
    for tensor in module.parameters():
        whole.update(tensor.detach().view(torch.uint8).numpy())
    return whole.hexdigest()


def memory_bytes(kinds: tuple[str, ...]) -> int:
    """This process's resident bytes of the given kinds (RssAnon, RssShmem)."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return sum(int(lines[kind].split()[0]) * 1024 for kind in kinds)


def serve_engine(pipe: Any, shape: Shape) -> None:
    """The engine process: serves, then says what it holds and what memory the pushes took."""
    torch.set_num_threads(1)
    model = Matrices(shape, seed=2)
    with BackgroundServer(Receiver(model)) as server:
        before = memory_bytes(("RssAnon",))
        pipe.send(server.url)
        while pipe.recv() == "what":
            pipe.send((digest(model), memory_bytes(("RssAnon",)) - before))


def gloo_peer(pipe: Any, num_bytes: int, repeats: int) -> None:
    """The other side of the raw broadcast."""
    torch.set_num_threads(1)
    broadcast_all(1, pipe.recv(), num_bytes, repeats)


def broadcast_all(rank: int, port: int, num_bytes: int, repeats: int) -> float:
    """Least seconds of a raw gloo broadcast of `num_bytes` in messages of 16 MiB, one after another."""
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=WAIT_SECONDS))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=WAIT_SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(store, rank, 2, options)
    flat = torch.ones(num_bytes, dtype=torch.uint8)
    times = []
    for _ in range(repeats + 1):
        group.barrier().wait()
        start = time.perf_counter()
        for part in flat.split(BROADCAST_BYTES):
            group.broadcast([part], dist.BroadcastOptions()).wait()
        group.barrier().wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def gloo_floor(shape: Shape, repeats: int) -> float:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    peer = context.Process(target=gloo_peer, args=(there, shape.num_bytes, repeats), daemon=True)
    peer.start()
    store = dist.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=WAIT_SECONDS), False)
    here.send(store.port)
    seconds = broadcast_all(0, store.port, shape.num_bytes, repeats)
    peer.join(WAIT_SECONDS)
    return seconds


def memcpy_floor(shape: Shape, repeats: int) -> float:
    source = torch.ones(shape.num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return min(times[2:])


def time_pushes(shape: Shape, transport: str, in_arena: bool, repeats: int) -> tuple[float, dict[str, float], int]:
    """Least seconds of a push in steady state, that push's stages, and the extra memory of both sides."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    engine = context.Process(target=serve_engine, args=(there, shape), daemon=True)
    engine.start()
    if not here.poll(WAIT_SECONDS):
        raise SystemExit("the engine did not come up")
    url = here.recv()
    trainer = Matrices(shape, seed=1)
    if in_arena:
        share_parameters(trainer)
    before = memory_bytes(("RssAnon", "RssShmem"))
    seconds, stages = [], []
    with TrainerClient(trainer, url, transport=transport, deadline_seconds=WAIT_SECONDS) as client:
        for number in range(repeats + 2):
            for parameter in trainer.parameters():
                parameter.data.view(torch.int16).add_(1)
            start = time.perf_counter()
            report = client.push()
            if number >= 2:
                seconds.append(time.perf_counter() - start)
                stages.append(report.seconds)
        extra = memory_bytes(("RssAnon", "RssShmem")) - before
    here.send("what")
    found, engine_extra = here.recv()
    if found != digest(trainer):
        raise SystemExit(f"{transport}: the engine does not hold the trainer's bytes")
    here.send("end")
    engine.join(WAIT_SECONDS)
    best = seconds.index(min(seconds))
    return seconds[best], stages[best], max(extra, 0) + max(engine_extra, 0)


FLOORS = {"memcpy": memcpy_floor, "raw gloo broadcast": gloo_floor}
CASES = (
    ("shared_memory", True, "memcpy"),
    ("shared_memory", False, "memcpy"),
    ("gloo", False, "raw gloo broadcast"),
)


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append to bench/results/transport_cpu.jsonl")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--transports", nargs="+", choices=sorted({case[0] for case in CASES}), default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    cases = [case for case in CASES if args.transports is None or case[0] in args.transports]
    for size in args.sizes:
        shape = SHAPES[size]
        floors = dict.fromkeys(FLOORS, float("inf"))
        timed = []
        for transport, in_arena, floor in cases:
            for name in {case[2] for case in cases}:  # again before each case: other work on the machine comes and goes
                floors[name] = min(floors[name], FLOORS[name](shape, args.repeats))
            timed.append((transport, in_arena, floor, *time_pushes(shape, transport, in_arena, args.repeats)))
        for transport, in_arena, floor, ours, stages, extra in timed:
            where = {"shared_memory": ", tensors in an arena" if in_arena else ", copied once", "gloo": ""}[transport]
            shown = " ".join(f"{stage} {value * 1e3:.1f}" for stage, value in stages.items())
            case = f"{transport}{where}, {size} tensors, direct"
            print(
                f"{case:56} {shape.num_bytes >> 20:5} MiB {shape.num_tensors:5} tensors  ours {ours * 1e3:8.1f} ms  "
                f"{floor} {floors[floor] * 1e3:8.1f} ms  ratio {ours / floors[floor]:5.2f}  ({shown})",
                flush=True,
            )
            rows.append(
                {
                    "case": f"{case} (floor: {floor})",
                    "ours_seconds": ours,
                    "floor_seconds": floors[floor],
                    "peer": None,
                    "peer_seconds": None,
                    "bytes": shape.num_bytes,
                    "tensors": shape.num_tensors,
                    "extra_bytes": extra,
                    "hardware": f"CPU, {mp.cpu_count()} cores, {platform.machine()}",
                    "date": datetime.date.today().isoformat(),
                    "command": " ".join(["python", "bench/transport_cpu.py", *sys.argv[1:]]),
                }
            )
    if args.record:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
