"""Executes a table of strided copies: one Triton launch on a GPU, torch views elsewhere, the same bytes.

    copy = SegmentCopy(table, storages)      # checks every offset once, lays the tile table out on the device
    copy.run([buffer])                       # sources in the table's order, at any alignment

For a CUDA graph, the source is bound apart from the launch, because a captured launch reads source addresses from
device memory. The graph then serves every later source:

    copy.run([buffer])                       # compiles the kernel, before the capture
    copy.bind_sources([buffer])
    with torch.cuda.graph(graph):
        copy.launch()
    copy.bind_sources([other_buffer]); graph.replay()

The destinations can be exchanged in the same way, for tables that outlive them:

    copy.release_destinations(); copy.bind_destinations(other_storages); copy.run([buffer])
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal, NoReturn, Protocol

import numpy as np
import torch

from weightsync.errors import LayoutError, ReloadError, shown
from weightsync.plan.segments import SHORT_RUN_BYTES, Ints, SegmentTable

Backend = Literal["auto", "torch", "triton"]
Storage = torch.Tensor | torch.UntypedStorage

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def storage_view(storage: Storage) -> torch.Tensor:
    """All bytes of a storage as a 1-D uint8 tensor that aliases it; a tensor stands for its whole storage."""
    untyped = storage.untyped_storage() if isinstance(storage, torch.Tensor) else storage
    view = torch.empty(0, dtype=torch.uint8, device=untyped.device)
    return view.set_(untyped, 0, (untyped.nbytes(),), (1,))


def strided_view(
    storage: torch.Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A view of `storage`'s bytes. `offset` counts bytes, `size` and `strides` count elements of `dtype`.

    The caller has checked the bounds: `set_` would grow a storage that is too small.
    """
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), offset // dtype.itemsize, size, strides)


