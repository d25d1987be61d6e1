"""What a person sees of the demo: a line per verdict and a bar while data moves, then the table.

with Display(Console(stderr=True)) as display: result = run_demo(..., progress=display)
Console().print(table(result))
"""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table

from megamoe_adapter.demo.story import CASES, DemoResult, Run


class Display:
    """Shows progress on a console; where that is no terminal, it prints one line per push.

    Args:
        console: Where to; stderr, so that stdout holds the result alone.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Names the stage; the bar is idle until data moves."""
        self._bar.reset(self._task, description=text, total=None)

    def data(self, sent_bytes: int, total_bytes: int) -> None:
        """Moves the bar."""
        self._bar.update(self._task, completed=sent_bytes, total=total_bytes)

    def verdict(self, run: Run) -> None:
        """Prints one line."""
        mark = "[green]ok[/]" if run.ok else "[red]FAILED[/]"
        self._console.print(
            f"{mark} {run.mode}/{run.transport} {run.case}: {run.differing} differing and {run.moved} moved "
            f"of {run.compared} tensors, {run.greedy_matching}/{run.greedy_total} outputs equal, {run.seconds:.2f} s",
            highlight=False,
            soft_wrap=True,
        )


def table(result: DemoResult) -> Table:
    """The result as a table: rows are checks, columns are mode x transport."""
    columns = list(dict.fromkeys((run.mode, run.transport) for run in result.runs))
    runs = {(run.case, run.mode, run.transport): run for run in result.runs}
    verdict = "[green]every push equals a cold load[/]" if result.ok else "[red]NOT every push equals a cold load[/]"
    view = Table(
        title=f"{result.tensors} tensors, {result.bytes / 2**20:.1f} MiB per checkpoint: {verdict}",
        caption="each push was compared with a cold load of the same checkpoint in another process",
    )
    view.add_column("push")
    view.add_column("check")
    for mode, transport in columns:
        view.add_column(f"{mode}\n{transport}", justify="right")
    for case in CASES:
        row = [runs[case.name, *column] for column in columns]
        view.add_row(case.title, "differing", *(_of(r.differing, r.compared, r.differing == 0) for r in row))
        view.add_row("", "moved", *(_of(r.moved, r.compared, r.moved == 0) for r in row))
        view.add_row(
            "",
            "greedy equal",
            *(_of(r.greedy_matching, r.greedy_total, r.greedy_matching == r.greedy_total) for r in row),
        )
        view.add_row("", "seconds", *(f"{r.seconds:.2f}" for r in row), end_section=True)
    return view


def _of(count: int, total: int, good: bool) -> str:
    return f"[{'green' if good else 'red'}]{count}[/] of {total}"
