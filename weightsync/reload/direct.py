"""A plan bound to a live model: what to check of each arriving tensor, and where its bytes go.

    bound = BoundPlan(plan, live, units)
    entry = bound.entries["layers.0.w1"]         # expected dtype and shape, treatment, units
    bound.live_replay.copy_tensors([...])        # straight into live storage
    bound.staged_replay(staging)                 # into one unit's staged tensors
    bound.packing(buckets)                       # by units, what a push of these buckets brings

Binding costs once per plan and addresses; a push then costs one dict look-up per tensor and one fused copy per call,
and one of known buckets nothing per tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from weightsync.plan.regions import Region
from weightsync.plan.replay import Replay
from weightsync.plan.tally import overlaps
from weightsync.plan.writes import Destination, NamePlan, Write
from weightsync.reload.audit import LiveTensors
from weightsync.reload.derived import Call, by_module, record_calls
from weightsync.reload.layerwise import Staging, Unit
from weightsync.reload.packing import Packing, packing_of
from weightsync.transport.buckets import Bucket

if TYPE_CHECKING:
    from weightsync.plan.plan import ReloadPlan

NUM_PACKINGS_KEPT = 16  # per plan: one for a whole push, a few for updates of a part
NUM_UNIT_TABLES_KEPT = 8  # per unit: one for its part of a whole push, a few if it comes in parts


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
        self._packings: dict[tuple[int, ...], tuple[tuple[Bucket, ...], Packing | None]] = {}
        self._staged_replays: dict[int, tuple[list[int], Replay]] = {}  # by unit, with how far destinations are shifted
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
        self._addresses = {index: tensor.data_ptr() for index, tensor in self.live_tensors.items()}
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
        self._unit_destinations = {
            number: tuple(dict.fromkeys(write.destination for write in writes))
            for number, writes in self._unit_writes.items()
        }

    def replayed_calls(self, model: torch.nn.Module) -> dict[str, list[tuple[torch.nn.Module, Call]]]:
        """Loader calls behind the copies of each name, in modules that want to be told; worked out once."""
        if self._calls is None:
            self._calls = record_calls(model, self)
            self.all_replayed_calls = by_module(self._calls, self._calls)
        return self._calls

    @cached_property
    def routes(self) -> dict[str, tuple[int, ...]]:
        """Units of each name that is staged."""
        return {name: entry.units for name, entry in self.entries.items() if entry.units and not entry.is_dropped}

    @cached_property
    def units_needed_at_once(self) -> set[int]:
        """Units that have to be staged together, since one name's loader writes into several."""
        wide = (entry.units for entry in self.entries.values() if not entry.is_copy and len(entry.units) > 1)
        return {unit for units in wide for unit in units}

    @cached_property
    def expected(self) -> dict[int, set[str]]:
        """Names that each unit's hooks need."""
        names: dict[int, set[str]] = {number: set() for number in range(len(self._units))}
        for name, entry in self.entries.items():
            for unit in () if entry.is_dropped else entry.needed_by:
                names[unit].add(name)
        return names

    @cached_property
    def is_all_direct(self) -> bool:
        """Whether every name is a copy into live tensors, or dropped, and no unit waits for one."""
        return all(e.is_dropped or (e.is_copy and not e.units and not e.needed_by) for e in self.entries.values())

    @cached_property
    def paths(self) -> set[str]:
        """Paths of all destinations that are written."""
        return {path for entry in self.entries.values() if not entry.is_dropped for path in entry.paths}

    @cached_property
    def modules(self) -> set[str]:
        """Modules that own them."""
        return {module for entry in self.entries.values() if not entry.is_dropped for module in entry.modules}

    @cached_property
    def interpreted(self) -> dict[str, str]:
        """Names whose loaders are run, with the reason."""
        return {n: e.plan.reason for n, e in self.entries.items() if not (e.is_copy or e.is_dropped)}

    @cached_property
    def dropped(self) -> list[str]:
        """Names that this rank leaves alone."""
        return [name for name, entry in self.entries.items() if entry.is_dropped]

    def names_that_overlap(self, other: BoundPlan) -> list[str]:
        """Names of this plan that copy to bytes which names of `other` copy to as well."""
        theirs = other._regions
        return [
            name
            for path, regions in self._regions.items()
            for region, name in regions
            if any(overlaps(region, taken) for taken, _ in theirs.get(path, ()))
        ]

    @cached_property
    def _regions(self) -> dict[str, list[tuple[Region, str]]]:
        """Bytes copied to, relative to the destination, by its path."""
        regions: defaultdict[str, list[tuple[Region, str]]] = defaultdict(list)
        for entry in self.entries.values():
            for write in entry.plan.writes:
                destination = self.plan.destinations[write.destination]
                offset = write.dest.offset - destination.region.offset
                regions[destination.path].append((replace(write.dest, offset=offset), write.name))
        return regions

    def packing(self, buckets: tuple[Bucket, ...]) -> Packing | None:
        """What `buckets` hold, if each tensor there is known, whole, and in one of them alone; else None.

        Worked out once for the same bucket objects, as mapped memory gives them at every push.
        """
        key = tuple(map(id, buckets))
        known = self._packings.get(key)
        if known is None:
            if len(self._packings) >= NUM_PACKINGS_KEPT:
                self._packings.clear()
            known = self._packings[key] = (buckets, packing_of(buckets, self.entries))
        return known[1]

    def is_bound_to(self, live: LiveTensors, units: Sequence[Unit]) -> bool:
        """Whether the live tensors and the units are still those that this was bound to, and where they were then.

        A storage that was resized, as one is that slept and woke, takes its tensors with it, ours too: so the address
        that counts is the one noted at binding, and both have to be there.
        """
        return self._units == _shape_of(units) and all(
            (place := live.by_path.get(self.plan.destinations[index].path)) is not None
            and place.alias.data_ptr() == tensor.data_ptr() == self._addresses[index]
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
        """The copies of all names into one unit's staged tensors.

        There is one per unit: its tables stay from push to push, while the caller releases it before what is staged is
        dropped.
        """
        number = staging.unit.number
        tensors = {
            index: _staged(staging, self.plan.destinations[index]) for index in self._unit_destinations.get(number, ())
        }
        shifts = [
            int(tensor.storage_offset()) * tensor.dtype.itemsize - self.plan.destinations[index].region.offset
            for index, tensor in tensors.items()
        ]
        known = self._staged_replays.get(number)
        if known is not None and known[0] == shifts:
            known[1].bind(tensors)
            return known[1]
        by_index = dict(zip(tensors, shifts, strict=True))
        writes = [_shifted(write, by_index[write.destination]) for write in self._unit_writes.get(number, ())]
        replay = Replay(writes, tensors, max_tables=NUM_UNIT_TABLES_KEPT)
        self._staged_replays[number] = (shifts, replay)
        return replay

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


def _shifted(write: Write, num_bytes: int) -> Write:
    return replace(write, dest=replace(write.dest, offset=write.dest.offset + num_bytes)) if num_bytes else write


def _staged(staging: Staging, destination: Destination) -> torch.Tensor:
    for path in (destination.path, *destination.aliases):
        if path in staging.tensors:
            return staging.tensors[path]
    raise KeyError(destination.path)
