"""Replays a plan's writes: bound to the live storages once, then no look-up of modules or loaders per tensor.

    replay = Replay(plan_writes, {destination index: storage, ...})
    replay.copy_tensors(named_tensors)              # tensors of this process, any layout, any device
    replay.copy_bucket(bucket, buffer)              # one packed uint8 buffer, tensors perhaps split over several
    replay.copy_buckets([(bucket, buffer), ...])    # several buffers (mapped allocations), on a GPU still one launch
    replay.release(); replay.bind(others)           # other storages of the same sizes: the tables stay

Names that no write mentions are passed over: the session interprets those. Shapes and dtypes against the manifest are
the session's check too; here every byte read and written is proved to lie inside its tensor and its storage.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import LayoutError
from weightsync.kernels.segment_copy import (
    Backend,
    SegmentCopy,
    Storage,
    bound_addresses,
    check_unmoved,
    choose_backend,
    storage_view,
    strided_view,
)
from weightsync.plan.segments import SegmentTable, compile_segments, group_by_name
from weightsync.transport.buckets import Bucket

if TYPE_CHECKING:
    from weightsync.plan.writes import Write

MAX_HELD_BYTES = 64 << 20  # staged copies, and tensors of a one-pass iterator, that are alive at once beyond the first
MAX_BATCH_TENSORS = 1024  # on a GPU the next batch is gathered while this one is copied
MAX_COMPILED = 16384  # tables kept; a fixed plan has as many as buckets, all of which come again in the next push
NUM_PASSES_KEPT = 3  # whole pushes that they may stand for together: two that alternate, and updates of a part
ROUNDING = 1e-3  # of shares that are added up
MIN_LAUNCH_TENSORS = 16  # fewer tensors on a GPU are copied by views: a table for each small set would not pay

Named = tuple[str, torch.Tensor]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Replay:
    """Writes bound to destination storages.

    Args:
        writes: The plan's writes; no two share destination bytes.
        storages: The storage of each `Write.destination`, as an `UntypedStorage` or any tensor on it; several devices
            are fine. They are kept alive.
        backend: "torch" or "triton" instead of each device's own (see `SegmentCopy`).
        max_tables: Tables kept for sets of names or buckets that may come again; those that were used last, and no more
            than `NUM_PASSES_KEPT` tables of everything would come to.

    Attributes:
        names: Wire names that are written.

    Raises:
        LayoutError: A write is no plain copy, leaves its storage, or has none.
    """

    def __init__(
        self,
        writes: Iterable[Write],
        storages: Mapping[int, Storage],
        *,
        backend: Backend = "auto",
        max_tables: int = MAX_COMPILED,
    ) -> None:
        self._writes = tuple(writes)
        self._backend: Backend = backend
        self._max_tables = max_tables
        self.names = frozenset(write.name for write in self._writes)
        self._keys = {write.destination for write in self._writes}
        self._sizes: dict[int, tuple[int, torch.device]] | None = None
        self._parts: list[_DeviceReplay] = []
        self.bind(storages)

    def bind(self, storages: Mapping[int, Storage]) -> None:
        """Binds the writes to other storages and drops every view of the old ones.

        Tables stay if each storage has the size and the device of the one before.

        Raises:
            LayoutError: As for the class; the old binding stays then.
        """
        views = {key: storage_view(storages[key]) for key in self._keys & storages.keys()}
        sizes = {key: (view.nbytes, view.device) for key, view in views.items()}
        if sizes == self._sizes:
            for part in self._parts:
                part.bind(views)
            return
        table = compile_segments(self._writes)
        table.check_bounds(None, {key: num_bytes for key, (num_bytes, _) in sizes.items()})
        by_device: defaultdict[torch.device, list[Write]] = defaultdict(list)
        for write in self._writes:
            if write.dest.num_bytes:
                by_device[views[write.destination].device].append(write)
        shares = _Shares(table)
        self._parts = [
            _DeviceReplay(device, w, views, self._backend, shares, self._max_tables) for device, w in by_device.items()
        ]
        self._sizes = sizes

    def release(self) -> None:
        """Lets go of the storages and keeps the tables; nothing can be copied before `bind`."""
        for part in self._parts:
            part.release()

    @property
    def devices(self) -> set[torch.device]:
        """Devices of the storages that are written."""
        return {part.device for part in self._parts}

    def copy_tensors(self, tensors: Iterable[Named]) -> None:
        """Copies whole wire tensors of this process into the live storages.

        A tensor that is not contiguous, or is on another device, goes through a temporary copy. Those, and tensors that
        a one-pass iterator yields, are let go once they hold `MAX_HELD_BYTES` together (one tensor may be larger). On a
        GPU the copies are enqueued on the current stream; a caller that reuses its tensors on another stream orders
        the two.

        Raises:
            LayoutError: A storage has moved since it was bound; nothing has been copied then. Or a tensor is smaller
                than what the plan reads of it; tensors before it may have been copied.
        """
        for part in self._parts:
            part.check_unmoved()
        if len(self._parts) > 1 and not isinstance(tensors, Sequence):
            for named in tensors:
                for part in self._parts:
                    part.copy_tensors((named,))
            return
        for part in self._parts:
            part.copy_tensors(tensors)

    def copy_bucket(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Copies the chunks of one bucket out of `buffer`.

        Args:
            bucket: What the buffer holds. The table is compiled at first sight and kept.
            buffer: uint8, contiguous, at least as long as the chunks reach; any alignment. Not kept. A buffer on
                another device than the live storages is copied there first.

        Raises:
            LayoutError: The buffer is too short or not contiguous. Nothing has been copied then.
        """
        self.copy_buckets([(bucket, buffer)])

    def copy_buckets(self, filled: Sequence[tuple[Bucket, torch.Tensor]]) -> None:
        """`copy_bucket` for several buffers at once; per device of the live storages one launch on a GPU."""
        buckets = tuple(bucket for bucket, _ in filled)
        for part in self._parts:
            part.check_unmoved()
        copies = [copy for copy in (part.compiled(buckets) for part in self._parts) if copy.device is not None]
        try:
            for copy in copies:
                device = copy.device
                copy.bind_sources([b if b.device == device else b.to(device) for _, b in filled])
            for copy in copies:
                copy.launch()
        finally:
            for copy in copies:
                copy.release_sources()


