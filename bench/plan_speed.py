"""Times planning a reload of MoE experts, and planning it again unchanged.

The model is 24 layers of stacked experts behind vLLM's `weight_loader` signature: w1 and w3 land in w13 with gate and
up interleaved by 8 rows, w2 in w2. 256 experts a layer are 18,432 tensors; smaller cases show that the cost is linear.
Tensors are tiny, since planning moves no byte. The floor is the model's own `load_weights` over the same meta tensors
into a meta model: what its Python costs without us. Times are medians of fresh models, on one core; `--cpu-time`
counts this process's CPU seconds, for machines that are shared.

    .venv/bin/python bench/plan_speed.py               # a table
    .venv/bin/python bench/plan_speed.py --record      # and a line per case in bench/results/plan_speed.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # on a bare machine the package is not installed

from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload

RESULTS = Path(__file__).with_name("results") / "plan_speed.jsonl"
NUM_LAYERS = 24
HIDDEN, INTERMEDIATE = 8, 16
CASES = {f"{24 * num * 3:,} expert tensors": num for num in (16, 64, 256)}


class Experts(nn.Module):
    """Stacked experts of one layer in kernel layout."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(num_experts, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16))
        self.w2 = nn.Parameter(torch.zeros(num_experts, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16))
        for param in (self.w13, self.w2):
            param.weight_loader = self.weight_loader

    def weight_loader(self, param, loaded, name, shard_id, expert_id):
        """Loads one shard of one expert."""
        target = param.data[expert_id]
        if shard_id != "w2":
            target = target.view(INTERMEDIATE // 8, 2, 8, HIDDEN)[:, 0 if shard_id == "w1" else 1]
            loaded = loaded.view(INTERMEDIATE // 8, 8, HIDDEN)
        target.copy_(loaded)


class Model(nn.Module):
    """Layers of experts, loaded by checkpoint name."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(num_experts) for _ in range(NUM_LAYERS))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads `layers.L.experts.E.SHARD.weight`."""
        params = dict(self.named_parameters())
        for name, tensor in weights:
            _, layer, _, expert, shard, _ = name.split(".")
            param = params[f"layers.{layer}.{'w2' if shard == 'w2' else 'w13'}"]
            param.weight_loader(param, tensor, name, shard_id=shard, expert_id=int(expert))


def checkpoint(num_experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Meta tensors in checkpoint order."""
    shapes = {"w1": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE), "w3": (INTERMEDIATE, HIDDEN)}
    for layer in range(NUM_LAYERS):
        for expert in range(num_experts):
            for shard, shape in shapes.items():
                name = f"layers.{layer}.experts.{expert}.{shard}.weight"
                yield name, torch.empty(shape, dtype=torch.bfloat16, device="meta")


def hardware() -> str:
    """The processor, in words, as the other CPU benchmarks name it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    return f"CPU {model}, 1 thread"


def measure(case: str, repeats: int, clock: Callable[[], float]) -> dict[str, object]:
    """One row."""
    num_experts = CASES[case]
    manifest = Manifest.from_tensors(checkpoint(num_experts))
    plans, replans, floors = [], [], []
    for _ in range(repeats):
        model = Model(num_experts)
        start = clock()
        plan = plan_reload(model, manifest)
        planned = clock()
        again = plan_reload(model, manifest)
        plans.append(planned - start)
        replans.append(clock() - planned)
        if again is not plan or len(plan.writes) != len(manifest) or plan.interpreted:
            raise SystemExit("the plan is not what this benchmark is about: every tensor copied, and planned once")
        with torch.device("meta"):
            empty = Model(num_experts)
        weights = list(checkpoint(num_experts))
        start = clock()
        with torch.no_grad():
            empty.load_weights(weights)
        floors.append(clock() - start)
    return {
        "case": f"plan {case}",
        "ours_seconds": statistics.median(plans),
        "replan_seconds": statistics.median(replans),
        "floor_seconds": statistics.median(floors),
        "peer": None,
        "peer_seconds": None,
        "bytes": manifest.num_bytes,
        "tensors": len(manifest),
        "extra_bytes": None,
        "hardware": hardware(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds instead of elapsed ones")
    parser.add_argument("--record", action="store_true", help=f"append to bench/results/{RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    plan_reload(Model(1), Manifest.from_tensors(checkpoint(1)))  # imports and operator tables are paid once per process
    print(f"{'case':32} {'seconds':>9} {'us/tensor':>10} {'replan s':>9} {'loader alone s':>15}")
    for case in CASES:
        line = measure(case, options.repeats, clock)
        line["command"] = " ".join(["bench/plan_speed.py", *sys.argv[1:]])
        per_tensor = line["ours_seconds"] / line["tensors"] * 1e6
        print(
            f"{line['case']:32} {line['ours_seconds']:9.3f} {per_tensor:10.1f} {line['replan_seconds']:9.5f} "
            f"{line['floor_seconds']:15.3f}"
        )
        if options.record:
            RESULTS.parent.mkdir(exist_ok=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
