"""What a post-load hook did: which tensors it read and wrote, and which attributes it set.

A hook's effect on an attribute can't be told from its value alone: a scale that is 1.0 before and after may have been
computed again, or never touched. So both are watched while hooks run:

    with TensorLog(live, staged, before_live_write) as log, assignments(holders) as assigned:
        hook()
    log.written_live, log.written_staged, assigned[id(module)]

Writes are seen through torch's dispatcher; a kernel launched past it (a raw Triton launch) is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.reload.records import byte_range

_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "set_"}


Index = dict[int, list[tuple[int, int, str, torch.Tensor]]]


def index_of(tensors: Mapping[str, torch.Tensor]) -> Index:
    """Tensors by storage, to be found again through any view; built once and watched many times."""
    index: Index = {}
    for path, tensor in tensors.items():
        if tensor.layout == torch.strided and tensor.numel():
            index.setdefault(tensor.untyped_storage()._cdata, []).append((*byte_range(tensor), path, tensor))
    return index


class TensorLog(TorchDispatchMode):
    """Notes reads and writes of live and of staged tensors, whatever view they go through.

    Args:
        live: Live tensors.
        staged: Staged tensors.
        before_live_write: Called with path and tensor before the first write to a live tensor.

    Attributes:
        written_live: Paths of live tensors that were written in place.
        written_staged: Paths of staged tensors that were written in place.
        read: Paths of live tensors whose bytes were read.
        operators: Names of all operators that ran, views left out.
        read_then_written: Live tensors whose old bytes went into the computation before they were overwritten.
    """

    def __init__(self, live: Index, staged: Index, before_live_write: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._live = live
        self._staged = staged
        self._before_live_write = before_live_write
        self.read: set[str] = set()
        self.operators: list[str] = []
        self.written_live: set[str] = set()
        self.written_staged: set[str] = set()
        self.read_then_written: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, seconds on the first reload, to guard against tracing."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            self.operators.append(str(func))
            reads, writes = _classify(func, args, kwargs)
            for tensor in reads:
                self.read.update(path for path, _ in _hit(self._live, tensor))
            for tensor in writes:
                self.written_staged.update(path for path, _ in _hit(self._staged, tensor))
                for path, watched in _hit(self._live, tensor):
                    if path not in self.written_live:
                        self._before_live_write(path, watched)
                        self.written_live.add(path)
                        self.read_then_written.update({path} & self.read)
        return func(*args, **kwargs)


_hooks_lock = threading.RLock()  # classes are shared by all models


@contextmanager
def assignments(holders: Iterable[Any]) -> Iterator[dict[int, set[str]]]:
    """Names that are assigned on each holder inside the block, by `id` of the holder.

    The holders' classes get a `__setattr__` that notes the name, and lose it again; one block at a time in a process. A
    class that cannot be changed (a C type, a metaclass that forbids it) is left out; attributes of its objects are
    compared by identity alone.
    """
    assigned: dict[int, set[str]] = {}
    changed: list[tuple[type, Any]] = []
    with _hooks_lock:
        try:
            for holder in holders:
                cls = type(holder)
                if all(cls is not other for other, _ in changed):
                    own = vars(cls).get("__setattr__")
                    try:
                        cls.__setattr__ = _noting(cls, own, assigned)  # type: ignore[assignment]
                    except (TypeError, AttributeError):
                        continue
                    changed.append((cls, own))
                assigned.setdefault(id(holder), set())
            yield assigned
        finally:
            for cls, own in reversed(changed):
                if own is None:
                    del cls.__setattr__
                else:
                    cls.__setattr__ = own


def _noting(cls: type, own: Any, assigned: dict[int, set[str]]) -> Callable[[Any, str, Any], None]:
    def note(self: Any, name: str, value: Any) -> None:
        if id(self) in assigned:
            assigned[id(self)].add(name)
        if own is not None:
            own(self, name, value)
        else:
            super(cls, self).__setattr__(name, value)  # type: ignore[arg-type]  # mypy: not a class

    return note


def _classify(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensor arguments that an operator reads, and those that it writes."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    overwrites = func._schema.name.rpartition("::")[2] in _OVERWRITES
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = value if isinstance(value, (list, tuple)) else (value,)
        found = [item for item in tensors if isinstance(item, torch.Tensor)]
        if not found:
            continue
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            writes.extend(found)
        if not is_written or not (overwrites or argument.kwarg_only):
            reads.extend(found)
    return reads, writes


def _hit(index: Index, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Watched tensors that share bytes with a tensor."""
    if not index or tensor.layout != torch.strided or not tensor.numel():
        return []
    entries = index.get(tensor.untyped_storage()._cdata)
    if not entries:
        return []
    start, end = byte_range(tensor)
    return [(path, watched) for first, last, path, watched in entries if first < end and start < last]
