"""The plain Python values that hang on a model, as something that compares: whatever a loader could branch on.

    before = values_of(model)
    model.layers[0].w.tp_rank = 1
    values_of(model) == before          # False

Follows the walk of reachable.py, so attributes of tensors, closures, bound methods, partials and slots count like
those of modules. Immutable values count by value, arrays by their bytes, functions by their code and what they close
over, tensors by shape and dtype, and helper objects by what they hold and by which places share them.
"""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import enum
import fractions
import hashlib
import pathlib
import threading
import types
import uuid
import weakref
from typing import Any

import numpy as np
import torch

from weightsync.reachable import attributes_of, children_of, is_reachable, join_path, visit

# What every module has of itself, and what a loader has no business with.
_COMMON = frozenset(torch.nn.Module().__dict__) - {"training"}
_SHADOWED = ("named_parameters", "named_buffers")  # on instances, while wrapper components are left out of names
_BY_VALUE = (
    torch.dtype, torch.device, torch.Size, range, fractions.Fraction, decimal.Decimal, pathlib.PurePath, np.dtype,
    datetime.date, datetime.time, datetime.timedelta, uuid.UUID,
)  # fmt: skip
_BYTES = (bytearray, memoryview, array.array)


def values_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """One row per place in `model` that holds something: path, type, and the values there. Holds nothing of the model.

    Equal at two moments unless a loader could tell these apart; a plain tensor in another's place with the same shape
    and dtype is no difference.
    """
    found = visit(model)
    numbers: dict[int, int] = {}
    for entry in found:
        if not isinstance(entry.value, torch.Tensor):
            numbers.setdefault(id(entry.value), len(numbers))
    passed_over: list[str] = []
    rows: list[tuple[Any, ...]] = []
    seen: set[int] = set()
    for path, _, kind, node in found:
        if passed_over and path.startswith(tuple(passed_over)):
            continue
        is_module = isinstance(node, torch.nn.Module)
        if is_module:
            tables = [name for name in _COMMON if name[0] == "_" and node.__dict__.get(name)]
            passed_over.extend(join_path(path, f".{name}") for name in tables)
        if id(node) in seen:
            rows.append((path, kind, _own(node)))
            continue
        seen.add(id(node))
        below = [
            (step.how, _leaf(step.key), _child(child, numbers))
            for step, child in children_of(node)
            if not is_module or step.how != "attribute" or not _is_common(step.key)
        ]
        if isinstance(node, (set, frozenset)):
            below = [frozenset(value for _, _, value in below)]  # type: ignore[list-item]
        rows.append((path, kind, type(node), _own(node), tuple(below)))
    return tuple(rows)


def shallow(node: Any) -> Any:
    """What hangs on one holder: plain values by value, tensors and other holders by identity."""
    is_module = isinstance(node, torch.nn.Module)
    below = [
        (step.how, step.key if isinstance(step.key, (str, int)) else _leaf(step.key), _identity_or_leaf(child))
        for step, child in children_of(node)
        if not is_module or step.how != "attribute" or not (_is_common(step.key) or step.key in _SHADOWED)
    ]
    is_set = isinstance(node, (set, frozenset))
    return type(node), _own(node), frozenset(value for _, _, value in below) if is_set else below


def _identity_or_leaf(value: Any) -> Any:
    return id(value) if isinstance(value, torch.Tensor) or is_reachable(value) else _leaf(value)


def _is_common(name: Any) -> bool:
    return name in _COMMON or str(name).startswith("_weightsync")


def _child(value: Any, numbers: dict[int, int]) -> Any:
    """What hangs on a holder: a value, or which row tells more of it."""
    if isinstance(value, torch.Tensor):
        return _layout(value)
    if is_reachable(value):
        return type(value), numbers.get(id(value))
    return _leaf(value)


def _own(node: Any) -> Any:
    """What an object is besides what hangs on it."""
    if isinstance(node, torch.Tensor):
        return _layout(node)
    if isinstance(node, types.FunctionType):
        return node.__code__
    if isinstance(node, types.ModuleType) or not isinstance(node, (np.ndarray, np.generic, *_BYTES)):
        return None
    return _contents(node, ())


def _layout(tensor: torch.Tensor) -> Any:
    return type(tensor), tuple(tensor.shape) if not tensor.is_nested else None, tensor.dtype, tensor.requires_grad


def _leaf(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """A hashable stand-in for a value that no walk enters.

    Args:
        value: The value.
        inside: Identities of the values around it.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return kind, value
    if isinstance(value, torch.Tensor):
        return _layout(value)
    if isinstance(value, _BY_VALUE):
        return kind, value
    if isinstance(value, (bool, int, float, complex, str, bytes, slice)):
        return kind, repr(value)
    if isinstance(value, enum.Enum):
        return kind, value.name
    if isinstance(value, weakref.ref):
        return kind, id(value())
    if kind.__module__.startswith("weightsync."):
        return kind  # what this package keeps on a model says nothing of the model
    if id(value) in inside:
        return kind, len(inside) - inside.index(id(value))
    return kind, _contents(value, (*inside, id(value)))


def _contents(value: Any, inside: tuple[int, ...]) -> Any:
    """What is inside a value of another library; its identity if nobody can tell."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return value.shape, tuple(_leaf(item, inside) for item in value.ravel().tolist())
        return value.shape, value.dtype.str, _digest(value.tobytes())
    if isinstance(value, np.generic):
        return value.dtype.str, value.tobytes()
    if isinstance(value, _BYTES):
        return _digest(bytes(value))
    if isinstance(value, (collections.abc.Mapping, types.MappingProxyType)):
        return tuple((_leaf(key, inside), _leaf(item, inside)) for key, item in value.items())
    if isinstance(value, (set, frozenset)):
        return frozenset(_leaf(item, inside) for item in value)
    if isinstance(value, (list, tuple, collections.deque)):
        return tuple(_leaf(item, inside) for item in value)
    if isinstance(value, threading.Event):
        return value.is_set()
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return tuple((name, _leaf(item, inside)) for name, item in vars(value).items())
    if isinstance(value, (types.FunctionType, types.MethodType)) or is_reachable(value):
        return tuple((name, _leaf(item, inside)) for name, item in attributes_of(value).items()) or id(value)
    return id(value)


def _digest(data: bytes) -> bytes:
    return data if len(data) <= 64 else hashlib.blake2b(data, digest_size=32).digest()
