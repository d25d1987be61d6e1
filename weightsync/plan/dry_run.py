"""The torch mode under which a loader runs without moving a byte.

Sources are meta tensors. Views of anything are made for real, since they cost nothing and change nothing. A `copy_`
from an untouched source into a live tensor is noted and not executed; anything computed from a source is computed on
meta, and its result remembers the names. Loaders' own constants and live tensors that no name has written are computed
for real, so that a loader's branches on them (expert maps, ranks) go the way that they go in a real load.

    dispatch = DispatchMode(ledger)
    with dispatch, FunctionMode(ledger, dispatch):       # calls.py: what never becomes an operator
        model.load_weights(sources)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.errors import LayoutError
from weightsync.plan.ledger import NO_LIVE, NO_NAMES, Ledger, Names, squeezed
from weightsync.plan.operators import Operator, describe, map_tensors, tensors_in
from weightsync.plan.regions import Region
from weightsync.plan.tally import repeats_itself

_META = torch.device("meta")


class DispatchMode(TorchDispatchMode):
    """Notes writes instead of executing them; see the module docstring."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.setitem_numel: int | None = None  # elements of the value in a running `target[index] = value`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from wrapping each call in a guard against tracing: 20 us each, and it imports the compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = describe(func)
        if operator.is_view:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            special = _SPECIAL_OPERATORS.get(operator.name)
            if special is not None:
                return special(self, func, operator, args, kwargs)
            return self._run(func, operator, args, kwargs)

    # --- any operator

    def _run(self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self.ledger
        arguments = operator.bind(args, kwargs)
        written = list(tensors_in(arguments[name] for name in operator.mutates if name in arguments))
        inputs = list(tensors_in(arguments.values()))
        if operator.is_overwrite:
            inputs = [tensor for tensor in inputs if not any(tensor is target for target in written)]
        names, live = NO_NAMES, NO_LIVE
        for tensor in inputs:
            more_names, more_live = ledger.read(tensor)
            names, live = names | more_names, live | more_live
        on_meta = bool(names) or any(tensor.is_meta for tensor in inputs)
        if operator.is_like:
            live = NO_LIVE
            if not on_meta:
                return func(*args, **kwargs)
        if operator.reads_value:
            return self._read_value(func, operator, args, kwargs, names, live)
        if written:
            return self._write_in_place(func, operator, args, kwargs, written, names, live)
        out = self._on_meta(func, operator, args, kwargs, names) if on_meta else func(*args, **kwargs)
        for tensor in tensors_in([out]):
            if not any(tensor is given for given in inputs):
                ledger.mark(tensor, names, live)
        return out

    def _write_in_place(
        self,
        func: Any,
        operator: Operator,
        args: Any,
        kwargs: Any,
        written: list[torch.Tensor],
        names: Names,
        live: Any,
    ) -> Any:
        """An in-place or `out=` operator: executed only if it touches neither sources nor live tensors."""
        ledger = self.ledger
        known = [holding for holding in map(ledger.of, written) if holding is not None]
        if not names and not any(holding.destinations or holding.names for holding in known):
            out = func(*args, **kwargs)
            for target in written:
                ledger.mark(target, names, live)
            return out
        out = self._on_meta(func, operator, args, kwargs, names)  # raises where shapes don't fit, as a real load would
        for target in written:
            holding = ledger.of(target)
            ledger.claim(target, names, live)
            if holding is None or not holding.destinations:
                ledger.mark(target, names or NO_NAMES, live)
                if holding is not None:
                    holding.source = None
        arguments = operator.bind(args, kwargs)
        outs = [
            arguments[name] if name is not None else value
            for name, value in zip(operator.returns, out if isinstance(out, (list, tuple)) else [out], strict=False)
        ]
        return outs[0] if len(operator.returns) == 1 else (tuple(outs) if outs else None)

    def _on_meta(self, func: Any, operator: Operator, args: Any, kwargs: Any, names: Names) -> Any:
        """Runs an operator for its result's shape. Where that depends on values, placeholders stand in for them."""
        meta_kwargs = {key: map_tensors(value, _as_meta) for key, value in kwargs.items() if key != "pin_memory"}
        if meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = _META
        try:
            return func(*(map_tensors(value, _as_meta) for value in args), **meta_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not isinstance(error, NotImplementedError) and "meta tensors" not in str(error):
                raise
        return self._on_placeholders(func, operator, args, kwargs, names)

    def _on_placeholders(self, func: Any, operator: Operator, args: Any, kwargs: Any, names: Names) -> Any:
        if not names and self.ledger.current is None:
            raise LayoutError("load_weights looks at a staged tensor's value outside of any weight; it has none yet")
        self.ledger.needs_values(names, f"its loader depends on values ({operator.name.strip('_')})")
        fill = self.ledger.placeholder

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            known = not tensor.is_meta and not self.ledger.read(tensor)[0]
            return tensor.cpu() if known else torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu")

        kwargs = {key: torch.device("cpu") if key == "device" else map_tensors(kwargs[key], stand_in) for key in kwargs}
        return map_tensors(func(*(map_tensors(value, stand_in) for value in args), **kwargs), _as_meta)

    def _read_value(
        self, func: Any, operator: Operator, args: Any, kwargs: Any, names: Names, live: frozenset[int]
    ) -> Any:
        """An operator whose result the loader can branch on: a placeholder if the value isn't known yet."""
        inputs = list(tensors_in(operator.bind(args, kwargs).values()))
        self.ledger.looked_at(live)
        if names or any(tensor.is_meta for tensor in inputs):
            return self._on_placeholders(func, operator, args, kwargs, names)
        return func(*args, **kwargs)

    # --- copies

    def _copy_(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        target, source = args[0], args[1]
        if not self._noted(target, source):
            return func(*args, **kwargs)
        return target

    def _foreach_copy_(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> None:
        for target, source in zip(args[0], args[1], strict=True):
            if not self._noted(target, source):
                target.copy_(source)

    def _noted(self, target: torch.Tensor, source: torch.Tensor, given: int | None = None) -> bool:
        """Notes `target.copy_(source)`; False if neither matters and it has to be executed.

        Args:
            target: What is written.
            source: What is read, already expanded if it came from an indexed assignment.
            given: Elements that the loader gave before that expansion; None if there was none.
        """
        ledger = self.ledger
        to, origin = ledger.of(target), ledger.of(source)
        if (to is None or not to.destinations) and (origin is None or not ledger.read(source)[0]):
            if to is None or not to.names:
                ledger.mark(target, *ledger.read(source))
                return False
            to.source = None  # the loader overwrites its own copy of a source
            return True
        names, live = ledger.read(source)
        wire_bytes = None
        if given is None:
            given = source.numel() if self.setitem_numel is None else self.setitem_numel
        from_load = bool(names) and (origin is None or not origin.destinations)
        region = Region.of(target)
        if not target.is_contiguous() and repeats_itself(region):
            ledger.refuse_copy(names, target, source, "several elements of the target share a byte")
        elif not _fits(source, target):
            ledger.refuse_copy(names, target, source, "shape mismatch")
        elif from_load and given != target.numel():
            ledger.refuse_copy(names, target, source, f"silent broadcast of {given} to {target.numel()} elements")
        elif from_load and source.dtype != target.dtype and not ledger.allow_casts:
            ledger.refuse_copy(names, target, source, "implicit cast (pass casts='allow' to accept it)")
        elif origin is not None and origin.source is not None and source.dtype == target.dtype:
            wire_bytes = squeezed(Region.of(source))
        ledger.claim(target, names, live, wire_bytes, squeezed(region))
        if to is None or not to.destinations:
            ledger.mark(target, names, live)
        return True

    def _to_copy(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        """A move to another device keeps a source what it is; a change of dtype does not."""
        source = args[0]
        holding = self.ledger.of(source)
        if holding is None or not holding.names:
            return self._run(func, operator, args, kwargs)
        if kwargs.get("dtype") in (None, source.dtype) and kwargs.get("layout") in (None, source.layout):
            # On the model's device, where weights arrive, `to` returns the tensor itself unless told to reorder it.
            reorders = kwargs.get("memory_format") not in (None, torch.preserve_format)
            same = _cloned(source, kwargs) if reorders else source.detach()
            if same is not None:
                return same
        return self._run(func, operator, args, {**kwargs, "device": _META})

    def _clone(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        """A clone in the same order is the same bytes; another order counts as computed."""
        source = args[0]
        holding = self.ledger.of(source)
        same = _cloned(source, kwargs) if holding is not None and holding.source is not None else None
        return self._run(func, operator, args, kwargs) if same is None else same

    def _pin_memory(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        return args[0].detach() if args[0].is_meta else self._run(func, operator, args, kwargs)

    # --- scattered rows

    def _index_put_(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        bound = operator.bind(args, kwargs)
        indices = [(dim, index) for dim, index in enumerate(bound["indices"]) if index is not None]
        if len(indices) == 1 and not bound.get("accumulate"):
            dim, index = indices[0]
            if self._rows_noted(bound["self"], dim, index, bound["values"]):
                return bound["self"]
        return self._scatter(func, operator, args, kwargs, [index for _, index in indices])

    def _index_copy_(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        bound = operator.bind(args, kwargs)
        if self._rows_noted(bound["self"], bound["dim"], bound["index"], bound["source"]):
            return bound["self"]
        return self._scatter(func, operator, args, kwargs, [bound["index"]])

    def _scatter(self, func: Any, operator: Operator, args: Any, kwargs: Any, indices: list[torch.Tensor]) -> Any:
        for index in indices:
            names, live = self.ledger.read(index)
            self.ledger.looked_at(live)
            if names:
                self.ledger.needs_values(names, "where it is written depends on values")
        return self._run(func, operator, args, kwargs)

    def _rows_noted(self, target: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor) -> bool:
        """`target[index] = values` along one dim with an index that is known now, as one copy per run of rows."""
        holding = self.ledger.of(target)
        if holding is None or not holding.destinations or index.is_meta or index.dim() != 1:
            return False
        names, live = self.ledger.read(index)
        if names:
            return False
        self.ledger.looked_at(live)
        rows = (index.nonzero().flatten() if index.dtype == torch.bool else index).tolist()
        size = target.shape[dim]
        spread = values.expand(*target.shape[:dim], len(rows), *target.shape[dim + 1 :])
        for start, stop in _runs([row + size if row < 0 else row for row in rows]):
            piece = spread.narrow(dim, start, stop - start)
            given = values.numel() * piece.numel() // max(spread.numel(), 1)
            self._noted(target.narrow(dim, rows[start] % size, stop - start), piece, given)
        return True

    def _rebind_(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        target = args[0]
        holding = self.ledger.of(target)
        if holding is None or not holding.destinations:
            return self._run(func, operator, args, kwargs)
        source = next(iter(tensors_in(args[1:])), None)
        self.ledger.rebind(target, source)
        return target


_SPECIAL_OPERATORS: dict[str, Callable[..., Any]] = {
    "copy_": DispatchMode._copy_,
    "_foreach_copy_": DispatchMode._foreach_copy_,
    "_to_copy": DispatchMode._to_copy,
    "clone": DispatchMode._clone,
    "index_put_": DispatchMode._index_put_,
    "index_copy_": DispatchMode._index_copy_,
    "_pin_memory": DispatchMode._pin_memory,
    "set_": DispatchMode._rebind_,
    "resize_": DispatchMode._rebind_,
}


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _fits(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether torch would broadcast `source` to `target`."""
    if source.shape == target.shape:
        return True
    if source.dim() > target.dim():
        return False
    pairs = zip(reversed(source.shape), reversed(target.shape), strict=False)
    return all(have in (want, 1) for have, want in pairs)


def _cloned(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """An alias that looks like a clone with `memory_format`; None if that clone has its bytes in another order."""
    if kwargs.get("memory_format") in (None, torch.preserve_format):
        is_dense = Region.of(source).coalesced().shape == (source.numel() * source.dtype.itemsize,)
        return source.detach() if is_dense or source.is_contiguous() else None
    if not source.is_contiguous() or kwargs["memory_format"] != torch.contiguous_format:
        return None
    return source.as_strided(source.shape, torch.empty(source.shape, device=_META).stride())


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """Positions `[start, stop)` over which `rows` counts up by one."""
    cuts = [at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(rows)], strict=True)) if rows else []
