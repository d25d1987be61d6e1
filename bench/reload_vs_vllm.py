"""Runs the reported failures through vLLM 0.33.0's reload code and through ours, and prints both outcomes.

Theirs runs in its own virtual environment (`peer_vllm.py`), ours in this one, on the same toys (`toys_peer.py`,
`rows_peer.py`), both on CPU with uninitialised memory made visible. A row that one side gets wrong is printed as wrong,
whoever's it is; nothing is left out.

    python3 -m venv .venv-vllm033 && .venv-vllm033/bin/pip install vllm==0.33.0
    .venv/bin/python bench/reload_vs_vllm.py                  # a table for people
    .venv/bin/python bench/reload_vs_vllm.py --write          # and docs/CORRECTNESS.md's table
    .venv/bin/python bench/reload_vs_vllm.py --rows D1 L1     # some rows
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rows_peer import ALL_ROWS, ROWS
from torch import nn
from toys_peer import Host, Outcome, Row, Weights, run_row

import weightsync
from weightsync.errors import WeightSyncError
from weightsync.manifest import Manifest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "CORRECTNESS.md"
BEGIN, END = "<!-- table: bench/reload_vs_vllm.py -->", "<!-- end of table -->"
PEER_DEADLINE_SECONDS = 600


class AttentionLike:
    """Marks a toy's attention layer; our post-load order knows a module's own hook by its name."""


class OurReload:
    """weightsync's reload in one mode; a direct session writes live bytes at once, so it is opened with a journal."""

    host = Host(quant_base=object, attention_base=AttentionLike)
    refusals = (WeightSyncError,)

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.session: Any = None
        self.report: Any = None

    def cold_load(self, model: nn.Module, weights: Weights) -> None:
        """A plain loader: the weights, then module, attention and model hooks, in the order of vLLM's loader."""
        weightsync.record_layouts(model)
        model.load_weights(weights)
        for module in list(model.modules()):
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        for module in list(model.modules()):
            if isinstance(module, AttentionLike):
                module.process_weights_after_loading(torch.float32)
        if hasattr(model, "process_weights_after_loading"):
            model.process_weights_after_loading()

    def start(self, model: nn.Module, declared: Weights, partial: bool, max_held_bytes: int | None) -> None:
        self.session, self.report = None, None
        self.session = weightsync.start_reload(
            model,
            mode=self.mode,
            scope="partial" if partial else "full",
            rollback="host" if self.mode == "direct" else "none",
            manifest=Manifest.from_tensors(declared),
            **({} if max_held_bytes is None else {"max_held_bytes": max_held_bytes}),
        )

    def load(self, model: nn.Module, weights: Weights) -> None:
        self.session.load_weights(weights)

    def finish(self, model: nn.Module) -> None:
        self.report = weightsync.finish_reload(model)

    def abort(self, model: nn.Module) -> None:
        if self.session is not None and weightsync.reload_state(model) == "loading":
            weightsync.abort_reload(model)

    def held_bytes(self, model: nn.Module) -> int:
        return 0 if self.report is None else int(self.report.peak_held_bytes)


def peer_outcomes(python: Path) -> dict[str, Any]:
    """Runs vLLM's side in its interpreter.

    Raises:
        SystemExit: Its environment is missing, or it failed; with its own words.
    """
    if not python.exists():
        raise SystemExit(f"{python} is missing: python3 -m venv .venv-vllm033 && {python} -m pip install vllm==0.33.0")
    run = subprocess.run(
        [str(python), str(Path(__file__).with_name("peer_vllm.py"))],
        capture_output=True,
        text=True,
        timeout=PEER_DEADLINE_SECONDS,
        check=False,
    )
    if run.returncode != 0:
        raise SystemExit(f"vLLM's side failed:\n{run.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def compare(rows: Sequence[Row], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """Both outcomes of each row."""
    table = []
    for row in rows:
        sides = {"vLLM 0.33.0": Outcome(**theirs["outcomes"][row.id])}
        for mode in ("layerwise", "direct"):
            sides[mode] = run_row(row, OurReload(mode))
        table.append(
            {
                "row": row,
                "right": {side: row.is_right(outcome) for side, outcome in sides.items()},
                "told": {side: row.told(outcome) for side, outcome in sides.items()},
            }
        )
    return table


def print_table(table: list[dict[str, Any]]) -> None:
    """Prints each row with both outcomes."""
    for entry in table:
        row = entry["row"]
        print(f"{row.id:4} {row.title}\n     right: {row.wanted()}")
        for side, told in entry["told"].items():
            print(f"     {'right' if entry['right'][side] else 'WRONG':5} {side:12} {told}")
    print(
        ", ".join(
            f"{side}: {sum(entry['right'][side] for entry in table)} of {len(table)} right"
            for side in table[0]["right"]
        )
    )


def markdown(table: list[dict[str, Any]], theirs: dict[str, Any]) -> str:
    """The table of docs/CORRECTNESS.md."""
    lines = [
        f"Measured with vLLM {theirs['vllm']} on torch {theirs['torch']} and weightsync {version('weightsync')} on "
        f"torch {torch.__version__}, CPU.",
        "",
        "| row | what users see | right | vLLM 0.33.0 | ours, layerwise | ours, direct |",
        "|---|---|---|---|---|---|",
    ]
    for entry in table:
        cells = [
            ("" if entry["right"][side] else "**wrong:** ") + entry["told"][side].replace("|", "\\|")
            for side in entry["told"]
        ]
        if cells[2] == cells[1]:
            cells[2] = "the same"
        row = entry["row"]
        lines.append(f"| {row.id} | {row.title} | {row.wanted()} | " + " | ".join(cells) + " |")
    counts = {side: sum(entry["right"][side] for entry in table) for side in table[0]["right"]}
    lines += ["", f"Right of {len(table)}: " + ", ".join(f"{side} {count}" for side, count in counts.items()) + "."]
    return "\n".join(lines)


def write_document(table: list[dict[str, Any]], theirs: dict[str, Any]) -> None:
    """Replaces the table between the two marks of docs/CORRECTNESS.md."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{DOCUMENT.name} lacks the marks {BEGIN} and {END}")
    DOCUMENT.write_text(f"{before}{BEGIN}\n{markdown(table, theirs)}\n{END}{after}")


def main() -> int:
    """Entry point; the exit status is 1 if ours gets a row wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="*", choices=sorted(ROWS), help="rows to run; all if left out")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm033" / "bin" / "python")
    parser.add_argument("--write", action="store_true", help="write docs/CORRECTNESS.md's table")
    options = parser.parse_args()
    rows = [ROWS[name] for name in options.rows] if options.rows else list(ALL_ROWS)
    theirs = peer_outcomes(options.python)
    table = compare(rows, theirs)
    print_table(table)
    if options.write:
        if len(rows) != len(ALL_ROWS):
            raise SystemExit("--write needs all rows")
        write_document(table, theirs)
    return 0 if all(entry["right"][mode] for entry in table for mode in ("layerwise", "direct")) else 1


if __name__ == "__main__":
    sys.exit(main())
