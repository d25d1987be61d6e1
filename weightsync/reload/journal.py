"""The rollback journal: old bytes of every live tensor, saved before their first overwrite.

journal = Journal("host")
journal.save(path, live)     # once per tensor, before it is written
journal.restore()            # the old bytes are back
"""

from __future__ import annotations

from typing import Literal

import torch

from weightsync.reload.records import span

Rollback = Literal["none", "host", "device"]


class Journal:
    """Old bytes by place.

    Args:
        where: "host" keeps them in host memory, "device" beside the tensors, "none" keeps nothing.

    Attributes:
        num_bytes: Bytes saved.
    """

    def __init__(self, where: Rollback) -> None:
        self.where = where
        self.num_bytes = 0
        self._saved: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is saved at all."""
        return self.where != "none"

    def save(self, tensor: torch.Tensor) -> None:
        """Saves a live tensor's bytes unless they are saved already."""
        if not self.is_on or not tensor.numel() or tensor.is_meta or tensor.layout != torch.strided:
            return
        live = span(tensor)
        key = (live.data_ptr(), live.numel(), live.device.index or 0)
        if key in self._saved:
            return
        self._saved[key] = (live, live.to("cpu", copy=True) if self.where == "host" else live.clone())
        self.num_bytes += live.numel()

    def restore(self) -> None:
        """Writes all saved bytes back, the last saved first, and forgets them."""
        for live, old in reversed(self._saved.values()):
            live.copy_(old)
        self.close()

    def close(self) -> None:
        """Forgets the saved bytes."""
        self._saved.clear()
