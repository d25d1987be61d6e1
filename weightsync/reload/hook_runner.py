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
from functools import cached_property
from typing import Any

import torch

from weightsync.errors import LayoutError, shown
from weightsync.reachable import walk, walk_module
from weightsync.reload.audit import LiveSlot, LiveTensors, address
from weightsync.reload.journal import Journal
from weightsync.reload.layerwise import Staging, is_below
from weightsync.reload.observe import Index, TensorLog, assignments, index_of
from weightsync.reload.partial import Partial
from weightsync.reload.post_load import Hook, HookGuards, activation_dtype, declares_direct
from weightsync.reload.reconcile import keep_untouched, settle
from weightsync.reload.scopes import Swap
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
        self._guards = guards
        self._partial = partial
        self._finished: set[str] = set()

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

    def finish_unit(self, staging: Staging) -> None:
        """Runs the hooks of a complete unit and copies the result into the live model."""
        unit = staging.unit
        hooks = [hook for hook in unit.hooks if self.applies(hook)]
        if self._partial is not None:
            self._partial.refuse_unfit(unit.modules)
        self._finished.update(unit.modules, (hook.path for hook in hooks))
        if not hooks and not unit.from_record:
            for path, staged in staging.tensors.items():
                if path in self.loaded:
                    self.write(path, self.live.by_path[path].alias, staged)
            return
        paths = dict.fromkeys([*unit.modules, *(hook.path for hook in hooks)])
        self._run([staging], [], hooks, self.live.of_modules(paths), paths)

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
        swaps = [
            Swap(list(records[module].scopes[1:]))
            for path, module in self.modules.items()
            if module in records
            and path not in left_alone
            and not declares_direct(module)
            and any(is_below(path, hook.path) for hook in hooks)
        ]
        if hooks or stagings or interpreted or self._refreshes:
            self._run(stagings, swaps, hooks, self.live.by_path, None)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, loaders and hooks may write parameters in place."""
        inference = any(parameter.is_inference() for parameter in self.model.parameters())
        with torch.inference_mode() if inference else torch.no_grad():
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
        swaps: Sequence[Swap],
        hooks: Sequence[Hook],
        before: Mapping[str, LiveSlot],
        paths: Iterable[str] | None,
    ) -> None:
        made = {path: tensor for staging in stagings for path, tensor in staging.tensors.items()}
        starts = {path: tensor.clone() for path, tensor in made.items() if path not in self.loaded}
        installed: list[Staging | Swap] = []
        parts: list[Staging | Swap] = [*stagings, *swaps]
        try:
            for part in parts:
                installed.append(part)
                part.install()
            all_swaps = [*(staging.swap for staging in stagings), *swaps]
            unsent = self._unsent(made)
            log, assigned = self._call(hooks, self._refreshes if paths is None else [], made, unsent, all_swaps)
            self._refuse_processed_twice(unsent, log)

            def is_new_value(path: str, tensor: torch.Tensor) -> bool:
                return path in self.loaded or path in log.written_staged or not _equal_bytes(tensor, starts.get(path))

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
        made: Mapping[str, torch.Tensor],
        unsent: Mapping[str, _Unsent],
        swaps: Sequence[Swap],
    ) -> tuple[TensorLog, dict[int, set[str]]]:
        """Runs the hooks under observation."""

        def before_live_write(path: str, tensor: torch.Tensor) -> None:
            if path in unsent:
                unsent[path].keep(tensor)
            else:
                self.about_to_write(tensor)

        holders = [hook.module for hook in hooks] + [holder for swap in swaps for holder in swap.changed_holders()]
        dtype = activation_dtype(self.model)
        log = TensorLog(self._live_index, index_of(made), before_live_write)
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
        self.ran.extend(hook.name for hook in hooks if self._guards.has_run(hook))
        return log, assigned

    def _unsent(self, made: Mapping[str, torch.Tensor]) -> dict[str, _Unsent]:
        """Parameters of which not all is loaded, as they stand before the hooks."""
        paths = self._partial.unsent() if self._partial is not None else ()
        return {path: _Unsent(made.get(path), self.live.by_path.get(path)) for path in paths}

    def _refuse_processed_twice(self, unsent: Mapping[str, _Unsent], log: TensorLog) -> None:
        """Refuses a hook that changed parameters which hold its own earlier results."""
        now = {slot.path: slot.tensor for slot in walk(self.model)} if unsent else {}
        changed = [path for path, was in unsent.items() if path in log.written_staged or was.differs(now.get(path))]
        for was in unsent.values():
            was.undo()
        if changed:
            raise LayoutError(
                f"{len(changed)} parameters were not (wholly) sent, hold processed values, and a post-load hook "
                "processed "
                f"them again: {shown(changed)}; send them too, or declare supports_direct_reload = True if the "
                "hook may "
                "run over its own results. They are unchanged",
                names=changed,
            )


class _Unsent:
    """A parameter that no hook may change in this session."""

    def __init__(self, staged: torch.Tensor | None, live: LiveSlot | None) -> None:
        self._tensor = staged if staged is not None else live.slot.tensor if live is not None else None
        self._address = address(self._tensor) if self._tensor is not None else None
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Called before live bytes are written."""
        self._kept.append((tensor, tensor.clone()))

    def undo(self) -> None:
        """Puts live bytes back."""
        for tensor, old in self._kept:
            tensor.copy_(old)

    def differs(self, now: torch.Tensor | None) -> bool:
        """Whether the hooks wrote live bytes, or put another tensor or storage there."""
        return bool(self._kept) or now is not self._tensor or (now is not None and address(now) != self._address)


def _equal_bytes(left: torch.Tensor, right: torch.Tensor | None) -> bool:
    if right is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (left, right)))
