"""What the first load's hooks set or changed: theirs from then on, and shown to them in every reload as they found it.

Looked at between `record_layouts` and the first reload, around each hook, since afterwards nobody can tell a latch that
a hook closed from a setting that the engine made:

    before      references to all that hangs on the hook's module, its owner and whatever these lead to; small tensors
    hook
    after       another object under a name, other items in a container, other bytes in a tensor: the hook's

A hook finds itself at its own place while it runs, and an observer is gone once it has run. What lies behind class
attributes and module globals is not looked at.

    first = FirstLoad(records, hooks, state)       # by `record_layouts`
    ...first load...
    first.close()                                  # by the first reload: `state` knows now
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from weightsync.reload.audit import address
from weightsync.reload.hooks.logs import Logs
from weightsync.reload.hooks.post_load import HOOK, Hook, Watch, declares_direct
from weightsync.reload.hooks.scopes import (
    ABSENT,
    MUTABLE,
    Container,
    Scope,
    has_tensors,
    in_place,
    is_outer,
    is_single,
    same_plain,
    tensors_in,
)
from weightsync.reload.records import TensorLayout, equal_bytes

if TYPE_CHECKING:
    from weightsync.reload.layouts import ModuleRecord
    from weightsync.reload.state import ModelState

_LEAVES = (str, bytes, int, float, complex, type(None), type, torch.Tensor, torch.dtype, torch.device)
_READS_PER_SCOPE = 64  # hooks that lead to the whole model, and are many, are not all looked at


class FirstLoad:
    """Observes the hooks of one model.

    Args:
        records: The model as recorded.
        hooks: Its hooks, as recorded.
        state: Where findings go: `latches`, `compounding`, and that `settings` are all else.
    """

    def __init__(
        self, records: Mapping[torch.nn.Module, ModuleRecord], hooks: Sequence[Hook], state: ModelState
    ) -> None:
        self._records = records
        self._hooks = hooks
        self._state = state
        self._names: dict[int, _Names] = {}  # by `id` of a recorded scope
        self._changed: dict[str, tuple[Any, Scope, Any]] = {}  # path -> the object that has that name, scope, name
        self._abroad: dict[str, list[tuple[str, str]]] = {}  # name of a hook -> paths changed in other modules
        self._tensors: set[str] = set()
        self._by_holder: dict[int, list[tuple[str, Scope]]] = {}
        for record in records.values():
            for scope in (*record.scopes, *record.outer):
                self._by_holder.setdefault(id(scope.holder), []).append((record.path, scope))
        self._reads_left = _READS_PER_SCOPE * (64 + sum(map(len, self._by_holder.values())))
        self._num_observed = 0
        self._missed = False
        self._hook_of = {(id(hook.owner), id(hook.module)): hook for hook in hooks}
        self._watches: list[Watch] = []
        by_owner: dict[int, list[Hook]] = {}
        for hook in hooks:
            if not declares_direct(hook.module) and hook.method is not None and hasattr(hook.owner, "__dict__"):
                by_owner.setdefault(id(hook.owner), []).append(hook)
        for its_hooks in by_owner.values():
            owner = its_hooks[0].owner
            watch = vars(owner).get(HOOK)
            if not isinstance(watch, Watch):
                watch = Watch(owner, its_hooks[0].method)  # type: ignore[arg-type]  # not None, see above
            watch.add(self, (hook.module for hook in its_hooks))
            watch.put_on()
            self._watches.append(watch)

    @property
    def has_begun(self) -> bool:
        """Whether a hook has run."""
        return self._num_observed > 0 or self._missed

    def close(self) -> None:
        """Ends the observation."""
        for watch in self._watches:
            watch.remove(self)
        self._watches.clear()
        self.settle()

    def settle(self) -> None:
        """Tells the model's state what is known so far."""
        state = self._state
        known = Logs(self._hooks)
        logs = {
            path
            for path, (owner, scope, name) in self._changed.items()
            if known.has(path, owner, scope.holder if scope.registry == "items" else scope.read().get(name))
        }
        state.settings.add(logs)
        state.latches |= self._changed.keys() - logs
        state.compounding |= self._tensors
        for _, scope, name in self._changed.values():
            if is_outer(scope) and has_tensors(scope.read().get(name, ABSENT)):
                scope.filled.add(name)
        for hook, changes in self._abroad.items():
            if modules := frozenset(module for path, module in changes if path not in logs):
                state.reach[hook] = state.reach.get(hook, frozenset()) | modules
        self._changed.clear()
        self._abroad.clear()
        if self._num_observed and not self._missed:
            state.settings.has_all_others = True

    @contextmanager
    def observe(self, owner: Any, module: torch.nn.Module) -> Iterator[None]:
        """Around one run of a hook."""
        before = self._read([owner, module])
        if before is None:
            self._missed = True
            yield
            return
        try:
            yield
        except BaseException:
            self._missed = True
            raise
        self._num_observed += 1
        hook = self._hook_of[id(owner), id(module)]
        if hook.callable_by_us:  # else no reload can run it, and what it made stays
            self._compare(before, hook)

    def _read(self, roots: list[Any]) -> list[_Was] | None:
        """What the recorded holders that can be reached from some objects hold now; None if they are too many."""
        found: list[_Was] = []
        seen: set[int] = set()
        stack = roots
        while stack:
            value = stack.pop()
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, types.MethodType):
                stack += (value.__self__, value.__func__)
            elif isinstance(value, (tuple, frozenset)):
                stack += value
            elif isinstance(value, MUTABLE):
                stack += value.values() if isinstance(value, dict) else value
            for path, scope in self._scopes_of(value, stack):
                self._read_scope(path, scope, scope.holder, found, stack)
            if self._reads_left < 0:
                return None
        return found

    def _read_scope(self, path: str, scope: Scope, owner: Any, found: list[_Was], stack: list[Any]) -> None:
        """Reads one holder, and the containers that were recorded of it."""
        names = self._names_of(scope)
        if scope.registry == "parameters" and not names.small:
            return
        self._reads_left -= 1
        was = scope.read()
        found.append(_Was(path, scope, owner, was, _copies(scope, names.small, was) if names.small else {}))
        stack += was.values()
        for name in names.containers:
            _, parts = in_place(scope.values[name], was.get(name, ABSENT), scope.path_of(name))
            for holder, part, where in parts:
                self._read_scope(path, Scope(holder, "items", where, part.labelled()), owner, found, stack)

    def _names_of(self, scope: Scope) -> _Names:
        """Which of its names hold what; kept for the holders that were recorded, not for the containers in them."""
        names = self._names.get(id(scope))
        if names is None:
            tensors = {n: list(tensors_in(v, ABSENT)) for n, v in scope.values.items() if not is_single(v)}
            small = [n for n, found in tensors.items() if any(_is_small(scope, layout) for _, layout, _ in found)]
            names = _Names(small, [n for n, v in scope.values.items() if isinstance(v, Container)])
            if scope.registry != "items":
                self._names[id(scope)] = names
        return names

    def _scopes_of(self, value: Any, stack: list[Any]) -> list[tuple[str, Scope]]:
        """What was recorded of an object, each with its module; of a module all that is its own."""
        if isinstance(value, torch.nn.Module):
            stack += value._modules.values()
            record = self._records.get(value)
            return [(record.path, scope) for scope in (*record.scopes, *record.outer)] if record is not None else []
        return self._by_holder.get(id(value), [])

    def _compare(self, before: Sequence[_Was], hook: Hook) -> None:
        for module, scope, owner, was, copies in before:
            now = scope.read()
            if not copies and list(map(id, now.values())) == list(map(id, was.values())) and now.keys() == was.keys():
                continue
            changed: list[str] = []
            for name in was.keys() | now.keys():
                old, new = was.get(name, ABSENT), now.get(name, ABSENT)
                recorded = scope.values.get(name, ABSENT)
                is_same = old is new or same_plain(old, new)
                if not is_same and not isinstance(recorded, TensorLayout) and scope.registry != "parameters":
                    if scope.key_of(name) not in self._changed and scope.registry != "items":
                        _found_by_hooks(scope, name, old)
                    self._changed[scope.key_of(name)] = owner, scope, name
                    changed.append(scope.key_of(name))
                for rest, _, tensor in tensors_in(recorded, new) if copies else ():
                    path = scope.path_of(name) + rest
                    if path in copies and not _is_unchanged(tensor, *copies[path]):
                        self._tensors.add(path)
                        changed.append(path)
            if changed and not _is_within(module, hook.path):
                self._abroad.setdefault(hook.name, []).extend((path, module) for path in changed)