class _Shares:
    """What part of a plan's rows a table stands for.

    A push writes every byte of the plan once, so the shares of its tables add up to 1, however many buckets there are
    and however their edges cut the rows.

    Args:
        table: The table of all writes.
    """

    def __init__(self, table: SegmentTable) -> None:
        num_bytes, num_rows = _bytes_by_name(table), np.bincount(table.name, minlength=len(table.names))
        shares = num_rows / (np.maximum(num_bytes, 1) * max(len(table), 1))
        self._per_byte: dict[str, float] = dict(zip(table.names, shares.tolist(), strict=True))

    def of(self, table: SegmentTable) -> float:
        """The share of a table of some of these writes."""
        num_bytes: list[float] = _bytes_by_name(table).tolist()
        return math.fsum(n * self._per_byte[name] for name, n in zip(table.names, num_bytes, strict=True) if n)


def _bytes_by_name(table: SegmentTable) -> npt.NDArray[np.float64]:
    num_bytes = (table.sizes.prod(axis=1) * table.run).astype(np.float64)
    return np.bincount(table.name, num_bytes, minlength=len(table.names)).astype(np.float64)


class _Kept(Generic[_Key, _Value]):
    """Tables that may be used again; the least recently used go first.

    A trainer whose tensors lie elsewhere at each push brings buckets that never come again, so there is a bound on the
    shares of all tables together, which a fixed plan of any number of buckets keeps to.
    """

    def __init__(self, max_tables: int) -> None:
        self._max_tables = max_tables
        self._items: dict[_Key, tuple[_Value, float]] = {}
        self._share = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: _Key) -> _Value | None:
        """The value, which is the most recently used then."""
        item = self._items.pop(key, None)
        if item is None:
            return None
        self._items[key] = item
        return item[0]

    def put(self, key: _Key, value: _Value, share: float) -> None:
        """Keeps a value under a new key."""
        self._items[key] = value, share
        self._share += share
        while len(self) > 1 and (len(self) > self._max_tables or self._share > NUM_PASSES_KEPT + ROUNDING):
            _, gone = self._items.pop(next(iter(self._items)))
            self._share -= gone

    def values(self) -> Iterator[_Value]:
        """All values."""
        return (value for value, _ in self._items.values())


class _NameViews(NamedTuple):
    """The destination views of one name, for sources of one shape and dtype.

    `whole` holds views that a source can be copied to as it is; `parts` pairs other views with the dtype, size, strides
    and offset of the source's view, in elements of that dtype.
    """

    dtype: torch.dtype
    shape: torch.Size
    whole: list[torch.Tensor]
    parts: list[tuple[torch.Tensor, torch.dtype, list[int], list[int], int]]


