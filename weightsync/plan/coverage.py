"""The proof that a load writes every loadable byte exactly once, by identity and region, never by adding up elements.

    coverage = prove(destinations, claims, scope="full")
    coverage.missing, coverage.duplicated, coverage.wrong_numel

    parameter 4 x 2    [ a a | b b | . . | b b ]      a is written by "left", b by "right": row 2 is missing
    "left" twice       [ 2 2 | 1 1 | . . | 1 1 ]      counts above one are duplicated: both names are listed

What counts as loadable: parameters, whole, unless they declare `weight_loader_numel = n` (0: derived, never loaded). A
parameter whose only source has its own name may leave the rest as padding; one that declares `weight_loader_optional`
may have no source. Buffers and plain tensors need no source.
Pure: takes and returns values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weightsync.plan.missing import infer_names
from weightsync.plan.regions import Region
from weightsync.plan.tally import Tally, span_end
from weightsync.plan.writes import Claim, Destination

Scope = Literal["full", "partial"]


@dataclass(frozen=True)
class Coverage:
    """What a load writes, and what is wrong with that.

    Attributes:
        missing: Wire names that nothing supplies, where siblings tell them; else paths with a range of rows.
        duplicated: Names that write bytes which other names write too.
        wrong_numel: Destination path -> (declared, written) elements, where `weight_loader_numel` does not hold.
        written_bytes: Distinct bytes that are written.
        padding: Destination path -> bytes that its only source leaves as they are.
        derived: Parameters that declare `weight_loader_numel = 0`.
        untouched: Buffers and plain tensors that no name writes.
        left_out: Optional parameters that no name writes.
    """

    missing: tuple[str, ...] = ()
    duplicated: tuple[str, ...] = ()
    wrong_numel: tuple[tuple[str, int, int], ...] = ()
    written_bytes: int = 0
    padding: tuple[tuple[str, int], ...] = ()
    derived: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def prove(
    destinations: Sequence[Destination],
    claims: Sequence[Claim],
    *,
    scope: Scope = "full",
    unseen: frozenset[str] = frozenset(),
    optional: frozenset[str] = frozenset(),
) -> Coverage:
    """Counts every byte of every destination.

    Args:
        destinations: Live tensors; those with an equal `storage` share bytes.
        claims: Who writes what. Claims that share a name never count as duplicates of each other: a loader may write
            its own bytes twice.
        scope: "full" makes unwritten loadable bytes missing; "partial" only forbids duplicates.
        unseen: Names whose loader was not seen to the end (it depends on values, or failed): the parameter of the same
            name is not missing on top of that.
        optional: Paths of parameters that may have no source at all; one that is written in part is missing its rest.
    """
    by_storage: dict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.region.num_bytes:
            by_storage[destinations[claim.destination].storage].append(claim)
    duplicated: dict[str, None] = {}
    written_bytes = 0
    extents: dict[int, list[_Extent]] = {}
    for storage, mine in by_storage.items():
        extents[storage] = [_count(cluster) for cluster in _clusters(mine)]
        for extent in extents[storage]:
            written_bytes += extent.num_bytes
            duplicated.update(dict.fromkeys(extent.duplicated))
    findings = [_examine(d, extents.get(d.storage, []), by_storage.get(d.storage, [])) for d in destinations]
    vouched = {d.path for d in destinations if any(is_own_name(name, d) for name in unseen)}
    may_lack = optional if scope == "full" else frozenset()
    left_out = {f.destination.path for f in findings if f.destination.path in may_lack and not f.written_numel}
    vouched |= left_out
    gaps = [f for f in findings if f.gaps and f.destination.path not in vouched] if scope == "full" else []
    return Coverage(
        missing=tuple(infer_names([(f.destination, f.gaps) for f in gaps], destinations, claims)),
        duplicated=tuple(duplicated),
        wrong_numel=tuple(
            (f.destination.path, f.destination.loadable_numel or 0, f.written_numel)
            for f in findings
            if f.wrong_numel and (scope == "full" or f.written_numel > (f.destination.loadable_numel or 0))
        ),
        written_bytes=written_bytes,
        padding=tuple((f.destination.path, f.padding) for f in findings if f.padding),
        derived=tuple(d.path for d in destinations if d.kind == "parameter" and d.loadable_numel == 0),
        untouched=tuple(
            f.destination.path for f in findings if f.destination.kind != "parameter" and not f.written_numel
        ),
        left_out=tuple(f.destination.path for f in findings if f.destination.path in left_out),
    )


@dataclass(frozen=True, slots=True)
class _Extent:
    """A stretch of claims that touch nobody else's."""

    start: int
    end: int
    num_bytes: int
    duplicated: tuple[str, ...]
    tally: Tally | None  # None if it is one contiguous run, written once


