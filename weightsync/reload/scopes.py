"""A module's Python side as values that can be swapped: the dicts that hold its tensors, flags and helper objects.

A post-load hook must find the module as the first load's hook found it: raw parameters, latches such as `_done` not yet
set, caches not yet there. A `Swap` puts that world in place of the live one and takes it out again:

    swap = Swap(scopes_of_module)     # `start` holds the recorded values, tensors made anew
    swap.install();   ...load, run hooks...
    swap.uninstall()                  # the live values are back, the other world is kept for the next install
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weightsync import reachable
from weightsync.reload.records import TensorLayout, allocate

Registry = Literal["parameters", "buffers", "attributes"]

ABSENT: Any = object()
# What torch itself keeps in every module, and what a session puts there.
_NOT_RECORDED = frozenset(vars(torch.nn.Module())) | {"_weightsync_state", "process_weights_after_loading"}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


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

    def build(self, items: list[Any]) -> Any:
        """Such a container with other items."""
        if self.empty is None:
            return self.cls._make(items) if hasattr(self.cls, "_make") else self.cls(items)
        made = copy.copy(self.empty)
        if self.keys is not None:
            dict.update(made, zip(self.keys, items, strict=True))
        elif isinstance(made, set):
            set.update(made, items)
        elif isinstance(made, list):
            list.extend(made, items)
        else:
            made.extend(items)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """One dict of names that belongs to a module, or to a helper object that the module holds.

    Attributes:
        holder: The module or helper object.
        registry: Which of its dicts.
        path: Path of the holder.
        values: Recorded value of each name: a `TensorLayout`, a `Container`, or the object itself.
    """

    holder: Any
    registry: Registry
    path: str
    values: Mapping[str, Any]

    def read(self) -> dict[str, Any]:
        """A copy of the dict as it is now."""
        return _read(self.holder, self.registry)

    def write(self, values: Mapping[str, Any]) -> None:
        """Makes the dict hold exactly `values`; entries that are already there are not touched."""
        now = self.read()
        if list(now) == list(values) and all(now[name] is value for name, value in values.items()):
            return
        if self.registry != "attributes":
            registry = getattr(self.holder, f"_{self.registry}")
            registry.clear()
            registry.update(values)
            return
        for name in now.keys() - values.keys():
            object.__delattr__(self.holder, name)
        for name, value in values.items():
            if now.get(name, ABSENT) is not value:
                object.__setattr__(self.holder, name, value)

    def path_of(self, name: str) -> str:
        """Path of one name."""
        return f"{self.path}.{name}" if self.path else name


def scope_of(holder: Any, registry: Registry, path: str, layouts: Mapping[int, TensorLayout]) -> Scope:
    """Records one dict as it is now.

    Args:
        holder: The module or helper object.
        registry: Which of its dicts.
        path: Path of the holder.
        layouts: Layout of every tensor in it, by `id`.
    """
    return Scope(holder, registry, path, {k: _record(v, layouts, 0) for k, v in _read(holder, registry).items()})


def is_helper(value: Any) -> bool:
    """Whether a holder that `reachable` found is an engine's own object, with attributes that a hook may set."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, *reachable._CONTAINERS, *reachable._CALLABLES)):
        return False
    return hasattr(value, "__dict__") or bool(reachable._attributes(value))


