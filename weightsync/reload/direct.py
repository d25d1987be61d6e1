"""A plan bound to a live model: what to check of each arriving tensor, and where its bytes go.

    bound = BoundPlan(plan, live, units)
    entry = bound.entries["layers.0.w1"]         # expected dtype and shape, treatment, units
    bound.live_replay.copy_tensors([...])        # straight into live storage
    bound.staged_replay(staging)                 # into one unit's staged tensors

Binding costs once per plan and addresses; a push then costs one dict look-up per tensor and one fused copy per call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from weightsync.plan.replay import Replay
from weightsync.plan.writes import Destination, NamePlan, Write
from weightsync.reload.audit import LiveTensors
from weightsync.reload.derived import Call, by_module, record_calls
from weightsync.reload.layerwise import Staging, Unit

if TYPE_CHECKING:
    from weightsync.plan.plan import ReloadPlan


@dataclass(frozen=True, slots=True)
class Entry:
    """What the session knows about one wire name.

    Attributes:
        dtype: Expected dtype.
        shape: Expected shape.
        num_bytes: Its bytes.
        plan: Its plan.
        is_copy: Whether copies alone load it; else its loader is run, unless it is dropped.
        is_dropped: Not on this rank, or ignored.
        units: Numbers of the units that stage something it writes.
        is_direct: Whether it writes live tensors.
        needed_by: Numbers of the units whose hooks need it.
        paths: Paths of all destinations it writes, aliases included.
        modules: Modules that own them.
    """

    dtype: torch.dtype
    shape: torch.Size
    num_bytes: int
    plan: NamePlan
    is_copy: bool
    is_dropped: bool
    units: tuple[int, ...]
    is_direct: bool
    needed_by: tuple[int, ...]
    paths: tuple[str, ...]
    modules: tuple[str, ...]


class BoundPlan:
    """One plan over one model.

    Args:
        plan: The plan.
        live: The model's live tensors.
        units: The session's units.

    Attributes:
        plan: The plan.
        entries: By wire name.
        live_replay: Copies of all names into live tensors.
        live_tensors: Live destination tensors by index, for those that are loaded directly.
        all_replayed_calls: Per module, the loader calls behind all copies; the same tuples for every push.
    """

    def __init__(self, plan: ReloadPlan, live: LiveTensors, units: Sequence[Unit]) -> None:
        self.plan = plan
        self._units = _shape_of(units)
        self._calls: dict[str, list[tuple[torch.nn.Module, Call]]] | None = None
        self.all_replayed_calls: dict[torch.nn.Module, tuple[Call, ...]] = {}
        unit_of = {module: unit.number for unit in units for module in unit.modules}
        needing: defaultdict[str, set[int]] = defaultdict(set)
        for unit in units:
            for module in unit.needs:
                needing[module].add(unit.number)
        self._unit_of_destination = [_unit_of(destination, unit_of) for destination in plan.destinations]
        self._needing = [needing.get(destination.module, set()) for destination in plan.destinations]
        self.live_tensors = {
            index: live.by_path[destination.path].alias
            for index, destination in enumerate(plan.destinations)
            if self._unit_of_destination[index] is None and destination.path in live.by_path
        }
        self.entries = {
            meta.name: self._entry(plan.names[meta.name], meta.dtype, torch.Size(meta.shape), meta.num_bytes)
            for meta in plan.manifest
        }
        self._unit_writes: defaultdict[int, list[Write]] = defaultdict(list)
        direct: list[Write] = []
        for entry in self.entries.values():
            for write in entry.plan.writes if entry.is_copy else ():
                number = self._unit_of_destination[write.destination]
                (direct if number is None else self._unit_writes[number]).append(write)
        self.live_replay = Replay(direct, self.live_tensors)

    def replayed_calls(self, model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, Call]]]:
        """Loader calls behind the copies of each name, in modules that want to be told; worked out once."""
        if self._calls is None:
            self._calls = record_calls(model, self)
            self.all_replayed_calls = by_module(self._calls, self._calls)
        return self._calls

    def is_bound_to(self, live: LiveTensors, units: Sequence[Unit]) -> bool:
        """Whether the live tensors and the units are still those that this was bound to."""
        return self._units == _shape_of(units) and all(
            live.by_path[self.plan.destinations[index].path].alias.data_ptr() == tensor.data_ptr()
            for index, tensor in self.live_tensors.items()
        )

    @cached_property
    def staged_paths(self) -> dict[int, set[str]]:
        """Paths that are written in each unit."""
        paths: defaultdict[int, set[str]] = defaultdict(set)
        for entry in self.entries.values():
            for index in entry.plan.destinations:
                unit = self._unit_of_destination[index]
                if unit is not None:
                    paths[unit].add(self.plan.destinations[index].path)
        return paths

    def staged_replay(self, staging: Staging) -> Replay:
        """The copies of all names into one unit's staged tensors."""
        tensors: dict[int, torch.Tensor] = {}
        writes: list[Write] = []
        for write in self._unit_writes[staging.unit.number]:
            destination = self.plan.destinations[write.destination]
            tensor = tensors.setdefault(write.destination, _staged(staging, destination))
            shift = int(tensor.storage_offset()) * tensor.dtype.itemsize - destination.region.offset
            dest = replace(write.dest, offset=write.dest.offset + shift) if shift else write.dest
            writes.append(replace(write, dest=dest) if shift else write)
        return Replay(writes, tensors)

    def _entry(self, plan: NamePlan, dtype: torch.dtype, shape: torch.Size, num_bytes: int) -> Entry:
        indices = set(plan.destinations) | {write.destination for write in plan.writes}
        destinations = [self.plan.destinations[index] for index in indices]
        units = {self._unit_of_destination[index] for index in indices}
        is_dropped = plan.treatment in ("skipped", "ignored")
        return Entry(
            dtype,
            shape,
            num_bytes,
            plan,
            is_copy=plan.treatment == "copy" and not any(destination.late for destination in destinations),
            is_dropped=is_dropped,
            units=tuple(sorted(unit for unit in units if unit is not None)),
            is_direct=None in units or (not units and not is_dropped),
            needed_by=tuple(sorted(set().union(*(self._needing[index] for index in indices)))),
            paths=tuple(path for d in destinations for path in (d.path, *d.aliases)),
            modules=tuple(dict.fromkeys(d.module for d in destinations)),
        )


def _shape_of(units: Sequence[Unit]) -> list[tuple[tuple[str, ...], frozenset[str]]]:
    return [(unit.modules, unit.needs) for unit in units]


def _unit_of(destination: Destination, unit_of: Mapping[str, int]) -> int | None:
    return unit_of.get(destination.module)


def _staged(staging: Staging, destination: Destination) -> torch.Tensor:
    for path in (destination.path, *destination.aliases):
        if path in staging.tensors:
            return staging.tensors[path]
    raise KeyError(destination.path)
