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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from weightsync.reachable import attributes_of, cells_of, children_of, contents, is_set, visit
from weightsync.survey import (
    REGISTRIES,
    TABLES,
    Read,
    read_attributes,
    read_dict,
    read_function,
    read_module,
    read_sequence,
)

_RAW = (np.ndarray, bytearray, array.array)  # bytes outside of any tensor, which no walk enters
_UNCHANGEABLE = (tuple, frozenset, types.MethodType, types.MappingProxyType)


class PythonState:
    """A model's Python state, to be put back in place: attributes, containers, helper objects, closures, `.data`.

    Tensors are captured by alias (storage, shape, strides), not by bytes: a restore undoes rebinding, not writing.

        state = PythonState.capture(model)
        try: model.load_weights(...)
        finally: state.restore()
    """

    def __init__(self, entries: Sequence[_Saved | _SavedRead]) -> None:
        self._entries = entries

    @classmethod
    def capture(cls, model: torch.nn.Module) -> PythonState:
        """Remembers everything that `walk` can reach in `model`; costs references, no tensor memory."""
        read = contents(model)
        if read:  # what a walk has just read need not be read again
            return cls([
                _SavedRead(entry) if entry.how in _PARTS_OF else _Saved(entry.holder)
                for entry in read
                if type(entry.holder) not in _UNCHANGEABLE
            ])  # fmt: skip
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
        _put_attributes(self.node, self.attributes)
        _put_contents(self.node, self.contents)


class _SavedRead:
    """The same, of what a walk read; taken apart only if it is put back."""

    __slots__ = ("rest", "was")

    def __init__(self, was: Read) -> None:
        self.was = was
        node = was.holder
        self.rest: Any = None
        if isinstance(node, torch.Tensor):
            self.rest = node.data, node.requires_grad
        elif was.how is read_module and any(was.keys[-1]):
            self.rest = {name: table.copy() for name in TABLES if (table := node.__dict__[name])}

    def restore(self) -> None:
        attributes, contents = _PARTS_OF[self.was.how](self.was, self.rest)
        if attributes is not None:
            _put_attributes(self.was.holder, attributes)
        _put_contents(self.was.holder, contents)


Parts = tuple[dict[str, Any] | None, Any]  # attributes and contents as `_Saved` has them; None: it has no attributes


def _of_module(was: Read, tables: dict[str, Any] | None) -> Parts:
    values = iter(was.values)
    registries = [{key: next(values) for key in keys} for keys in was.keys[:3]]
    every = {key: next(values) for key in was.keys[3]}
    contents: list[Any] = [(name, every[name], items) for name, items in zip(REGISTRIES, registries, strict=True)]
    contents += [(name, every[name], (tables or {}).get(name)) for name in TABLES]
    return {name: value for name, value in every.items() if name not in REGISTRIES}, contents


def _of_attributes(was: Read, rest: Any) -> Parts:
    attributes = dict(zip(was.keys, was.values, strict=True))
    return {name: value for name, value in attributes.items() if name not in REGISTRIES}, rest


def _of_function(was: Read, rest: None) -> Parts:
    _, names, num_cells = was.keys
    defaults, keyword_defaults, *others = was.values
    cells = list(zip(was.holder.__closure__ or (), others[:num_cells], strict=True))
    return dict(zip(names, others[num_cells:], strict=True)), (defaults, keyword_defaults, cells)


_PARTS_OF: dict[Any, Callable[[Read, Any], Parts]] = {
    read_module: _of_module,
    read_attributes: _of_attributes,
    read_function: _of_function,
    read_dict: lambda was, rest: (None, dict(zip(was.keys, was.values, strict=True))),
    read_sequence: lambda was, rest: (None, set(was.values) if isinstance(was.holder, set) else list(was.values)),
}


def _put_attributes(node: Any, attributes: dict[str, Any]) -> None:
    now = attributes_of(node)
    for name in now:
        if name not in attributes:
            object.__delattr__(node, name)
    for name, value in attributes.items():
        if name not in now or now[name] is not value:
            object.__setattr__(node, name, value)


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
