"""The wire names that would fill a gap, told from the names that fill its siblings.

    layers.0.experts.w13    rows of experts 0, 1, 3 are written by experts.0.w1.weight, ...: nothing fills rows 4..5
    ->                      layers.0.experts.2.w1.weight

Two laws are tried: another number in the same destination (offsets grow evenly with the number), and the same place in
a destination whose path differs by that number alone (another layer). A guess counts only if all its bytes are missing.
What no law explains is named by path and rows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weightsync.plan.regions import Region
from weightsync.plan.writes import Claim, Destination

Gap = tuple[int, int]
NUM_GAPS_SHOWN = 8  # of one destination; more are summed up
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def infer_names(
    gaps: Sequence[tuple[Destination, Sequence[Gap]]], destinations: Sequence[Destination], claims: Sequence[Claim]
) -> list[str]:
    """Names for every gap.

    Args:
        gaps: Destinations with byte ranges of their storage that nothing writes.
        destinations: What the claims' indices mean.
        claims: What is written.

    Returns:
        Wire names where siblings tell them, else paths: whole, or with the range of rows or elements.
    """
    if not gaps:
        return []
    laws = _Laws(destinations, claims)
    names: dict[str, None] = {}
    for destination, ranges in gaps:
        left = _Ranges(ranges)
        for guess in laws.guesses(destination):
            if guess.name not in laws.known and left.take(guess.region):
                names[guess.name] = None
        rest = list(left)
        if rest == list(ranges) and _is_whole(destination, rest):
            names[destination.path] = None
        elif len(rest) > NUM_GAPS_SHOWN:
            num_bytes = sum(stop - start for start, stop in rest)
            total = destination.region.num_bytes
            names[f"{destination.path}[{num_bytes:,} of {total:,} bytes, in {len(rest)} places]"] = None
        else:
            names.update((f"{destination.path}[{_rows(destination, start, stop)}]", None) for start, stop in rest)
    return list(names)


class _Guess(NamedTuple):
    name: str
    region: Region


class _Laws:
    """Claims by pattern, so that a number can be put in another's place."""

    def __init__(self, destinations: Sequence[Destination], claims: Sequence[Claim]) -> None:
        self.known = {name for claim in claims for name in claim.names}
        self._in_place: dict[tuple[int, str, str], dict[int, Region]] = defaultdict(dict)
        self._across: dict[str, list[tuple[str, Destination, Region]]] = defaultdict(list)
        for claim in claims:
            destination = destinations[claim.destination]
            for name in claim.names:
                for match in _NUMBER.finditer(name):
                    key = (claim.destination, name[: match.start()], name[match.end() :])
                    self._in_place[key][int(match.group())] = claim.region
                self._across[_NUMBER.sub("#", destination.path)].append((name, destination, claim.region))
        self._index = {destination.path: index for index, destination in enumerate(destinations)}

    def guesses(self, destination: Destination) -> Iterator[_Guess]:
        """Names that might fill `destination`, with the bytes each would fill."""
        index = self._index[destination.path]
        for (where, prefix, suffix), regions in list(self._in_place.items()):
            if where == index and len(regions) > 1:
                yield from _evenly(prefix, suffix, regions, destination)
        for name, sibling, region in self._across[_NUMBER.sub("#", destination.path)]:
            if sibling.path != destination.path and sibling.shape == destination.shape:
                renamed = _renumbered(name, sibling.path, destination.path)
                offset = region.offset - sibling.region.offset + destination.region.offset
                yield _Guess(renamed, Region(offset, region.shape, region.strides, region.itemsize))


def _evenly(prefix: str, suffix: str, regions: dict[int, Region], destination: Destination) -> Iterator[_Guess]:
    """Numbers between and beyond the known ones, as long as their bytes stay inside the destination."""
    numbers = sorted(regions)
    first, second = numbers[0], numbers[1]
    pace, odd = divmod(regions[second].offset - regions[first].offset, second - first)
    if odd or pace <= 0:
        return
    base = regions[first]
    begin, end = destination.region.offset, destination.region.offset + _extent(destination.region)
    number = max(0, first - (base.offset - begin) // pace)
    while True:
        offset = base.offset + (number - first) * pace
        if offset + _extent(base) > end:
            return
        if number not in regions and offset >= begin:
            yield _Guess(f"{prefix}{number}{suffix}", Region(offset, base.shape, base.strides, base.itemsize))
        number += 1


def _renumbered(name: str, path: str, other: str) -> str:
    """`name` with the numbers by which `other` differs from `path`, first come first served."""
    changes: list[tuple[str, str]] = list(zip(_NUMBER.findall(path), _NUMBER.findall(other), strict=True))

    def change(match: re.Match[str]) -> str:
        if changes and match.group() == changes[0][0]:
            return changes.pop(0)[1]
        return match.group()

    return _NUMBER.sub(change, name)


def _extent(region: Region) -> int:
    steps = zip(region.shape, region.strides, strict=True)
    return sum((size - 1) * stride for size, stride in steps) + region.itemsize


class _Ranges:
    """Byte ranges from which guesses are taken away."""

    def __init__(self, ranges: Sequence[Gap]) -> None:
        self._ranges = list(ranges)

    def __iter__(self) -> Iterator[Gap]:
        return iter(self._ranges)

    def take(self, region: Region) -> bool:
        """Takes the region's bytes away if all of them are here."""
        runs = list(_runs(region.coalesced()))
        kept = self._ranges
        for start, stop in runs:
            holder = next((item for item in kept if item[0] <= start and stop <= item[1]), None)
            if holder is None:
                return False
            parts = [(holder[0], start), (stop, holder[1])]
            kept = [item for item in kept if item is not holder] + [part for part in parts if part[0] < part[1]]
        self._ranges = sorted(kept)
        return bool(runs)


def _runs(flat: Region) -> Iterator[Gap]:
    if not flat.num_bytes:
        return
    offsets = [flat.offset]
    for size, stride in zip(flat.shape[:-1], flat.strides[:-1], strict=True):
        offsets = [offset + step * stride for offset in offsets for step in range(size)]
    yield from ((offset, offset + flat.shape[-1]) for offset in offsets)


def _is_whole(destination: Destination, ranges: Sequence[Gap]) -> bool:
    return sum(stop - start for start, stop in ranges) == destination.region.num_bytes


def _rows(destination: Destination, start: int, stop: int) -> str:
    """A byte range as rows of the first dim where it is made of whole rows, else as elements in storage order."""
    region = destination.region
    first, last = start - region.offset, stop - region.offset
    row = region.strides[0] if region.strides else 0
    flat = region.coalesced()
    if row and len(flat.shape) == 1 and row * region.shape[0] == region.num_bytes and first % row == last % row == 0:
        return f"{first // row}:{last // row}"
    return f"elements {first // region.itemsize}:{last // region.itemsize}"
