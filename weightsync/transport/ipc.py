"""Two processes on one GPU: the engine maps the trainer's CUDA allocations and reads them where they lie.

    trainer: cudaMalloc segment  [ w0 | w1 | w2 ... ]      one handle per segment, not per tensor
             64-byte handle, base64, in a typed JSON field; with size, buffer id and the GPU's UUID
    engine:  cuIpcOpenMemHandle once per connection        uint8 tensor over the mapping, no copy

Order: the trainer waits for its whole device before it posts the update, so nothing of its step is still being
written; the engine waits for its reads before it answers, so the trainer may overwrite as soon as `push` returns. (An
interprocess event would save the trainer's host some microseconds of a wait that a push has to make anyway.)

Segments are found with `cuMemGetAddressRange` and told apart by the driver's buffer id, which is never reused: memory
that was freed and allocated again at the same address is offered anew. `expandable_segments` memory has no such
handle and is refused by name. Source: CUDA driver API, "Memory Management" and "Unified Addressing".
"""

from __future__ import annotations

import base64
import binascii
import bisect
import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from weightsync.control import Json
from weightsync.errors import ProtocolError, TransportError
from weightsync.transport.base import Feed, take, take_int
from weightsync.transport.cuda_driver import HANDLE_BYTES, CudaDriver
from weightsync.transport.mapped import Exporter, MappedSender, Mapper, Place
from weightsync.transport.mapped_link import MappedLink

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def device_uuid(device: torch.device) -> str:
    """The GPU's own UUID, whatever index it has in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def refuse_expandable_segments(device: torch.device) -> None:
    """Refuses memory that cannot be exported.

    Raises:
        TransportError: `expandable_segments` is on, with the variable that turns it on where that is known.
    """
    settings = [
        f"{name}={os.environ[name]}"
        for name in ALLOCATOR_VARIABLES
        if "expandable_segments:True" in os.environ.get(name, "")
    ]
    expandable = any(
        segment.get("is_expandable") and segment.get("device") == device.index
        for segment in torch.cuda.memory_snapshot()
    )
    if settings or expandable:
        raise TransportError(
            f"expandable_segments is on ({', '.join(settings) or 'set at run time'}): such memory cannot be mapped by "
            "another process through CUDA IPC; start the trainer with expandable_segments:False, or push over nccl"
        )


@dataclass(frozen=True, slots=True)
class _Segment:
    base: int
    num_bytes: int
    buffer_id: int


class IpcExporter(Exporter):
    """Offers the trainer's CUDA segments.

    Args:
        device: The trainer's GPU.

    Raises:
        TransportError: The allocator's memory cannot be exported, or there is no driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        refuse_expandable_segments(self._device)
        self._driver = CudaDriver()
        self._uuid = device_uuid(self._device)
        self._segments: list[_Segment] = []  # by address
        self._bases: list[int] = []  # theirs
        self._staged: list[torch.Tensor] = []

    def locate(self, tensor: torch.Tensor) -> Place | None:
        """See `Exporter.locate`."""
        if tensor.device != self._device:
            return None
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._bases, address)  # the first segment that begins behind it
        if index:
            segment = self._segments[index - 1]
            if address < segment.base + segment.num_bytes:
                return Place(segment, address - segment.base)
        base, num_bytes = self._driver.address_range(address)
        segment = _Segment(base, num_bytes, self._driver.buffer_id(base))
        self._bases.insert(index, base)
        self._segments.insert(index, segment)
        return Place(segment, address - base)

    def handle(self, allocation: Hashable) -> tuple[Json, int]:
        """See `Exporter.handle`."""
        segment = _segment(allocation)
        with torch.cuda.device(self._device):
            handle = self._driver.export_handle(segment.base)
        return {
            "handle": base64.b64encode(handle).decode("ascii"),
            "device_uuid": self._uuid,
            "buffer_id": segment.buffer_id,
        }, segment.num_bytes

    def is_current(self, allocation: Hashable) -> bool:
        """See `Exporter.is_current`."""
        segment = _segment(allocation)
        return self._driver.buffer_id(segment.base) == segment.buffer_id

    def stage(self, num_bytes: int) -> torch.Tensor:
        """See `Exporter.stage`."""
        self._staged.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return self._staged[-1]

    def fence(self) -> None:
        """See `Exporter.fence`: every stream of the device, since a step may have written on any of them."""
        torch.cuda.synchronize(self._device)

    def forget(self) -> None:
        """See `Exporter.forget`."""
        self._segments.clear()
        self._bases.clear()
        torch.cuda.synchronize(self._device)  # makes the device's context current on this thread, for the driver

    def close(self) -> None:
        """See `Exporter.close`."""
        self._segments.clear()
        self._bases.clear()
        self._staged.clear()


def _segment(allocation: Hashable) -> _Segment:
    if not isinstance(allocation, _Segment):
        raise TypeError(f"a segment is expected, got {type(allocation).__name__}")
    return allocation


class _RawMemory:
    """Device memory that something else owns, as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class IpcMapper(Mapper):
    """Maps segments of another process on the same GPU.

    Args:
        device: The engine's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = CudaDriver()
        self._uuid = device_uuid(device)

    def open(self, handle: Json, num_bytes: int) -> torch.Tensor:
        """See `Mapper.open`."""
        uuid = take(handle, "device_uuid", str, "an IPC handle")
        take_int(handle, "buffer_id", "an IPC handle")
        if uuid != self._uuid:
            raise TransportError(f"the trainer's memory is on GPU {uuid}, this engine is on GPU {self._uuid}")
        try:
            raw = base64.b64decode(str(take(handle, "handle", str, "an IPC handle")), validate=True)
        except binascii.Error as error:
            raise ProtocolError(f"an IPC handle must be base64: {error}") from error
        if len(raw) != HANDLE_BYTES:
            raise ProtocolError(f"an IPC handle has {HANDLE_BYTES} bytes, got {len(raw)}")
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # makes the device's context current on this thread, for the driver
            address = self._driver.open_handle(raw)
            base, mapped_bytes = self._driver.address_range(address)
            if (base, mapped_bytes) != (address, num_bytes):
                self._driver.close_handle(address)
                raise TransportError(f"{num_bytes} bytes were offered, the mapping has {mapped_bytes}")
            return torch.as_tensor(_RawMemory(address, num_bytes), device=self._device)

    def release(self, buffer: torch.Tensor) -> None:
        """See `Mapper.release`. Waits for this device first: a kernel may still read the mapping."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._driver.close_handle(buffer.data_ptr())


def ipc_sender(feeds: Mapping[str, Feed], bucket_bytes: int, device: torch.device) -> MappedSender:
    """The sender of the CUDA IPC transport."""
    return MappedSender("ipc", IpcExporter(device), feeds, bucket_bytes)


def ipc_link(device: torch.device) -> MappedLink:
    """The link of the CUDA IPC transport."""
    return MappedLink(IpcMapper(device))
