"""Which state of hooks is a mere log: what their code only adds to, or only takes from, and nobody asks for.

A hook that counts its runs, or appends to a list, leaves something that grows with every load. No result depends on it,
so it goes on from its live value, where every other state of hooks is shown to them as the first load's hooks found it.
Read off the source of the hooks and of what they call:

    self.num_runs += 1                     n = getattr(self, "n", 0) + 1 on the same name
    self.log.append(...)                   counts["runs"] += 1
    values.pop(0)                          what hooks are fed with

Any other mention of the name, in a hook or in another method of the holder's class, makes it state. So does code
without source.

    Logs(hooks).has("layers.0.quant_method.num_runs", layer.quant_method, 3)
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from weightsync.reload.hooks.post_load import Hook, functions_of
from weightsync.reload.hooks.scopes import MUTABLE

_ADDING = {"append", "appendleft", "extend", "add", "update"}
_TAKING = {"pop", "popleft"}


class Logs:
    """Tells logs from state.

    Args:
        hooks: All hooks of the model.
    """

    def __init__(self, hooks: Iterable[Hook]) -> None:
        self._hooks = hooks

    @cached_property
    def _functions(self) -> set[types.CodeType]:
        return {function.__code__ for hook in self._hooks for function in functions_of(hook)}

    def has(self, path: str, owner: Any, value: Any) -> bool:
        """Whether hooks only add to what is at a path, or only take from it.

        Args:
            path: Path of a name; its last part is what the code calls it.
            owner: The object that has it among its attributes.
            value: What is there.
        """
        name = path.rpartition(".")[2].strip("<>")
        is_count = isinstance(value, (int, float, *MUTABLE)) and not isinstance(value, bool)
        if not is_count or not name.isidentifier():
            return False
        methods = _methods_of(type(owner))
        if any(name in method.__code__.co_names for method in methods if method.__code__ not in self._functions):
            return False
        uses = {_use(code, name) for code in self._functions} - {""}
        return uses == {"add"} or uses == {"take"}


def _methods_of(cls: type) -> list[types.FunctionType]:
    own = (base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins"))
    found = [value for base in own for value in vars(base).values()]
    found = [getattr(value, "fget", None) or getattr(value, "func", None) or value for value in found]
    return [value for value in found if isinstance(value, types.FunctionType) and value.__name__ != "__init__"]


@functools.lru_cache(maxsize=4096)
def _use(code: types.CodeType, name: str) -> str:
    """How a function uses a name: "add", "take", "" for not at all, "ask" for anything else."""
    if not _mentions(code, name):
        return ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return "ask"
    visitor = _Uses(name)
    visitor.visit(tree)
    return visitor.use if visitor.use and not visitor.others else "ask"


def _mentions(code: types.CodeType, name: str) -> bool:
    names = (*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars, *code.co_consts)
    return name in names or any(_mentions(inner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))


class _Uses(ast.NodeVisitor):
    """Finds statements that only add to a name or take from it, and counts all other mentions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.use = ""
        self.others = 0

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """`n += 1` or `n[k] += 1`."""
        if isinstance(node.op, ast.Add) and self._is_place(node.target) and not self._mentioned(node.value):
            self._note("add")
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """`n = n + 1`, where the second may be a `getattr` with a default."""
        value = node.value
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        if is_sum and len(node.targets) == 1 and self._is_place(node.targets[0]):
            left, right = value.left, value.right  # type: ignore[attr-defined]
            if (self._is_place(left) or self._is_getattr(left)) and not self._mentioned(right):
                self._note("add")
                return
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """`n.append(x)`."""
        call = node.value
        if self._is_call(call, _ADDING):
            self._note("add")
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`n.pop(0)`, wherever its result goes."""
        if self._is_call(node, _TAKING):
            self._note("take")
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A plain mention."""
        self.others += node.id == self.name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A mention as an attribute."""
        self.others += node.attr == self.name
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A mention by text, as in `hasattr`."""
        self.others += node.value == self.name

    def visit_arg(self, node: ast.arg) -> None:
        """A parameter of that name."""
        self.others += node.arg == self.name

    def _note(self, use: str) -> None:
        self.others += self.use not in ("", use)
        self.use = use

    def _is_call(self, node: ast.AST, methods: set[str]) -> bool:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods):
            return False
        return self._is_place(node.func.value) and not any(map(self._mentioned, (*node.args, *node.keywords)))

    def _is_getattr(self, node: ast.AST) -> bool:
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        return is_call and isinstance(node.args[1], ast.Constant) and node.args[1].value == self.name  # type: ignore[attr-defined]

    def _is_place(self, node: ast.AST) -> bool:
        """The name itself, or an item of it."""
        while isinstance(node, ast.Subscript) and not self._mentioned(node.slice):
            node = node.value
        if isinstance(node, ast.Attribute):
            return node.attr == self.name and not self._mentioned(node.value)
        return isinstance(node, ast.Name) and node.id == self.name

    def _mentioned(self, node: ast.AST) -> bool:
        inner = _Uses(self.name)
        inner.visit(node)
        return bool(inner.others or inner.use)
