"""Whose a value is where the first load was not observed: running hooks to find out, and undoing the run.

A value that no push sends, and that is not as recorded, is the hooks' if they set it, else the engine's. A flag is
shown as recorded in a first run; a number, a list, or what lies outside of the hooks' own modules in a second one; what
hooks did not set then is live in the last. What was found is remembered for the model, so that later reloads run each
hook once. Of tensors it is found in every reload: one that hooks compute from its own value is shown as recorded.

    undo = Undo(model, stagings)
    try: ...run hooks...; judge(trial, ...)
    except Again as found: undo.restore(); trial = found.trial; ...run once more...
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from weightsync.errors import LayoutError, shown
from weightsync.python_state import PythonState
from weightsync.reachable import Slot
from weightsync.reload.audit import LiveSlot, address
from weightsync.reload.hooks.observe import TensorLog
from weightsync.reload.layerwise import Staging
from weightsync.reload.records import COPY_BYTES
from weightsync.reload.state import ModelState


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of hooks.

    Attributes:
        shows: "live" or "recorded" values of `candidates`; "known" once it is known whose they are.
        suspects: Live tensors, not as recorded, that hooks may process.
        flags: Paths of plain values that are shown as recorded.
        candidates: Paths of further plain values, and tensors of one element, not as recorded.
        others: Those of `candidates` that hooks which do not run now may set: they stay open if these do not.
    """

    shows: Literal["live", "recorded", "known"]
    suspects: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    candidates: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()

    @property
    def shown(self) -> frozenset[str]:
        """Names to show as recorded in this run, besides those known to be hooks'."""
        return self.candidates if self.shows == "recorded" else frozenset()

    @property
    def is_open(self) -> bool:
        """Whether it may take another run."""
        return bool(self.shows != "known" and (self.suspects or self.flags or self.candidates))


@dataclass(frozen=True, slots=True)
class Run:
    """What hooks did.

    Attributes:
        log: To tensors.
        slots: What the model holds after them.
        touched: Paths of names that they set, or that their code sets under some condition; logs left out.
    """

    log: TensorLog
    slots: Sequence[Slot]
    touched: frozenset[str]


class Again(Exception):  # a finding that makes hooks run once more, not an error
    """The hooks have to find other values."""

    def __init__(self, trial: Trial, what: Collection[str] = ()) -> None:
        super().__init__(shown(sorted(what)))
        self.trial = trial


class Wide(Exception):  # a finding that makes a unit wait, not an error
    """Hooks of one unit looked into modules outside it."""

    def __init__(self, read: frozenset[str], modules: frozenset[str], undo: Undo | None) -> None:
        super().__init__(shown(sorted(modules)))
        self.read = read
        self.modules = modules
        self.undo = undo


class Undo:
    """What it takes to run hooks a second time: Python state, staged values, live bytes before they were written.

    Args:
        model: The model, as hooks are going to find it.
        stagings: Units that are staged.
    """

    def __init__(self, model: torch.nn.Module, stagings: Sequence[Staging]) -> None:
        self._python = PythonState.capture(model)
        self._stagings = [(staging, {p: t.clone() for p, t in staging.tensors.items()}) for staging in stagings]
        self._live: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, live: torch.Tensor) -> None:
        """Called before a live tensor is written."""
        self._live.append((live, live.clone()))

    def restore(self) -> None:
        """Puts everything back but staged values."""
        self._python.restore()
        for live, old in reversed(self._live):
            live.copy_(old)

    def staged_again(self, shown: Collection[str] = ()) -> list[Staging]:
        """The units staged anew, with the values that they had; `shown` as for `Staging`."""
        return [staging.again(values, shown) for staging, values in self._stagings]


def judge(trial: Trial, run: Run, state: ModelState, live: Mapping[str, LiveSlot], lost: Collection[str]) -> None:
    """Raises `Again` if the hooks have to find other values, or it takes a run to tell whose a value is.

    Args:
        trial: What was shown.
        run: What the hooks did.
        state: Of the model; what is found is remembered there.
        live: Live tensors before.
        lost: Paths of tensors whose recorded value was not kept.
    """
    if trial.shows == "recorded":
        _decide(trial, run, state)
        return
    if trial.shows == "known":
        return
    now = {slot.path: slot.tensor for slot in run.slots} if trial.suspects else {}
    read = trial.suspects & run.log.read
    found = {path for path in read if path in run.log.read_then_written or is_moved(live[path], now.get(path))}
    if too_large := sorted(found.intersection(lost)):
        raise LayoutError(
            f"{shown(too_large)}: a post-load hook computes it from its own value, which would happen again in every "
            f"reload, and its value before the first load was not kept, since it is larger than {COPY_BYTES} "
            "bytes; keep the unprocessed value under another name",
            names=too_large,
        )
    if found:
        state.compounding |= found
        raise Again(replace(trial, suspects=trial.suspects - found), found)
    candidates = trial.candidates if state.settings.has_all_others else trial.candidates | read.difference(lost)
    if candidates:
        raise Again(replace(trial, shows="recorded", candidates=candidates), candidates)
    _settle_flags(trial, run, state)


def _decide(trial: Trial, run: Run, state: ModelState) -> None:
    """Settles whose the candidates are, after they were shown as recorded; raises `Again` unless all are the hooks'."""
    latches = trial.candidates & (run.touched | run.log.written_staged)
    settings = trial.candidates - latches - trial.others
    state.latches |= latches
    state.compounding |= latches
    state.settings.add(settings)
    state.harmless |= settings
    _settle_flags(trial, run, state)
    if latches != trial.candidates:
        raise Again(Trial("known"), trial.candidates - latches)


def _settle_flags(trial: Trial, run: Run, state: ModelState) -> None:
    state.latches |= trial.flags & run.touched
    settings = trial.flags - run.touched
    state.settings.add(settings)
    if settings:
        raise Again(Trial("known"), settings)


def is_moved(live: LiveSlot, now: torch.Tensor | None) -> bool:
    """Whether another tensor, or the same one over other bytes, is at a place now."""
    return now is not live.slot.tensor or (live.alias.layout == torch.strided and address(now) != address(live.alias))
