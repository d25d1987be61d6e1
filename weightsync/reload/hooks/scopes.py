"""A model's Python side as values: the dicts, lists, closures and objects that hold its tensors, flags and helpers.

One `Scope` is one holder's names and what stood under each when it was recorded. A tensor is recorded as its layout,
a list, dict or tuple as its items, so that a record keeps no tensor alive; anything else as the object itself.

    scopes = record(model, layouts)      # module -> its scopes: parameters, buffers, attributes, then what hangs on it
    scopes[module][2].values["scale"]

`swap.py` puts recorded values in place of the live ones and takes them out again.
"""

from __future__ import annotations

import collections
import copy
import enum
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from weightsync import reachable
from weightsync.reload.records import TensorLayout

Registry = Literal["parameters", "buffers", "modules", "attributes", "cells", "call", "items"]

ABSENT: Any = object()
# Stands for "whatever is live": a value that no swap touches.
LIVE: Any = object()
# What torch itself keeps in every module, and what a session puts there.
_NOT_RECORDED = frozenset(vars(torch.nn.Module())) | {"_weightsync_state", "process_weights_after_loading"}
_HOOK = "process_weights_after_loading"
_MAX_DEPTH = 100
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
MUTABLE = (dict, list, set, collections.deque)


@dataclass(frozen=True, slots=True)
class Container:
    """A list, tuple, dict or set as it was: its type, and its items (for a dict its values) as recorded values.

    Attributes:
        cls: Its type.
        keys: For a dict, its keys.
        items: Its items, or values.
        empty: An empty one with the same default factory, bound and so on; None for a tuple.
    """

    cls: type
    keys: tuple[Any, ...] | None
    items: tuple[Any, ...]
    empty: Any = None

    @property
    def is_mutable(self) -> bool:
        """Whether its items can be changed in place."""
        return self.empty is not None

    def labelled(self) -> dict[Any, Any]:
        """Its items by the keys that a `Scope` over such a container has."""
        if self.keys is not None:
            return dict(zip(self.keys, self.items, strict=True))
        return (
            dict(zip(self.items, self.items, strict=True)) if issubclass(self.cls, set) else dict(enumerate(self.items))
        )

    def build(self, items: list[Any]) -> Any:
        """Such a container with other items."""
        if self.empty is None:
            return self.cls._make(items) if hasattr(self.cls, "_make") else self.cls(items)
        made = copy.copy(self.empty)
        _fill(made, dict(zip(self.labelled(), items, strict=True)))
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """The names of one holder.

    Attributes:
        holder: A module, helper object, function, `functools.partial`, dict, list, set or deque.
        registry: Which of its names: a module's registries or attributes, a function's closure cells, what a function
            or partial is called with, or the items of a container.
        path: Path of the holder.
        values: Recorded value of each name: a `TensorLayout`, a `Container`, or the object itself.
        is_partial: Whether it says nothing of other names, which stay live; else they were not there.
        filled: Names that hooks fill with something that leads to tensors.
    """

    holder: Any
    registry: Registry
    path: str
    values: Mapping[Any, Any]
    is_partial: bool = False
    filled: set[Any] = field(default_factory=set)

    def read(self) -> dict[Any, Any]:
        """A copy of what each name holds now."""
        return _read(self.holder, self.registry)

    def write(self, values: Mapping[Any, Any]) -> None:
        """Makes the holder have exactly these names and values; those that are there already are not touched."""
        now = self.read()
        if list(now) == list(values) and all(now[name] is value for name, value in values.items()):
            return
        _write(self.holder, self.registry, now, values)

    def path_of(self, name: Any) -> str:
        """Path of one name, as `walk` gives it."""
        if self.registry == "items":
            return f"{self.path}[{name!r}]"
        label = f"<{name}>" if self.registry == "cells" else name
        return f"{self.path}.{label}" if self.path else str(label)

    def key_of(self, name: Any) -> str:
        """Path by which it is remembered whose a name is: items of a container go together."""
        return self.path if self.registry == "items" else self.path_of(name)


def scope_of(holder: Any, registry: Registry, path: str, layouts: Mapping[int, TensorLayout]) -> Scope:
    """Records one holder's names as they are now.

    Args:
        holder: The holder.
        registry: Which of its names.
        path: Path of the holder.
        layouts: Layout of every tensor in it, by `id`.
    """
    return Scope(holder, registry, path, {k: _record(v, layouts, ()) for k, v in _read(holder, registry).items()})


def scopes_on(holder: Any, path: str, layouts: Mapping[int, TensorLayout]) -> Iterator[Scope]:
    """Records all that hangs on one holder that a walk found: a module, helper object, function or partial.

    Containers are part of the values of whatever holds them.
    """
    if isinstance(holder, torch.nn.Module):
        for registry in _MODULE_REGISTRIES:
            yield scope_of(holder, registry, path, layouts)
    elif isinstance(holder, types.FunctionType):
        for registry in _FUNCTION_REGISTRIES:
            scope = scope_of(holder, registry, path, layouts)
            if scope.values or registry == "attributes":  # attributes may come up later, the rest may not
                yield scope
    elif isinstance(holder, functools.partial):
        yield scope_of(holder, "call", path, layouts)
        yield scope_of(holder, "attributes", path, layouts)
    elif not isinstance(holder, (torch.Tensor, types.MethodType, *reachable.CONTAINERS)) and (
        hasattr(holder, "__dict__") or reachable.attributes_of(holder)
    ):
        yield scope_of(holder, "attributes", path, layouts)


