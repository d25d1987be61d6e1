"""Compiles a plan's writes into a table of strided byte copies that can be replayed without Python per tensor.

A `Write` pairs a view of a contiguous wire tensor with a view of a live storage, dim by dim. Here the two sides are
coalesced *jointly*: dims merge where both sides are contiguous across them. What remains is a run of bytes and a few
strided dims. Most writes are one row; the 8-row gate/up interleave of a MoE kernel is one row with one strided dim:

    wire w1 (I, K)                            live w13 [gate: 0..7, up: 0..7, gate: 8..15, up: 8..15, ...]
    [ rows 0..7 | rows 8..15 | ... ]    ->    run = 8 K bytes, I/8 times, source stride 8 K, destination stride 16 K

A tensor that is split over buckets is cut at exact bytes of its contiguous form, permuted or not. All offsets and
strides are bytes. Equal shapes share one pattern, so that 18,432 expert tensors compile in about 0.1 s.

    table = compile_segments(plan_writes)                          # one source per wire name
    table = compile_segments(plan_writes, [bucket.chunks])         # one source per bucket buffer
    table.check_bounds(source_bytes, destination_bytes)            # LayoutError before anything moves
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from weightsync.errors import LayoutError, shown
from weightsync.transport.buckets import Chunk

if TYPE_CHECKING:
    from weightsync.plan.writes import Write

Ints = npt.NDArray[np.int64]
Dim = tuple[int, int, int]  # size, source stride, destination stride

NUM_OUTER_DIMS = 2  # strided dims of one row; the other dims of a write that has more become rows of their own
SHORT_RUN_BYTES = 32  # what a GPU moves at least; shorter runs are fast only beside their neighbours on both sides
MAX_ROWS_FOR_LOCALITY = 4096  # rows that one write may become to keep those neighbours together


class Pattern(NamedTuple):
    """The shape of one strided copy, without its offsets.

    Attributes:
        dims: `(size, source stride, destination stride)`, largest destination stride first; sizes are at least 2.
        run: Bytes that are contiguous on both sides.
    """

    dims: tuple[Dim, ...]
    run: int

    @property
    def source_extent(self) -> int:
        """Bytes from the first to the last source byte, both included."""
        return self.run + sum((size - 1) * stride for size, stride, _ in self.dims)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Rows of strided copies. Rows never depend on each other, so they may run in any order or all at once.

    Row r copies, for every `i1 < sizes[r, 0]` and `i0 < sizes[r, 1]`, `run[r]` bytes from
    `source_offset + i1 * source_strides[0] + i0 * source_strides[1]` of source `source[r]` to
    `destination_offset + i1 * destination_strides[0] + i0 * destination_strides[1]` of storage `destination[r]`.
    A dim of size 1 has stride 0.

    Attributes:
        names: Wire names that `name` indexes.
        num_sources: Number of sources; without chunks there is one per name, in the order of `names`.
        name: (R,) index of the wire name, for messages.
        source: (R,) index of the source.
        source_offset: (R,) bytes.
        destination: (R,) key of the destination storage, as in `Write.destination`.
        destination_offset: (R,) bytes.
        sizes: (R, 2) steps of the outer and the inner strided dim.
        run: (R,) contiguous bytes.
        source_strides: (R, 2) bytes.
        destination_strides: (R, 2) bytes.
    """

    names: tuple[str, ...]
    num_sources: int
    name: Ints
    source: Ints
    source_offset: Ints
    destination: Ints
    destination_offset: Ints
    sizes: Ints
    run: Ints
    source_strides: Ints
    destination_strides: Ints

    def __len__(self) -> int:
        return len(self.run)

    @property
    def num_bytes(self) -> int:
        """Bytes that the table writes."""
        return int((self.sizes.prod(axis=1) * self.run).sum())

    @property
    def source_ends(self) -> Ints:
        """(R,) one past the last source byte of each row."""
        ends: Ints = self.source_offset + ((self.sizes - 1) * self.source_strides).sum(axis=1) + self.run
        return ends

    @property
    def destination_ends(self) -> Ints:
        """(R,) one past the last destination byte of each row."""
        ends: Ints = self.destination_offset + ((self.sizes - 1) * self.destination_strides).sum(axis=1) + self.run
        return ends

    def source_bytes_needed(self) -> Ints:
        """(num_sources,) the least size of each source in bytes."""
        needed = np.zeros(self.num_sources, np.int64)
        np.maximum.at(needed, self.source, self.source_ends)
        return needed

    def select(self, rows: npt.NDArray[np.bool_]) -> SegmentTable:
        """The table of the rows where `rows` (R,) is true; sources and names keep their indices."""
        columns = (
            self.name, self.source, self.source_offset, self.destination, self.destination_offset,
            self.sizes, self.run, self.source_strides, self.destination_strides,
        )  # fmt: skip
        return SegmentTable(self.names, self.num_sources, *(column[rows] for column in columns))

    def check_bounds(self, source_bytes: Sequence[int] | Ints | None, destination_bytes: Mapping[int, int]) -> None:
        """Proves that no row reads or writes outside its source and its storage.

        Args:
            source_bytes: Size of each source; None checks only that no offset is negative.
            destination_bytes: Size of each destination storage.

        Raises:
            LayoutError: A storage is unknown, or rows leave their source or storage; names the wire names.
        """
        unknown = sorted(set(self.destination.tolist()) - set(destination_bytes))
        if unknown:
            names = self._names(np.isin(self.destination, unknown))
            raise LayoutError(
                f"no storage was given for destination {shown([str(key) for key in unknown])}, which {shown(names)} "
                "writes to; bind every destination of the plan",
                names=names,
            )
        limits = np.array([destination_bytes[key] for key in self.destination.tolist()], np.int64)
        self._check_inside("destination storage", self.destination_offset, self.destination_ends, limits)
        if source_bytes is None:
            self._check_inside("source", self.source_offset, self.source_ends, self.source_ends)
        else:
            limits = np.asarray(source_bytes, np.int64)
            if limits.shape != (self.num_sources,):
                raise LayoutError(f"the table reads {self.num_sources} sources, got {limits.size}")
            self._check_inside("source", self.source_offset, self.source_ends, limits[self.source])

    def _names(self, rows: npt.NDArray[np.bool_]) -> list[str]:
        return [self.names[index] for index in dict.fromkeys(self.name[rows].tolist())]

    def _check_inside(self, what: str, starts: Ints, ends: Ints, limits: Ints) -> None:
        outside = (starts < 0) | (ends > limits)
        if outside.any():
            row = int(np.argmax(outside))
            names = self._names(outside)
            raise LayoutError(
                f"{int(outside.sum())} copies leave their {what}: {shown(names)}; the first covers bytes "
                f"[{starts[row]}, {ends[row]}) of {limits[row]}; plan again for the tensors as they are now",
                names=names,
            )


