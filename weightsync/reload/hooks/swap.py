"""Puts recorded values in place of the live ones, and takes them out again.

A post-load hook must find the model as the first load's hook found it: raw parameters, latches such as `_done` not yet
set, caches not yet there. A `Swap` makes that world, wherever the state is kept:

    swap = Swap(scopes)               # `start` holds the recorded values, tensors made anew
    swap.install();   ...load, run hooks...
    swap.uninstall()                  # the live values are back, the other world is kept for the next install

A list, dict or set that is still there is refilled in place, so that all who hold it see the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from weightsync.reload.hooks.scopes import (
    ABSENT,
    LIVE,
    MUTABLE,
    Container,
    Scope,
    has_tensors,
    in_place,
    is_counter,
    is_plain,
    is_queue,
    is_single,
    matching,
    same_counter,
    same_plain,
    tensors_in,
)
from weightsync.reload.records import TensorLayout, allocate


class Swap:
    """Recorded values that can take the place of the live ones, and give it back.

    Tensors that are live as recorded stay, so that a hook reads their live bytes. Parameters are new, and so is any
    tensor that shares bytes with a new one. Names that were not recorded are absent while installed.

    Args:
        scopes: What to swap.
        placeholder: Keep even parameters that are live as recorded, and make the others on the meta device; nothing
            may be written while installed.
        new: Paths of further tensors that have to be new.
        counters: Paths of numbers and lists of plain values to put back too; None for all. Others are left as they
            are: an engine may have set them since.
        settings: Paths of plain values that are left as they are.

    Attributes:
        scopes: What is swapped; containers that are refilled in place have scopes of their own.
        kept_counters: Paths of numbers and lists that were left and are not as recorded.
        flags: Paths of other plain values that are not as recorded and were put back, or away.
        live: What each scope held before.
        start: What each scope holds when first installed.
    """

    def __init__(
        self,
        scopes: Iterable[Scope],
        *,
        placeholder: bool = False,
        new: Collection[str] = (),
        counters: Collection[str] | None = (),
        settings: Collection[str] = (),
    ) -> None:
        self.kept_counters: set[str] = set()
        self.flags: set[str] = set()
        self._settings = settings
        self._counters = counters
        self.scopes = self._with_containers(scopes)
        self.live = [scope.read() for scope in self.scopes]
        self._placeholder = placeholder
        self._new_blocks = self._find_new_blocks(new)
        self._made: dict[int, torch.Tensor] = {}
        self._make()
        self.start = [self._start(scope, live) for scope, live in zip(self.scopes, self.live, strict=True)]
        self._other = self.start
        self._contents = {
            id(v): _contents(v) for values in self.start for v in values.values() if isinstance(v, MUTABLE)
        }

    def install(self) -> None:
        """Puts the recorded values (or what `uninstall` took out) in place of the live ones."""
        self.live = [scope.read() for scope in self.scopes]
        for scope, values in zip(self.scopes, self._other, strict=True):
            scope.write(values)

    def add(self, further: Swap) -> None:
        """Takes in another swap and installs it at once; for a swap that is installed."""
        further.install()
        self.scopes += further.scopes
        self.live += further.live
        self.start += further.start
        self._other = self.start

    def uninstall(self) -> None:
        """Puts the live values back, and keeps what is there now for the next `install`."""
        self._other = [scope.read() for scope in self.scopes]
        for scope, values in zip(self.scopes, self.live, strict=True):
            scope.write(values)

    def is_changed(self, value: Any) -> bool:
        """Whether a container that this swap made has other items than at first."""
        was = self._contents.get(id(value))
        return was is not None and not _same_items(was, _contents(value))

    def changed_holders(self) -> list[Any]:
        """Holders of attributes that are not as they were recorded."""
        return [
            scope.holder
            for scope, start, live in zip(self.scopes, self.start, self.live, strict=True)
            if scope.registry == "attributes" and any(live.get(k, ABSENT) is not v for k, v in start.items())
        ]

    def touched(self, assigned: Mapping[int, set[str]]) -> dict[str, tuple[Any, Any]]:
        """Paths of names that hold something else than what was installed, or that were assigned.

        A container's own path is among them if one of its items is.

        Returns:
            By path: the object that has it among its attributes, and what is there.
        """
        found: dict[str, tuple[Any, Any]] = {}
        owner_of: dict[int, Any] = {}
        owner: Any = None
        for scope in self.scopes:  # containers follow what they hang on
            owner = owner if scope.registry == "items" else scope.holder
            owner_of[id(scope)] = owner
        for scope, names in self.touched_names(assigned):
            owner, now = owner_of[id(scope)], scope.read()
            found.update((scope.path_of(name), (owner, now.get(name))) for name in names)
            if scope.registry == "items":
                found[scope.path] = owner, scope.holder
        return found

    def touched_names(self, assigned: Mapping[int, set[str]]) -> list[tuple[Scope, list[Any]]]:
        """The same, as names by scope."""
        found = []
        for scope, start in zip(self.scopes, self.start, strict=True):
            now = scope.read()
            names = [
                name
                for name in (scope.values if scope.is_partial else {**now, **start})
                if now.get(name, ABSENT) is not (value := start.get(name, ABSENT))
                or name in assigned.get(id(scope.holder), ())
                or self.is_changed(value)
            ]
            if names:
                found.append((scope, names))
        return found

    def plain_values(self) -> dict[str, Any]:
        """Plain values that the scopes hold now, by path."""
        return {
            scope.path_of(name): value
            for scope in self.scopes
            for name, value in scope.read().items()
            if is_plain(value)
        }

    def kept(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        """Recorded tensors that are the live ones still, with what was recorded, by path."""
        return {path: (layout, there) for path, layout, there, live in self.recorded_tensors() if there is live}

    def made(self) -> dict[str, torch.Tensor]:
        """Tensors that are not the live ones, by path."""
        return {path: there for path, _, there, live in self.recorded_tensors() if there is not live}

    def recorded_tensors(self) -> Iterator[tuple[str, TensorLayout, torch.Tensor, Any]]:
        """Path, layout, installed tensor and live value of every recorded tensor."""
        for scope, name, value, live in self._entries():
            start = self.start[self._position[id(scope)]].get(name, ABSENT)
            pairs = zip(tensors_in(value, start), tensors_in(value, live), strict=True)
            for (rest, layout, there), (_, _, was) in pairs:
                if isinstance(there, torch.Tensor):
                    yield scope.path_of(name) + rest, layout, there, was

    def _start(self, scope: Scope, live: Mapping[Any, Any]) -> dict[Any, Any]:
        if scope.is_partial:
            names = dict.fromkeys([*live, *scope.values])
        else:
            added = {name: scope.key_of(name) for name in live if name not in scope.values}
            counts = {n: key for n, key in added.items() if is_counter(live[n]) and not self._is_shown(key)}
            self.kept_counters.update(counts.values())
            flags = {n: key for n, key in added.items() if is_plain(live[n]) and n not in counts}
            left = [*counts, *(name for name, key in flags.items() if key in self._settings)]
            self.flags.update(key for key in flags.values() if key not in self._settings)
            names = dict.fromkeys([*scope.values, *left])
        values = {n: self._build(scope.values.get(n, LIVE), live.get(n, ABSENT), scope.key_of(n)) for n in names}
        return {name: value for name, value in values.items() if value is not ABSENT}

    def _entries(self) -> list[tuple[Scope, Any, Any, Any]]:
        return [
            (scope, name, value, live.get(name, ABSENT))
            for scope, live in zip(self.scopes, self.live, strict=True)
            for name, value in scope.values.items()
        ]

    def _with_containers(self, scopes: Iterable[Scope]) -> list[Scope]:
        """The scopes, each followed by one for every recorded container whose place is still held by such a one."""
        found: list[Scope] = []
        pending = list(scopes)[::-1]
        seen: set[int] = set()
        while pending:
            scope = pending.pop()
            if scope.registry == "items":
                if id(scope.holder) in seen:
                    continue
                seen.add(id(scope.holder))
            containers = {n: v for n, v in scope.values.items() if isinstance(v, Container)}
            if containers:
                now, values = scope.read(), dict(scope.values)
                for name, value in containers.items():
                    there, path = now.get(name, ABSENT), scope.path_of(name)
                    if self._is_left_alone(value, there, path):
                        values[name] = LIVE
                        continue
                    values[name], parts = in_place(value, there, path)
                    pending.extend(
                        Scope(holder, "items", where, part.labelled(), scope.is_partial)
                        for holder, part, where in parts
                        if not (scope.is_partial and is_queue(part, holder))
                    )
                scope = replace(scope, values=values)
            found.append(scope)
        self._position = {id(scope): position for position, scope in enumerate(found)}
        return found

    def _is_left_alone(self, value: Any, live: Any, path: str) -> bool:
        """Whether it is a counter that keeps its live value; remembers those that are not as recorded."""
        if self._is_shown(path) or not is_counter(value) or not is_counter(live):
            return False
        if not same_counter(value, live):
            self.kept_counters.add(path)
        return True

    def _is_shown(self, path: str) -> bool:
        """Whether a counter is put back."""
        return self._counters is None or path in self._counters

    def _find_new_blocks(self, new: Collection[str]) -> set[int]:
        """Blocks that cannot be the live ones."""
        blocks = set()
        for scope, name, value, live in self._entries():
            is_loaded = scope.registry == "parameters" and not self._placeholder
            for rest, layout, there in tensors_in(value, live):
                forced = is_loaded or scope.path_of(name) + rest in new
                if forced or not isinstance(there, torch.Tensor) or not layout.fits(there):
                    blocks.add(id(layout.block))
        return blocks

    def _make(self) -> None:
        """Makes the new tensors: where they were recorded, or on the device that the model moved to since."""
        wanted: list[tuple[TensorLayout, bool]] = []
        devices = [
            t.device for live in self.live for t in live.values() if isinstance(t, torch.Tensor) and not t.is_meta
        ]
        for scope, _, value, live in self._entries():
            for _, layout, _ in tensors_in(value, live):
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
        if value is LIVE:
            return live
        if isinstance(value, TensorLayout):
            return self._made[id(value)] if id(value.block) in self._new_blocks else live
        if self._is_left_alone(value, live, path):
            return live
        if not isinstance(value, Container):
            if same_plain(value, live):
                return live
            if is_single(value) and is_single(live):
                if path in self._settings:
                    return live
                self.flags.add(path)
            return value
        if path in self._settings and not has_tensors(value) and not has_tensors(live):
            return live
        others = matching(value, live)
        items = [self._build(item, other, path) for item, other in zip(value.items, others, strict=True)]
        is_same = type(live) is value.cls and len(others) == _num_items(live)
        if is_same and all(item is other for item, other in zip(items, others, strict=True)):
            return live
        return value.build(items)


def _num_items(container: Any) -> int:
    return len(container)


def _contents(value: Any) -> list[Any]:
    """The items of a container, and of the containers in it."""
    found: list[Any] = []
    containers, seen = [value], {id(value)}
    for container in containers:
        is_dict = isinstance(container, dict)
        items = [part for item in container.items() for part in item] if is_dict else list(container)
        found += items
        new = [item for item in items if isinstance(item, MUTABLE) and id(item) not in seen]
        seen.update(map(id, new))
        containers += new
    return found


def _same_items(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
