"""Strided byte regions of one storage: where a write lands, as a value.

A region is `offset + sum(i_k * strides[k])` for every index of `shape`, each address the start of `itemsize` bytes.
All numbers are bytes from the start of the storage. Order matters when a region is paired with a source region of the
same shape; as a *set* of bytes, `coalesced` gives the canonical form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of one storage that a tensor or view occupies.

    Attributes:
        offset: First byte, from the start of the storage.
        shape: Number of steps per dim.
        strides: Bytes per step; 0 only for an expanded source.
        itemsize: Bytes at each address.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """The region that a tensor occupies in its own storage."""
        itemsize = tensor.dtype.itemsize
        return cls(
            int(tensor.storage_offset()) * itemsize,
            tuple(tensor.shape),
            tuple(stride * itemsize for stride in tensor.stride()),
            itemsize,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes written or read through this region."""
        return math.prod(self.shape) * self.itemsize

    def coalesced(self) -> Region:
        """The same set of bytes with dims sorted by stride, merged where they touch, in one-byte items.

        A contiguous region of any shape, transposed or not, becomes one dim of stride 1.
        """
        if not self.num_bytes:
            return Region(self.offset, (0,), (1,), 1)
        dims = sorted((stride, size) for size, stride in zip(self.shape, self.strides, strict=True) if size > 1)
        merged: list[tuple[int, int]] = [(1, self.itemsize)]
        for stride, size in dims:
            last_stride, last_size = merged[-1]
            if stride == last_stride * last_size:
                merged[-1] = (last_stride, last_size * size)
            else:
                merged.append((stride, size))
        merged.reverse()
        return Region(self.offset, tuple(size for _, size in merged), tuple(stride for stride, _ in merged), 1)