def bound_addresses(views: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Each storage behind `views` once, with its address, for `check_unmoved`. Keeps the storages alive."""
    storages = {view.data_ptr(): view.untyped_storage() for view in views}
    return [(storage, address) for address, storage in storages.items()]


def check_unmoved(addresses: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
    """LayoutError if a storage was resized or freed since its address was noted: views and tables of it are stale."""
    moved = sum(storage.data_ptr() != address for storage, address in addresses)
    if moved:
        raise LayoutError(f"{moved} destination storages have moved since they were bound; bind the plan again")


def choose_backend(device: torch.device, backend: Backend = "auto") -> Literal["torch", "triton"]:
    """The backend for a device: Triton on CUDA where it is installed, torch elsewhere, unless one is asked for."""
    if backend == "auto":
        return "triton" if device.type == "cuda" and importlib.util.find_spec("triton") else "torch"
    return backend


class SegmentCopy:
    """One table bound to its destination storages.

    Works under any autograd mode, and keeps the storages alive until they are released. Holds a source only between
    `bind_sources` and `release_sources`; `run` releases it, so that a shared or mapped buffer can be closed afterwards
    (on a GPU: once the stream has passed the launch).

    Args:
        table: The copies; rows must not share destination bytes.
        storages: The storage of each destination key of the table, as an `UntypedStorage` or any tensor on it; all on
            one device.
        backend: "torch" or "triton" instead of the device's own; "triton" on a CPU needs `TRITON_INTERPRET=1`.

    Attributes:
        table: The table.
        device: The device of the storages; sources must be there too. None if the table is empty.

    Raises:
        LayoutError: A copy would leave its storage, a storage is missing, or the storages are on several devices.
    """

    def __init__(self, table: SegmentTable, storages: Mapping[int, Storage], *, backend: Backend = "auto") -> None:
        self.table = table
        self.device: torch.device | None = None
        self._keys: list[int] = np.unique(table.destination).tolist()
        self._sizes: dict[int, int] | None = None  # of the storages that the table was checked against
        self._needed: list[int] = table.source_bytes_needed().tolist()
        self._addresses: list[tuple[torch.UntypedStorage, int]] | None = None
        self._sources: tuple[torch.Tensor, ...] | None = None
        self._backend: Backend = backend
        self._copies: _Copies | None = None
        self.bind_destinations(storages)

    @property
    def table_bytes(self) -> int:
        """Device memory that the tile table takes; 0 for the torch backend."""
        return self._copies.table_bytes if self._copies else 0

    @property
    def is_bound(self) -> bool:
        """Whether it has destinations."""
        return self._addresses is not None

    def bind_destinations(self, storages: Mapping[int, Storage]) -> None:
        """Points the table at other storages, on the device of the first; the table on the device stays.

        On a GPU the new addresses are written by the next `bind_sources`.

        Raises:
            LayoutError: As for the class; the old binding stays then.
        """
        views = {key: storage_view(storages[key]) for key in self._keys if key in storages}
        sizes = {key: view.nbytes for key, view in views.items()}
        if sizes != self._sizes:
            self.table.check_bounds(None, sizes)
        devices = {view.device for view in views.values()}
        if self.device is not None:
            devices.add(self.device)
        if len(devices) > 1:
            raise LayoutError(f"one SegmentCopy serves one device, got storages on {shown(sorted(map(str, devices)))}")
        self.device = next(iter(devices), None)
        self._sizes = sizes
        self._addresses = bound_addresses(views.values())
        self.release_sources()
        if self.device is not None and self._copies is None:
            kind = _TritonCopies if choose_backend(self.device, self._backend) == "triton" else _TorchCopies
            self._copies = kind(self.table, self._keys, self.device)
        if self._copies:
            self._copies.bind_destinations(views)

    def release_destinations(self) -> None:
        """Lets go of the storages; nothing can be copied before others are bound."""
        self._addresses = None
        self.release_sources()
        if self._copies:
            self._copies.release_destinations()

    def run(self, sources: Sequence[torch.Tensor]) -> None:
        """Copies every row from `sources` and lets go of them; on a GPU this enqueues it on the current stream."""
        self.bind_sources(sources)
        try:
            self.launch()
        finally:
            self.release_sources()

    @torch.inference_mode()
    def bind_sources(self, sources: Sequence[torch.Tensor]) -> None:
        """Points the table at other source memory; cheap if the addresses are the same as before.

        On a GPU the addresses are written in the order of the current stream, so a launch that is already enqueued
        there still reads from the memory it was enqueued for. Not allowed inside a graph capture.

        Args:
            sources: One contiguous tensor of any dtype per source of the table, on the destinations' device, at least
                as large as the table reads. Must not overlap a destination, unless a copy reads the bytes it writes.

        Raises:
            ReloadError: The destinations were released.
            LayoutError: Wrong number, device, layout or size of the sources.
        """
        if self._addresses is None:
            raise ReloadError("the destinations were released; call bind_destinations first")
        if len(sources) != len(self._needed):
            raise LayoutError(f"the table reads {len(self._needed)} sources, got {len(sources)}")
        device = self.device
        for number, (source, needed) in enumerate(zip(sources, self._needed, strict=True)):
            if source.nbytes < needed or not source.is_contiguous() or (source.device != device and needed):
                self._refuse(number, source)
        if self._copies:
            self._copies.bind_sources(sources)
        self._sources = tuple(sources)

    def _refuse(self, number: int, source: torch.Tensor) -> NoReturn:
        rows = self.table.name[self.table.source == number].tolist()
        raise LayoutError(
            f"source {number} must be contiguous on {self.device} with at least {self._needed[number]} bytes, got "
            f"{source.nbytes} bytes, {'' if source.is_contiguous() else 'not '}contiguous, on {source.device}; "
            "call contiguous() or copy it to that device first",
            names=[self.table.names[index] for index in dict.fromkeys(rows)],
        )

    @torch.inference_mode()
    def launch(self) -> None:
        """Runs the copies for the bound sources; on a GPU one kernel, which a CUDA graph can capture.

        Raises:
            ReloadError: No sources are bound.
            LayoutError: A storage has moved since it was bound, so that its address is not to be trusted.
        """
        if self._sources is None or self._addresses is None:
            raise ReloadError("no sources are bound; call bind_sources first, or run")
        check_unmoved(self._addresses)
        if self._copies:
            self._copies.launch()

    def release_sources(self) -> None:
        """Lets go of the bound sources."""
        self._sources = None
        if self._copies:
            self._copies.release_sources()


class _Copies(Protocol):
    """What executes a table on one kind of device."""

    table_bytes: int

    def __init__(self, table: SegmentTable, keys: Sequence[int], device: torch.device) -> None: ...

    def bind_destinations(self, storages: Mapping[int, torch.Tensor]) -> None: ...

    def release_destinations(self) -> None: ...

    def bind_sources(self, sources: Sequence[torch.Tensor]) -> None: ...

    def launch(self) -> None: ...

    def release_sources(self) -> None: ...


class _TorchCopies:
    """Views of both sides in the widest unit that fits, copied by one foreach call.

    Destination views are built once per source alignment, which in practice is always the same.
    """

    table_bytes = 0

    def __init__(self, table: SegmentTable, keys: Sequence[int], device: torch.device) -> None:
        self._table = table
        self._storages: Mapping[int, torch.Tensor] = {}
        # alignment of the sources -> destination views, and per row (source, unit, size, source strides, byte offset)
        self._built: dict[int, tuple[list[torch.Tensor], list[_SourceView]]] = {}
        self._pairs: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])

    def bind_destinations(self, storages: Mapping[int, torch.Tensor]) -> None:
        self._storages = storages
        self._built.clear()

    def release_destinations(self) -> None:
        self.bind_destinations({})

    def bind_sources(self, sources: Sequence[torch.Tensor]) -> None:
        offsets = [int(source.storage_offset()) * source.dtype.itemsize for source in sources]
        bits = 8
        for source, offset in zip(sources, offsets, strict=True):
            bits |= source.data_ptr() | offset
        alignment = bits & -bits
        if alignment not in self._built:
            self._built[alignment] = self._build(alignment)
        destinations, specs = self._built[alignment]
        handles: dict[tuple[int, int], torch.Tensor] = {}
        views = []
        for number, unit, size, strides, offset in specs:
            handle = handles.get((number, unit))
            if handle is None:
                handle = handles[number, unit] = strided_view(sources[number], UNITS[unit], 0, (0,), (1,))
            views.append(handle.as_strided(size, strides, (offsets[number] + offset) // unit))
        self._pairs = (destinations, views)

    def launch(self) -> None:
        if self._pairs[0]:
            torch._foreach_copy_(*self._pairs)

    def release_sources(self) -> None:
        self._pairs = ([], [])

    def _build(self, alignment: int) -> tuple[list[torch.Tensor], list[_SourceView]]:
        t = self._table
        address = np.array([self._storages[key].data_ptr() for key in t.destination.tolist()], np.int64)
        bits = t.source_offset | t.destination_offset | address | t.run | alignment
        bits |= np.bitwise_or.reduce(t.source_strides, 1) | np.bitwise_or.reduce(t.destination_strides, 1)
        units = bits & -bits
        sizes = np.column_stack([t.sizes, t.run // units]).tolist()
        one = np.ones_like(units)
        source_strides = np.column_stack([t.source_strides // units[:, None], one]).tolist()
        destination_strides = np.column_stack([t.destination_strides // units[:, None], one]).tolist()
        columns = zip(
            units.tolist(), t.destination.tolist(), (t.destination_offset // units).tolist(), sizes,
            destination_strides, t.source.tolist(), source_strides, t.source_offset.tolist(), strict=True,
        )  # fmt: skip
        handles: dict[tuple[int, int], torch.Tensor] = {}
        destinations, specs = [], []
        for unit, key, first, size, strides, source, theirs, offset in columns:
            handle = handles.get((key, unit))
            if handle is None:
                handle = handles[key, unit] = strided_view(self._storages[key], UNITS[unit], 0, (0,), (1,))
            destinations.append(handle.as_strided(size, strides, first))
            specs.append((source, unit, size, theirs, offset))
        return destinations, specs


_SourceView = tuple[int, int, list[int], list[int], int]


class _TritonCopies:
    """The tile table on the device, and the addresses of both sides that every launch reads."""

    def __init__(self, table: SegmentTable, keys: Sequence[int], device: torch.device) -> None:
        from weightsync.kernels import segment_copy_triton as kernel

        self._kernel = kernel
        self._keys = keys
        self._destinations: list[int] = []
        steps = tile_steps(table, kernel.TILE_BYTES)
        destination = table.num_sources + np.searchsorted(keys, table.destination)
        columns = (
            table.source, table.source_offset, destination, table.sizes, table.run, table.source_strides,
            table.destination_strides, steps, table.destination_offset,
        )  # fmt: skip
        segments = np.zeros((len(table), kernel.SEGMENT_COLUMNS), np.int64)
        filled = np.column_stack(columns)
        segments[:, : filled.shape[1]] = filled
        sizes = np.column_stack([table.sizes, table.run])
        counts = (-(-sizes // steps)).prod(axis=1)
        tiles = np.empty((int(counts.sum()), 2), np.int32)
        tiles[:, 0] = np.repeat(np.arange(len(table)), counts)
        tiles[:, 1] = np.arange(len(tiles)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._segments = torch.from_numpy(segments).to(device)
        self._tiles = torch.from_numpy(tiles).to(device)
        self._addresses = [0] * (table.num_sources + len(keys))
        self._bases = torch.tensor(self._addresses, dtype=torch.int64, device=device)
        self.table_bytes = self._segments.nbytes + self._tiles.nbytes + self._bases.nbytes

    def bind_destinations(self, storages: Mapping[int, torch.Tensor]) -> None:
        self._destinations = [storages[key].data_ptr() for key in self._keys]

    def release_destinations(self) -> None:
        """Keeps the addresses: `SegmentCopy` launches only for bound destinations."""

    def bind_sources(self, sources: Sequence[torch.Tensor]) -> None:
        addresses = [*(source.data_ptr() for source in sources), *self._destinations]
        if addresses != self._addresses:
            # Pinned and not waited for: torch hands pinned memory out again only when the copy from it is done, and the
            # host need not wait for the launches before it.
            on_gpu = self._bases.device.type == "cuda"
            self._bases.copy_(torch.tensor(addresses, dtype=torch.int64, pin_memory=on_gpu), non_blocking=on_gpu)
            self._addresses = addresses

    def launch(self) -> None:
        device = self._tiles.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._kernel.copy_tiles(self._segments, self._tiles, self._bases)

    def release_sources(self) -> None:
        """Keeps the addresses: `SegmentCopy` launches only for bound sources."""


def tile_steps(table: SegmentTable, tile_bytes: int) -> Ints:
    """(R, 3) steps of one tile along the two strided dims and the run, at most `tile_bytes` bytes together.

    Tiles of short runs are square, so that both sides use the whole of what a GPU moves at once.
    """
    n1, n0, run = table.sizes[:, 0], table.sizes[:, 1], table.run
    budget = np.maximum(tile_bytes // run, 1)
    square = np.int64(1) << (np.log2(budget).astype(np.int64) // 2)
    t0 = np.minimum(n0, np.where(run < SHORT_RUN_BYTES, square, budget))
    t1 = np.minimum(n1, budget // t0)
    t0 = np.minimum(n0, budget // t1)
    return np.column_stack([t1, t0, np.minimum(run, tile_bytes)])
