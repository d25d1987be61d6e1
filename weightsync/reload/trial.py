"""Whose a value is: running hooks to find out, and undoing the run.

A value that no push sends may differ from its record for three reasons:

    a hook goes on from it     a latch, a scale that it multiplies: hooks must find the recorded value
    the engine set it since    a setting: hooks must find the live value
    somebody counts in it      a log of hooks that ran: nothing depends on it, so it goes on from the live value

Which one shows when hooks run. A flag of the hooks' own modules is shown as recorded: if they set it, it is theirs,
else a setting. A number, a list, and what lies outside of these modules is shown live, and as recorded in a second run:
if the outcomes are equal, nothing depends on it; else it is theirs if they set it. What was found is remembered for the
model, so that later reloads run each hook once.

    undo = Undo(model, stagings)
    try: ...run hooks...; judge(trial, ...)
    except Again as found: undo.restore(); trial = found.trial; ...run once more...
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from weightsync.errors import LayoutError, shown
from weightsync.kernels.digest import digest_many
from weightsync.python_state import PythonState
from weightsync.reachable import Slot
from weightsync.reload.audit import LiveSlot, address
from weightsync.reload.layerwise import Staging
from weightsync.reload.observe import TensorLog
from weightsync.reload.records import COPY_BYTES
from weightsync.reload.scopes import ABSENT
from weightsync.reload.state import ModelState
from weightsync.reload.swap import Swap

Outcome = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of hooks.

    Attributes:
        shows: "live" or "recorded" values of `candidates`; "known" once it is known whose they are.
        suspects: Live tensors, not as recorded, that hooks may process.
        flags: Paths of plain values that are shown as recorded.
        candidates: Paths of further plain values, and tensors of one element, not as recorded.
        others: Those of `candidates` that belong to other hooks' modules too: who does not set them leaves them open.
        live_outcome: What came out when live values were shown.
    """

    shows: Literal["live", "recorded", "known"]
    suspects: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    candidates: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    live_outcome: Outcome = field(default_factory=dict)

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
        touched: Paths of names that they set, or that their code sets under some condition.
        outcome: All that came out.
    """

    log: TensorLog
    slots: Sequence[Slot]
    touched: frozenset[str]
    outcome: Outcome


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
    scalars = {path for path in read if live[path].alias.numel() == 1}
    candidates = trial.candidates | scalars
    if candidates:
        raise Again(replace(trial, shows="recorded", candidates=candidates, live_outcome=run.outcome), candidates)
    _settle_flags(trial, run, state)


def _decide(trial: Trial, run: Run, state: ModelState) -> None:
    """Settles whose the candidates are after both runs; raises `Again` unless the last one was right for all."""
    set_by_hooks = trial.candidates & (run.touched | run.log.written_staged)
    depends = not same_outcome(trial.live_outcome, run.outcome, trial.candidates)
    latches = set_by_hooks if depends else frozenset()
    state.latches |= latches
    state.compounding |= latches
    settings = trial.candidates - latches - (trial.others - set_by_hooks)
    state.settings |= settings
    state.harmless |= settings
    _settle_flags(trial, run, state)
    is_final = latches == trial.candidates or not (depends or set_by_hooks)
    if not is_final or latches & trial.others:
        raise Again(Trial("known"), trial.candidates)


def _settle_flags(trial: Trial, run: Run, state: ModelState) -> None:
    state.latches |= trial.flags & run.touched
    settings = trial.flags - run.touched
    state.settings |= settings
    if trial.flags & settings:
        raise Again(Trial("known"), trial.flags & settings)


def outcome_of(log: TensorLog, slots: Sequence[Slot], live: Mapping[str, LiveSlot], swaps: Sequence[Swap]) -> Outcome:
    """What hooks did and left: operators, plain values, bytes of tensors that are not the untouched live ones."""
    tensors = {
        slot.path: slot.tensor
        for slot in slots
        if slot.path in log.written_live or slot.path not in live or is_moved(live[slot.path], slot.tensor)
    }
    digests = digest_many([tensor for tensor in tensors.values() if not tensor.is_meta])
    layouts = [(tuple(t.shape), t.dtype) for t in tensors.values() if not t.is_meta]
    paths = [path for path, tensor in tensors.items() if not tensor.is_meta]
    outcome: dict[str, Any] = dict(zip(paths, zip(digests, layouts, strict=True), strict=True))
    outcome["operators"] = tuple(log.operators)  # a branch that changed no bytes, for these weights, was another branch
    for swap in swaps:
        outcome.update(swap.plain_values())
    return outcome


def same_outcome(left: Outcome, right: Outcome, apart_from: Collection[str]) -> bool:
    """Whether two runs left the same, but for some names and what is in them."""
    names = {*left, *right}
    aside = {name for name in names if any(name == c or name.startswith((f"{c}[", f"{c}.")) for c in apart_from)}
    return all(left.get(name, ABSENT) == right.get(name, ABSENT) for name in names - aside)


def is_moved(live: LiveSlot, now: torch.Tensor | None) -> bool:
    """Whether another tensor, or the same one over other bytes, is at a place now."""
    return now is not live.slot.tensor or (live.alias.layout == torch.strided and address(now) != address(live.alias))
