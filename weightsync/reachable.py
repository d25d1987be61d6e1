"""Every tensor that a model holds, wherever Python keeps it, each under a path that can be read and written.

A captured CUDA graph does not care whether a tensor is a parameter. It may hold a buffer, a plain attribute, an entry
of a dict, an argument of a `functools.partial` or the cell of a closure, so an audit of addresses must see all of them,
and whoever puts a tensor back must reach all of them. Paths read like Python:

    layers.0.weight                   parameter, buffer or plain attribute
    layers.0.kernel.scales['w13']     helper object, dict
    layers.0.forward_impl.args[1]     functools.partial
    layers.0.forward_impl.<table>     closure cell named `table`
    layers.0.streams{0}               set, by position

    for slot in walk(model): print(slot.path, slot.kind, slot.tensor.shape)
    replace(model, "layers.0.kernel.scales['w13']", tensor)

Not followed: weak references, dict keys, classes, and objects whose type belongs to torch, numpy, the standard library
or this package (their internals are not the model's), except the containers named above; and what an engine leaves out
(`leave_out`, `leave_modules_out`).
"""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from weightsync.class_facts import FOREIGN
from weightsync.errors import LayoutError
from weightsync.survey import LEFT_OUT, REGISTRIES, TABLES, Read, Survey, Visit

Kind = Literal["parameter", "buffer", "attribute"]

CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType)
# Standard-library types that only hold what a user put there.
_PLAIN_HOLDERS = (
    types.SimpleNamespace,
    collections.UserDict,
    collections.UserList,
    threading.Event,
    weakref.WeakSet,
    weakref.WeakKeyDictionary,
)
CALLABLES = (functools.partial, types.FunctionType, types.MethodType)
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Slot:
    """One place that holds a tensor.

    Attributes:
        path: Where it is, from the model.
        module: Path of the `nn.Module` that owns the place; "" for the model itself.
        kind: "parameter" or "buffer" if registered under that name, else "attribute".
        tensor: The tensor itself, not a copy.
    """

    path: str
    module: str
    kind: Kind
    tensor: torch.Tensor


class _Step(NamedTuple):
    """How one child hangs on its holder."""

    how: Literal["parameter", "buffer", "module", "attribute", "item", "member", "cell"]
    key: Any

    def label(self) -> str:
        if self.how == "item":
            return f"[{self.key!r}]"
        if self.how == "member":
            return f"{{{self.key}}}"
        return f".<{self.key}>" if self.how == "cell" else f".{self.key}"


class Found(NamedTuple):
    """What a walk came upon: a holder or a tensor, its path, the module that owns it, and a tensor's kind."""

    path: str
    module: str
    kind: Kind
    value: Any


def walk(model: torch.nn.Module) -> list[Slot]:
    """Every place in `model` that holds a tensor, modules in registration order.

    A holder (module, container, helper object) is entered once, at the first path that reaches it, so cycles end. A
    tensor is listed at every place that holds it: tied parameters give two slots with the same `tensor`.
    """
    return [_slot(found) for found in visit(model) if isinstance(found.value, torch.Tensor)]


def walk_module(module: torch.nn.Module, path: str) -> list[Slot]:
    """The slots of `module` alone, without those of any other module, registered or held in an attribute.

    Args:
        module: The module to look into.
        path: Its path, which prefixes those of the slots.
    """
    own = _visit_module(module, path, seen={}, hidden=[])
    return [_slot(found) for found in own if isinstance(found.value, torch.Tensor)]


def holders(model: torch.nn.Module) -> list[Any]:
    """Every module and helper object in `model`, each once: what can have methods of its own."""
    plain = (torch.Tensor, *CONTAINERS, *CALLABLES)
    return [found.value for found in visit(model) if not isinstance(found.value, plain)]


def leave_out(kind: type) -> None:
    """Makes objects of a class no part of any model: an engine's configuration, which knows every model's layers.

    Args:
        kind: The class; subclasses are followed as before.
    """
    LEFT_OUT.add(kind)
    _surveys.clear()


