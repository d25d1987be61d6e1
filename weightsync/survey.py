"""Remembers what a walk over a model found, and sees cheaply whether a walk today would find the same.

A reload looks at everything its model holds several times: before, for what the loaders may write; after, for what
moved. A full walk costs a millisecond per layer, most of it spent on finding that nothing has changed. A survey keeps,
for each holder on the way, the keys of what hangs on it, and its identities and types; comparing these is cheap.

    survey = Survey(model, found, ...)     # after a full walk
    survey.revisit(model)                  # the same entries, of the objects that stand there now; None: walk anew

A survey holds no tensor and no object of the model, only keys, immutable values, types and numbers: it keeps nothing
alive, and has no weak reference to a tensor, which `torch.utils.swap_tensors` would refuse to move. An identity can be
reused by a new object once the old one is gone; then its type and everything below it are compared all the same, and
for a tensor the address of its implementation, its shape and its dtype.
"""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import functools
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

Raw = tuple[Any, Sequence[Any]]  # keys, and what hangs on the holder


class _Holder(NamedTuple):
    """One object whose children are compared."""

    slot: int  # where it stands among the objects of a visit
    read: Callable[[Any], Raw]
    keys: Any
    identities: list[int]
    kinds: list[type]
    leaves: list[Any]  # the numbers and strings among them
    gives: tuple[tuple[int, int], ...]  # (position among the children, slot of that child)


class Survey:
    """What one full walk found.

    Args:
        model: The module walked.
        found: What was found, in order: named tuples of one kind whose last field is `value`; the model is the first.
        children: What hangs on an object that is neither module, dict, list nor plain object: (step, child) pairs.
        tables: Names of the dicts and sets that torch puts on every module; compared by length.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        found: Sequence[Any],
        children: Callable[[Any], Any],
        tables: tuple[str, ...],
    ) -> None:
        self._children, self._tables = children, tables
        self._make = type(found[0])
        self._found = [tuple(entry)[:-1] for entry in found]
        slots: dict[int, int] = {id(model): 0}
        for entry in found:
            slots.setdefault(id(entry.value), len(slots))
        self._slot_of_entry = [slots[id(entry.value)] for entry in found]
        self._num_slots = len(slots)
        self._tensors = {
            slots[id(entry.value)]: _facts(entry.value) for entry in found if isinstance(entry.value, torch.Tensor)
        }
        self._holders: list[_Holder] = []
        self.is_complete = self._record(model, slots)
        self._sees_all_values = not any(
            _is_opaque(value) and id(value) not in slots
            for holder in self._holders
            for value in holder.read(self._reached[holder.slot])[1]
        )
        del self._reached
        self._state: object = object()

    def _record(self, model: torch.nn.Module, slots: dict[int, int]) -> bool:
        """Visits everything found, parents first; False if something can't be reached by what holders give."""
        reached = self._reached = {0: model}
        queue = [0]
        for slot in queue:
            node = reached[slot]
            read = self._reader(node)
            keys, values = read(node)
            gives = []
            for position, value in enumerate(values):
                child = slots.get(id(value))
                if child is None:
                    continue
                if child not in reached:
                    reached[child] = value
                    queue.append(child)
                gives.append((position, child))
            self._holders.append(
                _Holder(
                    slot,
                    read,
                    keys,
                    list(map(id, values)),
                    list(map(type, values)),
                    list(map(_leaf, values)),
                    tuple(gives),
                )
            )
        return len(reached) == self._num_slots

    def _reader(self, node: Any) -> Callable[[Any], Raw]:
        if isinstance(node, torch.nn.Module):
            return self._read_module
        fast = _READERS.get(type(node))
        if fast is not None:
            return fast
        is_plain = isinstance(node, torch.Tensor) or type(node).__module__ not in _SPECIAL
        if is_plain and hasattr(node, "__dict__") and not isinstance(node, _HOLD_ITEMS) and not _has_slots(type(node)):  # type: ignore[arg-type]  # types are hashable
            return _read_attributes
        return self._read_children

    def _read_module(self, node: Any) -> Raw:
        attributes = node.__dict__
        parameters, buffers, modules = attributes["_parameters"], attributes["_buffers"], attributes["_modules"]
        keys = (
            [*parameters, *buffers, *modules, *attributes],
            [len(attributes[name]) for name in self._tables if name in attributes],
        )
        return keys, [*parameters.values(), *buffers.values(), *modules.values(), *attributes.values()]

    def _read_children(self, node: Any) -> Raw:
        pairs = list(self._children(node))
        return [step for step, _ in pairs], [child for _, child in pairs]

    def revisit(self, model: torch.nn.Module) -> list[Any] | None:
        """The entries of a walk over `model` as it is now; None if it must be walked anew."""
        objects: list[Any] = [None] * self._num_slots
        objects[0] = model
        try:
            unchanged = self._fill(objects)
        except Exception:  # a key whose comparison fails, a holder that lost what its kind has: a walk tells
            return None
        if not unchanged or any(facts != _facts(objects[slot]) for slot, facts in self._tensors.items()):
            return None
        make = self._make
        return [make(*entry, objects[slot]) for entry, slot in zip(self._found, self._slot_of_entry, strict=True)]

    @property
    def state(self) -> object | None:
        """The same object as long as every number and string that hangs on the model stays the same, too.

        None if something hangs there whose inside a survey cannot see, such as an array.
        """
        return self._state if self._sees_all_values else None

    def _fill(self, objects: list[Any]) -> bool:
        """Looks up every object from its holder; False as soon as something differs."""
        for index, holder in enumerate(self._holders):
            keys, values = holder.read(objects[holder.slot])
            if keys != holder.keys or list(map(type, values)) != holder.kinds:
                return False
            identities = list(map(id, values))
            if identities != holder.identities:
                if not _only_leaves_changed(holder, values):
                    return False
                leaves = list(map(_leaf, values))
                if leaves != holder.leaves:
                    self._state = object()
                self._holders[index] = holder._replace(identities=identities, leaves=leaves)
            for position, slot in holder.gives:
                objects[slot] = values[position]
        return True


