"""A model's Python state, to be put back in place: attributes, containers, helper objects, closures, `.data`.

state = PythonState.capture(model)
try: model.load_weights(...)
finally: state.restore()
"""

from __future__ import annotations

import array
import collections
import functools
import types
from typing import Any

import numpy as np
import torch

from weightsync.reachable import REGISTRIES, TABLES, attributes_of, cells_of, children_of, is_set, visit

_RAW = (np.ndarray, bytearray, array.array)  # bytes outside of any tensor, which no walk enters
_UNCHANGEABLE = (tuple, frozenset, types.MethodType, types.MappingProxyType)


class PythonState:
    """A model's Python state, to be put back in place: attributes, containers, helper objects, closures, `.data`.

    Tensors are captured by alias (storage, shape, strides), not by bytes: a restore undoes rebinding, not writing.

        state = PythonState.capture(model)
        try: model.load_weights(...)
        finally: state.restore()
    """

    def __init__(self, entries: list[_Saved]) -> None:
        self._entries = entries

    @classmethod
    def capture(cls, model: torch.nn.Module) -> PythonState:
        """Remembers everything that `walk` can reach in `model`; costs references, no tensor memory."""
        saved: dict[int, _Saved] = {}
        for found in visit(model):
            if id(found.value) not in saved and type(found.value) not in _UNCHANGEABLE:
                saved[id(found.value)] = _Saved(found.value)
                for _, child in children_of(found.value):
                    if isinstance(child, _RAW) and id(child) not in saved:
                        saved[id(child)] = _Saved(child)
        return cls(list(saved.values()))

    def restore(self) -> None:
        """Puts the captured state back into the very same objects. May be called more than once."""
        for entry in self._entries:
            entry.restore()


class _Saved:
    """What one object held, and how to put it back into the same object."""

    __slots__ = ("attributes", "contents", "node")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.attributes = attributes_of(node)
        self.contents = _contents(node)

    def restore(self) -> None:
        node = self.node
        now = attributes_of(node)
        for name in now:
            if name not in self.attributes:
                object.__delattr__(node, name)
        for name, value in self.attributes.items():
            if name not in now or now[name] is not value:
                object.__setattr__(node, name, value)
        _put_contents(node, self.contents)


def _contents(node: Any) -> Any:
    """What an object holds besides attributes, as a shallow copy."""
    if isinstance(node, torch.Tensor):
        return node.data, node.requires_grad
    if isinstance(node, torch.nn.Module):
        own = node.__dict__
        return [(name, table := own[name], table.copy() if table else None) for name in (*REGISTRIES, *TABLES)]
    if isinstance(node, dict):
        return dict(node)
    if isinstance(node, (list, collections.deque)):
        return list(node)
    if isinstance(node, set):
        return set(node)
    if isinstance(node, (bytearray, array.array)):
        return node[:]
    if isinstance(node, np.ndarray):
        return node.copy()
    if isinstance(node, functools.partial):
        return node.func, node.args, node.keywords
    if isinstance(node, types.FunctionType):
        cells = [(cell, cell.cell_contents) for _, cell in cells_of(node) if is_set(cell)]
        return node.__defaults__, node.__kwdefaults__, cells
    return None


def _put_contents(node: Any, contents: Any) -> None:
    if isinstance(node, torch.Tensor):
        data, requires_grad = contents
        if not _same_view(node, data):
            node.data = data
        if node.requires_grad != requires_grad:
            node.requires_grad_(requires_grad)
    elif isinstance(node, torch.nn.Module):
        for name, table, items in contents:
            if isinstance(table, set) or not items:
                table.clear()
                table.update(items or ())
            else:
                _refill(table, items)
            if node.__dict__.get(name) is not table:
                object.__setattr__(node, name, table)
    elif isinstance(node, dict):
        _refill(node, contents)
    elif isinstance(node, (list, collections.deque)):
        if len(node) != len(contents) or any(a is not b for a, b in zip(node, contents, strict=True)):
            node.clear()
            node.extend(contents)
    elif isinstance(node, set):
        if {id(item) for item in node} != {id(item) for item in contents}:
            node.clear()
            node.update(contents)
    elif isinstance(node, (bytearray, array.array)):
        if node != contents:
            node[:] = contents
    elif isinstance(node, np.ndarray):
        if node.tobytes() != contents.tobytes():
            np.copyto(node, contents)
    elif isinstance(node, functools.partial):
        if any(a is not b for a, b in zip((node.func, node.args, node.keywords), contents, strict=True)):
            node.__setstate__((*contents, vars(node)))  # type: ignore[attr-defined]
    elif isinstance(node, types.FunctionType):
        node.__defaults__, node.__kwdefaults__, cells = contents
        for cell, value in cells:
            cell.cell_contents = value


def _refill(registry: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Makes `registry` hold `items`, in their order, without touching it if it does already."""
    same = len(registry) == len(items) and all(
        key is kept and value is items[kept] for (key, value), kept in zip(registry.items(), items, strict=True)
    )
    if not same:
        dict.clear(registry)
        dict.update(registry, items)


def _same_view(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors look at the same bytes in the same way."""
    return (
        left.dtype == right.dtype
        and left.device == right.device
        and left.shape == right.shape
        and left.layout == right.layout
        and (left.layout != torch.strided or left.stride() == right.stride())
        and (left.layout != torch.strided or left.storage_offset() == right.storage_offset())
        and (left.layout != torch.strided or left.untyped_storage()._cdata == right.untyped_storage()._cdata)
    )
