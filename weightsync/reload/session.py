"""One reload of one model: start, load any number of times, finish or abort.

    live --start_reload--> loading --finish_reload--> live                      all new, hooks run, addresses audited
                              |---- error or abort --> live                     nothing live was written, or rolled back
                              '---- error or abort --> torn                     part new: no version, no serving
    torn --start_reload(scope="full")--> loading --finish_reload--> live

    session = start_reload(model, mode="layerwise", manifest=manifest)
    session.load_weights(part_1); session.load_weights(part_2)
    report = session.finish(version=7)

    with reload(model, rollback="host") as session:      # finishes; aborts if the block raises
        session.load_weights(weights)

With a manifest, everything that can be wrong with names, shapes, dtypes and coverage is an error at start, before
anything changes. Without one, each call is planned when it comes (the last push's manifest is remembered and tried
first), and what is missing is found at finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.errors import ReloadError, TornModelError
from weightsync.manifest import Manifest
from weightsync.plan.coverage import Scope as PlanScope
from weightsync.plan.record import Casts
from weightsync.reload.intake import HeldPolicy
from weightsync.reload.journal import Rollback
from weightsync.reload.layouts import Mode
from weightsync.reload.report import ReloadReport
from weightsync.reload.state import Status, state_of
from weightsync.reload.transaction import MAX_HELD_BYTES, ReloadSession, SessionOptions

__all__ = [
    "ReloadSession",
    "abort_reload",
    "finish_reload",
    "live_version",
    "reload",
    "reload_state",
    "start_reload",
]


def start_reload(
    model: torch.nn.Module,
    *,
    mode: Mode = "direct",
    scope: PlanScope = "full",
    rollback: Rollback = "none",
    manifest: Manifest | None = None,
    ignore: Iterable[str] = (),
    casts: Casts = "refuse",
    allow_empty: bool = False,
    max_held_bytes: int = MAX_HELD_BYTES,
    held_policy: HeldPolicy = "spill",
    version: int | None = None,
) -> ReloadSession:
    """Opens a reload of `model`. Runs on the engine, on each rank.

    Args:
        model: The live model; a `torch.compile` wrapper stands for what it wraps.
        mode: "direct" writes into live tensors where a module's live layout is its loaders' layout, and stages the
            other modules one by one; "layerwise" stages every module.
        scope: "full": everything loadable has to come. "partial": what is not named keeps its bytes.
        rollback: "host" or "device" keeps the old bytes until finish, there, so that an abort brings them back.
        manifest: What will come. Recommended: all errors of names, shapes, dtypes and coverage are raised here.
        ignore: Patterns (`fnmatch`) of wire names that are not to be loaded.
        casts: "allow" lets loaders change the dtype; "refuse" makes it an error.
        allow_empty: Accept a reload that loads nothing.
        max_held_bytes: Layerwise: bytes of tensors held back while another module is staged.
        held_policy: Beyond that: "spill" to host memory or a temporary file; "refuse" (with a manifest: before it
            starts); "write_through" to a second staged module.
        version: Announces the version that `finish` will publish.

    Returns:
        The open session.

    Raises:
        ReloadError: A session is open, the model is asleep, or the version is not newer than the newest published.
        TornModelError: The model is torn, and only a full push repairs it.
        CoverageError: Names are missing, unexpected or duplicated in the manifest.
        LayoutError: A shape, dtype or loader does not fit, or a module needs `record_layouts`.
    """
    options = SessionOptions(
        mode, scope, rollback, manifest, tuple(ignore), casts, allow_empty, max_held_bytes, held_policy, version
    )
    _check_options(options)
    state = state_of(model)
    session = ReloadSession(model, options)
    try:
        with state.lock:
            if state.session is not None:
                raise ReloadError("a reload session is open on this model already; finish or abort it first")
            if state.status == "torn" and scope != "full":
                raise TornModelError(f'the model is torn ({state.torn_by}); only a push with scope="full" repairs it')
            session.refuse_old(version)
            state.session = session
        session.open()
        state.status = "loading"
    except BaseException as error:
        if session.is_open:
            session.abort(f"{type(error).__name__} while it was opened")
        session.release_claim()
        with state.lock:
            if state.session is session:
                state.session = None
        raise
    return session


def finish_reload(model: torch.nn.Module, version: int | None = None) -> ReloadReport:
    """Finishes the open reload of `model`; see `ReloadSession.finish`."""
    return _session_of(model).finish(version)


def abort_reload(model: torch.nn.Module, reason: str = "") -> Status:
    """Aborts the open reload of `model`; see `ReloadSession.abort`."""
    return _session_of(model).abort(reason)


@contextmanager
def reload(model: torch.nn.Module, **options: Any) -> Iterator[ReloadSession]:
    """A reload as a `with` block: finishes at its end, aborts if it raises.

    Args:
        model: The live model.
        **options: Those of `start_reload`.
    """
    session = start_reload(model, **options)
    try:
        yield session
    except BaseException as error:
        if session.is_open:
            session.abort(f"{type(error).__name__}: {error}")
        raise
    if session.is_open:
        session.finish()


def reload_state(model: torch.nn.Module) -> Status:
    """Where a model is in its lifecycle: "live", "loading" or "torn"."""
    return state_of(model).status


def live_version(model: torch.nn.Module) -> int | None:
    """The version of the live bytes; None before the first versioned push, and after one without a version.

    Raises:
        TornModelError: The model holds part old, part new bytes, which no version names.
    """
    state = state_of(model)
    if state.status == "torn":
        raise TornModelError(f"the model is torn ({state.torn_by}) and has no version; a full push repairs it")
    return state.version


def _session_of(model: torch.nn.Module) -> ReloadSession:
    session = state_of(model).session
    if session is None or not session.is_open:
        raise ReloadError("no reload session is open on this model; call start_reload first")
    return session


def _check_options(options: SessionOptions) -> None:
    allowed = {
        "mode": ("direct", "layerwise"),
        "scope": ("full", "partial"),
        "rollback": ("none", "host", "device"),
        "casts": ("refuse", "allow"),
        "held_policy": ("spill", "refuse", "write_through"),
    }
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(options, name)!r}")