def leave_modules_out(model: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> None:
    """Makes modules, and what lies below them, no part of `model`: another model that shares them answers for them.

    Args:
        model: The model that reaches them, such as a draft model.
        modules: The modules, such as the embedding of its target model.
    """
    _strangers.setdefault(model, weakref.WeakSet()).update(modules)
    _surveys.pop(model, None)


def modules_left_out(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What `leave_modules_out` was told of a model."""
    return list(_strangers.get(model, ()))


def replace(model: torch.nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Puts `tensor` at `path`, which must exist. Tuples, frozen sets and partials on the way are rebuilt or updated.

    Raises:
        LayoutError: Nothing is at that path, a registered parameter would become a plain tensor, or no holder on the
            way can change.
    """
    chain = _find(model, "", path)
    if chain is None:
        raise LayoutError(f"{path}: no such place in {type(model).__name__}; take paths from walk(model)", names=[path])
    value: Any = tensor
    for node, step in reversed(chain):
        value = _assign(node, step, value, path)
        if value is None:
            return
    raise LayoutError(f"{path}: every holder on the way is immutable, so no tensor can be put there", names=[path])


def _slot(found: Found) -> Slot:
    return Slot(found.path, found.module, found.kind, found.value)


# What the last walks over each model found, newest first: as it serves, and as a session that shadows its hooks has it.
_surveys: weakref.WeakKeyDictionary[torch.nn.Module, list[Survey]] = weakref.WeakKeyDictionary()
_NUM_SURVEYS = 4
# Modules that a model reaches and that are another one's.
_strangers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[torch.nn.Module]] = weakref.WeakKeyDictionary()


def python_state(model: torch.nn.Module) -> object | None:
    """Stands for what hangs on `model` now: the same object at two moments if nothing changed between them.

    Tensors count by identity, address and layout, everything else by value; a tensor's bytes are not seen. None if
    something hangs on the model whose inside cannot be seen.
    """
    return _visit(model).state


class _Still(threading.local):
    """What walks give in this thread while the caller changes nothing, by `id` of the model."""

    def __init__(self) -> None:
        self.pinned: dict[int, Visit] = {}


_still = _Still()


@contextmanager
def standing_still(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the caller changes nothing that hangs on `model`, so one walk serves for all of this thread's."""
    if id(model) in _still.pinned:
        yield
        return
    _still.pinned[id(model)] = _visit(model)
    try:
        yield
    finally:
        del _still.pinned[id(model)]


@contextmanager
def moving_again(model: torch.nn.Module) -> Iterator[None]:
    """Inside `standing_still`, lets the caller change what hangs on `model` for a while."""
    was_pinned = _still.pinned.pop(id(model), None) is not None
    try:
        yield
    finally:
        if was_pinned:
            _still.pinned[id(model)] = _visit(model)


def visit(model: torch.nn.Module) -> list[Found]:
    """Holders once, tensors at every place; by an earlier walk where nothing has changed since."""
    return _visit(model).found


def contents(model: torch.nn.Module) -> list[Read]:
    """What each holder that `visit` gives holds now; empty where that was not read on the way."""
    return _visit(model).read


def _visit(model: torch.nn.Module) -> Visit:
    pinned = _still.pinned.get(id(model))
    if pinned is not None:
        return pinned
    surveys = _surveys.setdefault(model, [])
    for index, survey in enumerate(surveys):
        again = survey.revisit(model)
        if again is not None:
            surveys.insert(0, surveys.pop(index))
            return again
    found = list(_visit_anew(model))
    survey = Survey(model, found, children_of)
    if not survey.is_complete:
        surveys.clear()
        return Visit(found, [], None)
    surveys.insert(0, survey)
    del surveys[_NUM_SURVEYS:]
    return Visit(found, [], survey.state)


def _visit_anew(model: torch.nn.Module) -> Iterator[Found]:
    """A full walk: registered modules first so that they are found under their own paths."""
    modules: dict[int, tuple[str, torch.nn.Module]] = {id(m): ("", m) for m in _strangers.get(model, ())}
    queue = _registered(model, "", modules)
    seen: dict[int, Any] = {}
    for path, module in queue:
        hidden: list[tuple[str, torch.nn.Module]] = []
        yield from _visit_module(module, path, seen, hidden)
        for hidden_path, hidden_module in hidden:
            queue.extend(_registered(hidden_module, hidden_path, modules))


def _registered(
    module: torch.nn.Module, path: str, known: dict[int, tuple[str, torch.nn.Module]]
) -> list[tuple[str, torch.nn.Module]]:
    """`module` and its registered descendants, less the known ones, which it adds to."""
    added = []
    stack = [(path, module)]
    while stack:
        where, node = stack.pop()
        if id(node) in known:
            continue
        known[id(node)] = (where, node)
        added.append((where, node))
        children = [(join_path(where, f".{name}"), child) for name, child in node._modules.items() if child is not None]
        stack.extend(reversed(children))
    return added


def _visit_module(
    module: torch.nn.Module, path: str, seen: dict[int, Any], hidden: list[tuple[str, torch.nn.Module]]
) -> Iterator[Found]:
    """What belongs to one module. Other modules met on the way go to `hidden`, not into the result."""
    stack: list[tuple[str, Kind, Any]] = [(path, "attribute", module)]
    while stack:
        where, kind, node = stack.pop()
        is_tensor = isinstance(node, torch.Tensor)
        if is_tensor:
            yield Found(where, path, kind, node)
        elif isinstance(node, torch.nn.Module) and node is not module:
            hidden.append((where, node))
            continue
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if not is_tensor:
            yield Found(where, path, kind, node)
        below: list[tuple[str, Kind, Any]] = []
        for step, child in children_of(node):
            if step.how != "module" and is_reachable(child):
                child_kind: Kind = step.how if step.how in ("parameter", "buffer") else "attribute"
                below.append((join_path(where, step.label()), child_kind, child))
        stack.extend(reversed(below))


def is_reachable(value: Any) -> bool:
    """Whether `value` is a tensor or can hold one."""
    if isinstance(value, _LEAVES) or type(value) in LEFT_OUT:
        return False
    if isinstance(value, (torch.Tensor, torch.nn.Module, *CONTAINERS, *CALLABLES, *_PLAIN_HOLDERS)):
        return True
    return type(value).__module__.partition(".")[0] not in FOREIGN


def children_of(node: Any) -> Iterator[tuple[_Step, Any]]:
    """What hangs on one holder, in a fixed order."""
    if isinstance(node, torch.nn.Module):
        yield from ((_Step("parameter", name), value) for name, value in node._parameters.items())
        yield from ((_Step("buffer", name), value) for name, value in node._buffers.items())
        yield from ((_Step("module", name), value) for name, value in node._modules.items())
    elif isinstance(node, (dict, types.MappingProxyType)):
        yield from ((_Step("item", key), value) for key, value in node.items())
    elif isinstance(node, (list, tuple, collections.deque)):
        yield from ((_Step("item", index), value) for index, value in enumerate(node))
    elif isinstance(node, (set, frozenset)):
        yield from ((_Step("member", index), value) for index, value in enumerate(node))
    elif isinstance(node, functools.partial):
        yield from ((_Step("attribute", name), getattr(node, name)) for name in ("func", "args", "keywords"))
    elif isinstance(node, types.MethodType):
        yield from ((_Step("attribute", name), getattr(node, name)) for name in ("__self__", "__func__"))
    elif isinstance(node, types.FunctionType):
        yield from ((_Step("attribute", name), getattr(node, name)) for name in ("__defaults__", "__kwdefaults__"))
        yield from ((_Step("cell", name), cell.cell_contents) for name, cell in cells_of(node) if is_set(cell))
    passed_over = TABLES if isinstance(node, torch.nn.Module) else frozenset()
    for name, value in attributes_of(node).items():
        if name not in passed_over or not _is_empty_table(value):
            yield _Step("attribute", name), value


def _is_empty_table(table: Any) -> bool:
    """Whether a table of hooks holds none, or the gate of this package alone."""
    if isinstance(table, dict):
        return all(str(getattr(hook, "__module__", "")).startswith("weightsync.") for hook in table.values())
    return not table


def attributes_of(node: Any) -> dict[str, Any]:
    """Instance attributes, from `__dict__` and slots, without a module's registries."""
    if isinstance(node, types.MethodType):
        return {}
    found = {name: value for name, value in getattr(node, "__dict__", {}).items() if name not in REGISTRIES}
    for descriptor in _slot_descriptors(type(node)):  # type: ignore[arg-type]
        try:
            found[descriptor.__name__] = descriptor.__get__(node)
        except AttributeError:
            continue  # an unset slot holds nothing
    return found


@functools.lru_cache(maxsize=4096)
def _slot_descriptors(cls: type) -> tuple[types.MemberDescriptorType, ...]:
    return tuple(
        value
        for base in cls.__mro__
        if base.__module__.partition(".")[0] not in FOREIGN
        for value in vars(base).values()
        if isinstance(value, types.MemberDescriptorType)
    )


def cells_of(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """Names and cells of a function's closure."""
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def is_set(cell: types.CellType) -> bool:
    """Whether a cell holds anything."""
    try:
        cell.cell_contents  # noqa: B018  # reading an empty cell raises, there is no other way to ask
    except ValueError:
        return False
    return True


def join_path(path: str, label: str) -> str:
    """A path and the label of what is below it."""
    return path + label if path else label.removeprefix(".")


def _find(node: Any, where: str, path: str) -> list[tuple[Any, _Step]] | None:
    """The holders from `node` down to `path`, following the path alone."""
    for step, child in children_of(node):
        below = join_path(where, step.label())
        if below == path:
            return [(node, step)]
        if path.startswith(below) and path[len(below)] in ".[{" and is_reachable(child):
            rest = _find(child, below, path)
            if rest is not None:
                return [(node, step), *rest]
    return None


def _assign(node: Any, step: _Step, value: Any, path: str) -> Any:
    """Puts `value` on `node`; returns None when done in place, else a rebuilt `node` for the holder above."""
    how, key = step
    if how == "parameter":
        if not isinstance(value, torch.nn.Parameter):
            raise LayoutError(
                f"{path}: a parameter can only be replaced by a parameter, got a plain tensor", names=[path]
            )
        node._parameters[key] = value
    elif how == "buffer":
        node._buffers[key] = value
    elif how == "module":
        node._modules[key] = value
    elif how == "cell":
        dict(cells_of(node))[key].cell_contents = value
    elif how == "item":
        if isinstance(node, tuple):
            items = [value if index == key else item for index, item in enumerate(node)]
            return type(node)._make(items) if hasattr(node, "_make") else type(node)(items)
        if isinstance(node, types.MappingProxyType):
            raise LayoutError(f"{path}: a mappingproxy can't be changed, so no tensor can be put there", names=[path])
        node[key] = value
    elif how == "member":
        items = [value if index == key else item for index, item in enumerate(node)]
        if isinstance(node, frozenset):
            return type(node)(items)
        node.clear()
        node.update(items)
    elif isinstance(node, functools.partial) and key in ("func", "args", "keywords"):
        func, args, keywords = (value if key == name else getattr(node, name) for name in ("func", "args", "keywords"))
        node.__setstate__((func, args, keywords, vars(node)))  # type: ignore[attr-defined]
    elif isinstance(node, types.MethodType):
        raise LayoutError(f"{path}: a bound method can't be changed, so no tensor can be put there", names=[path])
    elif isinstance(node, types.FunctionType) and key in ("__defaults__", "__kwdefaults__"):
        setattr(node, key, value)
    else:
        object.__setattr__(node, key, value)  # also past a frozen dataclass and nn.Module's own registration
    return None
