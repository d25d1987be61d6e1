"""What a push of DeepSeek-V3 or GLM-5.3-Flash costs before its bytes move: planning, and control for N receivers.

No weight exists anywhere: engines are on the meta device (full_size.py), and receivers are the answers that they would
give. Each case runs in a process of its own, so that peak memory is the case's. Seconds are CPU seconds of one thread.

plan      one rank plans both targets. The floor is the model's own `load_weights` over the same meta tensors.
control   the trainer's share for N receivers, as whole engines (every rank takes every byte: "everything") or as
          expert-parallel ranks, 64 to an engine at most ("owners"): merging the answers to the hello, the schedule of
          buckets for NCCL. `bytes` are the bodies of one hello and one start, to all receivers together.
http      the same hello and start to N receivers over HTTP: the trainer's CPU seconds, since one server process
          answers for all of them here; `elapsed_seconds` has the server's work in it.

    .venv/bin/python bench/scaling.py                    # a table, all cases: some minutes
    .venv/bin/python bench/scaling.py --only plan        # cases whose name starts so
    .venv/bin/python bench/scaling.py --record           # and a line per case in bench/results/scaling.jsonl
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # on a bare machine the package is not installed

from bench.full_size import CONFIGS, TARGETS, build, checkpoint
from bench.plan_speed import hardware
from megamoe_adapter.placement import Placement
from weightsync import control
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload
from weightsync.plan.segments import compile_segments
from weightsync.trainer.handshake import owners_of
from weightsync.trainer.http import HttpEndpoint
from weightsync.transport.choose import DEFAULT_BUCKET_BYTES, local_facts
from weightsync.transport.streams import EVERYONE, schedule, streams_of
from weightsync.worker.group import EndpointGroup
from weightsync.worker.server import BackgroundServer

RESULTS = Path(__file__).with_name("results") / "scaling.jsonl"
NUM_RECEIVERS = (1, 2, 8, 32, 64, 256)
EP_SIZES = (1, 2, 8, 32, 64)
MAX_EP = 64
SECONDS = 600.0  # no call is given up before


def replicas(model: str, ep_size: int) -> int:
    """Redundant experts that make the experts divide evenly over the ranks."""
    return -CONFIGS[model]().n_routed_experts % ep_size


def peak_bytes() -> int:
    """Most memory that this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def plan_case(model: str, ep_size: int) -> dict[str, Any]:
    """The last of `ep_size` ranks plans both targets."""
    config, seconds = CONFIGS[model](), dict.fromkeys(("plan", "again", "hash", "segments", "floor"), 0.0)
    parts = []
    for target in TARGETS:
        options = {"ep_size": ep_size, "ep_rank": ep_size - 1, "num_redundant_experts": replicas(model, ep_size)}
        engine = build(config, target, **options)
        parts.append((engine, checkpoint(config, engine)))
    before, found = peak_bytes(), []
    for engine, manifest in parts:
        marks = [time.process_time()]
        for step in (
            lambda: found.append(plan_reload(engine, manifest)),  # noqa: B023 - called at once
            lambda: plan_reload(engine, manifest),  # noqa: B023
            lambda: found[-1].hash,
            lambda: compile_segments(found[-1].writes),
        ):
            step()
            marks.append(time.process_time())
        for name, start, end in zip(seconds, marks, marks[1:], strict=False):
            seconds[name] += end - start
    extra = peak_bytes() - before
    for engine, manifest in parts:
        weights = [(entry.name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")) for entry in manifest]
        start = time.process_time()
        with torch.no_grad():
            engine.load_weights(weights)
        seconds["floor"] += time.process_time() - start
    return {
        "ours_seconds": seconds["plan"],
        "floor_seconds": seconds["floor"],
        "replan_seconds": seconds["again"],
        "hash_seconds": seconds["hash"],
        "segments_seconds": seconds["segments"],
        "bytes": sum(plan.coverage.written_bytes for plan in found),
        "tensors": sum(len(plan.names) for plan in found),
        "copies": sum(len(plan.writes) for plan in found),
        "extra_bytes": extra,
        "process_bytes": peak_bytes(),
    }


@functools.cache
def manifest_of(model: str) -> Manifest:
    """The main target's manifest: the draft's is a sixtieth of it."""
    config = CONFIGS[model]()
    return checkpoint(config, build(config))


def answers(model: str, num_receivers: int, split: str) -> list[tuple[control.Accept, control.TargetAccept]]:
    """What N ranks would answer to a hello."""
    manifest = manifest_of(model)
    ep_size = min(num_receivers, MAX_EP) if split == "owners" else 1
    num_experts = CONFIGS[model]().n_routed_experts
    expert_of = [int(e.name.split(".")[5]) if ".mlp.experts." in e.name else None for e in manifest]
    facts, found = control.encode(local_facts(torch.device("cpu"))), []
    owned = []
    for rank in range(ep_size):
        held = {None, *Placement(num_experts, replicas(model, ep_size), ep_size, rank).logical_of_slot}
        owned.append(control.to_ranges(index for index, expert in enumerate(expert_of) if expert in held))
    for number in range(num_receivers):
        engine, rank = divmod(number, ep_size)
        target = control.TargetAccept(manifest.hash, "0" * 64, owned[rank], [], 0)
        accept = control.Accept(
            control.PROTOCOL_VERSION, "0" * 16, f"engine-{engine}", rank, ep_size, None, "live",
            DEFAULT_BUCKET_BYTES["cuda"], {"model": control.encode(target)}, facts,
        )  # fmt: skip
        found.append((accept, target))
    return found


def bodies(model: str, found: list[Any], owners: tuple[frozenset[int], ...]) -> tuple[Any, Any]:
    """The bodies of a hello and of a start for NCCL, as the client makes them."""
    manifest, facts = manifest_of(model), control.encode(local_facts(torch.device("cpu")))
    rows = json.loads(manifest.to_json())
    hello = control.Hello(
        control.PROTOCOL_VERSION, "0" * 16, "host:1", {"model": rows}, "direct", "full", DEFAULT_BUCKET_BYTES["cuda"],
        SECONDS, {}, facts,
    )  # fmt: skip
    shared = control.to_ranges(index for index, who in enumerate(owners) if len(who) == len(found))
    per_rank = {
        accept.key: {"plans": {"model": "0" * 64}, "offer": {"index": index, "everyone": {"model": shared}}}
        for index, (accept, _) in enumerate(found)
    }
    offer = {"transport": "nccl", "host": "10.0.0.1", "port": 40000, "token": "0" * 32, "name": "0" * 16,
             "receivers": len(found), "bucket_bytes": DEFAULT_BUCKET_BYTES["cuda"]}  # fmt: skip
    start = control.Start("0" * 16, 1, "0" * 16, offer, per_rank)
    return {"init_info": control.encode(hello)}, {"start_info": control.encode(start)}


def control_case(model: str, num_receivers: int, split: str) -> dict[str, Any]:
    """Merges N answers and schedules N receivers' buckets."""
    manifest, found = manifest_of(model), answers(model, num_receivers, split)
    before, start = peak_bytes(), time.process_time()
    owners = owners_of(manifest, [accept for accept, _ in found], [target for _, target in found])
    merged = time.process_time()
    streams = streams_of(owners, range(len(manifest)), num_receivers)
    steps = schedule(manifest.entries, streams, DEFAULT_BUCKET_BYTES["cuda"], num_receivers)
    scheduled = time.process_time()
    extra = peak_bytes() - before
    hello, opening = (len(json.dumps(body, separators=(",", ":"))) for body in bodies(model, found, owners))
    by_stream = Counter(step.stream for step in steps)
    return {
        "ours_seconds": scheduled - start,
        "floor_seconds": None,
        "owners_seconds": merged - start,
        "schedule_seconds": scheduled - merged,
        "bytes": num_receivers * (hello + opening),
        "hello_bytes": hello,
        "start_bytes": opening,
        "tensors": len(manifest),
        "wire_bytes": sum(step.bucket.num_payload_bytes for step in steps),
        "broadcast_bytes": sum(step.bucket.num_payload_bytes for step in steps if step.stream == EVERYONE),
        "messages": len(steps),
        "messages_to_all": by_stream[EVERYONE],
        "messages_to_one": max((number for stream, number in by_stream.items() if stream != EVERYONE), default=0),
        "chunks": sum(len(step.bucket.chunks) for step in steps),
        "extra_bytes": extra,
    }


class _Nobody:
    """Answers each call at once, with no rank in it."""

    def call(self, route: str, body: Any, deadline_seconds: float) -> Any:
        return {"ranks": []}

    def close(self) -> None:
        """Holds nothing."""


def answer_calls(pipe: Any) -> None:
    """A server process, until something is said to it."""
    with BackgroundServer(_Nobody(), start_seconds=60) as server:
        pipe.send(server.url)
        pipe.recv()


def http_case(model: str, num_receivers: int) -> dict[str, Any]:
    """A hello and a start to N receivers, the server's own work included."""
    manifest, found = manifest_of(model), answers(model, num_receivers, "owners")
    owners = owners_of(manifest, [accept for accept, _ in found], [target for _, target in found])
    hello, opening = bodies(model, found, owners)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    server = context.Process(target=answer_calls, args=(other,), daemon=True)
    server.start()
    url = pipe.recv()
    before, begin, marks = peak_bytes(), time.perf_counter(), [time.process_time()]
    group = EndpointGroup([HttpEndpoint(url) for _ in range(num_receivers)])
    marks.append(time.process_time())
    small = {"session_id": "0" * 16, "phase": "publish"}
    calls = ((control.FINISH, small), (control.FINISH, small), (control.START, opening), (control.INIT, hello))
    for route, body in calls:
        group.call(route, body, SECONDS)
        marks.append(time.process_time())
    elapsed, extra = time.perf_counter() - begin, peak_bytes() - before
    group.close()
    pipe.send("end")
    server.join(30)
    made, _, again, opened, greeted = (end - start for start, end in itertools.pairwise(marks))
    texts = [json.dumps(body, separators=(",", ":")) for body in (hello, opening)]
    start = time.process_time()
    Manifest.from_rows(json.loads(texts[0])["init_info"]["targets"]["model"])
    return {
        "ours_seconds": greeted + opened,
        "floor_seconds": None,
        "clients_seconds": made,
        "small_call_seconds": again,
        "start_seconds": opened,
        "hello_seconds": greeted,
        "elapsed_seconds": elapsed,
        "read_seconds": time.process_time() - start,
        "bytes": num_receivers * sum(map(len, texts)),
        "tensors": len(manifest),
        "extra_bytes": extra,
    }


def cases() -> dict[str, tuple[Any, ...]]:
    """Name -> function and arguments."""
    found: dict[str, tuple[Any, ...]] = {}
    for model in sorted(CONFIGS):
        for ep_size in EP_SIZES:
            found[f"plan {model}, " + (f"one of {ep_size} ranks" if ep_size > 1 else "whole engine")] = (
                plan_case, model, ep_size,
            )  # fmt: skip
        for split in ("everything", "owners"):
            for number in NUM_RECEIVERS:
                found[f"control {model}, {number} receivers, {split}"] = (control_case, model, number, split)
        for number in NUM_RECEIVERS:
            found[f"http {model}, {number} receivers"] = (http_case, model, number)
    return found


def run_case(name: str, pipe: Any) -> None:
    """The whole of a child process."""
    torch.set_num_threads(1)
    function, *arguments = cases()[name]
    pipe.send(function(*arguments))


def in_a_process(name: str) -> dict[str, Any]:
    """A case's figures, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe(duplex=False)
    child = context.Process(target=run_case, args=(name, other))
    child.start()
    other.close()
    try:
        figures = pipe.recv()
    except EOFError:
        raise SystemExit(f"{name}: the process ended without a result") from None
    child.join()
    return figures


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name starts so")
    parser.add_argument("--record", action="store_true", help=f"append to bench/results/{RESULTS.name}")
    options = parser.parse_args()
    about = {"peer": None, "peer_seconds": None, "hardware": hardware(), "torch": torch.__version__}
    for name in (name for name in cases() if name.startswith(options.only)):
        line = {"case": name, **in_a_process(name), **about, "date": time.strftime("%Y-%m-%d", time.gmtime())}
        line["command"] = "bench/scaling.py --record"
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in line.items()}
        print(name, {key: value for key, value in shown.items() if key not in ("case", "command", *about)}, flush=True)
        if options.record:
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