def group_by_name(writes: Iterable[Write]) -> dict[str, list[Write]]:
    """The writes of each wire name, names in order of first appearance."""
    by_name: defaultdict[str, list[Write]] = defaultdict(list)
    for write in writes:
        by_name[write.name].append(write)
    return dict(by_name)


def compile_segments(
    writes: Iterable[Write] | Mapping[str, Sequence[Write]], buffers: Sequence[Sequence[Chunk]] | None = None
) -> SegmentTable:
    """Compiles writes to a table of strided copies.

    Args:
        writes: The plan's writes, or the same grouped by name (`group_by_name`), which saves time if called once per
            bucket. No two writes may share destination bytes: the order of the copies is not kept.
        buffers: The chunks of each source buffer. A chunk holds bytes `[start, start + num_bytes)` of a contiguous
            wire tensor at `offset` of its buffer; writes are cut to those bytes. Names without writes are left out.
            None: each wire tensor is a source of its own, contiguous, its first byte at offset 0.

    Returns:
        The table; zero-byte writes leave no row.

    Raises:
        LayoutError: The two sides of a write differ in shape or item size, a stride is negative, or a destination
            stride is 0, which would write one byte twice.
    """
    by_name = writes if isinstance(writes, Mapping) else group_by_name(writes)
    names = tuple(by_name) if buffers is None else tuple(dict.fromkeys(c.name for chunks in buffers for c in chunks))
    # Rows of equal pattern: [name, source, source offset, destination, destination offset], flat for numpy.
    rows: defaultdict[Pattern, list[int]] = defaultdict(list)
    if buffers is None:
        for index, of_name in enumerate(by_name.values()):
            for write in of_name:
                pattern = _pattern_of(write)
                rows[pattern] += (index, index, write.source.offset, write.destination, write.dest.offset)
    else:
        index_of = {name: index for index, name in enumerate(names)}
        for source, chunks in enumerate(buffers):
            for chunk in chunks:
                stop = chunk.start + chunk.num_bytes
                shift = chunk.offset - chunk.start
                for write in by_name.get(chunk.name, ()):
                    pieces = _cut(_pattern_of(write), write.source.offset, write.dest.offset, chunk.start, stop)
                    for pattern, from_, to in pieces:
                        rows[pattern] += (index_of[chunk.name], source, from_ + shift, write.destination, to)
    return _assemble(names, len(names) if buffers is None else len(buffers), rows)