class Swap:
    """Recorded values that can take the place of the live ones, and give it back.

    Tensors that are live as recorded stay, so that a hook reads their live bytes. Parameters are new, and so is any
    tensor that shares bytes with a new one. Names that were not recorded are absent while installed.

    Args:
        scopes: What to swap.
        placeholder: Keep even parameters that are live as recorded, and make the others on the meta device; nothing
            may be written while installed.
        new: Paths of further tensors that have to be new.
        counters: Names of numbers and lists of plain values to put back too. Others are left as they are: an engine
            may have set them since.

    Attributes:
        scopes: What to swap.
        kept_counters: Names of numbers and lists that were left and are not as recorded.
        live: What each scope held before.
        start: What each scope holds when first installed.
    """

    def __init__(
        self,
        scopes: list[Scope],
        *,
        placeholder: bool = False,
        new: Collection[str] = (),
        counters: Collection[str] = (),
    ) -> None:
        self.scopes = scopes
        self.kept_counters: set[str] = set()
        self._counters = counters
        self.live = [scope.read() for scope in scopes]
        self._placeholder = placeholder
        self._new_blocks = self._find_new_blocks(new)
        self._made: dict[int, torch.Tensor] = {}
        self._make()
        self.start = [
            {n: self._build(value, live.get(n, ABSENT), scope.path_of(n)) for n, value in scope.values.items()}
            for scope, live in zip(scopes, self.live, strict=True)
        ]
        self._other = self.start
        self._contents = {id(v): _contents(v) for values in self.start for v in values.values() if _is_container(v)}

    def install(self) -> None:
        """Puts the recorded values (or what `uninstall` took out) in place of the live ones."""
        self.live = [scope.read() for scope in self.scopes]
        for scope, values in zip(self.scopes, self._other, strict=True):
            scope.write(values)

    def uninstall(self) -> None:
        """Puts the live values back, and keeps what is there now for the next `install`."""
        self._other = [scope.read() for scope in self.scopes]
        for scope, values in zip(self.scopes, self.live, strict=True):
            scope.write(values)

    def is_changed(self, value: Any) -> bool:
        """Whether a container that this swap made or kept has other items than at first."""
        was = self._contents.get(id(value))
        return was is not None and not _same_items(was, _contents(value))

    def changed_holders(self) -> list[Any]:
        """Holders of attributes that are not as they were recorded."""
        return [
            scope.holder
            for scope, start, live in zip(self.scopes, self.start, self.live, strict=True)
            if scope.registry == "attributes" and any(live.get(k, ABSENT) is not v for k, v in start.items())
        ]

    def touched(self, assigned: Mapping[int, set[str]]) -> set[str]:
        """Paths of names that hold something else than what was installed, or that were assigned."""
        return {
            scope.path_of(name)
            for scope, start in zip(self.scopes, self.start, strict=True)
            for now in (scope.read(),)
            for name in {*now, *start}
            if now.get(name, ABSENT) is not (value := start.get(name, ABSENT))
            or name in assigned.get(id(scope.holder), ())
            or self.is_changed(value)
        }

    def kept(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        """Recorded tensors that are the live ones still, with what was recorded, by path."""
        return {
            scope.path_of(name): (recorded, values[name])
            for scope, values, live in zip(self.scopes, self.start, self.live, strict=True)
            for name, recorded in scope.values.items()
            if isinstance(recorded, TensorLayout) and values[name] is live.get(name, ABSENT)
        }

    def made(self) -> dict[str, torch.Tensor]:
        """Tensors that are not the live ones, by the path of the name that holds them."""
        return {
            scope.path_of(name): value
            for scope, values, live in zip(self.scopes, self.start, self.live, strict=True)
            for name, value in values.items()
            if isinstance(value, torch.Tensor) and value is not live.get(name, ABSENT)
        }

    def _entries(self) -> list[tuple[Scope, str, Any, Any]]:
        return [
            (scope, name, value, live.get(name, ABSENT))
            for scope, live in zip(self.scopes, self.live, strict=True)
            for name, value in scope.values.items()
        ]

    def _find_new_blocks(self, new: Collection[str]) -> set[int]:
        """Blocks that cannot be the live ones."""
        blocks = set()
        for scope, name, value, live in self._entries():
            forced = scope.path_of(name) in new or (scope.registry == "parameters" and not self._placeholder)
            for layout, tensor in _tensors(value, live):
                if forced or tensor is None or not layout.fits(tensor):
                    blocks.add(id(layout.block))
        return blocks

    def _make(self) -> None:
        """Makes the new tensors: where they were recorded, or on the device that the model moved to since."""
        wanted: list[tuple[TensorLayout, bool]] = []
        devices = [
            t.device for live in self.live for t in live.values() if isinstance(t, torch.Tensor) and not t.is_meta
        ]
        for scope, _, value, live in self._entries():
            for layout, _ in _tensors(value, live):
                if id(layout.block) in self._new_blocks:
                    kept = layout.block.start is not None and scope.registry != "parameters"
                    wanted.append((layout, self._placeholder and not kept))
        by_device: dict[torch.device | None, list[TensorLayout]] = {}
        for layout, is_meta in wanted:
            if not is_meta:
                moved = bool(devices) and layout.block.device not in devices
                by_device.setdefault(devices[0] if moved else None, []).append(layout)
        for device, layouts in by_device.items():
            self._made |= allocate(layouts, device)
        self._made |= allocate((layout for layout, is_meta in wanted if is_meta), "meta")

    def _build(self, value: Any, live: Any, path: str) -> Any:
        if isinstance(value, TensorLayout):
            return self._made[id(value)] if id(value.block) in self._new_blocks else live
        if path not in self._counters and _is_counter(value) and _is_counter(live):
            if not _same_counter(value, live):
                self.kept_counters.add(path)
            return live
        if not isinstance(value, Container):
            return live if _same_plain(value, live) else value
        matching = _matching(value, live)
        items = [self._build(item, other, path) for item, other in zip(value.items, matching, strict=True)]
        is_same = (
            isinstance(live, (list, tuple, dict, set, collections.deque))
            and type(live) is value.cls
            and len(live) == len(items)
        )
        if is_same and all(item is other for item, other in zip(items, matching, strict=True)):
            return live
        return value.build(items)


def _read(holder: Any, registry: Registry) -> dict[str, Any]:
    if registry != "attributes":
        return dict(getattr(holder, f"_{registry}"))
    attributes = reachable._attributes(holder)
    if isinstance(holder, torch.nn.Module):
        return {name: value for name, value in attributes.items() if name not in _NOT_RECORDED}
    return {name: value for name, value in attributes.items() if name != "process_weights_after_loading"}


def _record(value: Any, layouts: Mapping[int, TensorLayout], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return layouts[id(value)]
    is_tuple = type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make"))
    if not (is_tuple or _is_container(value)) or depth > 8:  # a container that holds itself is kept as it is
        return value
    empty = None
    if not is_tuple:
        empty = copy.copy(value)
        empty.clear()
    items = value.values() if isinstance(value, dict) else value
    keys = tuple(value) if isinstance(value, dict) else None
    return Container(type(value), keys, tuple(_record(item, layouts, depth + 1) for item in items), empty)


def _tensors(value: Any, live: Any) -> list[tuple[TensorLayout, torch.Tensor | None]]:
    """Recorded tensors within a value, each with the live tensor at the same place, if there is one."""
    if isinstance(value, TensorLayout):
        return [(value, live if isinstance(live, torch.Tensor) else None)]
    if not isinstance(value, Container):
        return []
    return [
        pair for item, other in zip(value.items, _matching(value, live), strict=True) for pair in _tensors(item, other)
    ]


def _matching(value: Container, live: Any) -> list[Any]:
    """The live items at the places of the recorded items; ABSENT where there is none."""
    if value.keys is not None:
        return [live.get(key, ABSENT) if isinstance(live, dict) else ABSENT for key in value.keys]
    items = list(live) if isinstance(live, (list, tuple, set, collections.deque)) and type(live) is value.cls else []
    return [items[index] if index < len(items) else ABSENT for index in range(len(value.items))]


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set, collections.deque))


def _contents(value: Any, depth: int = 0) -> list[Any]:
    """The items of a container, and of the containers in it."""
    items = [part for item in value.items() for part in item] if isinstance(value, dict) else list(value)
    if depth < 8:
        items += [inner for item in items if _is_container(item) for inner in _contents(item, depth + 1)]
    return items


def _same_items(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _is_counter(value: Any) -> bool:
    """A number, or a list of plain values, recorded or live."""
    if isinstance(value, Container):
        return value.cls is list and all(isinstance(item, _PLAIN) for item in value.items)
    if isinstance(value, list):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _same_counter(value: Any, live: Any) -> bool:
    return list(value.items) == live if isinstance(value, Container) else _same_plain(value, live)


def _same_plain(left: Any, right: Any) -> bool:
    return left is right or (isinstance(left, _PLAIN) and type(left) is type(right) and left == right)