class _Was(NamedTuple):
    """What one holder's names held: its module, its scope, the object that a container hangs on, values, tensors."""

    module: str
    scope: Scope
    owner: Any
    values: dict[Any, Any]
    copies: dict[str, Any]


class _Names(NamedTuple):
    """Names of one holder: of small tensors that no checkpoint fills, and of containers."""

    small: list[Any]
    containers: list[Any]


def _is_small(scope: Scope, layout: TensorLayout) -> bool:
    is_loaded = scope.registry == "parameters" and layout.attributes.get("weight_loader_numel") != 0
    return layout.block.start is not None and not is_loaded


def _copies(scope: Scope, names: Sequence[Any], was: Mapping[Any, Any]) -> dict[str, Any]:
    """The bytes and addresses of small tensors, by path."""
    return {
        scope.path_of(name) + rest: (tensor, tensor.detach().clone(), address(tensor))
        for name in names
        for rest, layout, tensor in tensors_in(scope.values[name], was.get(name, ABSENT))
        if _is_small(scope, layout) and _is_plain_tensor(tensor)
    }


def _found_by_hooks(scope: Scope, name: Any, value: Any) -> None:
    """Corrects a record by what the first hook found: loaders, or the engine, had set it since."""
    recorded = scope.values.get(name, ABSENT)
    if is_single(value) and is_single(recorded) and not same_plain(value, recorded):
        values = cast("dict[Any, Any]", scope.values)
        if value is ABSENT:
            del values[name]
        else:
            values[name] = value


def _is_within(path: str, above: str) -> bool:
    """Whether a module is the other one, or below it."""
    return not above or path == above or path.startswith((f"{above}.", f"{above}[", f"{above}{{"))


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta and value.layout == torch.strided


def _is_unchanged(now: Any, tensor: torch.Tensor, copied: torch.Tensor, where: Any) -> bool:
    return now is tensor and address(tensor) == where and equal_bytes(tensor, copied)
