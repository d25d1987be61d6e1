"""Caches that forward builds on first use and keeps: emptied by a reload, rebuilt by the next forward at their address.

Read off the source of `forward` and of the methods that it calls, a cache is what is bound under a condition that asks
for it:

    if self._c is None: self._c = pad(self.sink)
    if key not in self.tables: self.tables[key] = build(key)
    self.holder.parts.setdefault("sink", build())
    @functools.cached_property

What forward binds without asking (its last output) is no cache, nor is what an engine binds (a KV cache). A module that
has `refresh_derived` looks after its own. Code that has no source, and caches bound through local names or by helper
objects themselves, are not found.

    paths = empty_lazy_caches(model, modules)
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.errors import LayoutError
from weightsync.reachable import attributes_of, join_path, replace, walk_module
from weightsync.reload.layouts import ModuleRecord
from weightsync.reload.records import TensorLayout, same_layout
from weightsync.reload.scopes import ABSENT, Container, is_plain
from weightsync.reload.state import state_of

_ITEM = "[]"
_ADDING = {"append", "setdefault", "update", "insert", "extend", "__setitem__"}
_UNKNOWN: Any = object()


@dataclass(frozen=True, slots=True)
class Binding:
    """One place that forward fills.

    Attributes:
        chain: Attribute names from the module on; `"[]"` for an item.
        is_none_first: Whether it is asked for as None, rather than as missing.
        is_flag: Whether it is no cache but says that one was built.
    """

    chain: tuple[str, ...]
    is_none_first: bool
    is_flag: bool = False


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
    for path, module in modules.items():
        bindings = bindings_of(type(module))  # type: ignore[arg-type]  # mypy does not take a class for hashable
        pending = next((h for h in module._forward_hooks.values() if isinstance(h, _Rebuilt)), None)
        if (not bindings and pending is None) or callable(getattr(module, "refresh_derived", None)):
            continue
        flags: list[tuple[Any, Any]] = []
        before = {slot.path: slot.tensor for slot in walk_module(module, "")}
        for binding in bindings:
            for holder, name in list(_places(module, binding.chain)):
                if binding.is_flag:
                    flags.append((holder, name))
                    continue
                _empty(holder, name, _recorded(records.get(module), holder, name), binding)
        now = {slot.path for slot in walk_module(module, "")}
        old = {where: tensor for where, tensor in before.items() if where not in now}
        if old:
            for holder, name in flags:
                was = _recorded(records.get(module), holder, name)
                if is_plain(was) and was is not ABSENT and not isinstance(holder, (dict, list)):
                    object.__setattr__(holder, name, was)
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


@functools.lru_cache(maxsize=4096)
def bindings_of(cls: type) -> frozenset[Binding]:
    """The caches of a class, by the source of its forward and of the methods that it calls."""
    found: set[Binding] = set()
    seen: set[int] = set()
    pending: list[Any] = [getattr(cls, "forward", None)]
    while pending:
        function = inspect.unwrap(pending.pop()) if pending[-1] is not None else pending.pop()
        tree = _parsed(function)
        if tree is None or id(function) in seen or not tree.args.args:
            continue
        seen.add(id(function))
        this = tree.args.args[0].arg
        found.update(_bindings(tree, this))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == this:
                member = inspect.getattr_static(cls, node.attr, None)
                if isinstance(member, functools.cached_property):
                    found.add(Binding((node.attr,), is_none_first=False))
                    pending.append(member.func)
                elif isinstance(member, property):
                    pending.append(member.fget)
                elif inspect.isfunction(member) and node.attr not in vars(torch.nn.Module):
                    pending.append(member)
    return frozenset(found)


def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _bindings(tree: ast.FunctionDef, this: str) -> Iterator[Binding]:
    """Places under `this` that are bound within a condition that names them, or names a flag that is set with them."""

    def visit(node: ast.AST, tests: tuple[ast.AST, ...]) -> Iterator[Binding]:
        tests = (*tests, *_tests_of(node))
        for chain in _bound_by(node, this):
            guards = [test for test in tests if _names(test, this, chain)]
            if isinstance(node, ast.Call) and _called(node) == "setdefault":
                guards.append(node)
            if guards:
                yield Binding(chain, any(_asks_for_none(test) for test in guards))
            elif flags := [flag for test in tests for flag in _flags_of(test, this, tree)]:
                yield Binding(chain, is_none_first=True)
                yield from (Binding(flag, is_none_first=False, is_flag=True) for flag in flags)
        for _, value in ast.iter_fields(node):
            above = tests
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, above)
                    if isinstance(child, ast.If) and isinstance(child.body[-1], (ast.Return, ast.Raise)):
                        above = (*above, child.test)  # what follows runs where the condition does not hold

    yield from visit(tree, ())


def _tests_of(node: ast.AST) -> list[ast.AST]:
    """Conditions that a node puts over what is in it."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [node.test]
    if isinstance(node, ast.Match):
        asks = [isinstance(case.pattern, ast.MatchSingleton) and case.pattern.value is None for case in node.cases]
        none = ast.Compare(left=node.subject, ops=[ast.Is()], comparators=[ast.Constant(value=None)])
        return [none if any(asks) else node.subject]
    if isinstance(node, ast.Try) and node.handlers:
        return list(node.body)
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.IfExp, ast.BoolOp)):
        return [node.value]
    return []


