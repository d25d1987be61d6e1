"""Tensors that arrived before their module could be staged: private copies, bounded in bytes.

    held = HeldTensors(max_bytes=256 * 2**20)
    held.put("layers.1.w", tensor)      # a copy; beyond `max_bytes` it is spilled, in host memory or in a temporary
    file tensor = held.take("layers.1.w")
    held.close()

Device tensors spill to host memory, host tensors to a temporary file that is deleted when closed.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import IO

import torch


@dataclass(frozen=True, slots=True)
class _Spilled:
    """Where a spilled tensor is: in host memory, or in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    host: torch.Tensor | None
    offset: int
    num_bytes: int


class HeldTensors:
    """Copies of tensors by name.

    Args:
        max_bytes: Bytes held in the memory where the tensors arrived; what comes on top is spilled.

    Attributes:
        num_bytes: Bytes held now, spilled ones not counted.
        peak_bytes: The most that was ever held.
        spilled_bytes: Bytes spilled in total.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.peak_bytes = 0
        self.spilled_bytes = 0
        self._held: dict[str, torch.Tensor] = {}
        self._spilled: dict[str, _Spilled] = {}
        self._file: IO[bytes] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._held or name in self._spilled

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more can be held without spilling."""
        return self.num_bytes + num_bytes <= self.max_bytes

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps a copy of a tensor."""
        if not self.has_room(tensor.nbytes):
            self._spill(name, tensor)
            return
        self._held[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.num_bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def take(self, name: str) -> torch.Tensor:
        """Gives a kept tensor back, on the device it arrived on, and forgets it."""
        if name in self._held:
            tensor = self._held.pop(name)
            self.num_bytes -= tensor.nbytes
            return tensor
        spilled = self._spilled.pop(name)
        if spilled.host is not None:
            return spilled.host.to(spilled.device)
        data = torch.empty(spilled.num_bytes, dtype=torch.uint8)
        if spilled.num_bytes and self._file is not None:
            self._file.seek(spilled.offset)
            self._file.readinto(data.numpy())  # type: ignore[attr-defined]
        return data.view(spilled.dtype).view(spilled.shape) if spilled.num_bytes else _empty(spilled)

    def close(self) -> None:
        """Forgets everything and deletes the file."""
        self._held.clear()
        self._spilled.clear()
        self.num_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _spill(self, name: str, tensor: torch.Tensor) -> None:
        self.spilled_bytes += tensor.nbytes
        host, offset = None, 0
        if tensor.device.type == "cpu":
            if self._file is None:
                # Open as long as the session; `close` deletes it.
                self._file = tempfile.TemporaryFile(prefix="weightsync-held-")  # noqa: SIM115
            offset = self._file.seek(0, 2)
            self._file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            host = tensor.detach().to("cpu")
        self._spilled[name] = _Spilled(tuple(tensor.shape), tensor.dtype, tensor.device, host, offset, tensor.nbytes)


def _empty(spilled: _Spilled) -> torch.Tensor:
    return torch.empty(spilled.shape, dtype=spilled.dtype, device=spilled.device)
