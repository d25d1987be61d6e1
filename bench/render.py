"""Makes docs/PERFORMANCE.md's tables from the recorded results.

A benchmark that is run with `--record` appends one JSON line per case to `bench/results/NAME.jsonl`. This script shows
the newest line of each case and hardware, one table per file, between the two marks of docs/PERFORMANCE.md. A line
holds at least

    case ours_seconds floor_seconds peer peer_seconds bytes tensors extra_bytes hardware date command

where `floor_seconds` is the least time the same bytes can take (one copy), and `peer_seconds` what another project's
code takes for them in the same run; null where there is none.

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
        if missing := [name for name in REQUIRED if name not in line]:
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
    return (
        "-" if not above or not below else f"{above / below:.1f}x" if above / below < 100 else f"{above / below:.0f}x"
    )


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


def render(results: Path) -> str:
    """All tables, one section per file."""
    parts: list[str] = []
    for path in sorted(results.glob("*.jsonl")):
        lines = read_lines(path)
        if lines:
            commands = ", ".join(dict.fromkeys(f"`{line['command']}`" for line in lines))
            parts += [f"### {path.stem}", "", f"By {commands}.", "", *table(lines), ""]
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