def _bound_by(node: ast.AST, this: str) -> list[tuple[str, ...]]:
    """Places that one statement or call binds."""
    chains: list[tuple[str, ...]] = []
    if isinstance(node, ast.Assign):
        targets = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        chains = [_chain(target, this) for target in targets]
    elif isinstance(node, ast.AnnAssign):
        chains = [_chain(node.target, this)]
    elif isinstance(node, ast.Call):
        chains = [_bound_by_call(node, this)]
    return [chain for chain in chains if chain]


def _bound_by_call(node: ast.Call, this: str) -> tuple[str, ...]:
    arguments = list(node.args)
    if isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(arguments) == 3:
        above, name = _chain(arguments[0], this), arguments[1]
        is_this = isinstance(arguments[0], ast.Name) and arguments[0].id == this
        return (*above, name.value) if (above or is_this) and _is_text(name) else ()  # type: ignore[attr-defined]
    above = _chain(node.func.value, this) if isinstance(node.func, ast.Attribute) else ()
    return (*above, _ITEM) if above and _called(node) in _ADDING else ()


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _flags_of(test: ast.AST, this: str, tree: ast.FunctionDef) -> list[tuple[str, ...]]:
    """Attributes that a condition asks for and that the function sets to a constant."""
    asked = {_chain(node, this) for node in ast.walk(test)} - {()}
    set_here = {
        _chain(target, this)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    }
    return sorted(asked & set_here)


def _chain(node: ast.AST, this: str) -> tuple[str, ...]:
    """`self.a[k].b` as ("a", "[]", "b"); empty if it does not start at `this`."""
    steps: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        steps.append(node.attr if isinstance(node, ast.Attribute) else _ITEM)
        node = node.value
    return tuple(reversed(steps)) if isinstance(node, ast.Name) and node.id == this else ()


def _names(test: ast.AST, this: str, chain: tuple[str, ...]) -> bool:
    """Whether a condition asks for a place, or for what holds it."""
    last = next(step for step in reversed(chain) if step != _ITEM)
    for node in ast.walk(test):
        asked = _chain(node, this)
        if asked and (asked == chain or (chain[-1] == _ITEM and asked == chain[: len(asked)])):
            return True
        if isinstance(node, ast.Constant) and node.value == last:  # hasattr(self, "_c")
            return True
    return False


def _asks_for_none(test: ast.AST) -> bool:
    has_none = any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(test))
    return has_none and not any(isinstance(node, ast.Call) for node in ast.walk(test))


def _places(node: Any, chain: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    """Holder and name of every place that a chain stands for; items by key or index, the last first."""
    step, rest = chain[0], chain[1:]
    if step == _ITEM:
        pairs = (
            list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
        )
        pairs.reverse()
    else:
        held = attributes_of(node) if not isinstance(node, (dict, list, tuple)) else {}
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
    scopes = [s for s in (*record.scopes, *record.outer) if s.holder is holder and s.registry == "attributes"]
    return scopes[0].values.get(name, ABSENT) if scopes else ABSENT


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


def _empty(holder: Any, name: Any, was: Any, binding: Binding) -> None:
    """Puts a place back to how forward finds it at first, if it holds a tensor now and did not at first."""
    value = holder[name] if isinstance(holder, (dict, list)) else attributes_of(holder).get(name)
    if isinstance(was, (TensorLayout, Container)) or not _holds_tensor(value):
        return
    if was is _UNKNOWN:
        was = None if binding.is_none_first else ABSENT
    if isinstance(holder, (dict, list)):
        if was is ABSENT and (isinstance(holder, dict) or name == len(holder) - 1):
            del holder[name]
        elif was is not ABSENT:
            holder[name] = was
    elif was is ABSENT:
        object.__delattr__(holder, name)
    else:
        object.__setattr__(holder, name, was)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(value, torch.nn.Parameter)
    if isinstance(value, dict):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_tensor(item) for item in value)