def _pattern_of(write: Write) -> Pattern:
    dest, source = write.dest, write.source
    try:
        return _pattern(dest.shape, source.shape, source.strides, dest.strides, dest.itemsize, source.itemsize)
    except LayoutError as error:
        raise LayoutError(f"{write.name}: {error}", names=[write.name]) from None


@lru_cache(maxsize=65536)
def _pattern(
    shape: tuple[int, ...],
    source_shape: tuple[int, ...],
    source_strides: tuple[int, ...],
    destination_strides: tuple[int, ...],
    itemsize: int,
    source_itemsize: int,
) -> Pattern:
    """The joint pattern of a write; an empty one has `run` 0."""
    if shape != source_shape or itemsize != source_itemsize:
        raise LayoutError(
            f"both sides of a copy need one shape and item size, got source {source_shape} of {source_itemsize} bytes "
            f"and destination {shape} of {itemsize} bytes; record the write again"
        )
    if 0 in shape:
        return Pattern((), 0)
    dims = tuple(dim for dim in zip(shape, source_strides, destination_strides, strict=True) if dim[0] > 1)
    if any(source < 0 or destination <= 0 for _, source, destination in dims):
        raise LayoutError(
            f"strides must not be negative, and a destination's not 0 (it would be written twice), got source "
            f"{source_strides} and destination {destination_strides} for shape {shape}"
        )
    return _coalesced(dims, itemsize)


def _coalesced(dims: Iterable[Dim], run: int) -> Pattern:
    """Merges dims that are contiguous on both sides; the order of paired dims does not matter to a copy."""
    merged: list[Dim] = []
    for size, source, destination in sorted(dims, key=lambda dim: (dim[2], dim[1])):
        if size == 1:
            continue
        if not merged and source == destination == run:
            run *= size
        elif merged and (source, destination) == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = (merged[-1][0] * size, merged[-1][1], merged[-1][2])
        else:
            merged.append((size, source, destination))
    return Pattern(tuple(reversed(merged)), run)


def _cut(pattern: Pattern, source: int, destination: int, start: int, stop: int) -> Iterator[tuple[Pattern, int, int]]:
    """The parts of a copy whose source bytes lie in `[start, stop)`, each with its two offsets."""
    end = source + pattern.source_extent
    if start <= source and end <= stop:
        yield pattern, source, destination
    elif start < stop and source < stop and start < end:
        by_source = tuple(sorted(pattern.dims, key=lambda dim: -dim[1]))
        yield from _cut_dims(by_source, pattern.run, source, destination, start, stop)


