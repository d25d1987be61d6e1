"""Runs post-load hooks in the world of the first load and brings what they made into the live tensors.

    runner = HookRunner(...)
    runner.finish_unit(staging)             # one complete unit: hooks in its staged copy, then copy back
    runner.finish_model(late_stagings)      # all other hooks, in the loader's order, over the whole model

Both do the same: install the recorded world, run, keep what nobody touched, settle the rest into live storage. Until
the last step nothing live has changed, unless a hook wrote a live tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from weightsync.errors import LayoutError, ReloadError, shown
from weightsync.reachable import PythonState, Slot, walk, walk_module
from weightsync.reload.audit import LiveSlot, LiveTensors
from weightsync.reload.journal import Journal
from weightsync.reload.layerwise import Staging, ancestors
from weightsync.reload.observe import Index, TensorLog, assignments, index_of
from weightsync.reload.partial import Partial, Unsent
from weightsync.reload.post_load import Hook, HookGuards, activation_dtype, declares_direct
from weightsync.reload.reconcile import keep_untouched, settle
from weightsync.reload.records import COPY_BYTES, equal_bytes
from weightsync.reload.scopes import Scope, Swap
from weightsync.reload.state import state_of


class HookRunner:
    """The hooks of one session, and its access to live bytes.

    Args:
        model: The model.
        modules: Its modules by path.
        hooks: All hooks, in order.
        guards: Shadows of the hooks.
        live: Live tensors at the start of the session.
        journal: Where old bytes go before they are overwritten.
        partial: What a partial session has loaded; None for scope "full".

    Attributes:
        loaded: Paths that have been loaded in this session.
        touched: Modules that own them.
        wrote_live: Whether any live byte was changed.
        ran: Names of hooks that ran.
        coming: Paths that the session loads, once all are known; None before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Mapping[str, torch.nn.Module],
        hooks: Sequence[Hook],
        guards: HookGuards,
        live: LiveTensors,
        journal: Journal,
        partial: Partial | None,
    ) -> None:
        self.model = model
        self.modules = modules
        self.hooks = hooks
        self.live = live
        self.journal = journal
        self.loaded: set[str] = set()
        self.touched: set[str] = set()
        self.wrote_live = False
        self.ran: list[str] = []
        self.coming: Collection[str] | None = None
        self._guards = guards
        self._partial = partial
        self._finished: set[str] = set()
        self._are_cells_reset = False
        self._lost: set[str] = set()  # tensors whose start value was too large to keep
        self._inference = any(parameter.is_inference() for parameter in model.parameters())

    @property
    def reach(self) -> Mapping[str, frozenset[str]]:
        """Modules that hooks looked into, outside their own and those below, by the hook's name."""
        return state_of(self.model).reach

    def applies(self, hook: Hook) -> bool:
        """Whether a hook's module, or one below it, received data; in a full session all did."""
        if self._partial is None:
            return True
        below = {id(module) for module in hook.module.modules()}
        return any(id(self.modules[path]) in below for path in self.touched)

    def start_staging(self, staging: Staging) -> None:
        """Gives staged tensors the bytes that they start from."""
        if self._partial is not None:
            self._partial.start(staging)

    def write(self, path: str, live: torch.Tensor, value: torch.Tensor) -> None:
        """Copies a value into live bytes, saving the old ones first."""
        self.about_to_write(live)
        live.copy_(value)

    def about_to_write(self, live: torch.Tensor) -> None:
        """Notes that live bytes are going to change."""
        self.journal.save(live)
        self.wrote_live = True

    def finish_unit(self, staging: Staging) -> Staging | None:
        """Runs the hooks of a complete unit and copies the result into the live model.

        Returns:
            None; or the unit, staged anew with the same values, if a hook looked at what this session loads elsewhere.
            It has to wait for all data then, and nothing has changed.
        """
        unit = staging.unit
        hooks = [hook for hook in unit.hooks if self.applies(hook)]
        if self._partial is not None:
            self._partial.refuse_unfit(unit.modules)
        if not hooks and not unit.from_record and not staging.was_interpreted:
            for path, staged in staging.tensors.items():
                if path in self.loaded:
                    self.write(path, self.live.by_path[path].alias, staged)
            self._finished.update(unit.modules)
            return None
        owners = {id(hook.owner) for hook in hooks}
        owned = [path for path, module in self.modules.items() if id(module) in owners]
        paths = dict.fromkeys([*unit.modules, *(hook.path for hook in hooks), *owned])
        own = unit.needs.union(paths)
        try:
            self._run([staging], (), hooks, self.live.of_modules(paths), paths, own)
        except _Wide as found:
            return self._wait(found, hooks)
        self._finished.update(unit.modules, (hook.path for hook in hooks))
        return None

    def _wait(self, found: _Wide, hooks: Sequence[Hook]) -> Staging:
        """Remembers that a unit's hooks have to wait for all data, and undoes what they did."""
        later = {id(hook) for hook in self.hooks[self.hooks.index(hooks[0]) :]}
        for hook in hooks:
            state_of(self.model).reach[hook.name] = found.modules
        ran = [hook.name for hook in self.hooks if id(hook) in later and self._guards.has_run(hook)]
        too_early = [name for hook in self.hooks if (name := hook.name) in ran and hook.path in found.modules]
        if too_early or found.undo is None:
            order = f", after {shown(too_early)} had run already" if too_early else ""
            raise ReloadError(
                f"{shown([hook.name for hook in hooks])} looked into {shown(sorted(found.modules))}, which this "
                f"session loads too{order}; this is known now, so start again: the next session lets them wait for "
                "all data"
            )
        found.undo.restore()
        self._guards.forget(hooks)
        return found.undo.staged_again()[0]

    def finish_model(self, stagings: Sequence[Staging], interpreted: Collection[str]) -> None:
        """Runs every hook that has not run yet, and settles the whole model.

        Args:
            stagings: Units that are still staged.
            interpreted: Modules whose loaders were run on live tensors; what those set on the module stays.
        """
        if self._partial is not None:
            self._partial.refuse_unfit(path for staging in stagings for path in staging.unit.modules)
        hooks = [hook for hook in self.hooks if not self._guards.has_run(hook) and self.applies(hook)]
        left_alone = {path for staging in stagings for path in staging.unit.modules} | self._finished | set(interpreted)
        records = state_of(self.model).records
        hooked = {hook.path for hook in hooks}
        scopes = [
            list(records[module].scopes[1:])
            for path, module in self.modules.items()
            if module in records
            and path not in left_alone
            and not declares_direct(module)
            and not hooked.isdisjoint(ancestors(path))
        ]
        if hooks or stagings or interpreted or self.ran or self._refreshes:
            self._run(stagings, scopes, hooks, self.live.by_path, None)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, parameters may be written in place, whatever mode the caller is in."""
        with torch.inference_mode(self._inference), torch.no_grad():
            yield

    @contextmanager
    def journaled(self) -> Iterator[None]:
        """Inside, the old bytes of every live tensor are saved before torch writes it, whoever does."""
        with TensorLog(self._live_index, {}, lambda path, tensor: self.about_to_write(tensor)):
            yield

    @property
    def _refreshes(self) -> list[Callable[[], object]]:
        """`refresh_derived` of every module that has one and that received data, itself or below."""
        touched = {id(self.modules[path]) for path in self.touched}
        found = []
        for module in self.modules.values():
            refresh: Any = getattr(module, "refresh_derived", None)
            if callable(refresh) and touched & {id(below) for below in module.modules()}:
                found.append(refresh)
        return found

    @cached_property
    def _live_index(self) -> Index:
        return index_of({path: live.alias for path, live in self.live.by_path.items()})

    def _run(
        self,
        stagings: Sequence[Staging],
        scopes: Sequence[list[Scope]],
        hooks: Sequence[Hook],
        before: Mapping[str, LiveSlot],
        paths: Iterable[str] | None,
        own: Collection[str] | None = None,
    ) -> None:
        """Runs hooks and settles; once more if it shows that they did not find the model as a first load finds it.

        A hook that only reads a buffer must find its live value; one that scales it in place must find the recorded
        one, else every reload would scale it again. A number that hooks themselves set must be found as recorded too,
        one that the engine set as it is. Which it is shows when they run, and is remembered.
        """
        state = state_of(self.model)
        if hooks and not self._are_cells_reset:  # once: hooks of several modules may share one
            self._are_cells_reset = True
            for cell, recorded in state.cells:
                cell.cell_contents = recorded
        swaps = self._swaps(scopes)
        all_swaps = [*(staging.swap for staging in stagings), *swaps]
        suspects = self._suspects(all_swaps) if hooks else set()
        counters = {path for swap in all_swaps for path in swap.kept_counters} - state.settings if hooks else set()
        is_unknown = own is not None and any(hook.name not in state.reach for hook in hooks)
        undo = _Undo(self.model, stagings) if suspects or counters or is_unknown else None
        trial = _Trial(suspects, counters)
        while True:
            try:
                self._attempt(stagings, swaps, hooks, before, paths, trial, undo, own)
                break
            except _Again as found:
                trial = found.trial
                if undo is None:
                    raise ReloadError(f"cannot run {shown([hook.name for hook in hooks])} a second time") from found
                undo.restore()
                self._guards.forget(hooks)
                stagings = undo.staged_again()
                swaps = self._swaps(scopes)
        state.harmless |= suspects - state.compounding
        if own is not None:
            for hook in hooks:
                state.reach.setdefault(hook.name, frozenset())
        self.ran.extend(hook.name for hook in hooks if self._guards.has_run(hook))

    def _swaps(self, scopes: Sequence[list[Scope]]) -> list[Swap]:
        state = state_of(self.model)
        return [Swap(own, new=state.compounding, counters=state.latches) for own in scopes]

    def _attempt(
        self,
        stagings: Sequence[Staging],
        swaps: Sequence[Swap],
        hooks: Sequence[Hook],
        before: Mapping[str, LiveSlot],
        paths: Iterable[str] | None,
        trial: _Trial,
        undo: _Undo | None,
        own: Collection[str] | None,
    ) -> None:
        made = {path: tensor for staging in stagings for path, tensor in staging.tensors.items()}
        remade = {path: tensor for swap in swaps for path, tensor in swap.made().items()}
        starts = {path: tensor.clone() for path, tensor in (remade | made).items() if path not in self.loaded}
        installed: list[Staging | Swap] = []
        parts: list[Staging | Swap] = [*stagings, *swaps]
        all_swaps = [*(staging.swap for staging in stagings), *swaps]
        try:
            for part in parts:
                installed.append(part)
                part.install()
            unsent = self._unsent(made)
            log, assigned = self._call(
                hooks, self._refreshes if paths is None else [], index_of(made), unsent, all_swaps, undo
            )
            if own is not None:
                self._look_abroad(own, log, undo)
            self._refuse_processed_twice(unsent, log)
            slots = None if paths is None else [s for path in paths for s in walk_module(self.modules[path], path)]
            self._look_again(trial, log, walk(self.model) if slots is None else slots, all_swaps, assigned)

            def is_new_value(path: str, tensor: torch.Tensor) -> bool:
                start = starts.get(path)
                unchanged = start is not None and equal_bytes(tensor, start)
                return path in self.loaded or path in log.written_staged or not unchanged

            for swap in all_swaps:
                keep_untouched(swap, assigned, is_new_value)
            slots = None if paths is None else [s for path in paths for s in walk_module(self.modules[path], path)]
            settle(self.model, before, self.write, slots=slots)
        except BaseException:
            for part in reversed(installed):
                part.uninstall()
            raise

    def _call(
        self,
        hooks: Sequence[Hook],
        refreshes: Iterable[Callable[[], object]],
        staged: Index,
        unsent: Mapping[str, Unsent],
        swaps: Sequence[Swap],
        undo: _Undo | None,
    ) -> tuple[TensorLog, dict[int, set[str]]]:
        """Runs the hooks under observation."""

        def before_live_write(path: str, tensor: torch.Tensor) -> None:
            if path in unsent:
                unsent[path].keep(tensor)
                return
            if undo is not None:
                undo.keep(tensor)
            self.about_to_write(tensor)

        holders = [hook.module for hook in hooks] + [holder for swap in swaps for holder in swap.changed_holders()]
        dtype = activation_dtype(self.model)
        log = TensorLog(self._live_index, staged, before_live_write)
        with self.loading(), log, assignments(holders) as assigned:
            self._guards.allow(hooks)
            for hook in hooks:
                try:
                    self._guards.run(hook, dtype)
                except Exception as error:
                    error.add_note(f"raised by {hook.name} during a reload")
                    raise
            for refresh in refreshes:
                refresh()
        return log, assigned

    def _unsent(self, made: Mapping[str, torch.Tensor]) -> dict[str, Unsent]:
        """Parameters of which not all is loaded, as they stand before the hooks."""
        paths = self._partial.unsent() if self._partial is not None else ()
        return {path: Unsent(made.get(path), self.live.by_path.get(path)) for path in paths}

    def _suspects(self, swaps: Sequence[Swap]) -> set[str]:
        """Paths of tensors that are not loaded nor as recorded, of which it is not known what hooks do to them."""
        state = state_of(self.model)
        kept = {path: pair for swap in swaps for path, pair in swap.kept().items()}
        self._lost.update(path for path, (recorded, _) in kept.items() if not recorded.keeps_start)
        return {
            path
            for path, (recorded, live) in kept.items()
            if path not in self.loaded and path not in state.harmless and not recorded.holds_start(live)
        }

    def _look_abroad(self, own: Collection[str], log: TensorLog, undo: _Undo | None) -> None:
        """Raises if hooks that ran early looked at something outside their unit that this session loads."""
        slots = [self.live.by_path[path].slot for path in log.read | log.written_live]
        abroad = [slot for slot in slots if slot.module not in own and self._comes(slot)]
        if abroad:
            raise _Wide(frozenset(slot.module for slot in abroad), undo)

    def _comes(self, slot: Slot) -> bool:
        if self.coming is None:
            return slot.kind == "parameter" or slot.path in self.loaded
        return slot.path in self.coming

    def _look_again(
        self,
        trial: _Trial,
        log: TensorLog,
        slots: Sequence[Slot],
        swaps: Sequence[Swap],
        assigned: Mapping[int, set[str]],
    ) -> None:
        """Raises `_Again` if the hooks have to see other values, or it takes a run to tell whose a value is.

        A number that is not as recorded is the hooks' own state (a latch), or a setting that changed since. So is a
        tensor of one element that they read. Shown the recorded value, a hook sets its latch; a setting it only reads.
        """
        state = state_of(self.model)
        suspects = trial.suspects
        now = {slot.path: slot.tensor for slot in slots} if suspects or trial.scalars else {}
        read = suspects & log.read
        rebound = {path for path in read if now.get(path) is not self.live.by_path[path].slot.tensor}
        found = (suspects & log.read_then_written) | rebound
        touched = {path for swap in swaps for path in swap.touched(assigned)} if trial.is_second else set()
        if trial.is_second:
            only_read = {path for path in trial.scalars if path not in log.written_staged and path not in touched}
            settings = trial.counters - touched
            state.compounding -= only_read
            state.harmless |= only_read
            state.latches -= settings
            state.settings |= settings
            if only_read or settings:
                raise _Again(_Trial(set(), set()))
            return
        scalars = {path for path in read - found if self.live.by_path[path].alias.numel() == 1}
        if lost := sorted(found & self._lost):
            raise LayoutError(
                f"{shown(lost)}: a post-load hook computes it from its own value, which would happen again in every "
                f"reload, and its value before the first load was not kept, since it is larger than {COPY_BYTES} "
                "bytes; keep the unprocessed value under another name",
                names=lost,
            )
        if found or scalars or trial.counters:
            state.compounding |= found | scalars
            state.latches |= trial.counters
            raise _Again(_Trial(set(), trial.counters, scalars, is_second=True))

    def _refuse_processed_twice(self, unsent: Mapping[str, Unsent], log: TensorLog) -> None:
        """Refuses a hook that changed parameters which hold its own earlier results."""
        now = {slot.path: slot.tensor for slot in walk(self.model)} if unsent else {}
        changed = [path for path, was in unsent.items() if path in log.written_staged or was.differs(now.get(path))]
        for was in unsent.values():
            was.undo()
        if changed:
            raise LayoutError(
                f"{len(changed)} parameters were not (wholly) sent, hold processed values, and a post-load hook "
                f"processed them again: {shown(changed)}; send them too, or declare supports_direct_reload = "
                "True if the "
                "hook may run over its own results. They are unchanged",
                names=changed,
            )


@dataclass(frozen=True, slots=True)
class _Trial:
    """What one run of hooks has to show.

    Attributes:
        suspects: Live tensors, not as recorded, that hooks may process.
        counters: Names of numbers and lists, not as recorded, that hooks may own; shown as recorded in a second run.
        scalars: Tensors of one element, likewise.
        is_second: Whether this is the run that shows recorded values.
    """

    suspects: set[str]
    counters: set[str]
    scalars: set[str] = field(default_factory=set)
    is_second: bool = False


class _Again(Exception):  # a finding that makes `_run` try once more, not an error
    """The hooks did not find the model as a first load would find it."""

    def __init__(self, trial: _Trial) -> None:
        super().__init__(shown(sorted(trial.counters | trial.scalars)))
        self.trial = trial


class _Wide(Exception):  # a finding that makes a unit wait, not an error
    """Hooks of one unit looked into modules outside it."""

    def __init__(self, modules: frozenset[str], undo: _Undo | None) -> None:
        super().__init__(shown(sorted(modules)))
        self.modules = modules
        self.undo = undo


class _Undo:
    """What it takes to run hooks a second time: Python state, staged values, live bytes before they were written."""

    def __init__(self, model: torch.nn.Module, stagings: Sequence[Staging]) -> None:
        self._python = PythonState.capture(model)
        self._stagings = [(staging, {p: t.clone() for p, t in staging.tensors.items()}) for staging in stagings]
        self._live: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, live: torch.Tensor) -> None:
        self._live.append((live, live.clone()))

    def restore(self) -> None:
        self._python.restore()
        for live, old in reversed(self._live):
            live.copy_(old)

    def staged_again(self) -> list[Staging]:
        return [staging.again(values) for staging, values in self._stagings]
