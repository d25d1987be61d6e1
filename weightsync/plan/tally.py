"""How often each byte of a range is written, exactly, without an entry per byte.

Regions whose spans touch nobody else's need no counting. The others are counted per granule, the greatest common
divisor of all their offsets, strides and runs: a row of an expert matrix is one entry, not 7,168.

    tally = Tally.of([region_a, region_b])
    tally.counts           # writes per granule of tally.granule bytes, from byte tally.start
    overlaps(region_a, region_b); is_covered(region, [region_a, region_b])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightsync.plan.regions import Region


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over `[start, start + len(counts) * granule)`.

    Attributes:
        start: First byte.
        granule: Bytes per entry; every region begins and ends at a multiple, counted from `start`.
        counts: (N,) how many regions cover each granule.
    """

    start: int
    granule: int
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Tally:
        """Counts `regions`, each of which has to have bytes."""
        return cls.of_flat([region.coalesced() for region in regions])

    @classmethod
    def of_flat(cls, flat: Sequence[Region]) -> Tally:
        """Counts regions that are coalesced already."""
        start = min(region.offset for region in flat)
        end = max(span_end(region) for region in flat)
        granule = math.gcd(*(number for region in flat for number in (region.offset - start, *_pitches(region))))
        tally = cls(start, granule, np.zeros((end - start) // granule, np.int32))
        for region in flat:
            tally.view_flat(region)[...] += 1
        return tally

    def view(self, region: Region) -> npt.NDArray[np.int32]:
        """The counts of one of the regions that the tally was made of, as a writable view."""
        return self.view_flat(region.coalesced())

    def view_flat(self, flat: Region) -> npt.NDArray[np.int32]:
        """`view` of a region that is coalesced already."""
        *outer, run = flat.shape
        shape = (*outer, run // self.granule)
        strides = tuple(stride // self.granule * self.counts.itemsize for stride in flat.strides[:-1])
        first = self.counts[(flat.offset - self.start) // self.granule :]
        return np.ndarray(shape, np.int32, first, 0, (*strides, self.counts.itemsize))


def span_end(region: Region) -> int:
    """One past the last byte of a coalesced region."""
    return (
        region.offset + sum((size - 1) * stride for size, stride in zip(region.shape, region.strides, strict=True)) + 1
    )


def _pitches(flat: Region) -> Iterator[int]:
    yield flat.shape[-1]  # the run of touching bytes
    yield from flat.strides[:-1]


def repeats_itself(region: Region) -> bool:
    """Whether a region names some byte more than once, as an expanded view does."""
    if not region.num_bytes:
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(region.shape, region.strides, strict=True)):
        return True
    flat = region.coalesced()
    reach = flat.shape[-1]
    for size, stride in zip(flat.shape[-2::-1], flat.strides[-2::-1], strict=True):
        if stride < reach:  # steps interleave: only counting tells
            tally = Tally.of([region])
            return int(np.count_nonzero(tally.counts)) * tally.granule < region.num_bytes
        reach += (size - 1) * stride
    return False


def overlaps(left: Region, right: Region) -> bool:
    """Whether two regions share a byte."""
    if not left.num_bytes or not right.num_bytes:
        return False
    first, second = left.coalesced(), right.coalesced()
    if span_end(first) <= second.offset or span_end(second) <= first.offset:
        return False
    if len(first.shape) == len(second.shape) == 1:
        return True
    return bool((Tally.of([left, right]).counts > 1).any())


def is_covered(region: Region, by: Sequence[Region]) -> bool:
    """Whether every byte of `region` is in one of `by`."""
    if not region.num_bytes:
        return True
    others = [other for other in by if other.num_bytes]
    tally = Tally.of([region, *others])
    return bool((tally.view(region) > 1).all())