def tensors_in(value: Any, now: Any) -> Iterator[tuple[str, TensorLayout, Any]]:
    """Recorded tensors within a value that is a tensor or a tuple: how the path goes on, the layout, what is there."""
    if isinstance(value, TensorLayout):
        yield "", value, now
    elif isinstance(value, Container):
        for label, item, there in zip(_labels(value), value.items, matching(value, now), strict=True):
            for rest, layout, tensor in tensors_in(item, there):
                yield label + rest, layout, tensor


def only(scope: Scope, names: Collection[Any]) -> Scope:
    """A scope over some of its names."""
    return replace(scope, values={name: scope.values[name] for name in names}, is_partial=True)


def only_tensors(scope: Scope) -> Scope:
    """A scope over those of its names that lead, or led, to tensors; plain values beside them stay live."""
    values = {n: value if n in scope.filled else _stripped(value) for n, value in scope.values.items()}
    return replace(scope, values={n: value for n, value in values.items() if value is not LIVE}, is_partial=True)


def _stripped(value: Any) -> Any:
    if isinstance(value, TensorLayout):
        return value
    if isinstance(value, Container):
        items = tuple(_stripped(item) for item in value.items)
        if any(item is not LIVE for item in items):
            return replace(value, items=items)
    return LIVE


def in_place(value: Any, there: Any, path: str) -> tuple[Any, list[tuple[Any, Container, str]]]:
    """Takes those containers out of a recorded value that can be refilled in place.

    Args:
        value: Recorded value.
        there: What is at its place.
        path: Its path.

    Returns:
        The value with `LIVE` in their place, and of each the live container, what it was, and its path.
    """
    if not isinstance(value, Container) or type(there) is not value.cls:
        return value, []
    if value.is_mutable:
        return LIVE, [(there, value, path)]
    others: tuple[Any, ...] = tuple(there)  # type: ignore[arg-type]  # of the recorded container's type
    if len(others) != len(value.items):
        return value, []
    parts: list[tuple[Any, list[tuple[Any, Container, str]]]] = [
        in_place(item, other, f"{path}[{index}]")
        for index, (item, other) in enumerate(zip(value.items, others, strict=True))
    ]
    found = [entry for _, entries in parts for entry in entries]
    return (replace(value, items=tuple(item for item, _ in parts)) if found else value), found


def is_outer(scope: Scope) -> bool:
    """Whether only code leads to a holder: closures, default arguments, what a partial is called with.

    Others may hold such state too: a log that a test or a profiler reads.
    """
    is_code = isinstance(scope.holder, (types.FunctionType, functools.partial))
    return is_code or any(mark in scope.path for mark in (".<", ".args[", ".keywords[", "defaults__["))


def matching(value: Container, live: Any) -> list[Any]:
    """The live items at the places of the recorded items; ABSENT where there is none."""
    if value.keys is not None:
        return [live.get(key, ABSENT) if isinstance(live, dict) else ABSENT for key in value.keys]
    items = list(live) if isinstance(live, (*MUTABLE, tuple)) and type(live) is value.cls else []
    return [items[index] if index < len(items) else ABSENT for index in range(len(value.items))]


def is_plain(value: Any) -> bool:
    """Whether it is a value without parts, or nothing at all."""
    if isinstance(value, frozenset):
        return all(is_plain(item) for item in value)
    return value is ABSENT or isinstance(value, (*PLAIN, enum.Enum, type))


def is_single(value: Any) -> bool:
    """Whether it is plain, or an object or function: what is shown as a whole, or not at all."""
    return is_plain(value) or not isinstance(
        value, (torch.Tensor, torch.nn.Module, TensorLayout, Container, tuple, *MUTABLE)
    )


def has_tensors(value: Any) -> bool:
    """Whether a tensor hangs on a value, recorded or live."""
    stack, seen = [value], set()
    while stack:
        node = stack.pop()
        if isinstance(node, (torch.Tensor, TensorLayout)):
            return True
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Container):
            stack += node.items
        elif reachable.is_reachable(node):
            stack += (child for _, child in reachable.children_of(node))
    return False


def with_containers(scopes: Iterable[Scope]) -> Iterator[Scope]:
    """The scopes, and one for each recorded container that is still there."""
    pending = list(scopes)[::-1]
    while pending:
        scope = pending.pop()
        yield scope
        now = scope.read() if any(isinstance(value, Container) for value in scope.values.values()) else {}
        for name in now.keys() & scope.values.keys():
            _, parts = in_place(scope.values[name], now[name], scope.path_of(name))
            pending.extend(Scope(holder, "items", path, part.labelled()) for holder, part, path in parts)


