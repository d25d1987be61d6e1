"""Caches that forward builds on first use and keeps: emptied by a reload, rebuilt by the next forward at their address.

Read off the source of `forward` and of the methods that it calls, a cache is what is bound under a condition that asks
for it:

    if self._c is None: self._c = pad(self.sink)
    if key not in self.tables: self.tables[key] = build(key)
    self.holder.parts.setdefault("sink", build())
    @functools.cached_property

It may be bound through a local name (`c = self._c`), by `register_buffer`, or by a method of a helper object that
forward calls; it may be a tensor, an object or container with tensors, or a number that was not there. What forward
binds without asking (its last output) is no cache, nor is what an engine binds (a KV cache). A module that has
`refresh_derived` looks after its own. Code that has no source is not seen.

    paths = empty_lazy_caches(model, modules)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import LayoutError
from weightsync.reachable import attributes_of, is_reachable, join_path, replace, walk_module
from weightsync.reload.hooks.lazy_bindings import ITEM, Binding, bindings_of
from weightsync.reload.hooks.scopes import ABSENT, Container, is_plain
from weightsync.reload.layouts import ModuleRecord
from weightsync.reload.records import TensorLayout, same_layout
from weightsync.reload.state import state_of
from weightsync.reload.unchanged import while_unchanged

_UNKNOWN: Any = object()


def empty_lazy_caches(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Empties the caches that modules' own forwards build, and has the rebuilt ones moved to their old addresses.

    Args:
        model: The model, finished.
        modules: Modules whose weights may have changed.

    Returns:
        Paths of the emptied tensors, those included that no forward has rebuilt since an earlier call.
    """
    records = state_of(model).records
    emptied = []
    all_bindings = while_unchanged(model, "lazy bindings", lambda: _all_bindings(modules))
    for path, module in modules.items():
        pending = next((h for h in module._forward_hooks.values() if isinstance(h, _Rebuilt)), None)
        places = [(b, *place) for b in all_bindings.get(path, ()) for place in _places(module, b.chain)]
        if pending is None and not any(_is_cache(holder, name) for b, holder, name in places if not b.is_flag):
            continue
        flags = [(holder, name) for binding, holder, name in places if binding.is_flag]
        numbers: list[str] = []
        before = {slot.path: slot.tensor for slot in walk_module(module, "")}
        for binding, holder, name in places:
            was = ABSENT if binding.is_flag else _recorded(records.get(module), holder, name)
            if not binding.is_flag and _empty(holder, name, was, binding):
                numbers.append(join_path(path, f".{'.'.join(binding.chain)}".replace(".[]", f"[{name!r}]")))
        now = {slot.path for slot in walk_module(module, "")}
        old = {where: tensor for where, tensor in before.items() if where not in now}
        emptied += numbers
        if old or numbers:
            for holder, name in flags:
                was = _recorded(records.get(module), holder, name)
                if is_plain(was) and was is not ABSENT and not isinstance(holder, (dict, list)):
                    object.__setattr__(holder, name, was)
        if old:
            if pending is None:
                pending = _Rebuilt(path)
                pending.handle = module.register_forward_hook(pending)
            pending.old.update(old)
        if pending is not None:
            emptied += [join_path(path, where if where[0] == "[" else f".{where}") for where in pending.old]
    return emptied


class _Rebuilt:
    """Forward hook that moves rebuilt caches to their old addresses, and takes itself away."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.old: dict[str, torch.Tensor] = {}
        self.handle: Any = None

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Runs after each forward until all caches were rebuilt; a forward may take a branch that needs none."""
        now = {slot.path: slot.tensor for slot in walk_module(module, "")}
        for where, old in list(self.old.items()):
            new = now.get(where)
            if new is None:
                continue
            if not same_layout(new, old):
                path = join_path(self.path, f".{where}")
                raise LayoutError(
                    f"{path}: forward rebuilt it as {new.dtype} {tuple(new.shape)}, it was {old.dtype} "
                    f"{tuple(old.shape)}, so it cannot stay at its address",
                    names=[path],
                )
            with torch.inference_mode() if old.is_inference() else torch.no_grad():
                old.copy_(new)
            replace(module, where, old)
            del self.old[where]
        if not self.old and self.handle is not None:
            self.handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rebuilt:
        """A copied model has no graph that holds the old tensors: its caches stay where its forward puts them."""
        return _Rebuilt(self.path)


def _all_bindings(modules: Mapping[str, torch.nn.Module]) -> dict[str, list[Binding]]:
    """The caches of every module that has some and does not look after them itself, by its path."""
    return {
        path: found
        for path, module in modules.items()
        if not callable(getattr(module, "refresh_derived", None)) and (found := _bindings_in(module))
    }