# Kept, not only their identities: a value that is alive leaves its identity to no other.
_LEAVES = (
    bool, int, float, complex, str, bytes, range, slice, fractions.Fraction, decimal.Decimal,
    torch.Size, torch.dtype, torch.device,
    pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath,
)  # fmt: skip
_IMMUTABLE = (
    *_LEAVES, type(None), type, types.ModuleType, types.BuiltinFunctionType, enum.Enum,
)  # fmt: skip
# Classes whose objects an engine declared to be no part of a model.
LEFT_OUT: set[type] = set()
_SPECIAL = frozenset({"builtins", "functools", "collections", "types"})
_HOLD_ITEMS = (dict, list, tuple, set, frozenset, collections.deque, collections.UserDict, collections.UserList)


def _is_opaque(value: Any) -> bool:
    """Whether a value that no walk enters may change inside."""
    if isinstance(value, (*_IMMUTABLE, np.generic)) or type(value) in LEFT_OUT:
        return False
    if isinstance(value, (dict, set)):
        return False  # a table of torch's, passed over: its length is compared
    return not type(value).__module__.startswith("weightsync.")  # which says nothing of the model


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells a tensor from another at the same place, besides its identity."""
    shape = None if tensor.is_nested else tensor.shape
    return tensor._cdata, shape, tensor.dtype, tensor.requires_grad


def _leaf(value: Any) -> Any:
    return value if type(value) in _LEAVES or isinstance(value, np.generic) else None


@functools.lru_cache(maxsize=4096)
def _has_slots(kind: Any) -> bool:
    return any(isinstance(value, types.MemberDescriptorType) for base in kind.__mro__ for value in vars(base).values())


def _only_leaves_changed(holder: _Holder, values: Sequence[Any]) -> bool:
    """Whether everything that differs is a number, a string or the like; the types are known to be the same.

    An object of this package, such as what a session puts in a hook's place, counts as one: no walk enters it.
    """
    return all(
        id(value) == identity or kind in _LEAVES or kind.__module__.startswith("weightsync.")
        for value, identity, kind in zip(values, holder.identities, holder.kinds, strict=True)
    )


def _read_sequence(node: Any) -> Raw:
    return None, list(node)


def _read_dict(node: Any) -> Raw:
    return list(node), list(node.values())


def _read_function(node: Any) -> Raw:
    attributes = vars(node)
    cells = [cell.cell_contents for cell in node.__closure__ or ()]  # an empty one raises, and a full walk is made
    keys = node.__code__, list(attributes), len(cells)
    return keys, [node.__defaults__, node.__kwdefaults__, *cells, *attributes.values()]


def _read_method(node: Any) -> Raw:
    return None, (node.__self__, node.__func__)


def _read_attributes(node: Any) -> Raw:
    attributes = node.__dict__
    return list(attributes), list(attributes.values())


_READERS: dict[type, Callable[[Any], Raw]] = {
    dict: _read_dict,
    list: _read_sequence,
    tuple: _read_sequence,
    set: _read_sequence,
    frozenset: _read_sequence,
    types.FunctionType: _read_function,
    types.MethodType: _read_method,
}