def _clusters(claims: list[Claim]) -> Iterator[list[tuple[Region, Claim]]]:
    """Claims grouped so that spans of different groups never overlap, in order of address."""
    flat = sorted(((claim.region.coalesced(), claim) for claim in claims), key=lambda pair: pair[0].offset)
    group: list[tuple[Region, Claim]] = []
    end = 0
    for region, claim in flat:
        if group and region.offset >= end:
            yield group
            group = []
        end = max(end, span_end(region)) if group else span_end(region)
        group.append((region, claim))
    if group:
        yield group


def _count(cluster: list[tuple[Region, Claim]]) -> _Extent:
    start = cluster[0][0].offset
    end = max(span_end(region) for region, _ in cluster)
    if len(cluster) == 1 and len(cluster[0][0].shape) == 1:
        return _Extent(start, end, end - start, (), None)
    distinct = list({(region, claim.names): (region, claim) for region, claim in cluster}.values())
    tally = Tally.of_flat([region for region, _ in distinct])
    num_bytes = int(np.count_nonzero(tally.counts)) * tally.granule
    return _Extent(start, end, num_bytes, _duplicated(distinct, tally), tally)


def _duplicated(claims: list[tuple[Region, Claim]], tally: Tally) -> tuple[str, ...]:
    """Names whose bytes somebody else, who shares no name with them, writes too."""
    if not (tally.counts > 1).any():
        return ()
    busy = [(region, claim) for region, claim in claims if (tally.view_flat(region) > 1).any()]
    names: dict[str, None] = {}
    for position, (region, claim) in enumerate(busy):
        for other_region, other in busy[:position]:
            if set(claim.names).isdisjoint(other.names) and _meet(region, other_region):
                names.update(dict.fromkeys((*other.names, *claim.names)))
    return tuple(names)


def _meet(left: Region, right: Region) -> bool:
    if span_end(left) <= right.offset or span_end(right) <= left.offset:
        return False
    return bool((Tally.of_flat([left, right]).counts > 1).any())


@dataclass(frozen=True, slots=True)
class _Finding:
    destination: Destination
    gaps: tuple[tuple[int, int], ...]  # byte ranges of the storage that nothing writes
    written_numel: int
    padding: int
    wrong_numel: bool


def _examine(destination: Destination, extents: list[_Extent], claims: list[Claim]) -> _Finding:
    """What of one destination is written, and whether that is enough."""
    own = destination.region.coalesced()
    total = destination.region.num_bytes
    gaps = _gaps(own, extents) if total else ()
    written = total - sum(stop - start for start, stop in gaps)
    numel = written // destination.dtype.itemsize
    declared = destination.loadable_numel
    if destination.kind != "parameter" or not gaps or declared is not None:
        wrong = destination.kind == "parameter" and declared is not None and numel != declared
        return _Finding(destination, (), numel, 0, wrong)
    sources = {name for claim in claims for name in claim.names} if written else set()
    if len(sources) == 1 and is_own_name(next(iter(sources)), destination):
        return _Finding(destination, (), numel, total - written, False)
    return _Finding(destination, gaps, numel, 0, False)


def _gaps(own: Region, extents: list[_Extent]) -> tuple[tuple[int, int], ...]:
    """Byte ranges of `own` that no extent covers, in order; ranges that touch are merged."""
    start, end = own.offset, span_end(own)
    near = [extent for extent in extents if extent.start < end and extent.end > start]
    if len(own.shape) == 1 and all(extent.tally is None for extent in near):
        found, at = [], start
        for extent in near:
            if extent.start > at:
                found.append((at, extent.start))
            at = max(at, extent.end)
        if at < end:
            found.append((at, end))
        return tuple(found)
    return _gaps_by_granule(own, near)


def _gaps_by_granule(own: Region, near: list[_Extent]) -> tuple[tuple[int, int], ...]:
    covered: list[Region] = []
    for extent in near:
        if extent.tally is None:
            covered.append(Region(extent.start, (extent.end - extent.start,), (1,), 1))
            continue
        edges = np.flatnonzero(np.diff((extent.tally.counts > 0).astype(np.int8), prepend=0, append=0))
        for first, last in edges.reshape(-1, 2).tolist():
            size = (last - first) * extent.tally.granule
            covered.append(Region(extent.tally.start + first * extent.tally.granule, (size,), (1,), 1))
    tally = Tally.of([own, *covered])
    needed = np.zeros_like(tally.counts)
    Tally(tally.start, tally.granule, needed).view(own)[...] = 1
    missing = (needed > 0) & (tally.counts < 2)
    edges = np.flatnonzero(np.diff(missing.astype(np.int8), prepend=0, append=0))
    return tuple(
        (tally.start + first * tally.granule, tally.start + last * tally.granule)
        for first, last in edges.reshape(-1, 2).tolist()
    )


def is_own_name(name: str, destination: Destination) -> bool:
    """Whether a wire name is a destination's own: equal, or one is the other's tail, component by component."""
    return any(
        path == name or path.endswith(f".{name}") or name.endswith(f".{path}")
        for path in (destination.path, *destination.aliases)
    )
