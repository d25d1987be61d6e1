"""Two processes of one host, both on CPUs: the engine maps the trainer's memory files.

Memory is an anonymous file (`memfd_create`): it has no name to leak, so nothing is left behind when a process is
killed. The engine opens it as `/proc/<pid>/fd/<fd>`, checks inode, size and seals, and maps it. The seals forbid
shrinking, so that a trainer cannot turn the engine's reads into bus errors.

    arena = share_parameters(model)      # once: the module's tensors move into one memory file; pushes copy nothing
    ... train in place, push; without it a push copies each byte once more, through two slots ...
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Hashable, Mapping

import torch
from torch import nn

from weightsync.control import Json
from weightsync.errors import LayoutError, TransportError
from weightsync.transport.base import Feed, take_int
from weightsync.transport.buckets import ALIGNMENT
from weightsync.transport.mapped import Exporter, MappedSender, Mapper, Place
from weightsync.transport.mapped_link import MappedLink

# Linux numbers; the fcntl module has them only on Linux, and only newer ones all of them.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW = 0x2, 0x4


def available() -> bool:
    """Whether this platform has anonymous memory files and lets another process of the same user open them."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Arena:
    """A memory file of this process, mapped.

    Attributes:
        buffer: Its bytes, uint8. Views of it may outlive the arena; they then can't be offered any more.
        num_bytes: Its size.

    Args:
        num_bytes: Size in bytes, at least 1.

    Raises:
        TransportError: The platform has no such files, or no memory is left.
    """

    def __init__(self, num_bytes: int) -> None:
        if not available():
            raise TransportError("shared memory needs Linux (memfd_create and /proc); use gloo")
        self.num_bytes = num_bytes
        self._fd = os.memfd_create("weightsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            os.ftruncate(self._fd, num_bytes)
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
            self.buffer = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)
        except OSError as error:
            self.close()
            raise TransportError(f"no shared memory of {num_bytes} bytes: {error}") from error
        _ARENAS[self.buffer.data_ptr()] = self

    def handle(self) -> Json:
        """What another process of this user and host needs to map it."""
        status = os.fstat(self._fd)
        return {"pid": os.getpid(), "fd": self._fd, "inode": status.st_ino, "device": status.st_dev}

    @property
    def is_open(self) -> bool:
        """Whether it can still be offered."""
        return bool(self._close.alive)

    def close(self) -> None:
        """Closes the file; mappings of it stay valid until their tensors die. Idempotent."""
        self._close()


# Where an address is looked up. Weak: an arena lives as long as whoever made it wants.
_ARENAS: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


def share_parameters(module: nn.Module) -> Arena:
    """Moves a module's parameters and buffers into one arena, so that pushes over shared memory copy nothing.

    Tensors keep their values, shapes, strides and ties; parameters stay the same objects, so an optimiser keeps
    working. Tensors that share a storage still do. Train in place (`param.data = ...` would leave the arena).

    Args:
        module: On a CPU. The arena lives at least as long as it.

    Raises:
        LayoutError: A tensor is not on a CPU.
        TransportError: No shared memory here.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if elsewhere := [name for name, t in module.state_dict().items() if t.device.type != "cpu"]:
        raise LayoutError("share_parameters needs tensors on a CPU", names=elsewhere)
    offsets: dict[int, int] = {}
    used = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in offsets:
            offsets[storage.data_ptr()] = used
            used += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    arena = Arena(max(used, 1))
    shared = arena.buffer.untyped_storage()
    for address, storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.items():
        if storage.nbytes():
            source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            arena.buffer[offsets[address] :][: storage.nbytes()].copy_(source)
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address in offsets:
            start = offsets[address] // tensor.element_size() + tensor.storage_offset()
            view = torch.empty(0, dtype=tensor.dtype)
            tensor.data = view.set_(shared, start, tensor.shape, tensor.stride())
    weakref.finalize(module, arena.close)
    return arena


class SharedMemoryExporter(Exporter):
    """Offers arenas of this process."""

    def __init__(self) -> None:
        self._staged: list[Arena] = []

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """See `Exporter.locate`."""
        if tensor.device.type != "cpu":
            return None
        base = tensor.untyped_storage().data_ptr()
        arena = _ARENAS.get(base)
        if arena is None or not arena.is_open:
            return None
        return Place(arena, tensor.data_ptr() - base)

    def handle(self, allocation: Hashable) -> tuple[Json, int]:
        """See `Exporter.handle`."""
        arena = _arena(allocation)
        return arena.handle(), arena.num_bytes

    def is_current(self, allocation: Hashable) -> bool:
        """See `Exporter.is_current`."""
        return _arena(allocation).is_open

    def stage(self, num_bytes: int) -> torch.Tensor:
        """See `Exporter.stage`."""
        self._staged.append(Arena(num_bytes))
        return self._staged[-1].buffer

    def fence(self) -> None:
        """Nothing to wait for: CPU writes are done when the call returns."""

    def forget(self) -> None:
        """Nothing to drop: arenas belong to their makers."""

    def close(self) -> None:
        """See `Exporter.close`."""
        while self._staged:
            self._staged.pop().close()


def _arena(allocation: Hashable) -> Arena:
    if not isinstance(allocation, Arena):
        raise TypeError(f"an Arena is expected, got {type(allocation).__name__}")
    return allocation


class SharedMemoryMapper(Mapper):
    """Maps arenas of another process of the same user and host."""

    def open(self, handle: Json, num_bytes: int) -> torch.Tensor:
        """See `Mapper.open`. Read and write access, since torch has no read-only tensors; nothing here writes."""
        pid, number, inode, device = (
            take_int(handle, name, "a shared memory handle") for name in ("pid", "fd", "inode", "device")
        )
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            gone = error.errno in (errno.ENOENT, errno.ESRCH)
            reason = "the process is gone or in another pid namespace" if gone else "another user's process?"
            raise TransportError(f"shared memory of process {pid} cannot be opened: {error} ({reason})") from error
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_dev) != (inode, device):
                raise TransportError(
                    f"/proc/{pid}/fd/{number} is not the memory that was offered: process {pid} is another"
                )
            if status.st_size != num_bytes or not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
                raise TransportError(
                    f"shared memory of process {pid}: {num_bytes} bytes that cannot shrink were offered, "
                    f"{status.st_size} bytes were found"
                )
            populate = getattr(mmap, "MAP_POPULATE", 0)
            return torch.frombuffer(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | populate), dtype=torch.uint8)
        finally:
            os.close(fd)

    def release(self, buffer: torch.Tensor) -> None:
        """The mapping goes with the last tensor that aliases it."""


def shared_memory_sender(feeds: Mapping[str, Feed], bucket_bytes: int) -> MappedSender:
    """The sender of the shared memory transport."""
    return MappedSender("shared_memory", SharedMemoryExporter(), feeds, bucket_bytes)


def shared_memory_link() -> MappedLink:
    """The link of the shared memory transport."""
    return MappedLink(SharedMemoryMapper())
