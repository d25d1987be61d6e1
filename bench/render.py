"""Makes docs/PERFORMANCE.md's tables from the recorded results.

A benchmark that is run with `--record` appends one JSON line per case to `bench/results/NAME.jsonl`. This script shows
the newest line of each case and hardware, one table per file, between the two marks of docs/PERFORMANCE.md. A line
holds at least

    case ours_seconds floor_seconds peer peer_seconds bytes tensors extra_bytes hardware date command

where `floor_seconds` is the least time the same bytes can take (one copy), and `peer_seconds` what another project's
code takes for them; null where there is none. A line with `pushes` instead (story_gpu.py) is a run whose results were
compared rather than timed. Whole pushes that nobody recorded yet are listed as not measured.

    .venv/bin/python bench/render.py            # rewrites the tables
    .venv/bin/python bench/render.py --check    # exit status 1 if they are out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "PERFORMANCE.md"
BEGIN, END = "<!-- tables: bench/render.py -->", "<!-- end of tables -->"
REQUIRED = (
    "case", "ours_seconds", "floor_seconds", "peer", "peer_seconds", "bytes", "tensors", "extra_bytes", "hardware",
    "date", "command",
)  # fmt: skip
STORY_REQUIRED = (
    "case",
    "pushes",
    "relative_l2",
    "relative_l2_wrong_layout",
    "bytes",
    "tensors",
    "hardware",
    "date",
    "command",
)
STORY_HEADER = (
    "| case | tensors | MiB | pushes | graph replay equals a cold load | differing | moved | kernel, relative L2 "
    "| same, rows not interleaved | hardware | date |"
)
# file, first word of the case -> what would be measured, and by what
PUSHES = {
    ("push_gpu", "ipc"): "a whole push over CUDA IPC, one GPU: `bench/push_gpu.py --record`",
    ("push_gpu", "nccl"): (
        "a whole push over NCCL, two GPUs: `bench/push_gpu.py --engine-device cuda:1 --transport nccl --record`"
    ),
    ("transport_cpu", "shared_memory"): (
        "a whole push over shared memory, CPU: `bench/transport_cpu.py --transports shared_memory --record`"
    ),
    ("transport_cpu", "gloo"): "a whole push over gloo, CPU: `bench/transport_cpu.py --transports gloo --record`",
}
HEADER = "| case | tensors | MiB | ours | floor | ours / floor | peer | peer / ours | extra memory | hardware | date |"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The newest line of each case and hardware, in order of first appearance.

    Raises:
        SystemExit: A line is not JSON or lacks a field.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise SystemExit(f"{path.name}:{number}: not JSON: {error}") from error
        required = STORY_REQUIRED if "pushes" in line else REQUIRED
        if missing := [name for name in required if name not in line]:
            raise SystemExit(f"{path.name}:{number}: lacks {', '.join(missing)}")
        newest[line["case"], line["hardware"]] = line
    return list(newest.values())


def duration(seconds: float | None) -> str:
    """A time for people."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def ratio(above: float | None, below: float | None) -> str:
    """A quotient for people."""
    if not above or not below:
        return "-"
    quotient = above / below
    return f"{quotient:.2f}x" if quotient < 10 else f"{quotient:.1f}x" if quotient < 100 else f"{quotient:.0f}x"


def table(lines: list[dict[str, Any]]) -> list[str]:
    """The table of one file."""
    rows = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for line in lines:
        ours, floor, peer = line["ours_seconds"], line["floor_seconds"], line["peer_seconds"]
        extra = "-" if line["extra_bytes"] is None else f"{line['extra_bytes'] / 2**20:.1f} MiB"
        cells = (
            line["case"], f"{line['tensors']:,}", f"{line['bytes'] / 2**20:,.1f}", duration(ours), duration(floor),
            ratio(ours, floor), "-" if peer is None else f"{line['peer']}: {duration(peer)}", ratio(peer, ours), extra,
            line["hardware"], line["date"],
        )  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def story_table(lines: list[dict[str, Any]]) -> list[str]:
    """The table of a file whose lines are comparisons."""
    rows = [STORY_HEADER, "|" + "---|" * (STORY_HEADER.count("|") - 1)]
    for line in lines:
        pushes = line["pushes"]
        cells = (
            line["case"], f"{line['tensors']:,}", f"{line['bytes'] / 2**20:,.1f}", str(len(pushes)),
            f"{sum(push['bitwise'] for push in pushes)} of {len(pushes)}, bit for bit",
            str(sum(push["differing"] for push in pushes)), str(sum(push["moved"] for push in pushes)),
            f"{line['relative_l2']:.3f}", f"{line['relative_l2_wrong_layout']:.2f}", line["hardware"], line["date"],
        )  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def not_measured(results: Path) -> list[str]:
    """A bullet for each kind of push without a recorded line."""
    bullets = []
    for (name, transport), what in PUSHES.items():
        path = results / f"{name}.jsonl"
        if not path.exists() or not any(line["case"].startswith(transport) for line in read_lines(path)):
            bullets.append(f"- {what}")
    return bullets


def render(results: Path) -> str:
    """All tables, one section per file."""
    parts: list[str] = []
    for path in sorted(results.glob("*.jsonl")):
        if path.stem == "scaling":
            continue  # has tables of its own: docs/SCALING.md, by scaling_tables.py
        lines = read_lines(path)
        if lines:
            commands = ", ".join(dict.fromkeys(f"`{line['command']}`" for line in lines))
            rows = story_table(lines) if "pushes" in lines[0] else table(lines)
            parts += [f"### {path.stem}", "", f"By {commands}.", "", *rows, ""]
    if bullets := not_measured(results):
        parts += ["### Not measured yet", "", *bullets, ""]
    return "\n".join(parts)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the tables are old")
    options = parser.parse_args()
    text = DOCUMENT.read_text()
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise SystemExit(f"{DOCUMENT.name} lacks the marks {BEGIN} and {END}")
    new = f"{before}{BEGIN}\n\n{render(RESULTS)}{END}{after}"
    if options.check:
        return int(new != text)
    DOCUMENT.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
