"""Places that a method fills on first use, read off its source: what is bound under a condition that asks for it.

bindings, calls = bindings_of(Attention)        # of its forward, and of the methods that this calls
bindings                                        # {Binding(("cache",), is_none_first=True), ...}
calls                                           # {(("helper",), "get"), ...}: whose methods may fill more
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

ITEM = "[]"
_ADDING = {"append", "setdefault", "update", "insert", "extend", "__setitem__"}


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


Calls = frozenset[tuple[tuple[str, ...], str]]  # where a helper object hangs, and the method that is called


def bindings_of(cls: type, method: str = "forward") -> tuple[frozenset[Binding], Calls]:
    """The caches that a method of a class fills, by its source and that of the methods that it calls."""
    return _bindings_of(cls, method, inspect.getattr_static(cls, method, None))


@functools.lru_cache(maxsize=4096)
def _bindings_of(cls: type, method: str, first: Any) -> tuple[frozenset[Binding], Calls]:
    found: set[Binding] = set()
    calls: set[tuple[tuple[str, ...], str]] = set()
    seen: set[int] = set()
    pending: list[Any] = [first]
    while pending:
        function = inspect.unwrap(pending.pop()) if pending[-1] is not None else pending.pop()
        tree = _parsed(function)
        if tree is None or id(function) in seen or not tree.args.args:
            continue
        seen.add(id(function))
        this = tree.args.args[0].arg
        names = _names_in(tree, this)
        found.update(_bindings(tree, names))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                above = _chain(node.func.value, names) if isinstance(node.func, ast.Attribute) else ()
                calls.update({(above, _called(node))} if above else ())
                calls.update({(own, "__call__")} if (own := _chain(node.func, names)) else ())
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
    return frozenset(found), frozenset(calls)


Names = Mapping[str, tuple[str, ...]]  # local name -> the attributes that it stands for; () for the object itself


def _names_in(tree: ast.FunctionDef, this: str) -> Names:
    """The object's own name, and local names that are bound to what hangs on it."""
    names: dict[str, tuple[str, ...]] = {this: ()}
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.NamedExpr) else []
        )
        if len(targets) == 1 and isinstance(targets[0], ast.Name):
            chain = _chain(node.value, names)  # type: ignore[attr-defined]
            if chain and targets[0].id not in names:
                names[targets[0].id] = chain
    return names


def _parsed(function: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _bindings(tree: ast.FunctionDef, names: Names) -> Iterator[Binding]:
    """Places that are bound within a condition that names them, or names a flag that is set with them."""

    def visit(node: ast.AST, tests: tuple[ast.AST, ...]) -> Iterator[Binding]:
        tests = (*tests, *_tests_of(node))
        for chain in _bound_by(node, names):
            guards = [test for test in tests if _names(test, names, chain)]
            if isinstance(node, ast.Call) and _called(node) == "setdefault":
                guards.append(node)
            if guards:
                yield Binding(chain, any(_asks_for_none(test) for test in guards))
            elif flags := [flag for test in tests for flag in _flags_of(test, names, tree)]:
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


def _bound_by(node: ast.AST, names: Names) -> list[tuple[str, ...]]:
    """Places that one statement or call binds."""
    chains: list[tuple[str, ...]] = []
    if isinstance(node, ast.Assign):
        targets = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        chains = [_chain(target, names) for target in targets]
    elif isinstance(node, ast.AnnAssign):
        chains = [_chain(node.target, names)]
    elif isinstance(node, ast.Call):
        chains = [_bound_by_call(node, names)]
    return [chain for chain in chains if chain]


def _bound_by_call(node: ast.Call, names: Names) -> tuple[str, ...]:
    arguments = list(node.args)
    if isinstance(node.func, ast.Name) and node.func.id == "setattr" and len(arguments) == 3:
        above, name = _chain(arguments[0], names), arguments[1]
        return (*above, name.value) if (above or _is_this(arguments[0], names)) and _is_text(name) else ()  # type: ignore[attr-defined]
    above = _chain(node.func.value, names) if isinstance(node.func, ast.Attribute) else ()
    if _called(node) == "register_buffer" and arguments and _is_text(arguments[0]):
        is_under = above or _is_this(node.func.value, names)  # type: ignore[attr-defined]
        return (*above, arguments[0].value) if is_under else ()  # type: ignore[attr-defined]
    return (*above, ITEM) if above and _called(node) in _ADDING else ()


def _is_this(node: ast.AST, names: Names) -> bool:
    return isinstance(node, ast.Name) and names.get(node.id) == ()


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _flags_of(test: ast.AST, names: Names, tree: ast.FunctionDef) -> list[tuple[str, ...]]:
    """Attributes that a condition asks for and that the function sets to a constant."""
    asked = {_chain(node, names) for node in ast.walk(test)} - {()}
    set_here = {
        _chain(target, names)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    }
    return sorted(asked & set_here)


def _chain(node: ast.AST, names: Names) -> tuple[str, ...]:
    """`self.a[k].b` as ("a", "[]", "b"); empty if it does not start at the object or at what hangs on it."""
    steps: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        steps.append(node.attr if isinstance(node, ast.Attribute) else ITEM)
        node = node.value
    return (*names[node.id], *reversed(steps)) if isinstance(node, ast.Name) and node.id in names else ()


def _names(test: ast.AST, names: Names, chain: tuple[str, ...]) -> bool:
    """Whether a condition asks for a place, or for what holds it."""
    last = next(step for step in reversed(chain) if step != ITEM)
    for node in ast.walk(test):
        asked = _chain(node, names)
        if asked and (asked == chain or (chain[-1] == ITEM and asked == chain[: len(asked)])):
            return True
        if isinstance(node, ast.Constant) and node.value == last:  # hasattr(self, "_c")
            return True
    return False


def _asks_for_none(test: ast.AST) -> bool:
    has_none = any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(test))
    return has_none and not any(isinstance(node, ast.Call) for node in ast.walk(test))
