"""The address audit: every tensor that a captured graph may hold is where it was, laid out as it was.

before = LiveTensors(model)
...
report = before.audit(model)         # LayoutError with every path that moved, vanished or changed its layout
report.added
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from weightsync.errors import LayoutError, shown
from weightsync.reachable import Slot, walk


@dataclass(frozen=True, slots=True)
class LiveSlot:
    """One place that held a tensor when the session started.

    Attributes:
        slot: The place and the tensor object.
        alias: The same bytes through another tensor object, which keeps pointing at them if the object's `.data` moves.
    """

    slot: Slot
    alias: torch.Tensor

    def problem(self, now: torch.Tensor | None) -> str:
        """What is wrong with the tensor that is at this place now; "" if nothing."""
        if now is None:
            return "vanished"
        was = self.alias
        if now.dtype != was.dtype:
            return f"dtype {was.dtype} -> {now.dtype}"
        if now.shape != was.shape:
            return f"shape {tuple(was.shape)} -> {tuple(now.shape)}"
        if was.layout != torch.strided:
            return "" if now is self.slot.tensor else f"{was.layout} tensor replaced"
        if now.device != was.device or address(now) != address(was):
            return f"address {where(was)} -> {where(now)}"
        if now.stride() != was.stride():
            return f"stride {was.stride()} -> {now.stride()}"
        return ""


class LiveTensors:
    """Every tensor of a model at one moment, by path; keeps their bytes alive.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_path = {slot.path: LiveSlot(slot, _alias(slot.tensor)) for slot in walk(model)}
        self.by_module: dict[str, dict[str, LiveSlot]] = {}
        for path, live in self.by_path.items():
            self.by_module.setdefault(live.slot.module, {})[path] = live

    def of_modules(self, paths: Iterable[str]) -> dict[str, LiveSlot]:
        """The places of these modules alone."""
        return {path: live for module in paths for path, live in self.by_module.get(module, {}).items()}

    def audit(self, model: torch.nn.Module) -> list[str]:
        """Compares with the model as it is now.

        Returns:
            Paths that hold a tensor now and held none before.

        Raises:
            LayoutError: A tensor moved, vanished, or changed its dtype, shape or stride. Every path is in `names`.
        """
        now = {slot.path: slot.tensor for slot in walk(model)}
        problems = dict(self._problems(now))
        if problems:
            lines = [f"{path}: {problem}" for path, problem in problems.items()]
            raise LayoutError(
                f"{len(problems)} tensors are not where they were before the reload, so a captured graph would read "
                f"stale or freed memory: {shown(lines)}",
                names=list(problems),
            )
        return [path for path in now if path not in self.by_path]

    def _problems(self, now: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
        for path, live in self.by_path.items():
            problem = live.problem(now.get(path))
            if problem:
                yield path, problem


def address(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Storage address, storage bytes and storage offset; zeros for a tensor without storage."""
    if tensor.is_meta:
        return 0, 0, 0
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), int(tensor.storage_offset())


def where(tensor: torch.Tensor) -> str:
    """Device, address and offset for a message."""
    pointer, _, offset = address(tensor)
    return f"{tensor.device}:{pointer:#x}+{offset}"


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor.data
