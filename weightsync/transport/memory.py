"""Trainer and engine in one process: the engine reads the trainer's tensors where they lie, on a CPU or a GPU.

Also the test double of every other transport: it runs the whole protocol without a second process.

    sender = memory_sender(feeds, bucket_bytes, device="cpu")
    link = memory_link()
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Mapping

import torch

from weightsync.control import Json
from weightsync.errors import TransportError
from weightsync.transport.base import Feed, take_int
from weightsync.transport.mapped import Exporter, MappedSender, Mapper, Place
from weightsync.transport.mapped_link import MappedLink

# What the senders of this process offer: number -> bytes. An entry lives from `handle` to `close` of its exporter.
_OFFERED: dict[int, torch.Tensor] = {}
_numbers = itertools.count()


class MemoryExporter(Exporter):
    """Offers storages of this process.

    Args:
        device: Type of the device that the engine reads on; tensors elsewhere are staged there.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._storages: dict[Hashable, torch.UntypedStorage] = {}
        self._offered: list[int] = []

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """See `Exporter.locate`. The storage is kept alive while it is offered, so its address names it."""
        if tensor.device.type != self._device:
            return None
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage
        return Place(storage.data_ptr(), tensor.data_ptr() - storage.data_ptr())

    def handle(self, allocation: Hashable) -> tuple[Json, int]:
        """See `Exporter.handle`."""
        storage = self._storages[allocation]
        number = next(_numbers)
        buffer = torch.empty(0, dtype=torch.uint8, device=storage.device)
        _OFFERED[number] = buffer.set_(storage, 0, (storage.nbytes(),), (1,))
        self._offered.append(number)
        return {"pid": os.getpid(), "number": number}, storage.nbytes()

    def is_current(self, allocation: Hashable) -> bool:
        """See `Exporter.is_current`."""
        return allocation in self._storages

    def stage(self, num_bytes: int) -> torch.Tensor:
        """See `Exporter.stage`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def fence(self) -> None:
        """See `Exporter.fence`."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def forget(self) -> None:
        """See `Exporter.forget`."""
        for number in self._offered:
            _OFFERED.pop(number, None)
        self._offered.clear()
        self._storages.clear()

    def close(self) -> None:
        """See `Exporter.close`."""
        self.forget()


class MemoryMapper(Mapper):
    """Finds what a `MemoryExporter` of this process offered."""

    def open(self, handle: Json, num_bytes: int) -> torch.Tensor:
        """See `Mapper.open`."""
        number = take_int(handle, "number", "a memory handle")
        buffer = _OFFERED.get(number) if handle.get("pid") == os.getpid() else None
        if buffer is None or buffer.numel() != num_bytes:
            raise TransportError(
                f"memory {number} of process {handle.get('pid')} is not offered in process {os.getpid()}; "
                "the memory transport works within one process, use shared_memory between two"
            )
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        """Nothing to unmap: the sender forgets it."""


def memory_sender(feeds: Mapping[str, Feed], bucket_bytes: int, device: str) -> MappedSender:
    """The sender of the memory transport; `device` is the type of the engine's device."""
    return MappedSender("memory", MemoryExporter(device), feeds, bucket_bytes)


def memory_link() -> MappedLink:
    """The link of the memory transport."""
    return MappedLink(MemoryMapper())
