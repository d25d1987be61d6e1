"""Layouts of tensors as values: enough to make the same tensors again, on the meta device or with defined bytes.

Tensors that share bytes (tied parameters, views) must share them again, so a layout is recorded per *block*, a range of
one storage that overlapping tensors cover together:

    storage   [ ............ w13 ............ ][ scale ]
                 \\__ gate view __/                          two blocks: {w13, gate view}, {scale}

    layouts = layouts_of([param, view, scale])       # by id(tensor); keeps no tensor alive
    copies = allocate(layouts.values())              # by id(layout); new bytes, sharing kept
    shadows = allocate(layouts.values(), "meta")
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

# A recorded tensor of at most this many bytes keeps its start value; of a larger one it is kept where it is simple: all
# elements equal, all rows equal (padded columns), or few stretches of equal elements (padded rows).
COPY_BYTES = 64 * 1024
_MAX_RUNS = 256
_COMPARE_BYTES = 64 * 2**20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Block:
    """One range of a storage.

    Attributes:
        num_bytes: Its length.
        device: Where it was.
        start: Its bytes when recorded (uint8), or None if they were not kept.
        pattern: The bytes (uint8) that it consists of again and again, if it does and `start` is None.
        runs: Else its stretches of equal elements, if they are few: the element of each, as bytes, and its bytes.
    """

    num_bytes: int
    device: torch.device
    start: torch.Tensor | None
    pattern: torch.Tensor | None
    runs: tuple[torch.Tensor, tuple[int, ...]] | None = None

    def allocate(self, device: torch.device | str | None) -> torch.Tensor:
        """New bytes (uint8), never uninitialised: the start value, else zeros."""
        where = self.device if device is None else torch.device(device)
        if where.type == "meta":
            return torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")
        if self.start is not None:
            return self.start.to(where, copy=True)
        if self.runs is not None:
            elements, lengths = self.runs
            made = torch.empty(self.num_bytes // elements.shape[1], elements.shape[1], dtype=torch.uint8, device=where)
            counts = [length // elements.shape[1] for length in lengths]
            for stretch, element in zip(made.split(counts), elements.to(where), strict=True):
                stretch.copy_(element)
            return made.view(-1)
        if self.pattern is None:
            return torch.zeros(self.num_bytes, dtype=torch.uint8, device=where)
        return self.pattern.to(where).repeat(-(-self.num_bytes // self.pattern.numel()))[: self.num_bytes].clone()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor lies in its block, and what Python attached to it.

    Attributes:
        block: The block.
        offset: First byte within the block.
        shape: Its shape.
        stride: Its strides, in elements.
        dtype: Its dtype.
        cls: Its Python class, e.g. `Parameter` or an engine's subclass.
        attributes: Its `__dict__`: weight loaders and other loader metadata.
    """

    block: Block
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cls: type[torch.Tensor]
    attributes: dict[str, Any]

    def view(self, data: torch.Tensor) -> torch.Tensor:
        """This tensor over the bytes of `data`."""
        tensor = torch.empty(0, dtype=self.dtype, device=data.device)
        tensor.set_(data.untyped_storage(), self.offset // self.dtype.itemsize, self.shape, self.stride)
        if self.cls is not torch.Tensor:
            tensor.__class__ = self.cls
        tensor.__dict__.update(self.attributes)
        return tensor

    def holds_start(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is known to have the recorded start value."""
        if not self.block.num_bytes:
            return True
        if not self.keeps_start:
            return False
        return equal_bytes(self.view(self.block.allocate(None)), tensor)

    @property
    def keeps_start(self) -> bool:
        """Whether the start value was kept."""
        block = self.block
        kept = (block.start, block.pattern, block.runs)
        return not block.num_bytes or any(value is not None for value in kept)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a live tensor has this layout and its loaders' attributes."""
        return same_layout(self, tensor) and type(tensor) is self.cls and self.attributes.keys() == vars(tensor).keys()


def same_layout(left: torch.Tensor | TensorLayout, right: torch.Tensor | TensorLayout) -> bool:
    """Whether shapes, dtypes and strides agree; the stride of a dim of size 1 says nothing and is ignored."""
    if left.dtype != right.dtype or tuple(left.shape) != tuple(right.shape):
        return False
    strides = [layout.stride() if isinstance(layout, torch.Tensor) else layout.stride for layout in (left, right)]
    return 0 in left.shape or all(
        size == 1 or a == b for size, a, b in zip(left.shape, strides[0], strides[1], strict=True)
    )


def equal_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have equal shape, dtype and bits; NaN equals itself here."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (left, right))
    return torch.equal(first, second.to(first.device))


def layouts_of(tensors: Iterable[torch.Tensor], *, alias: bool = False) -> dict[int, TensorLayout]:
    """The layout of each tensor, by the tensor's `id`.

    Args:
        tensors: All tensors that may share bytes; tensors of different calls never share a block.
        alias: Let blocks alias the live bytes as their start value (for copies made at once), instead of keeping a copy
            of small ones and the fill value of large ones.
    """
    layouts = {}
    for group, start, end in _blocks(list({id(tensor): tensor for tensor in tensors}.values())):
        block = _block(group[0], start, end, alias)
        for tensor in group:
            layouts[id(tensor)] = TensorLayout(
                block,
                int(tensor.storage_offset()) * tensor.dtype.itemsize - start,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.dtype,
                type(tensor),
                dict(vars(tensor)),
            )
    return layouts


def allocate(layouts: Iterable[TensorLayout], device: torch.device | str | None = None) -> dict[int, torch.Tensor]:
    """New tensors with defined bytes, one per layout, sharing bytes where the recorded ones did.

    Args:
        layouts: What to make.
        device: Where; None for where each was. "meta" gives placeholders.

    Returns:
        Tensor by `id` of its layout.
    """
    data: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    for layout in layouts:
        if id(layout) not in made:
            if id(layout.block) not in data:
                data[id(layout.block)] = layout.block.allocate(device)
            made[id(layout)] = layout.view(data[id(layout.block)])
    return made


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte that a tensor spans in its storage."""
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.dtype.itemsize


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that a tensor spans in its storage, as uint8; aliases it."""
    start, end = byte_range(tensor)
    return _bytes_of(tensor, start, end)


def _bytes_of(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (end - start,), (1,))


def _blocks(tensors: list[torch.Tensor]) -> Iterable[tuple[list[torch.Tensor], int, int]]:
    """Groups of tensors whose byte ranges overlap, with the range they span together."""
    by_storage: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((*byte_range(tensor), tensor))
    for ranges in by_storage.values():
        ranges.sort(key=lambda item: item[:2])
        group: list[torch.Tensor] = []
        first, last = 0, -1
        for start, end, tensor in ranges:
            if group and start < last:
                group.append(tensor)
                last = max(last, end)
                continue
            if group:
                yield group, first, last
            group, first, last = [tensor], start // _ALIGNMENT * _ALIGNMENT, end
        if group:
            yield group, first, last


def _block(tensor: torch.Tensor, start: int, end: int, alias: bool) -> Block:
    """The block, with its start bytes where they are had for nothing or cheap to keep."""
    num_bytes = end - start
    if tensor.is_meta or num_bytes == 0 or tensor.untyped_storage().nbytes() < end:
        return Block(num_bytes, tensor.device, None, None)
    data = _bytes_of(tensor, start, end)
    if alias:
        return Block(num_bytes, tensor.device, data, None)
    if num_bytes <= COPY_BYTES:
        return Block(num_bytes, tensor.device, data.clone(), None)
    elements = _elements(data, tensor.dtype.itemsize)
    if elements is None:
        return Block(num_bytes, tensor.device, None, None)
    pattern = _pattern(elements, 1)
    if pattern is None and tensor.dim() > 1 and tensor.is_contiguous() and tensor.nbytes == num_bytes:
        pattern = _pattern(elements, tensor[0].numel())
    return Block(num_bytes, tensor.device, None, pattern, _runs(elements) if pattern is None else None)


def _elements(data: torch.Tensor, itemsize: int) -> torch.Tensor | None:
    """Bytes as integers of an element's size, which compare as bits do; None if there are none of that size."""
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return data.view(dtypes[itemsize]) if itemsize in dtypes and data.numel() % itemsize == 0 else None


def _pattern(elements: torch.Tensor, period: int) -> torch.Tensor | None:
    """The first `period` elements as bytes, if they come again and again; None if not, or if they are too many."""
    if period * elements.itemsize > COPY_BYTES or elements.numel() % period:
        return None
    rows = elements.view(-1, period)
    if not bool((rows[:2] == rows[0]).all()):  # most are told at once
        return None
    step = max(_COMPARE_BYTES // (elements.itemsize * period), 1)
    if all(bool((chunk == rows[0]).all()) for chunk in rows.split(step)):
        return rows[0].clone().view(torch.uint8)
    return None


def _runs(elements: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Stretches of equal elements; None if they are more than a few."""
    step = COPY_BYTES  # little at first, for most are told at once
    starts = [0]
    first = 0
    while first < elements.numel() - 1:
        chunk = elements[first : first + step + 1]
        changes = (chunk[1:] != chunk[:-1]).nonzero().view(-1)
        if len(starts) + changes.numel() > _MAX_RUNS:
            return None
        starts += [first + 1 + change for change in changes.tolist()]
        first += step
        step = _COMPARE_BYTES // elements.itemsize
    ends = [*starts[1:], elements.numel()]
    lengths = tuple((end - start) * elements.itemsize for start, end in zip(starts, ends, strict=True))
    values = elements[torch.tensor(starts, device=elements.device)]
    return values.view(-1, 1).view(torch.uint8), lengths
