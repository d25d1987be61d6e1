"""Makes the tables of docs/SCALING.md from counts, recorded measurements and link figures.

Counts come from the manifests (full_size.py) and from `bench/results/scaling.jsonl`; link figures are arguments, so
that other links give other tables:

    .venv/bin/python bench/scaling_tables.py                          # rewrites the tables
    .venv/bin/python bench/scaling_tables.py --check                  # exit status 1 if they are out of date
    .venv/bin/python bench/scaling_tables.py --print --network 90     # shows them for an 800 Gb/s network card
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # on a bare machine the package is not installed

from bench.full_size import CONFIGS, TARGETS, build, checkpoint
from bench.scaling import EP_SIZES, MAX_EP, NUM_RECEIVERS, RESULTS, replicas

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "SCALING.md"
BEGIN, END = "<!-- tables: bench/scaling_tables.py -->", "<!-- end of tables -->"
TITLES = {"deepseek_v3": "DeepSeek-V3", "glm_5_3_flash": "GLM-5.3-Flash"}
GPUS_OF_A_HOST = 8
GIB, MIB = 2**30, 2**20
BUCKET_BYTES = 256 * MIB
NUM_CALLS = 4  # of a push over NCCL: start, update, finish in two phases


@dataclass(frozen=True)
class Counts:
    """A model in numbers, both targets together.

    Attributes:
        tensors: Names in both manifests.
        num_bytes: Bytes of both manifests.
        routed_bytes: Bytes of the routed experts, weights and scales.
        routed_tensors: Their names.
        layer_bytes: Routed experts of one layer.
        num_experts: Routed experts of one layer.
        num_moe_layers: Layers with experts, the MTP layer included.
    """

    tensors: int
    num_bytes: int
    routed_bytes: int
    routed_tensors: int
    layer_bytes: int
    num_experts: int
    num_moe_layers: int

    @classmethod
    def of(cls, model: str) -> Counts:
        """Counted on the manifests themselves."""
        config = CONFIGS[model]()
        entries = [entry for target in TARGETS for entry in checkpoint(config, build(config, target))]
        routed = [entry for entry in entries if ".mlp.experts." in entry.name]
        num_layers = len({entry.name.partition(".mlp.")[0] for entry in routed})
        num_bytes = sum(entry.num_bytes for entry in routed)
        return cls(
            len(entries), sum(entry.num_bytes for entry in entries), num_bytes, len(routed), num_bytes // num_layers,
            config.n_routed_experts, num_layers,
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        """What every rank holds: all but the routed experts."""
        return self.num_bytes - self.routed_bytes

    def slots(self, model: str, ep_size: int) -> int:
        """Experts of a layer on one rank, replicas included."""
        return (self.num_experts + replicas(model, ep_size)) // ep_size

    def rank_bytes(self, model: str, ep_size: int) -> int:
        """Live bytes of one rank."""
        return self.shared_bytes + self.routed_bytes * self.slots(model, ep_size) // self.num_experts

    def rank_tensors(self, model: str, ep_size: int) -> int:
        """Names that one rank loads."""
        return self.tensors - self.routed_tensors + self.routed_tensors * self.slots(model, ep_size) // self.num_experts


def layout(num_receivers: int) -> tuple[int, int]:
    """(engines, ranks of each)."""
    ep_size = min(num_receivers, MAX_EP)
    return num_receivers // ep_size, ep_size


def recorded() -> dict[str, dict[str, Any]]:
    """Case -> its newest line."""
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {line["case"]: line for line in lines}


def seconds(value: float) -> str:
    """For people; what hangs on a measurement that nobody made is a dash."""
    if math.isnan(value):
        return "-"
    return f"{value * 1e3:,.0f} ms" if value < 1 else f"{value:,.1f} s" if value < 100 else f"{value:,.0f} s"


def gib(value: float) -> str:
    """For people."""
    return f"{value / GIB:,.1f} GiB" if value >= GIB else f"{value / MIB:,.1f} MiB"


def rows(header: str, lines: list[list[str]]) -> list[str]:
    """A table."""
    return [header, "|" + "---|" * (header.count("|") - 1), *("| " + " | ".join(line) + " |" for line in lines)]


def plan_name(model: str, ep_size: int) -> str:
    """The case of scaling.py that planned such a rank."""
    return f"plan {model}, " + (f"one of {ep_size} ranks" if ep_size > 1 else "whole engine")


def rank_table(model: str, counts: Counts, links: argparse.Namespace) -> list[str]:
    """What one rank holds, what planning costs it, and a steady push from memory on its host."""
    lines = []
    for ep_size in EP_SIZES:
        line = links.found.get(plan_name(model, ep_size))
        num_bytes, tensors = counts.rank_bytes(model, ep_size), counts.rank_tensors(model, ep_size)
        if line is not None and (line["bytes"], line["copies"]) != (num_bytes, tensors):
            raise SystemExit(f"{line['case']}: it wrote {line['bytes']}, {line['copies']}, not {num_bytes}, {tensors}")
        extra = replicas(model, ep_size)
        staged = counts.layer_bytes * counts.slots(model, ep_size) // counts.num_experts
        same_gpu = 1.1 * num_bytes / GIB / links.copy + tensors * links.tensor_us / 1e6
        measured = ["not measured"] * 4
        if line is not None:
            measured = [
                f"{line['ours_seconds']:.1f} s",
                f"{line['floor_seconds']:.1f} s",
                f"{line['replan_seconds'] * 1e3:.0f} ms",
                gib(line["extra_bytes"]),
            ]
        lines.append([
            f"{ep_size}" + (f", {extra} replicas" if extra else ""), f"{tensors:,}", gib(num_bytes),
            gib(2 * BUCKET_BYTES * (1 + (1 / ep_size if ep_size > 1 else 0))), gib(staged),
            *measured,
            seconds(same_gpu), seconds(num_bytes / GIB / links.peer),
        ])  # fmt: skip
    header = (
        "| ranks of an engine | tensors loaded | weights | + NCCL buffers | + staged, layerwise | planning "
        "| loader alone | planning again | host memory of planning | CUDA IPC, same GPU | peer memory |"
    )
    return rows(header, lines)


def push_table(model: str, counts: Counts, links: argparse.Namespace) -> list[str]:
    """Messages and seconds of a push over NCCL, computed from counts and links."""
    lines = []
    for number in NUM_RECEIVERS:
        engines, ep_size = layout(number)
        everything, owners = (
            links.found[f"control {model}, {number} receivers, {split}"] for split in ("everything", "owners")
        )
        copies = counts.routed_bytes * counts.slots(model, ep_size) * ep_size // counts.num_experts
        alone = engines * copies if number > 1 else 0
        shared = counts.shared_bytes if number > 1 else counts.num_bytes
        in_host = number < GPUS_OF_A_HOST  # the trainer's GPU is one of them
        broadcast, unicast = (links.broadcast, links.peer) if in_host else (links.network, links.network)
        overhead = owners["messages"] * links.message_us / 1e6
        steady = shared / GIB / broadcast + alone / GIB / unicast
        http = links.found.get(f"http {model}, {number} receivers")
        plan = links.found.get(plan_name(model, ep_size), {"ours_seconds": math.nan})
        before = plan["ours_seconds"] + owners["ours_seconds"]
        calls = "small_call_seconds", "hello_seconds", "start_seconds"
        small, hello, opening = (http[name] if http else math.nan for name in calls)
        push = steady + overhead + NUM_CALLS * small
        lines.append([
            f"{number}", f"{engines} x {ep_size}", f"{everything['messages']:,}",
            seconds(counts.num_bytes / GIB / broadcast), seconds(everything["messages"] * links.message_us / 1e6),
            gib(shared + alone), f"{owners['messages']:,}", seconds(steady), seconds(overhead),
            seconds(push), seconds(push + before + hello + opening),
        ])  # fmt: skip
    header = (
        "| receivers | engines x ranks | broadcast: messages | its bytes | its messages | owner-only: bytes out "
        "| messages | its bytes | its messages | steady push, at most | first push, at most |"
    )
    return rows(header, lines)


def control_table(model: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """What the trainer does before the first byte, measured."""
    lines = []
    for number in NUM_RECEIVERS:
        everything, owners = (
            found[f"control {model}, {number} receivers, {split}"] for split in ("everything", "owners")
        )
        line = found.get(f"http {model}, {number} receivers")
        lines.append([
            f"{number}", f"{owners['hello_bytes'] / MIB:.1f} MiB", f"{owners['start_bytes'] / 1024:,.1f} KiB",
            "not measured" if line is None else seconds(line["hello_seconds"]),
            "not measured" if line is None else seconds(line["start_seconds"]),
            "not measured" if line is None else seconds(line["small_call_seconds"]),
            "not measured" if line is None else gib(line["extra_bytes"]),
            seconds(everything["ours_seconds"]), seconds(owners["ours_seconds"]), gib(owners["extra_bytes"]),
        ])  # fmt: skip
    header = (
        "| receivers | hello, each | start, each | hello to all | start to all | small call to all | memory of that "
        "| tables, broadcast | tables, owner-only | they add to the peak memory |"
    )
    return rows(header, lines)


def render(links: argparse.Namespace) -> str:
    """All tables."""
    parts: list[str] = []
    for model in sorted(CONFIGS):
        counts = Counts.of(model)
        parts += [
            f"### {TITLES[model]}",
            "",
            f"{counts.tensors:,} tensors, {counts.num_bytes:,} bytes ({gib(counts.num_bytes)}). "
            f"{counts.num_moe_layers} layers of {counts.num_experts} routed experts are {counts.routed_tensors:,} of "
            f"them, {gib(counts.routed_bytes)}; each rank of an engine holds the other {gib(counts.shared_bytes)} too.",
            "",
            "One rank. Counted: tensors, weights, buffers. Measured: planning. Computed: the two pushes.",
            "",
            *rank_table(model, counts, links),
            "",
            "A push over NCCL. Counted: messages, bytes. Computed: seconds.",
            "",
            *push_table(model, counts, links),
            "",
            "Control of the first push, on the trainer. Measured; the tables' sizes counted.",
            "",
            *control_table(model, links.found),
            "",
        ]
    return "\n".join(parts)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the tables are old")
    parser.add_argument("--print", action="store_true", help="change nothing; show the tables")
    parser.add_argument("--copy", type=float, default=1510.0, help="GiB/s of a copy within one GPU")
    parser.add_argument("--peer", type=float, default=368.0, help="GiB/s between two GPUs of a host")
    parser.add_argument(
        "--broadcast", type=float, default=335.0, help="GiB/s of an NCCL broadcast of 256 MiB in a host"
    )
    parser.add_argument("--network", type=float, default=46.6, help="GiB/s of one GPU's network card")
    parser.add_argument("--tensor-us", type=float, default=5.9, help="host time per tensor of a CUDA IPC push")
    parser.add_argument("--message-us", type=float, default=100.0, help="host time per message")
    links = parser.parse_args()
    links.found = recorded()
    tables = render(links)
    if links.print:
        print(tables)
        return 0
    text = DOCUMENT.read_text()
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise SystemExit(f"{DOCUMENT.name} lacks the marks {BEGIN} and {END}")
    new = f"{before}{BEGIN}\n\n{tables}{END}{after}"
    if links.check:
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