def _bindings_in(module: torch.nn.Module) -> list[Binding]:
    """The caches of a module: those of its class, and of the helper objects whose methods its forward calls."""
    found: list[Binding] = []
    seen: set[tuple[int, str]] = set()
    pending: list[tuple[tuple[str, ...], Any, str]] = [((), module, "forward")]
    while pending:
        chain, holder, method = pending.pop()
        if (id(holder), method) in seen:
            continue
        seen.add((id(holder), method))
        bindings, calls = bindings_of(type(holder), method)
        found.extend(dataclasses.replace(binding, chain=(*chain, *binding.chain)) for binding in bindings)
        tables = (holder._modules, holder._parameters) if isinstance(holder, torch.nn.Module) else ()
        for step, called in calls:
            if any(step[0] in table for table in tables):
                continue  # modules have forwards of their own
            below = [_held(above).get(name) for above, name in _places(holder, step)] if ITEM not in step else []
            helpers = [helper for helper in below if not isinstance(helper, (torch.nn.Module, torch.Tensor))]
            pending.extend(((*chain, *step), helper, called) for helper in helpers)
    return found


def _held(node: Any) -> Mapping[Any, Any]:
    """What an object has under its names; of a module also its buffers."""
    if isinstance(node, torch.nn.Module):
        return {**attributes_of(node), **node._buffers}
    return attributes_of(node)


def _places(node: Any, chain: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    """Holder and name of every place that a chain stands for; items by key or index, the last first."""
    step, rest = chain[0], chain[1:]
    if step == ITEM:
        pairs = (
            list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
        )
        pairs.reverse()
    else:
        held = _held(node) if not isinstance(node, (dict, list, tuple)) else {}
        pairs = [(step, held[step])] if step in held else []
    for name, value in pairs:
        if not rest:
            yield node, name
        elif value is not None:
            yield from _places(value, rest)


def _recorded(record: ModuleRecord | None, holder: Any, name: Any) -> Any:
    """What was at a place when the model was recorded; ABSENT for nothing, _UNKNOWN without a record."""
    if record is None:
        return _UNKNOWN
    if isinstance(holder, (dict, list)):
        return _in_container(record, holder, name)
    registries = ("attributes", "buffers")
    scopes = [s for s in (*record.scopes, *record.outer) if s.holder is holder and s.registry in registries]
    return next((scope.values[name] for scope in scopes if name in scope.values), ABSENT)


def _in_container(record: ModuleRecord, holder: Any, name: Any) -> Any:
    """The same for an item: found by following the recorded containers to where `holder` hangs now."""
    pending = [(value, s.read().get(n)) for s in (*record.scopes, *record.outer) for n, value in s.values.items()]
    while pending:
        value, there = pending.pop()
        if not isinstance(value, Container):
            continue
        items = value.labelled()
        if there is holder:
            return items.get(name, ABSENT)
        if isinstance(there, dict):
            pending += [(item, there.get(key)) for key, item in items.items()]
        elif isinstance(there, (list, tuple)):
            pending += [(item, there[key]) for key, item in items.items() if key < len(there)]
    return ABSENT


def _empty(holder: Any, name: Any, was: Any, binding: Binding) -> bool:
    """Puts a place back to how forward finds it at first, if it holds a cache now and did not at first.

    Returns:
        Whether it was a number.
    """
    value = _value_at(holder, name)
    is_number = _is_number(value) and (was is None or was is ABSENT)
    if isinstance(was, (TensorLayout, Container)) or not (is_number or _holds_tensor(value)):
        return False
    if was is _UNKNOWN:
        was = None if binding.is_none_first else ABSENT
    if isinstance(holder, (dict, list)):
        if was is ABSENT and (isinstance(holder, dict) or name == len(holder) - 1):
            del holder[name]
        elif was is not ABSENT:
            holder[name] = was
    elif isinstance(holder, torch.nn.Module) and name in holder._buffers:
        if was is ABSENT:
            delattr(holder, name)
        else:
            holder._buffers[name] = was
    elif was is ABSENT:
        object.__delattr__(holder, name)
    else:
        object.__setattr__(holder, name, was)
    return is_number


def _value_at(holder: Any, name: Any) -> Any:
    return holder[name] if isinstance(holder, (dict, list)) else _held(holder).get(name)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _is_cache(holder: Any, name: Any) -> bool:
    """Whether a place may hold a cache now."""
    value = _value_at(holder, name)
    return _is_number(value) or _holds_tensor(value)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter)
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item) for item in value)
    if isinstance(value, torch.nn.Module) or not is_reachable(value):
        return False
    held = attributes_of(value).values()  # a kernel object, not what leads to other modules
    return any(map(_holds_tensor_itself, held)) and not any(isinstance(item, torch.nn.Module) for item in held)


def _holds_tensor_itself(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
