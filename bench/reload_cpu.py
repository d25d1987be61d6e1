"""Times a reload inside one process on CPU: ours, vLLM 0.33.0's layerwise reload, and one memcpy of the same bytes.

What is timed is the engine's part of a push, steady state: the plan is made, the tensors have arrived. Ours is
`start_reload -> load_weights -> finish_reload` in direct mode; vLLM's is `initialize_layerwise_reload -> load_weights
-> finalize_layerwise_reload` in its own virtual environment; both are given the same bytes, on one thread, and are
checked to have written them. Small tensors cost dispatch and Python, larger ones memory bandwidth as well.

    .venv/bin/python bench/reload_cpu.py             # a table
    .venv/bin/python bench/reload_cpu.py --record    # and a line per case in bench/results/reload_cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from synthetic_moe import CASES, AllocatedBytes, Shape, SyntheticMoE, checkpoint, expected_equal, seconds_of

import weightsync
from weightsync.manifest import Manifest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results") / "reload_cpu.jsonl"
PEER_DEADLINE_SECONDS = 600
ROUNDS = 3  # both sides take turns and each keeps its least time, so that a busy moment of the machine favours neither


def memcpy_seconds(num_bytes: int, repeats: int) -> float:
    """One copy of that many bytes between two touched buffers."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    return seconds_of(lambda: target.copy_(source), repeats)


def time_ours(shape: Shape, repeats: int) -> dict[str, Any]:
    """Our direct push in process: seconds, extra bytes, and what the session itself reports."""
    model = SyntheticMoE(shape)
    weightsync.record_layouts(model)
    model.load_weights(checkpoint(shape, seed=0))
    weights = checkpoint(shape, seed=1)
    manifest = Manifest.from_tensors(weights)

    def reload() -> None:
        session = weightsync.start_reload(model, mode="direct", manifest=manifest)
        session.load_weights(weights)
        weightsync.finish_reload(model)

    start = time.perf_counter()
    weightsync.plan_reload(model, manifest)
    plan_seconds = time.perf_counter() - start
    seconds = seconds_of(reload, repeats)
    expected_equal(model, weights, shape)
    with AllocatedBytes().ignore([*model.parameters(), *(tensor for _, tensor in weights)]) as allocated:
        reload()
    return {"seconds": seconds, "extra_bytes": allocated.peak, "plan_seconds": plan_seconds}


def time_peer(shape: Shape, repeats: int, python: Path) -> dict[str, Any]:
    """vLLM's layerwise reload in its interpreter.

    Raises:
        SystemExit: Its environment is missing, or it failed; with its own words.
    """
    if not python.exists():
        raise SystemExit(f"{python} is missing: python3 -m venv .venv-vllm033 && {python} -m pip install vllm==0.33.0")
    run = subprocess.run(
        [str(python), str(Path(__file__).with_name("peer_reload_cpu.py")), shape.name, str(repeats)],
        capture_output=True,
        text=True,
        timeout=PEER_DEADLINE_SECONDS,
        check=False,
    )
    if run.returncode != 0:
        raise SystemExit(f"vLLM's side failed:\n{run.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def hardware() -> str:
    """The processor, in words."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor() or platform.machine(),
    )
    return f"CPU {model}, 1 thread"


def measure(shape: Shape, repeats: int, python: Path) -> dict[str, Any]:
    """All sides of one case, as one line of the results."""
    weights = checkpoint(shape, seed=1)
    num_bytes, num_tensors = sum(tensor.nbytes for _, tensor in weights), len(weights)
    del weights
    rounds = [
        (time_ours(shape, repeats), time_peer(shape, repeats, python), memcpy_seconds(num_bytes, repeats))
        for _ in range(ROUNDS)
    ]
    ours, peer = (min((r[side] for r in rounds), key=lambda result: result["seconds"]) for side in (0, 1))
    floor = min(r[2] for r in rounds)
    return {
        "case": shape.name,
        "ours_seconds": ours["seconds"],
        "floor_seconds": floor,
        "peer": f"vLLM {peer['vllm']} layerwise, torch {peer['torch']}",
        "peer_seconds": peer["seconds"],
        "bytes": num_bytes,
        "tensors": num_tensors,
        "extra_bytes": ours["extra_bytes"],
        "peer_extra_bytes": peer["extra_bytes"],
        "plan_seconds": ours["plan_seconds"],
        "ours_us_per_tensor": (ours["seconds"] - floor) / num_tensors * 1e6,
        "hardware": hardware(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": "bench/reload_cpu.py --record",
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="*", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm033" / "bin" / "python")
    parser.add_argument("--record", action="store_true", help="append to bench/results/reload_cpu.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in options.cases:
        line = measure(CASES[case], options.repeats, options.python)
        print(
            f"{case}: {line['tensors']} tensors, {line['bytes'] / 2**20:.1f} MiB\n"
            f"  ours    {line['ours_seconds'] * 1e3:8.2f} ms  {line['ours_us_per_tensor']:.2f} us/tensor over memcpy, "
            f"{line['extra_bytes'] / 2**20:.2f} MiB extra, plan {line['plan_seconds']:.2f} s\n"
            f"  vLLM    {line['peer_seconds'] * 1e3:8.2f} ms  {line['peer_seconds'] / line['ours_seconds']:.1f}x ours, "
            f"{line['peer_extra_bytes'] / 2**20:.2f} MiB extra\n"
            f"  memcpy  {line['floor_seconds'] * 1e3:8.2f} ms"
        )
        if options.record:
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
