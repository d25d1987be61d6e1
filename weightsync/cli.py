"""The `weightsync` command.

Its own commands are few; other packages add theirs through the entry-point group `weightsync.commands`, each a function
that typer can run. So this package knows none of them, and one that cannot be imported does not take the rest down.

    weightsync --version
    weightsync manifest CHECKPOINT_DIR        what a push of that checkpoint would carry
    weightsync status http://127.0.0.1:8000   what a running engine says about its weights
    weightsync demo                           added by megamoe_adapter
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

COMMANDS = "weightsync.commands"
_STATUS_TIMEOUT_SECONDS = 10.0


def build_app() -> typer.Typer:
    """The command line, with every command that this environment offers."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, help="Reload and stream the weights of live models.")
    app.callback()(_root)
    app.command()(manifest)
    app.command()(status)
    for entry_point in sorted(entry_points(group=COMMANDS), key=lambda e: e.name):
        _add(app, entry_point)
    return app


def main() -> None:
    """Runs the command line; exits with the command's code."""
    build_app()()


def manifest(
    directory: Annotated[Path, typer.Argument(help="A folder with safetensors files.", exists=True, file_okay=False)],
    names: Annotated[bool, typer.Option("--names", help="List every tensor.")] = False,
) -> None:
    """Print what a push of a checkpoint would carry: tensors, bytes, and the hash that both sides agree on."""
    from weightsync.errors import ManifestError
    from weightsync.manifest import Manifest, dtype_name
    from weightsync.trainer.sources import CheckpointSource

    try:
        content = Manifest(tuple(CheckpointSource(directory).metadata))
    except ManifestError as error:
        _fail(str(error))
    if names:
        for entry in content:
            print(f"{entry.name}  {dtype_name(entry.dtype)}  {list(entry.shape)}")
    print(f"{len(content)} tensors, {content.num_bytes} bytes, hash {content.hash}")


def status(url: Annotated[str, typer.Argument(help="Where the engine serves, e.g. http://127.0.0.1:8000")]) -> None:
    """Print what a running engine says about its weights, as JSON."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/weight_info", timeout=_STATUS_TIMEOUT_SECONDS, trust_env=False)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        _fail(f"{url} does not answer /weight_info: {error}")
    print(json.dumps(answer.json(), indent=2))


def _fail(reason: str) -> NoReturn:
    print(f"weightsync: {reason}", file=sys.stderr)
    raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"weightsync {version('weightsync')}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _add(app: typer.Typer, entry_point: EntryPoint) -> None:
    try:
        command = entry_point.load()
    except ImportError as error:
        print(f"weightsync: command {entry_point.name!r} ({entry_point.value}) is left out: {error}", file=sys.stderr)
        return
    app.command(entry_point.name)(command)