_Row = tuple[int, int, int, list[int], int, list[int], list[int]]


class _DeviceReplay:
    """The part of a replay whose destinations are on one device."""

    def __init__(
        self,
        device: torch.device,
        writes: Sequence[Write],
        storages: Mapping[int, torch.Tensor],
        backend: Backend,
        shares: _Shares,
        max_tables: int,
    ) -> None:
        self.device = device
        self._by_name = group_by_name(writes)
        self._keys = tuple(dict.fromkeys(write.destination for write in writes))
        self._storages: dict[int, torch.Tensor] = {}
        self._addresses: list[tuple[torch.UntypedStorage, int]] = []
        self._backend = backend
        self._shares = shares
        self._launches = choose_backend(device, backend) == "triton"
        self._rows: defaultdict[str, list[_Row]] | None = None
        self._views: dict[str, _NameViews] = {}
        self._named_copies: _Kept[tuple[str, ...], SegmentCopy] = _Kept(max_tables)
        self._recent: _Kept[tuple[int, ...], tuple[tuple[Bucket, ...], SegmentCopy]] = _Kept(max_tables)
        self._compiled: _Kept[tuple[Bucket, ...], SegmentCopy] = _Kept(max_tables)
        self.bind(storages)

    def bind(self, storages: Mapping[int, torch.Tensor]) -> None:
        """Takes other storages of the same sizes; each table follows when it is used."""
        self.release()
        self._storages = {key: storages[key] for key in self._keys}
        self._addresses = bound_addresses(self._storages.values())

    def release(self) -> None:
        """Lets go of the storages and of all views of them."""
        self._storages, self._addresses = {}, []
        self._views.clear()
        for copy in (*self._named_copies.values(), *self._compiled.values(), *(c for _, c in self._recent.values())):
            copy.release_destinations()

    def check_unmoved(self) -> None:
        """LayoutError if a storage was resized or freed since it was bound, or the storages were released."""
        if not self._addresses:
            raise LayoutError("the destinations of this replay were released; bind it to others first")
        check_unmoved(self._addresses)

    def _bound(self, copy: SegmentCopy) -> SegmentCopy:
        if not copy.is_bound:
            copy.bind_destinations(self._storages)
        return copy

    def compiled(self, buckets: tuple[Bucket, ...]) -> SegmentCopy:
        """The table of these buckets; the same bucket objects are found without comparing their chunks."""
        ids = tuple(map(id, buckets))  # the entry keeps its buckets alive, so that no other object can take their ids
        recent = self._recent.get(ids)
        if recent is not None:
            return self._bound(recent[1])
        copy = self._compiled.get(buckets)
        if copy is None:
            table = compile_segments(self._by_name, [bucket.chunks for bucket in buckets])
            copy = SegmentCopy(table, self._storages, backend=self._backend)
            self._compiled.put(buckets, copy, self._shares.of(table))
        self._recent.put(ids, (buckets, copy), self._shares.of(copy.table))
        return self._bound(copy)

    def copy_tensors(self, tensors: Iterable[Named]) -> None:
        """Copies the tensors in batches of bounded memory."""
        device, by_name = self.device, self._by_name
        one_pass = not isinstance(tensors, Sequence)
        batch: list[Named] = []
        held_bytes = 0
        for name, tensor in tensors:
            if name not in by_name:
                continue
            held = one_pass
            if tensor.device != device:
                tensor, held = tensor.to(device), True  # waits, so that the caller may reuse the tensor
            if not tensor.is_contiguous():
                tensor, held = tensor.contiguous(), True
            batch.append((name, tensor))
            if held:
                held_bytes += tensor.nbytes
            if held_bytes >= MAX_HELD_BYTES or len(batch) == MAX_BATCH_TENSORS:
                self._copy_batch(batch)
                batch, held_bytes = [], 0
        self._copy_batch(batch)

    @torch.inference_mode()  # views of small tensors are a third cheaper, and storages bound under it are writable
    def _copy_batch(self, batch: list[Named]) -> None:
        if self._launches and len(batch) >= MIN_LAUNCH_TENSORS:
            copy = self._named_copy(tuple(name for name, _ in batch))
            if copy is not None:
                copy.run([tensor for _, tensor in batch])
                return
        destinations, sources = self._pairs(batch)
        if destinations:
            torch._foreach_copy_(destinations, sources)

    def _named_copy(self, names: tuple[str, ...]) -> SegmentCopy | None:
        """The table that takes one source per name; None if a name stands twice, for rows of a table have no order."""
        copy = self._named_copies.get(names)
        if copy is None and len(set(names)) == len(names):
            table = compile_segments({name: self._by_name[name] for name in names})
            copy = SegmentCopy(table, self._storages, backend=self._backend)
            self._named_copies.put(names, copy, self._shares.of(table))
        return copy and self._bound(copy)

    def _pairs(self, batch: list[Named]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        destinations: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        views = self._views
        for name, tensor in batch:
            bound = views.get(name)
            if bound is None or bound.dtype is not tensor.dtype or bound.shape != tensor.shape:
                bound = views[name] = self._bind_name(name, tensor)
            for view in bound.whole:
                destinations.append(view)
                sources.append(tensor)
            for view, dtype, size, strides, offset in bound.parts:
                destinations.append(view)
                if dtype is tensor.dtype:
                    sources.append(tensor.as_strided(size, strides, tensor.storage_offset() + offset))
                else:  # bytes: the write splits elements of the source's dtype
                    first = int(tensor.storage_offset()) * tensor.dtype.itemsize
                    sources.append(strided_view(tensor, dtype, first + offset, size, strides))
        return destinations, sources

    def _bind_name(self, name: str, tensor: torch.Tensor) -> _NameViews:
        """Builds the views of one name for contiguous tensors of this shape and dtype."""
        if self._rows is None:
            self._rows = _rows_by_name(self._by_name)
        whole: list[torch.Tensor] = []
        parts: list[tuple[torch.Tensor, torch.dtype, list[int], list[int], int]] = []
        for key, at, to, sizes, run, source_strides, destination_strides in self._rows[name]:
            end = at + run + sum((n - 1) * stride for n, stride in zip(sizes, source_strides, strict=True))
            if end > tensor.nbytes:
                raise LayoutError(
                    f"{name}: the plan reads {end} bytes of it, got a tensor of {tensor.nbytes} bytes "
                    f"({tuple(tensor.shape)}, {tensor.dtype}); send it as the manifest says",
                    names=[name],
                )
            item = tensor.dtype.itemsize
            if any(value % item for value in (at, to, run, *source_strides, *destination_strides)):
                dtype, item = torch.uint8, 1
            else:
                dtype = tensor.dtype
            size = [*sizes, run // item]
            strides = [*(stride // item for stride in destination_strides), 1]
            dense = [sizes[1] * run if sizes[0] > 1 else 0, run if sizes[1] > 1 else 0] == source_strides
            if dtype is tensor.dtype and dense and math.prod(size) == tensor.numel():
                reshaped = _strides_in_shape(size, strides, tensor.shape)
                if reshaped is not None:
                    whole.append(strided_view(self._storages[key], dtype, to, tensor.shape, reshaped))
                    continue
            view = strided_view(self._storages[key], dtype, to, size, strides)
            parts.append((view, dtype, size, [*(stride // item for stride in source_strides), 1], at // item))
        return _NameViews(tensor.dtype, tensor.shape, whole, parts)


def _strides_in_shape(size: Sequence[int], strides: Sequence[int], shape: Sequence[int]) -> list[int] | None:
    """Strides of the same elements in `shape`, or None if a dim of `shape` would need two strides.

    `size` has as many elements as `shape`, and no two of its dims are contiguous to each other.
    """
    dims = [(n, stride) for n, stride in zip(size, strides, strict=True) if n > 1]
    result: list[int] = []
    taken = 1  # elements of the innermost dim left in `dims` that are already dealt out
    for n in reversed(shape):
        if n == 1:
            result.append(1)
            continue
        if dims[-1][0] % (taken * n):
            return None
        result.append(dims[-1][1] * taken)
        taken *= n
        if taken == dims[-1][0]:
            dims.pop()
            taken = 1
    return result[::-1]


def _rows_by_name(by_name: Mapping[str, Sequence[Write]]) -> defaultdict[str, list[_Row]]:
    table = compile_segments(by_name)
    columns: Iterator[tuple[int, int, int, int, list[int], int, list[int], list[int]]] = zip(
        table.name.tolist(), table.destination.tolist(), table.source_offset.tolist(),
        table.destination_offset.tolist(), table.sizes.tolist(), table.run.tolist(), table.source_strides.tolist(),
        table.destination_strides.tolist(), strict=True,
    )  # fmt: skip
    rows: defaultdict[str, list[_Row]] = defaultdict(list)
    for name, *row in columns:
        rows[table.names[name]].append(tuple(row))  # type: ignore[arg-type]
    return rows
