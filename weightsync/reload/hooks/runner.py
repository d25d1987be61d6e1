"""Runs post-load hooks in the world of the first load and brings what they made into the live tensors.

    runner = HookRunner(...)
    runner.finish_unit(staging)             # one complete unit: hooks in its staged copy, then copy back
    runner.finish_model(late_stagings)      # all other hooks, in the loader's order, over the whole model

Both do the same: install the recorded world, run, keep what nobody touched, settle the rest into live storage. Until
the last step nothing live has changed, unless a hook wrote a live tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from weightsync.errors import LayoutError, ReloadError, shown
from weightsync.reachable import Slot, standing_still, walk, walk_module
from weightsync.reload.audit import LiveSlot, LiveTensors
from weightsync.reload.hooks.logs import Logs
from weightsync.reload.hooks.observe import Index, TensorLog, assignments, index_of
from weightsync.reload.hooks.post_load import Hook, HookGuards, activation_dtype, declares_direct, names_set_by
from weightsync.reload.hooks.reconcile import carry_attributes, keep_untouched, settle
from weightsync.reload.hooks.registered import Registered
from weightsync.reload.hooks.swap import Swap
from weightsync.reload.hooks.trial import Again, Run, Trial, Undo, Wide, is_moved, judge
from weightsync.reload.hooks.world import World
from weightsync.reload.journal import Journal
from weightsync.reload.layerwise import Staging, ancestors
from weightsync.reload.partial import Partial, Unsent
from weightsync.reload.records import equal_bytes
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
        unobserved: Names of hooks of which it is not known what is theirs, since nobody saw their first run.
        still: Holds the model still (`standing_still`) from the last hook on where nothing had to be settled.
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
        self.still = ExitStack()
        self._hooked: dict[str, str | None] = {}
        self._guards = guards
        self._partial = partial
        state_of(model).end_first_load()
        self._world = World(model, modules)
        self._logs = Logs(hooks)
        is_seen = state_of(model).settings.has_all_others
        watched = [] if is_seen else [hook for hook in hooks if not declares_direct(hook.module)]
        self.unobserved = [hook.name for hook in watched]
        self._registered: Registered | None = None
        self._assigned: dict[int, set[str]] = {}  # by `id` of the holder, over the whole session
        self._read: set[str] = set()  # live tensors that the last run read
        self._processed: set[str] = set()  # modules whose own hooks have run
        tensors = (slot.slot.tensor for slot in live.by_path.values() if slot.slot.kind == "parameter")
        self._inference = any(tensor.is_inference() for tensor in tensors)

    @property
    def reach(self) -> Mapping[str, frozenset[str]]:
        """Modules that hooks looked into, outside their own and those below, by the hook's name."""
        return state_of(self.model).reach

    def applies(self, hook: Hook) -> bool:
        """Whether a hook's module, or one below it, received data; in a full session all did."""
        if self._partial is None:
            return True
        below = {id(module) for module in hook.module.modules()}
        touched = self.touched.union(self._tied_to_loaded())
        return any(id(self.modules[path]) in below for path in touched) or not touched.isdisjoint(
            state_of(self.model).reads.get(hook.name, ())
        )

    def _tied_to_loaded(self) -> set[str]:
        """Modules that hold bytes which were loaded under another name."""
        return {module for path in self.loaded for module in self._holders.get(self._storage_of(path), ())}

    @cached_property
    def _holders(self) -> dict[int, set[str]]:
        holders: dict[int, set[str]] = {}
        for path, live in self.live.by_path.items():
            if live.slot.kind == "parameter":
                holders.setdefault(self._storage_of(path), set()).add(live.slot.module)
        return holders

    def _storage_of(self, path: str) -> int:
        live = self.live.by_path.get(path)
        return live.alias.untyped_storage()._cdata if live is not None and not live.alias.is_meta else 0

    def start_staging(self, staging: Staging) -> None:
        """Gives staged tensors the bytes that they start from."""
        if self._partial is not None:
            self._partial.start(staging, state_of(self.model).compounding)

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
            return None
        owners = {id(hook.owner) for hook in hooks}
        owned = [path for path, module in self.modules.items() if id(module) in owners]
        below = [path for path in [*self._below(hooks), *owned] if path not in unit.from_record]
        paths = dict.fromkeys([*unit.modules, *(hook.path for hook in hooks), *below])
        own = unit.needs.union(paths)
        added = frozenset(child for path in [*unit.from_record, *below] for child in self._world.added_children(path))
        if added:  # made anew by a hook: its tensors can be settled once the whole model is walked
            for hook in hooks:
                state_of(self.model).reach[hook.name] = added
            return staging
        if self._world.undecided({*below, *unit.from_record}):
            return staging  # it may be any hook's, and shows once all of them run together
        try:
            self._run([staging], below, hooks, self.live.of_modules(paths), paths, own)
        except Wide as found:
            return self._wait(found, hooks)
        self._processed.update(unit.modules, (hook.path for hook in hooks))
        return None

    def _below(self, hooks: Sequence[Hook]) -> list[str]:
        """Modules that hooks find as recorded: theirs and those below, but for those with hooks that do not run now."""
        idle = self._idle()
        return [path for path in self._world.below(hooks) if path not in idle]

    def _hooked_above(self, path: str) -> str | None:
        """The module whose hooks a value belongs to: its own, or the nearest above that has some."""
        if path not in self._hooked:
            self._hooked[path] = next((above for above in ancestors(path) if above in self._hook_paths), None)
        return self._hooked[path]

    @cached_property
    def _hook_paths(self) -> frozenset[str]:
        return frozenset(hook.path for hook in self.hooks)

    def _idle(self) -> set[str]:
        """Modules with hooks that do not run in this session, so that what they left is as it was."""
        return {hook.path for hook in self.hooks if self._partial is not None and not self.applies(hook)}

    def _wait(self, found: Wide, hooks: Sequence[Hook]) -> Staging:
        """Remembers that a unit's hooks have to wait for all data, and undoes what they did."""
        later = {id(hook) for hook in self.hooks[self.hooks.index(hooks[0]) :]}
        for hook in hooks:
            state_of(self.model).reach[hook.name] = found.modules
            state_of(self.model).reads[hook.name] = found.read
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
        self._world.show_flags()
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
        left_alone = (
            {path for staging in stagings for path in staging.unit.modules} | self._processed | set(interpreted)
        )
        below = [path for path in self._below(hooks) if path not in left_alone]
        if hooks or stagings or interpreted or self.ran or self._refreshes:
            self._run(stagings, below, hooks, self.live.by_path, None)
        if self._registered is not None:
            self._registered.drop_older()
        if self._partial is None:
            state_of(self.model).settings.has_all_others = True  # every hook was seen to run by now
        ran = {hook.path for hook in self.hooks if self._guards.has_run(hook)}
        self._world.take_back_flags(self._assigned, None if self._partial is None else ran)

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
        below: Collection[str],
        hooks: Sequence[Hook],
        before: Mapping[str, LiveSlot],
        paths: Iterable[str] | None,
        own: Collection[str] | None = None,
    ) -> None:
        """Runs hooks and settles; once more if it shows that they did not find the model as a first load finds it.

        Args:
            stagings: Units that are staged.
            below: Further modules that hooks find as recorded.
            hooks: What to run.
            before: Live tensors to settle.
            paths: Modules to settle; None for all.
            own: Modules that hooks may look into before all data is there; None for all.
        """
        state = state_of(self.model)
        needs_world = any(not declares_direct(hook.module) for hook in hooks)
        is_whole = paths is None and self._partial is None
        if is_whole and not needs_world and not stagings and not self._world.flag_holders() and not self._world.hidden:
            self._run_freely(hooks)
            return
        if needs_world:
            self._registered = self._registered or Registered(self.modules.values(), state.first_handle)
            self._world.show_flags()
        swap = self._swap(below, stagings, Trial("known")) if needs_world else Swap([])
        trial = Trial("known")
        if needs_world:
            trial = self._first_trial([*(staging.swap for staging in stagings), swap], below, stagings)
        is_unknown = needs_world and any(hook.name not in state.known for hook in hooks)
        suspects = trial.suspects
        is_open = replace(trial, suspects=suspects - state.unread).is_open
        undo = Undo(self.model, stagings) if is_unknown or is_open else None
        while True:
            try:
                self._attempt(stagings, swap, hooks, before, paths, trial, undo, own)
                break
            except Again as found:
                trial = found.trial
                if undo is None:
                    raise ReloadError(
                        f"{shown([hook.name for hook in hooks])} processed {found} for the first time; this is known "
                        "now, so start again"
                    ) from found
                undo.restore()
                self._guards.forget(hooks)
                self._world.show_flags()
                stagings = undo.staged_again(trial.shown)
                swap = self._swap(below, stagings, trial)
        self._world.leave_flags()
        state.harmless |= (suspects & self._read) - state.compounding
        state.unread |= suspects - self._read
        for hook in hooks:
            state.known.add(hook.name)
            if own is not None:
                state.reach.setdefault(hook.name, frozenset())
        self.ran.extend(hook.name for hook in hooks if self._guards.has_run(hook))

    def _run_freely(self, hooks: Sequence[Hook]) -> None:
        """Runs hooks that may all run over their own results, over the whole live model."""
        is_watched = self.journal.is_on or not self.wrote_live
        with self.loading(), self.journaled() if is_watched else nullcontext():
            self._run_each(hooks, self._refreshes)
        self.still.enter_context(standing_still(self.model))
        if settle(self.model, self.live.by_path, self.write).copied:
            self.still.close()
        state_of(self.model).known.update(hook.name for hook in hooks)
        self.ran.extend(hook.name for hook in hooks if self._guards.has_run(hook))

    def _first_trial(self, swaps: Sequence[Swap], below: Collection[str], stagings: Sequence[Staging]) -> Trial:
        """What is not as recorded and not known to be whose."""
        state = state_of(self.model)
        mine = {*below, *(path for staging in stagings for path in staging.unit.from_record)}
        outer = self._world.undecided(mine)
        counters = {path for swap in swaps for path in swap.kept_counters if path not in state.settings}
        return Trial(
            "live",
            frozenset(self._suspects(swaps)),
            frozenset({path for swap in swaps for path in swap.flags} - state.latches),
            frozenset(counters.union(outer)),
            frozenset(outer if self._partial is not None else ()),
        )

    def _swap(self, below: Collection[str], stagings: Sequence[Staging], trial: Trial) -> Swap:
        state = state_of(self.model)
        staged = [scope for staging in stagings for scope in staging.swap.scopes]
        done = {hook.path for hook in self.hooks if self._guards.has_run(hook)}
        compounding = {path for path in state.compounding if self._hooked_above(path) not in done} | trial.shown
        paths = [*below, *(path for staging in stagings for path in staging.unit.from_record)]
        return Swap(
            self._world.around(paths, compounding, staged),
            new=compounding,
            counters={*state.latches, *trial.shown},
            settings=state.settings,
        )

    def _attempt(
        self,
        stagings: Sequence[Staging],
        swap: Swap,
        hooks: Sequence[Hook],
        before: Mapping[str, LiveSlot],
        paths: Iterable[str] | None,
        trial: Trial,
        undo: Undo | None,
        own: Collection[str] | None,
    ) -> None:
        swaps = [*(staging.swap for staging in stagings), swap]
        made = {path: tensor for staging in stagings for path, tensor in staging.tensors.items()}
        remade = swap.made()
        starts = {path: tensor.clone() for path, tensor in (remade | made).items() if path not in self.loaded}
        outer = self._world.show(trial.shown)
        parts: list[Staging | Swap] = [*stagings, swap, outer]
        installed: list[Staging | Swap] = []
        try:
            for part in parts:
                installed.append(part)
                part.install()
            unsent = self._unsent(made)
            refreshes = self._refreshes if paths is None else []
            log = TensorLog(self._live_index, index_of(remade | made), self._before_live_write(unsent, undo))
            assigned = self._call(hooks, refreshes, log, swaps)
            if own is not None:
                self._look_abroad(own, log, assigned, undo)
            self._refuse_processed_twice(unsent, log)
            if trial.shows != "known":
                self._judge(trial, log, paths, [*swaps, outer], assigned)

            def is_new_value(path: str, tensor: torch.Tensor) -> bool:
                start = starts.get(path)
                unchanged = start is not None and equal_bytes(tensor, start)
                return path in self.loaded or path in log.written_staged or not unchanged

            state = state_of(self.model)
            if hooks:
                self._learn(swaps, log, assigned)
            running = {hook.path for hook in hooks}
            owned = {path for path in {*state.latches, *state.compounding} if self._hooked_above(path) in running}
            for each in [*swaps, outer]:
                carry_attributes(each)
                keep_untouched(each, assigned, is_new_value, self._world.hidden, owned)
            settle(self.model, before, self.write, slots=self._slots(paths))
        except BaseException:
            for part in reversed(installed):
                part.uninstall()
            raise
        self._read = log.read
        for holder, names in assigned.items():
            self._assigned.setdefault(holder, set()).update(names)

    def _slots(self, paths: Iterable[str] | None) -> list[Slot]:
        if paths is None:
            return walk(self.model)
        return [slot for path in paths for slot in walk_module(self.modules[path], path)]

    def _before_live_write(
        self, unsent: Mapping[str, Unsent], undo: Undo | None
    ) -> Callable[[str, torch.Tensor], None]:
        def before(path: str, tensor: torch.Tensor) -> None:
            if path in unsent:
                unsent[path].keep(tensor)
                return
            if undo is not None:
                undo.keep(tensor)
            self.about_to_write(tensor)

        return before

    def _call(
        self,
        hooks: Sequence[Hook],
        refreshes: Iterable[Callable[[], object]],
        log: TensorLog,
        swaps: Sequence[Swap],
    ) -> dict[int, set[str]]:
        """Runs the hooks under observation; returns the names that they assigned, by `id` of the holder."""
        holders = [hook.module for hook in hooks] + [holder for swap in swaps for holder in swap.changed_holders()]
        holders += self._world.flag_holders()
        with self.loading(), log, assignments(holders) as assigned:
            self._run_each(hooks, refreshes)
        return assigned

    def _run_each(self, hooks: Sequence[Hook], refreshes: Iterable[Callable[[], object]]) -> None:
        dtype = activation_dtype(self.model)
        self._guards.allow(hooks)
        for hook in hooks:
            try:
                self._guards.run(hook, dtype)
            except Exception as error:
                error.add_note(f"raised by {hook.name} during a reload")
                raise
        for refresh in refreshes:
            refresh()

    def _unsent(self, made: Mapping[str, torch.Tensor]) -> dict[str, Unsent]:
        """Parameters of which not all is loaded, as they stand before the hooks."""
        paths = self._partial.unsent() if self._partial is not None else ()
        return {path: Unsent(made.get(path), self.live.by_path.get(path)) for path in paths}

    def _suspects(self, swaps: Sequence[Swap]) -> set[str]:
        """Paths of tensors that are not loaded nor as recorded, of which it is not known what hooks do to them."""
        state = state_of(self.model)
        return {
            path
            for swap in swaps
            for path, (recorded, live) in swap.kept().items()
            if path not in self.loaded and path not in state.harmless and not recorded.holds_start(live)
        }

    def _look_abroad(
        self, own: Collection[str], log: TensorLog, assigned: Mapping[int, set[str]], undo: Undo | None
    ) -> None:
        """Raises if hooks that ran early looked at what this session loads elsewhere, or changed anything there."""
        slots = [self.live.by_path[path].slot for path in log.read | log.written_live]
        abroad = {
            slot.module
            for slot in slots
            if slot.module not in own and (slot.path in log.written_live or self._comes(slot))
        }
        flagged = self._world.newly_touched(assigned) - set(own)
        if abroad or flagged:
            raise Wide(frozenset(abroad), frozenset(abroad | flagged), undo)

    def _comes(self, slot: Slot) -> bool:
        if self.coming is None:
            return slot.kind == "parameter" or slot.path in self.loaded
        return slot.path in self.coming

    def _judge(
        self,
        trial: Trial,
        log: TensorLog,
        paths: Iterable[str] | None,
        swaps: Sequence[Swap],
        assigned: Mapping[int, set[str]],
    ) -> None:
        """Raises `Again` if the hooks have to see other values; see `trial.judge`."""
        state, live = state_of(self.model), self.live.by_path
        far: set[str] = set()
        if paths is None and trial.shows != "recorded" and log.read:
            # hooks of one unit that change something elsewhere wait for this run
            shown_here = {path for swap in swaps for path in [*swap.kept(), *swap.made()]}
            far = (log.read & self._world.places.keys()) - shown_here - self.loaded - state.harmless
        slots = self._slots(paths) if far or trial.is_open else []
        if far:
            now = {slot.path: slot.tensor for slot in slots}
            far = {path for path in far if path in log.read_then_written or is_moved(live[path], now.get(path))}
        suspects = trial.suspects | far
        lost = {path for path in suspects if not self._world.keeps_start(path)}
        touched = frozenset(path for swap in swaps for path in swap.touched(assigned))
        touched -= self._logs_among(swaps, assigned)
        if trial.flags:
            stored = {name for hook in self.hooks if self._guards.has_run(hook) for name in names_set_by(hook)}
            touched |= {path for path in trial.flags if path.rpartition(".")[2] in stored}
        judge(replace(trial, suspects=suspects), Run(log, slots, touched), state, live, lost)

    def _logs_among(self, swaps: Sequence[Swap], assigned: Mapping[int, set[str]]) -> set[str]:
        """Names that hooks only count or append in, of those that they touched."""
        touched = {path: entry for swap in swaps for path, entry in swap.touched(assigned).items()}
        return {path for path, (owner, value) in touched.items() if self._logs.has(path, owner, value)}

    def _learn(self, swaps: Sequence[Swap], log: TensorLog, assigned: Mapping[int, set[str]]) -> None:
        """What hooks set, or wrote, is theirs in later reloads too."""
        state, places = state_of(self.model), self._world.places
        touched = {path for swap in swaps for path in swap.touched(assigned)}
        if not all(path in state.latches or state.settings.knows(path) for path in touched):
            state.settings.add(self._logs_among(swaps, assigned) - state.latches)
        state.latches |= {path for path in touched if not state.settings.knows(path)}
        tensors = (log.written_live | touched) - self.loaded - state.compounding
        state.compounding |= {path for path in tensors if path in places and self._world.keeps_bytes(path)}

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
