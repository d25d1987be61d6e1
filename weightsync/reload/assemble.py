"""Keeps account of tensors that come in parts, and puts together those that a loader needs whole.

parts = Parts()
parts.check(bucket, buffer, entries, received)     # unknown, twice, out of bounds: error, nothing taken
for chunk in bucket.chunks:
    is_done = parts.note(chunk, entry)
    tensor = parts.whole(chunk, entry, buffer, is_done)      # once all of its bytes are there
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from weightsync.errors import CoverageError, LayoutError, shown
from weightsync.transport.buckets import Bucket, Chunk

if TYPE_CHECKING:
    from weightsync.reload.direct import Entry


class Parts:
    """Byte ranges received of each name that is not complete yet.

    Attributes:
        ranges: Name -> byte ranges within the contiguous tensor.
    """

    def __init__(self) -> None:
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        self._assembling: dict[str, torch.Tensor] = {}

    def check(
        self, bucket: Bucket, buffer: torch.Tensor, entries: Mapping[str, Entry], received: Collection[str]
    ) -> None:
        """Refuses a bucket that cannot be taken as a whole.

        Raises:
            CoverageError: A name is unknown, or bytes of it come twice.
            LayoutError: A part reaches beyond its tensor or the buffer.
        """
        unexpected = [chunk.name for chunk in bucket.chunks if chunk.name not in entries]
        duplicated: list[str] = []
        misfits: list[str] = []
        new: dict[str, list[tuple[int, int]]] = {}
        for chunk in bucket.chunks:
            entry = entries.get(chunk.name)
            if entry is None:
                continue
            start, end = chunk.start, chunk.start + chunk.num_bytes
            ranges = [*self.ranges.get(chunk.name, ()), *new.setdefault(chunk.name, [])]
            if chunk.name in received or any(start < last and first < end for first, last in ranges):
                duplicated.append(chunk.name)
            if end > entry.num_bytes or chunk.offset + chunk.num_bytes > buffer.numel():
                misfits.append(chunk.name)
            new[chunk.name].append((start, end))
        if unexpected or duplicated:
            raise CoverageError("this bucket was not taken", unexpected=unexpected, duplicated=duplicated)
        if misfits:
            raise LayoutError(
                f"{len(misfits)} parts reach beyond their tensor or the buffer of {buffer.numel()} bytes: "
                f"{shown(misfits)}; both sides have to pack the same manifest with the same cap",
                names=misfits,
            )

    def note(self, chunk: Chunk, entry: Entry) -> bool:
        """Counts a part; returns whether the tensor is complete with it."""
        ranges = self.ranges.setdefault(chunk.name, [])
        ranges.append((chunk.start, chunk.start + chunk.num_bytes))
        is_done = sum(end - start for start, end in ranges) == entry.num_bytes
        if is_done:
            del self.ranges[chunk.name]
        return is_done

    def whole(self, chunk: Chunk, entry: Entry, buffer: torch.Tensor, is_done: bool) -> torch.Tensor | None:
        """The tensor once all of its bytes are there: a view of the buffer if it came in one piece, else a copy."""
        if chunk.num_bytes == entry.num_bytes:
            return part_of(buffer, chunk, entry)
        data = buffer[chunk.offset : chunk.offset + chunk.num_bytes]
        whole = self._assembling.get(chunk.name)
        if whole is None:
            whole = torch.empty(entry.num_bytes, dtype=torch.uint8, device=buffer.device)
            self._assembling[chunk.name] = whole
        whole[chunk.start : chunk.start + chunk.num_bytes].copy_(data)
        return _as(self._assembling.pop(chunk.name), entry) if is_done else None

    def close(self) -> None:
        """Drops what is being put together."""
        self._assembling.clear()


def part_of(buffer: torch.Tensor, chunk: Chunk, entry: Entry) -> torch.Tensor:
    """A tensor that lies whole in a buffer; aliases it unless its bytes there are not aligned."""
    return _as(buffer[chunk.offset : chunk.offset + chunk.num_bytes], entry)


def _as(data: torch.Tensor, entry: Entry) -> torch.Tensor:
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=entry.dtype, device=data.device)
    itemsize = entry.dtype.itemsize
    if data.data_ptr() % itemsize or int(data.storage_offset()) % itemsize:
        data = data.clone()
    return data.view(entry.dtype).view(entry.shape)