def _cut_dims(
    dims: tuple[Dim, ...], run: int, source: int, destination: int, start: int, stop: int
) -> Iterator[tuple[Pattern, int, int]]:
    """Peels off the dim with the largest source stride: whole steps stay together, steps on an edge are cut further.

    Views of a contiguous tensor nest (a step of one dim spans all dims inside it), so at most one step per edge and dim
    is cut; sources whose steps overlap are cut step by step, which is exact too.
    """
    extent = Pattern(dims, run).source_extent
    if source >= stop or source + extent <= start:
        return
    if start <= source and source + extent <= stop:
        yield _coalesced(dims, run), source, destination
        return
    if not dims or dims[0][1] == 0:  # the run itself crosses an edge; dims of stride 0 read the same bytes again
        first, last = max(source, start), min(source + run, stop)
        yield _coalesced(dims, last - first), first, destination + first - source
        return
    (size, step, destination_step), inner = dims[0], dims[1:]
    span = extent - (size - 1) * step
    first = max(0, (start - source - span) // step + 1)  # steps [first, last) touch the range,
    last = min(size, -((source - stop) // step))
    whole_first = min(max(first, -((source - start) // step)), last)  # [whole_first, whole_last) lie inside it
    whole_last = max(min(last, (stop - source - span) // step + 1), whole_first)
    if whole_first < whole_last:
        whole = ((whole_last - whole_first, step, destination_step), *inner)
        yield _coalesced(whole, run), source + whole_first * step, destination + whole_first * destination_step
    for index in (*range(first, whole_first), *range(whole_last, last)):
        yield from _cut_dims(inner, run, source + index * step, destination + index * destination_step, start, stop)


def _kept_dims(pattern: Pattern) -> list[int]:
    """The dims that stay strided, in order: the largest, which makes the fewest rows.

    Short runs keep the dims whose steps are smallest in the source and in the destination instead, unless that makes
    too many rows: a tile then covers whole lines of memory on both sides, as in a blocked transpose.
    """
    dims = pattern.dims
    by_size = sorted(range(len(dims)), key=lambda d: -dims[d][0])
    kept = by_size[:NUM_OUTER_DIMS]
    if len(dims) > NUM_OUTER_DIMS and pattern.run < SHORT_RUN_BYTES:
        nearest = [min(range(len(dims)), key=lambda d: dims[d][side] or pattern.source_extent) for side in (1, 2)]
        near = list(dict.fromkeys(nearest + by_size))[:NUM_OUTER_DIMS]
        if math.prod(size for d, (size, _, _) in enumerate(dims) if d not in near) <= MAX_ROWS_FOR_LOCALITY:
            kept = near
    return sorted(kept)


def _assemble(names: tuple[str, ...], num_sources: int, rows: Mapping[Pattern, list[int]]) -> SegmentTable:
    """Stacks the rows of all patterns, with the dims that do not stay strided written out as rows."""
    offsets: list[Ints] = [np.empty((0, 5), np.int64)]  # name, source, source offset, destination, destination offset
    shapes: list[Ints] = [np.empty((0, 7), np.int64)]  # sizes x2, run, source strides x2, destination strides x2
    for pattern, flat in rows.items():
        if not pattern.run:
            continue
        kept = _kept_dims(pattern)
        base = np.array(flat, np.int64).reshape(-1, 5)
        for number, (size, source, destination) in enumerate(pattern.dims):
            if number not in kept:
                step = np.array([0, 0, source, 0, destination], np.int64)
                base = (base[:, None, :] + np.arange(size)[None, :, None] * step).reshape(-1, 5)
        outer, inner = ([(1, 0, 0)] * NUM_OUTER_DIMS + [pattern.dims[d] for d in kept])[-NUM_OUTER_DIMS:]
        row = (outer[0], inner[0], pattern.run, outer[1], inner[1], outer[2], inner[2])
        offsets.append(base)
        shapes.append(np.broadcast_to(np.array(row, np.int64), (len(base), 7)))
    offset, shape = np.concatenate(offsets), np.concatenate(shapes)
    name, source_index, source_offset, destination_key, destination_offset = np.ascontiguousarray(offset.T)
    return SegmentTable(
        names, num_sources, name, source_index, source_offset, destination_key, destination_offset,
        sizes=shape[:, 0:2], run=shape[:, 2], source_strides=shape[:, 3:5], destination_strides=shape[:, 5:7],
    )  # fmt: skip
