"""What a set of buckets holds, worked out once: a push of mapped memory brings the same buckets each time.

Where every tensor lies whole in one bucket, nothing has to be put together, and tensors can be taken by units instead
of one by one:

    bucket 0  [ 0.w | 1.w | 2.w ]        group of unit 0: [ 0.w ] of bucket 0, [ 0.s ] of bucket 1
    bucket 1  [ 0.s | 1.s | 2.s ]        group of unit 1: ...

    packing = packing_of(buckets, entries)       # None: a tensor is split, unknown, or there twice
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weightsync.reload.assemble import part_of
from weightsync.transport.buckets import Bucket, Chunk

if TYPE_CHECKING:
    from weightsync.reload.direct import Entry


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that the same units stage or wait for.

    Attributes:
        units: Numbers of the units that stage them.
        parts: Number of each bucket that holds some of them, with a bucket of these alone; always the same objects.
        needed_by: Their names, by the units whose hooks need them.
        is_plain: Whether copies alone load them, and no other unit's hooks than their own unit's need them.
    """

    units: tuple[int, ...]
    parts: tuple[tuple[int, Bucket], ...]
    needed_by: Mapping[int, frozenset[str]]
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Packing:
    """Buckets of whole tensors.

    Attributes:
        names: All names.
        direct: Names that are copied into live tensors.
        groups: The names that a unit stages or needs, and those whose loaders are run, in the order of their units.
    """

    names: tuple[str, ...]
    direct: tuple[str, ...]
    groups: tuple[Group, ...]


def packing_of(buckets: Sequence[Bucket], entries: Mapping[str, Entry]) -> Packing | None:
    """The packing of these buckets; None if not every tensor there is known, whole, and in one of them alone."""
    chunks = [chunk for bucket in buckets for chunk in bucket.chunks]
    names = tuple(chunk.name for chunk in chunks)
    is_whole = len(set(names)) == len(names) and all(
        (entry := entries.get(chunk.name)) is not None and chunk.start == 0 and chunk.num_bytes == entry.num_bytes
        for chunk in chunks
    )
    if not is_whole:
        return None
    groups: defaultdict[tuple[int, ...], defaultdict[int, list[Chunk]]] = defaultdict(lambda: defaultdict(list))
    direct = []
    for place, bucket in enumerate(buckets):
        for chunk in bucket.chunks:
            entry = entries[chunk.name]
            if entry.is_dropped:
                continue
            if entry.is_copy and entry.is_direct:
                direct.append(chunk.name)
            if entry.units or not entry.is_copy or entry.needed_by:
                groups[entry.units][place].append(chunk)
    found = (_group(units, groups[units], buckets, entries) for units in sorted(groups))
    return Packing(names, tuple(direct), tuple(found))


def tensors_of(
    parts: Sequence[tuple[Bucket, torch.Tensor]], entries: Mapping[str, Entry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each whole tensor of filled buckets; see `part_of`."""
    for bucket, buffer in parts:
        for chunk in bucket.chunks:
            yield chunk.name, part_of(buffer, chunk, entries[chunk.name])


def _group(
    units: tuple[int, ...],
    by_place: Mapping[int, Sequence[Chunk]],
    buckets: Sequence[Bucket],
    entries: Mapping[str, Entry],
) -> Group:
    parts = tuple((place, Bucket(tuple(chunks), buckets[place].num_bytes)) for place, chunks in by_place.items())
    needed_by: defaultdict[int, set[str]] = defaultdict(set)
    are_copies = True
    for chunks in by_place.values():
        for chunk in chunks:
            entry = entries[chunk.name]
            are_copies &= entry.is_copy
            for unit in entry.needed_by:
                needed_by[unit].add(chunk.name)
    is_plain = are_copies and len(units) <= 1 and (not units or set(needed_by) == set(units))
    return Group(units, parts, {unit: frozenset(names) for unit, names in needed_by.items()}, is_plain)
