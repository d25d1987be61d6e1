"""Takes arriving tensors: checks each against the plan, then writes it where it belongs.

names ----> checked as a batch: unknown, twice, wrong shape or dtype -> error, nothing written
    copies into live tensors      one fused copy
    copies into a staged unit     written, or held until its unit is staged (schedule.py decides)
    interpreted                   the model's own loader is run with a private copy

intake = Intake(...)
intake.take([(name, tensor), ...])
intake.take_bucket(bucket, buffer)
intake.take_buckets([(bucket, buffer), ...])     # known ones: by units, nothing per tensor
intake.drain()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from weightsync.errors import CoverageError, LayoutError, ReloadError, shown
from weightsync.plan.loading import Loader
from weightsync.plan.replay import Replay
from weightsync.reload.assemble import Parts
from weightsync.reload.direct import BoundPlan, Entry
from weightsync.reload.held import HeldTensors
from weightsync.reload.hooks.runner import HookRunner
from weightsync.reload.hooks.scopes import Scope
from weightsync.reload.layerwise import Staging, Unit
from weightsync.reload.packing import Group, tensors_of
from weightsync.reload.partial import Partial
from weightsync.reload.schedule import Schedule, Step, peak_held_bytes
from weightsync.transport.buckets import Bucket

HeldPolicy = Literal["spill", "refuse", "write_through"]
Named = tuple[str, torch.Tensor]
Filled = tuple[Bucket, torch.Tensor]
Arrival = tuple[str, torch.Tensor | None]  # None: written already, but a unit may have waited for it


class Intake:
    """What one session has received, and what it has staged.

    Args:
        runner: The session's hooks and its access to live bytes.
        units: What may be staged together.
        parameters: From `staged_parameters`.
        max_held_bytes: Bound for tensors held before their turn.
        held_policy: What to do beyond it.
        partial: What a partial session has loaded.

    Attributes:
        entries: What is known of each wire name, over all plans.
        received: Names received, in order.
        plans: All plans, in order.
        staged: Units that are staged now, by number.
        interpreted_live: Modules whose loaders were run on live tensors.
        peak_staged_bytes: The most bytes of staged copies.
        peak_together_bytes: The most bytes of copies that waited for the others that their loader needs with them.
    """

    def __init__(
        self,
        runner: HookRunner,
        units: Sequence[Unit],
        parameters: Mapping[str, Scope],
        max_held_bytes: int,
        held_policy: HeldPolicy,
        partial: Partial | None = None,
    ) -> None:
        self._partial = partial
        self.runner = runner
        self.units = units
        self.held = HeldTensors(max_held_bytes)
        self.entries: Mapping[str, Entry] = {}
        self.received: dict[str, None] = {}
        self.staged: dict[int, Staging] = {}
        self.interpreted_live: set[str] = set()
        self.peak_staged_bytes = 0
        self.peak_together_bytes = 0
        self._parameters = parameters
        self._policy = held_policy
        self.plans: list[BoundPlan] = []
        self._expected: Mapping[int, Collection[str] | None] = {unit.number: None for unit in units}
        self._late = {unit.number for unit in units if unit.is_late}
        self.schedule = Schedule({}, self._expected, self._late)
        self._replays: dict[tuple[int, int], Replay] = {}  # (unit, plan) -> copies into what is staged now
        self._together: dict[str, torch.Tensor] = {}
        self._parts = Parts()
        self._uncounted: list[str] = []  # received names that the runner was not told of yet

    # --- plans

    def _bound(self, name: str) -> BoundPlan:
        return next(bound for bound in self.plans if name in bound.entries)

    def add_plan(self, bound: BoundPlan, *, is_complete: bool) -> None:
        """Makes the names of a plan acceptable.

        Args:
            bound: The plan.
            is_complete: Whether it names everything that will come, so that units can be finished as they fill up.

        Raises:
            CoverageError: It writes bytes that an earlier plan of this session writes too.
            ReloadError: More would be held than is allowed, and the policy is to refuse.
        """
        if duplicated := [name for other in self.plans for name in bound.names_that_overlap(other)]:
            raise CoverageError(
                "these write bytes that names which came before wrote too (a tied tensor is sent under one of its "
                f"names); they were not taken, but {len(self.received)} tensors of this session were",
                duplicated=duplicated,
            )
        self.entries = bound.entries if not self.plans else {**self.entries, **bound.entries}
        self.plans.append(bound)
        for number, staging in self.staged.items():  # opened when an earlier plan did not know these
            staging.stage(bound.staged_paths.get(number, ()))
        self._late |= bound.units_needed_at_once
        if is_complete:
            self.runner.coming = bound.paths
            self._expected = bound.expected
            self.schedule = Schedule(bound.routes, self._expected, self._late)
            self._refuse_too_much_held(bound)
        else:
            self.schedule.add(bound.routes, self._late)

    def _refuse_too_much_held(self, bound: BoundPlan) -> None:
        if self._policy != "refuse":
            return
        arrivals = {name: entry.num_bytes for name, entry in bound.entries.items() if not entry.is_dropped}
        schedule = Schedule(self.schedule.routes, self._expected, self._late)
        peak = peak_held_bytes(schedule, arrivals, lambda name: bound.entries[name].needed_by)
        if peak > self.held.max_bytes:
            raise ReloadError(
                f"in this order {peak} bytes of tensors would be held until their module can be staged, more than "
                f"max_held_bytes={self.held.max_bytes}; order the names by module, raise the bound, or use "
                'held_policy="spill"'
            )

    # --- whole tensors

    def take(self, tensors: Sequence[Named]) -> None:
        """Checks all of these, then writes or holds each.

        Raises:
            CoverageError: A name is unknown or comes twice. Nothing of these has been written.
            LayoutError: A shape or dtype is not the planned one. Nothing of these has been written.
        """
        names = [name for name, _ in tensors]
        self._check(tensors, names)
        self._note_received(names)
        if len(self.plans) == 1 and self.plans[0].is_all_direct:
            self._copy_live(tensors)
            return
        direct: list[Named] = []
        others: list[Named] = []
        for name, tensor in tensors:
            entry = self.entries[name]
            if entry.is_dropped:
                continue
            if entry.is_copy and entry.is_direct:
                direct.append((name, tensor))
            if entry.units or not entry.is_copy or entry.needed_by:
                others.append((name, tensor))
        self._copy_live(direct)
        self._route(others)

    def _check(self, tensors: Sequence[Named], names: Sequence[str]) -> None:
        entries = self.entries
        is_new = len(set(names)) == len(names) and self.received.keys().isdisjoint(names) and not self._parts.ranges
        for name, tensor in tensors:
            entry = entries.get(name)
            if entry is None or tensor.dtype is not entry.dtype or tensor.shape != entry.shape:
                break
        else:
            if is_new:
                return
        self._refuse(tensors)

    def _refuse(self, tensors: Sequence[Named]) -> None:
        """Raises for what is wrong with these, naming each."""
        unexpected: list[str] = []
        duplicated: list[str] = []
        misfits: dict[str, str] = {}
        seen: set[str] = set()
        for name, tensor in tensors:
            entry = self.entries.get(name)
            if entry is None:
                unexpected.append(name)
            elif name in self.received or name in seen or name in self._parts.ranges:
                duplicated.append(name)
            elif tensor.dtype is not entry.dtype or tensor.shape != entry.shape:
                expected = f"{entry.dtype} {tuple(entry.shape)}"
                misfits[name] = f"{name}: expected {expected}, got {tensor.dtype} {tuple(tensor.shape)}"
            seen.add(name)
        if unexpected or duplicated:
            raise CoverageError(
                "these tensors were not taken, and nothing that came with them was written",
                unexpected=unexpected,
                duplicated=duplicated,
            )
        if misfits:
            raise LayoutError(
                f"{len(misfits)} tensors are not as planned: {shown(list(misfits.values()))}; nothing that came "
                "with them was written",
                names=list(misfits),
            )

    def _note_received(self, names: Sequence[str]) -> None:
        self.received.update(dict.fromkeys(names))
        self._uncounted.extend(names)

    def count(self) -> None:
        """Tells the runner which tensors and modules the received names have loaded so far."""
        runner = self.runner
        if self._partial is None and len(self.plans) == 1 and len(self.received) == len(self.entries):
            runner.loaded, runner.touched = self.plans[0].paths, self.plans[0].modules
        else:
            for name in self._uncounted:
                entry = self.entries[name]
                if not entry.is_dropped:
                    runner.loaded.update(entry.paths)
                    runner.touched.update(entry.modules)
                    if self._partial is not None:
                        self._partial.count(entry, self._bound(name).plan)
        self._uncounted.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes received."""
        if len(self.plans) == 1 and len(self.received) == len(self.entries):
            return self.plans[0].plan.manifest.num_bytes
        return sum(self.entries[name].num_bytes for name in self.received)

    def _copy_live(self, tensors: Sequence[Named]) -> None:
        if not tensors:
            return
        self._about_to_write_live(name for name, _ in tensors)
        for bound in self.plans:
            bound.live_replay.copy_tensors(tensors)

    def _about_to_write_live(self, names: Iterable[str]) -> None:
        self.runner.wrote_live = True
        if not self.runner.journal.is_on:
            return
        for name in names:
            bound = self._bound(name)
            for index in bound.entries[name].plan.destinations:
                if index in bound.live_tensors:
                    self.runner.journal.save(bound.live_tensors[index])

    # --- staged units

    def _route(self, arrivals: Sequence[Arrival]) -> None:
        batch: dict[int, list[Named]] = {}
        for name, tensor in arrivals:
            entry = self.entries[name]
            if tensor is not None:
                if not entry.units and not entry.is_copy:
                    self._interpret(name, tensor)
                can_hold = self._policy != "write_through" or self.held.has_room(tensor.nbytes)
                for step in self.schedule.arrive(name, can_hold=can_hold):
                    if step.action == "write" and entry.is_copy:
                        batch.setdefault(step.unit, []).append((name, tensor))
                    else:
                        self._flush(batch)
                        self._carry_out(step, tensor)
            for step in self.schedule.arrived(name, entry.needed_by):
                self._flush(batch)
                self._carry_out(step)
        self._flush(batch)

    def _flush(self, batch: dict[int, list[Named]]) -> None:
        for unit, tensors in batch.items():
            self._copy_staged(unit, tensors)
        batch.clear()

    def _carry_out(self, step: Step, tensor: torch.Tensor | None = None) -> None:
        if step.action == "open":
            self._open(step.unit)
        elif step.action == "finish":
            self._finish(step.unit)
        elif step.action == "hold" and tensor is not None:
            if self._policy == "refuse" and not self.held.has_room(tensor.nbytes):
                raise ReloadError(
                    f"{step.name} came before its module could be staged, and max_held_bytes={self.held.max_bytes} are "
                    'held already; order the names by module, raise the bound, or use held_policy="spill"'
                )
            self.held.put(step.name, tensor)
        elif step.action == "write_held":
            still_wanted = step.name in self.schedule.held
            held = self.held.take(step.name)
            self._write_staged(step.unit, step.name, held)
            if still_wanted:
                self.held.put(step.name, held)
        elif tensor is not None:
            self._write_staged(step.unit, step.name, tensor)

    def _open(self, number: int) -> None:
        unit = self.units[number]
        written = {path for bound in self.plans for path in bound.staged_paths.get(number, ())}
        staging = Staging(self.runner.model, self.runner.modules, unit, self._parameters, written)
        self.runner.start_staging(staging)
        self.staged[number] = staging
        self.peak_staged_bytes = max(self.peak_staged_bytes, sum(s.num_bytes for s in self.staged.values()))

    def _finish(self, number: int) -> None:
        self.count()
        kept = self.runner.finish_unit(self.staged.pop(number))
        if kept is not None:
            reached = {path for hook in kept.unit.hooks for path in self.runner.reach.get(hook.name, ())}
            late = {unit.number for unit in self.units if not reached.isdisjoint(unit.modules)}
            self.staged[number] = kept
            self._late |= {*late, number}
            self.schedule.keep_open(number, late)
        for key in [key for key in self._replays if key[0] == number]:
            self._replays.pop(key).release()

    def _write_staged(self, unit: int, name: str, tensor: torch.Tensor) -> None:
        if self.entries[name].is_copy:
            self._copy_staged(unit, [(name, tensor)])
        elif all(number in self.staged for number in self.entries[name].units) and unit == self.entries[name].units[-1]:
            self._interpret(name, tensor)

    def _copy_staged(self, unit: int, tensors: Sequence[Named]) -> None:
        for index in range(len(self.plans)):
            self._staged_replay(unit, index).copy_tensors(tensors)

    def _staged_replay(self, unit: int, index: int) -> Replay:
        replay = self._replays.get((unit, index))
        if replay is None:
            replay = self._replays[unit, index] = self.plans[index].staged_replay(self.staged[unit])
        return replay

    # --- loaders

    def _interpret(self, name: str, tensor: torch.Tensor) -> None:
        """Runs the model's loader, once all tensors that it needs together are there."""
        plan = self.entries[name].plan
        needed = plan.together or (name,)
        self._together[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        waiting = sum(tensor.nbytes for tensor in self._together.values())
        self.peak_together_bytes = max(self.peak_together_bytes, waiting)
        if not all(other in self._together for other in (name, *needed)):
            return
        weights = [(other, self._together.pop(other)) for other in dict.fromkeys((*needed, name))]
        entries = [self.entries[other] for other, _ in weights]
        if any(entry.is_direct for entry in entries):
            self._about_to_write_live(other for other, _ in weights)
            self.interpreted_live.update(module for entry in entries for module in entry.modules)
        mapping = self._bound(name).plan.mapping
        with ExitStack() as stack:
            for staging in self.staged.values():
                stack.enter_context(staging.installed())
                staging.was_interpreted = True
            stack.enter_context(self.runner.journaled())
            Loader(self.runner.model, dict(mapping))(weights)

    # --- buckets

    def take_bucket(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Takes one packed buffer; tensors may be split over several.

        Raises:
            CoverageError: A name is unknown, or bytes of it come twice. Nothing of this bucket has been written.
            LayoutError: A part reaches beyond its tensor, or beyond the buffer. Nothing of this bucket has been
                written.
        """
        self._parts.check(bucket, buffer, self.entries, self.received)
        direct: list[str] = []
        arrivals: list[Arrival] = []
        for chunk in bucket.chunks:
            name, entry = chunk.name, self.entries[chunk.name]
            is_done = self._parts.note(chunk, entry)
            if is_done:
                self._note_received([name])
            if entry.is_dropped:
                continue
            if entry.is_copy and entry.is_direct:
                direct.append(name)
            if entry.units or not entry.is_copy:
                tensor = self._parts.whole(chunk, entry, buffer, is_done)
                if tensor is not None:
                    arrivals.append((name, tensor))
            elif is_done and entry.needed_by:
                arrivals.append((name, None))
        if direct:
            self._about_to_write_live(direct)
            for bound in self.plans:
                bound.live_replay.copy_bucket(bucket, buffer)
        self._route(arrivals)

    def take_buckets(self, filled: Sequence[Filled]) -> None:
        """Takes several packed buffers that are valid at the same time.

        On a GPU, live copies of all are one launch. Staged ones go unit by unit, wherever each tensor lies, so that
        nothing has to be held; a unit of plain copies is one launch, too.

        Raises:
            CoverageError, LayoutError: As `take_bucket`; buckets before the one at fault may have been written.
        """
        bound = self.plans[0]
        packing = None
        if len(self.plans) == 1 and not self._parts.ranges:
            packing = bound.packing(tuple(bucket for bucket, _ in filled))
        fits = all(bucket.num_bytes_reached <= buffer.numel() for bucket, buffer in filled)
        if packing is None or not fits or not self.received.keys().isdisjoint(packing.names):
            for bucket, buffer in filled:
                self.take_bucket(bucket, buffer)
            return
        self._note_received(packing.names)
        if packing.direct:
            self._about_to_write_live(packing.direct)
            if bound.is_all_direct:
                bound.live_replay.copy_buckets(filled)
            else:
                self._copy_parts(bound.live_replay, filled)
        for group in packing.groups:
            self._take_group(group, [(bucket, filled[place][1]) for place, bucket in group.parts])

    def _take_group(self, group: Group, filled: Sequence[Filled]) -> None:
        """Takes the tensors of one group: at once where nothing of it has to be held or interpreted."""
        schedule = self.schedule
        if not group.is_plain or not (schedule.takes(group.units[0]) if group.units else not self.staged):
            self._route(list(tensors_of(filled, self.entries)))
            return
        for unit in group.units:
            for step in schedule.arrive_together(unit):
                self._carry_out(step)
            self._copy_parts(self._staged_replay(unit, 0), filled)
        for step in schedule.arrived_together(group.needed_by):
            self._carry_out(step)

    def _copy_parts(self, replay: Replay, filled: Sequence[Filled]) -> None:
        """Copies whole tensors out of buffers; those on another device go there one by one, in bounded memory."""
        if {buffer.device for _, buffer in filled} == replay.devices:
            replay.copy_buckets(filled)
        else:
            replay.copy_tensors(tensors_of(filled, self.entries))

    # --- the end

    def drain(self, left_out: Collection[str] = ()) -> None:
        """Stages what is still held and finishes every unit that need not wait.

        Args:
            left_out: Paths of optional parameters that did not come. Where nothing of a unit came, it is staged all the
                same: what was left out is as constructed, and hooks find it so.
        """
        self.count()
        for step in self.schedule.drain():
            self._carry_out(step)
        modules = {path.rpartition(".")[0] for path in left_out}
        for unit in self.units:
            if not modules.isdisjoint(unit.from_record) and not self.schedule.has_opened(unit.number):
                self._open(unit.number)
                if unit.number not in self._late:
                    self._finish(unit.number)

    def close(self) -> None:
        """Drops everything staged and held."""
        self.staged.clear()
        for replay in self._replays.values():
            replay.release()
        self._replays.clear()
        self._parts.close()
        self._together.clear()
        self.held.close()
