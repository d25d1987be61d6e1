"""What hooks must find as the first load's hooks found it, outside of the tensors that are staged for them.

    the hooks' own modules and those below     all that was recorded there; what is loaded stays live
    tensors known to compound, anywhere        their recorded value
    flags, anywhere                            plain values that are not as recorded: latches, sets of done layers

Flags are shown from the first hook of a session to its last, so that hooks which share one see each other, as they did
in the first load. The rest belongs to one run. What closures hold counts as a flag only once it is known to be one: it
may as well be somebody's log.

    world = World(model, modules)
    Swap(world.around(paths, compounding), new=compounding)
    world.show_flags(); ...hooks...; world.take_back_flags(assigned)
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from weightsync.reachable import join_path
from weightsync.reload.hooks.post_load import Hook, declares_direct
from weightsync.reload.hooks.reconcile import keep_untouched
from weightsync.reload.hooks.scopes import (
    ABSENT,
    LIVE,
    MUTABLE,
    Container,
    Scope,
    has_tensors,
    in_place,
    is_counter,
    is_outer,
    is_plain,
    is_single,
    only,
    same_plain,
    tensors_in,
)
from weightsync.reload.hooks.swap import Swap
from weightsync.reload.layerwise import ancestors
from weightsync.reload.layouts import ModuleRecord
from weightsync.reload.state import state_of


class World:
    """The recorded world of one model, for one session.

    Modules that declare `supports_direct_reload` are left out: their hooks may run over their own results.

    Args:
        model: The model.
        modules: Its modules by path.

    Attributes:
        hidden: Plain items of containers that hooks refill, to be put back at the end unless hooks did.
    """

    def __init__(self, model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> None:
        records = state_of(model).records
        self._state = state_of(model)
        self._records: dict[str, ModuleRecord] = {
            path: records[module].at(path)
            for path, module in modules.items()
            if module in records and not declares_direct(module)
        }
        self._flags: Swap | None = None
        self._owners: dict[int, str] = {}  # `id` of a flag's holder -> module
        self.hidden: list[tuple[Scope, dict[Any, Any]]] = []
        self._seen: set[str] = set()
        self._recent: list[Swap] = []
        self._told: set[tuple[int, Any]] = set()

    def below(self, hooks: Iterable[Hook]) -> list[str]:
        """Paths of recorded modules that belong to hooks: theirs, and those below."""
        owners = {hook.path for hook in hooks}
        return [path for path in self._records if not owners.isdisjoint(ancestors(path))]

    def around(self, paths: Iterable[str], compounding: set[str], staged: Iterable[Scope] = ()) -> list[Scope]:
        """What to swap besides staged tensors.

        Args:
            paths: Modules to show as recorded; parameters that a checkpoint fills stay live.
            compounding: Paths of tensors that hooks process in place, wherever they are.
            staged: What staged copies show already.
        """
        covered = {(id(scope.holder), scope.registry) for scope in staged}
        found: list[Scope] = []
        for path in dict.fromkeys(path for path in paths if path in self._records):
            parameters = self._records[path].scopes[0]
            derived = {name for name, value in parameters.values.items() if _is_derived(value)}
            if derived:
                found.append(only(parameters, derived))
            found.extend(self._records[path].besides_parameters)
            if self.added_children(path):
                module = parameters.holder
                found.append(
                    Scope(
                        module, "modules", path, {n: LIVE for n in module._modules if n in self._records[path].children}
                    )
                )
        found = [scope for scope in found if (id(scope.holder), scope.registry) not in covered]
        covered.update((id(scope.holder), scope.registry) for scope in found)
        far: dict[int, tuple[Scope, set[Any]]] = {}
        for path in compounding & self.places.keys() if compounding else ():
            _, scope, name = self.places[path]
            if (id(scope.holder), scope.registry) not in covered:
                far.setdefault(id(scope), (scope, set()))[1].add(name)
        return found + [only(scope, names) for scope, names in far.values()]

    def added_children(self, path: str) -> list[str]:
        """Paths of child modules that a module has now and had not when it was recorded."""
        record = self._records.get(path)
        if record is None:
            return []
        return [join_path(path, f".{n}") for n in record.scopes[0].holder._modules if n not in record.children]

    @cached_property
    def places(self) -> dict[str, tuple[str, Scope, Any]]:
        """Module, scope and name of every recorded tensor, by path."""
        return {
            scope.path_of(name) + rest: (path, scope, name)
            for path, record in self._records.items()
            for scope in (record.scopes[0], *record.besides_parameters)
            for name, value in scope.values.items()
            for rest, _, _ in tensors_in(value, ABSENT)
        }

    def keeps_start(self, path: str) -> bool:
        """Whether the recorded value of a tensor was kept."""
        _, scope, name = self.places[path]
        return all(layout.keeps_start for _, layout, _ in tensors_in(scope.values[name], ABSENT))

    def keeps_bytes(self, path: str) -> bool:
        """Whether all bytes of a recorded tensor were kept: of a small one that a checkpoint does not fill."""
        _, scope, name = self.places[path]
        layouts = [layout for _, layout, _ in tensors_in(scope.values[name], ABSENT)]
        return scope.registry != "parameters" and all(layout.block.start is not None for layout in layouts)

    def show_flags(self) -> None:
        """Lets hooks find what is known to be a flag as recorded, from now on; may be called again with more known.

        What was shown since the last `leave_flags` is shown again, for runs that were undone.
        """
        for swap in self._recent:
            swap.install()
        if self._flags is None:
            self._flags = Swap([], counters=None)
        new = self._state.latches - self._seen
        self._seen |= new
        for path, record in self._records.items() if new else ():
            found = list(_flags((*record.scopes, *record.outer), new))
            if found:
                self._owners.update((id(scope.holder), path) for scope in found)
                self._recent.append(Swap(found, counters=None))
                self._flags.add(self._recent[-1])

    def leave_flags(self) -> None:
        """Tells that hooks have run, with all that is known by now shown as recorded: it is theirs from here on."""
        new = self._state.latches - self._seen
        for path, record in self._records.items() if new else ():
            for scope in _with_containers((*record.scopes, *record.outer)):
                names = [name for name in scope.read() if scope.key_of(name) in new]
                if names and self._flags is not None:  # watched, should further hooks set them
                    self._owners[id(scope.holder)] = path
                    self._flags.add(Swap([replace(scope, values=dict.fromkeys(names, LIVE), is_partial=True)]))
        self._seen |= self._state.latches
        self._recent.clear()

    def undecided(self, modules: Collection[str]) -> dict[str, str]:
        """Plain values, not as recorded, of which it is not known whether hooks need them.

        Args:
            modules: Those whose own values are looked after already; what closures and calls in them hold is not.

        Returns:
            Module by path of the value.
        """
        latches, settings = self._state.latches, self._state.settings
        found: dict[str, str] = {}
        if settings.has_all_others:
            return found
        for module, record in self._records.items():
            scopes = record.outer if module in modules else (*record.scopes, *record.outer)
            unknown = (path for path in _keys(_flags(scopes)) if path not in latches and path not in settings)
            found.update((path, module) for path in unknown)
        return found

    def show(self, paths: Collection[str]) -> Swap:
        """A swap that shows such values as recorded for one run; the caller installs it."""
        scopes = (s for r in self._records.values() for s in _flags((*r.scopes, *r.outer), paths)) if paths else ()
        return Swap(scopes, counters=None)

    def flag_holders(self) -> list[Any]:
        """Objects whose attributes are shown as recorded."""
        return self._flags.changed_holders() if self._flags is not None else []

    def newly_touched(self, assigned: Mapping[int, set[str]]) -> set[str]:
        """Modules whose flags were set since the last call."""
        found = self._flags.touched_names(assigned) if self._flags is not None else []
        now = {(id(scope.holder), name) for scope, names in found for name in names}
        new, self._told = now - self._told, now
        return {self._owners[holder] for holder, _ in new}

    def take_back_flags(self, assigned: Mapping[int, set[str]], modules: Collection[str] | None) -> None:
        """Gives flags their live values back, but for those that hooks set, or whose hooks ran and did not set them.

        Args:
            assigned: Names assigned on each holder in this session.
            modules: Those whose hooks ran; None for all.
        """
        if self._flags is not None:
            ran = (
                (scope, name)
                for scope in self._flags.scopes
                for name in scope.values
                if modules is None or self._owners[id(scope.holder)] in modules
            )
            owned = self._state.latches & {scope.key_of(name) for scope, name in ran}
            keep_untouched(self._flags, assigned, lambda path, tensor: False, owned=owned)
            self._flags = None
        for scope, names in self.hidden:
            now = scope.read()
            scope.write(now | {name: value for name, value in names.items() if name not in now})
        self.hidden.clear()


def _flags(scopes: Sequence[Scope], chosen: Collection[str] | None = None) -> Iterator[Scope]:
    """Scopes over plain values, objects and functions that are not as recorded; all else in them stays live.

    Args:
        scopes: Where to look.
        chosen: Paths to take, whatever is there unless it leads to tensors; None for all but what engines count in.
    """
    for scope in _with_containers(scopes, chosen):
        now, values = scope.read(), {}
        for name, value in scope.values.items():
            there = now.get(name, ABSENT)
            if chosen is not None:
                if scope.key_of(name) in chosen and not same_plain(value, there) and _is_whole(value, there):
                    values[name] = value
            elif not _is_counted(scope, value, there) and _is_other(value, there):
                values[name] = value
        for name in now.keys() - scope.values.keys():
            is_hidden = _may_hide(scope) if chosen is None else scope.key_of(name) in chosen
            if is_hidden and (isinstance(scope.holder, set) or is_plain(now[name])):
                values[name] = ABSENT
        if values:
            yield replace(scope, values=values, is_partial=True)


def _with_containers(scopes: Sequence[Scope], chosen: Collection[str] | None = None) -> Iterator[Scope]:
    """The scopes, and one for each recorded container that is still there, and not counted in unless it is chosen."""
    pending = list(scopes)[::-1]
    while pending:
        scope = pending.pop()
        yield scope
        now = scope.read() if any(isinstance(value, Container) for value in scope.values.values()) else {}
        for name in now.keys() & scope.values.keys():
            value, there = scope.values[name], now[name]
            if scope.path_of(name) not in (chosen or ()) and _is_counted(scope, value, there):
                continue
            _, parts = in_place(value, there, scope.path_of(name))
            pending.extend(Scope(holder, "items", path, part.labelled()) for holder, part, path in parts)


def _is_counted(scope: Scope, value: Any, there: Any) -> bool:
    return not is_outer(scope) and is_counter(value) and is_counter(there)


def _is_other(value: Any, there: Any) -> bool:
    return is_single(value) and is_single(there) and not same_plain(value, there)


def _is_whole(value: Any, there: Any) -> bool:
    """Whether a recorded value can take the place of what is there, for more than one run: no tensor is in either."""
    if isinstance(value, Container):
        return not isinstance(there, MUTABLE) and not has_tensors(value) and not has_tensors(there)
    return is_single(value) and not has_tensors(there)


def _may_hide(scope: Scope) -> bool:
    """Whether names that came up since are flags: items of containers, attributes of functions."""
    return scope.registry == "items" or isinstance(scope.holder, types.FunctionType)


def _keys(scopes: Iterable[Scope]) -> Iterator[str]:
    return (scope.key_of(name) for scope in scopes for name in scope.values)


def _is_derived(value: Any) -> bool:
    """Whether a recorded parameter is one that no checkpoint fills."""
    return getattr(value, "attributes", {}).get("weight_loader_numel") == 0
