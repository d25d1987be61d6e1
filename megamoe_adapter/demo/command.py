"""`weightsync demo`: the whole path on one machine, proved against cold loads, as a table or as JSON.

    weightsync demo                                           every mode over every transport
    weightsync demo --mode direct --transport shm --json      one column, for programs

Exit code 0 only if every push was proved, 1 if one was not, 2 if the demo could not be carried out.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ModeChoice(StrEnum):
    """How the engine reloads."""

    direct = "direct"
    layerwise = "layerwise"
    all = "all"


class TransportChoice(StrEnum):
    """How the bytes travel."""

    shm = "shm"
    gloo = "gloo"
    all = "all"


def demo(
    mode: Annotated[ModeChoice, typer.Option(help="How the engine reloads.")] = ModeChoice.all,
    transport: Annotated[TransportChoice, typer.Option(help="How the bytes travel.")] = TransportChoice.all,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    workdir: Annotated[Path, typer.Option(help="Folder that caches the checkpoint.")] = Path(".demo"),
) -> None:
    """Push new weights from a trainer process into a live engine process; prove each push against a cold load."""
    from rich.console import Console

    from megamoe_adapter.demo.child import ChildError
    from megamoe_adapter.demo.display import Display, table
    from megamoe_adapter.demo.story import DemoError, run_demo

    try:
        with Display(Console(stderr=True)) as display:
            result = run_demo(
                workdir,
                modes=["direct", "layerwise"] if mode is ModeChoice.all else [mode.value],
                transports=["shm", "gloo"] if transport is TransportChoice.all else [transport.value],
                progress=display,
            )
    except (ChildError, DemoError) as error:
        print(f"the demo could not be carried out: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(result.to_json())
    else:
        Console().print(table(result))
    raise typer.Exit(0 if result.ok else 1)