def is_counter(value: Any) -> bool:
    """A number, or a list of plain values, recorded or live: what an engine may count in, too."""
    if isinstance(value, Container):
        return value.cls is list and all(isinstance(item, PLAIN) for item in value.items)
    if isinstance(value, list):
        return all(isinstance(item, PLAIN) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_queue(recorded: Container, live: Any) -> bool:
    """Whether items were taken out of a list since: what hooks are fed with is no state of theirs."""
    return not isinstance(live, (dict, set)) and len(live) < len(recorded.items)


def same_counter(value: Any, live: Any) -> bool:
    """Whether a counter is as recorded."""
    return list(value.items) == live if isinstance(value, Container) else same_plain(value, live)


def same_plain(left: Any, right: Any) -> bool:
    """Whether two values are one object, or equal plain values of one type."""
    if left is ABSENT or right is ABSENT:
        return left is right
    return left is right or (is_plain(left) and type(left) is type(right) and left == right)


_MODULE_REGISTRIES: tuple[Registry, ...] = ("parameters", "buffers", "attributes")
_FUNCTION_REGISTRIES: tuple[Registry, ...] = ("cells", "call", "attributes")
_CALL_NAMES = {functools.partial: ("func", "args", "keywords"), types.FunctionType: ("__defaults__", "__kwdefaults__")}


def _read(holder: Any, registry: Registry) -> dict[Any, Any]:
    if registry in ("parameters", "buffers", "modules"):
        return dict(getattr(holder, f"_{registry}"))
    if registry == "cells":
        return {name: cell.cell_contents for name, cell in reachable.cells_of(holder) if reachable.is_set(cell)}
    if registry == "call":
        names = _CALL_NAMES[types.FunctionType if isinstance(holder, types.FunctionType) else functools.partial]
        return {name: getattr(holder, name) for name in names}
    if registry == "items":
        if isinstance(holder, dict):
            return dict(holder)
        return {item: item for item in holder} if isinstance(holder, set) else dict(enumerate(holder))
    attributes = reachable.attributes_of(holder)
    if isinstance(holder, torch.nn.Module):
        return {name: value for name, value in attributes.items() if name not in _NOT_RECORDED}
    return {name: value for name, value in attributes.items() if name != _HOOK}


def _write(holder: Any, registry: Registry, now: Mapping[Any, Any], values: Mapping[Any, Any]) -> None:
    if registry in ("parameters", "buffers", "modules"):
        table = getattr(holder, f"_{registry}")
        table.clear()
        table.update(values)
    elif registry == "cells":
        cells = dict(reachable.cells_of(holder))
        for name, value in values.items():
            if now.get(name, ABSENT) is not value:
                cells[name].cell_contents = value
        for name in now.keys() - values.keys():
            del cells[name].cell_contents
    elif registry == "call" and isinstance(holder, functools.partial):
        holder.__setstate__((*(values[name] for name in _CALL_NAMES[functools.partial]), vars(holder)))  # type: ignore[attr-defined]
    elif registry == "items":
        _fill(holder, values)
    else:
        for name in now.keys() - values.keys():
            object.__delattr__(holder, name)
        for name, value in values.items():
            if now.get(name, ABSENT) is not value:
                object.__setattr__(holder, name, value)


def _fill(holder: Any, values: Mapping[Any, Any]) -> None:
    """Makes a container hold these items, past what a subclass does on its own account."""
    if isinstance(holder, dict):
        base = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
        base.clear(holder)
        base.update(holder, values)
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, values)
    elif isinstance(holder, list):
        list.__setitem__(holder, slice(None), list(values.values()))
    else:
        holder.clear()
        holder.extend(values.values())


def _record(value: Any, layouts: Mapping[int, TensorLayout], above: tuple[int, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        return layouts[id(value)]
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make"))
    is_kept = id(value) in above or len(above) > _MAX_DEPTH  # one that holds itself is kept as it is
    if is_kept or not (is_tuple or isinstance(value, MUTABLE)):
        return value
    if isinstance(value, set) and any(isinstance(item, torch.Tensor) for item in value):
        return value
    items = value.values() if isinstance(value, dict) else value
    keys = tuple(value) if isinstance(value, dict) else None
    recorded = tuple(_record(item, layouts, (*above, id(value))) for item in items)
    return Container(type(value), keys, recorded, None if is_tuple else _emptied(value))


def _emptied(container: Any) -> Any:
    """An empty container of the same class with the same attributes."""
    try:
        empty = copy.copy(container)
    except Exception:  # a class that refuses to be filled, say
        cls: Any = type(container)
        empty = cls.__new__(cls)
        if hasattr(empty, "__dict__"):
            vars(empty).update(vars(container))
    _fill(empty, {})
    return empty


def _labels(value: Container) -> list[str]:
    return [f"[{key!r}]" for key in (range(len(value.items)) if value.keys is None else value.keys)]
