"""Torch calls that reach no operator, so that a dispatch mode alone would miss them.

    target.data = x          another storage under a live tensor
    target[index] = x        broadcasts x before any operator sees it
    x.to(device), x.cuda()   a source has no device yet: it stays what it is
    x.numpy(), x.tolist()    leave torch: the loader depends on values

`FunctionMode` also notes which source a loader looked at last, for the blame if it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weightsync.plan.dry_run import DispatchMode
from weightsync.plan.ledger import Ledger


class FunctionMode(TorchFunctionMode):
    """Notes which source a loader looks at, and handles the calls that no dispatch mode sees."""

    def __init__(self, ledger: Ledger, dispatch: DispatchMode) -> None:
        super().__init__()
        self.ledger = ledger
        self.dispatch = dispatch

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:  # sources are on meta
            name = self.ledger.name_of(first)
            if name is not None:
                if name != self.ledger.current:
                    self.ledger.begin(name)
                self.ledger.touched.add(name)
        special = _SPECIAL_CALLS.get(func)
        if special is not None:
            return special(self, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_derived(self, tensor: torch.Tensor) -> bool:
        holding = self.ledger.of(tensor)
        return holding is not None and not holding.destinations and bool(holding.names)

    def _set_data(self, func: Any, target: torch.Tensor, value: torch.Tensor) -> None:
        holding = self.ledger.of(target)
        if holding is not None and holding.destinations:
            self.ledger.rebind(target, value)
        elif self._is_derived(value) and not target.is_meta:
            names, live = self.ledger.read(value)
            self.ledger.claim(target, names, live)
            self.ledger.mark(target, names, live)
        else:
            func(target, value)

    def _setitem(self, func: Any, target: torch.Tensor, index: Any, value: Any) -> None:
        self.dispatch.setitem_numel = value.numel() if isinstance(value, torch.Tensor) else None
        try:
            func(target, index, value)
        finally:
            self.dispatch.setitem_numel = None

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`tensor.to(...)` without the device, which a source does not have yet."""
        if not (tensor.is_meta and self._is_derived(tensor)):
            return func(tensor, *args, **kwargs)
        given = [*args, kwargs.get("dtype"), kwargs.get("other")]
        dtypes = [item.dtype if isinstance(item, torch.Tensor) else item for item in given]
        dtype = next((item for item in dtypes if isinstance(item, torch.dtype)), tensor.dtype)
        return func(tensor, dtype=dtype, memory_format=kwargs.get("memory_format", torch.preserve_format))

    def _move(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta and self._is_derived(tensor) else func(tensor, *args, **kwargs)

    def _leave_torch(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """NumPy arrays and lists: a placeholder for a source, a copy of live bytes."""
        names, live = self.ledger.read(tensor)
        self.ledger.looked_at(live)
        what = func.__name__.strip("_")
        if names or tensor.is_meta:
            self.ledger.needs_values(names, f"its loader depends on values ({what})")
            return func(torch.full(tensor.shape, self.ledger.placeholder, dtype=tensor.dtype), *args, **kwargs)
        holding = self.ledger.of(tensor)
        if holding is not None and holding.destinations and what != "tolist":
            self.ledger.needs_values((), "its loader hands a live tensor to NumPy, where writes can't be seen")
            return func(tensor.clone(), *args, **kwargs)
        return func(tensor, *args, **kwargs)

    def _address(self, func: Any, tensor: torch.Tensor) -> int:
        if self._is_derived(tensor):
            self.ledger.needs_values(self.ledger.read(tensor)[0], "its loader takes its address")
        return int(func(tensor))


_SPECIAL_CALLS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__set__: FunctionMode._set_data,  # type: ignore[attr-defined]
    torch.Tensor.__setitem__: FunctionMode._setitem,
    torch.Tensor.to: FunctionMode._to,
    torch.Tensor.cpu: FunctionMode._move,
    torch.Tensor.cuda: FunctionMode._move,
    torch.Tensor.pin_memory: FunctionMode._move,
    torch.Tensor.numpy: FunctionMode._leave_torch,
    torch.Tensor.__array__: FunctionMode._leave_torch,
    torch.Tensor.tolist: FunctionMode._leave_torch,
    torch.Tensor.data_ptr: FunctionMode._address,
}
