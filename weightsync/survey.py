"""Remembers what a walk over a model found, and sees cheaply whether a walk today would find the same.

A reload looks at everything its model holds several times: before, for what the loaders may write; after, for what
moved. A full walk costs a millisecond per layer, most of it spent on finding that nothing has changed. A survey keeps,
for each holder on the way, the keys of what hangs on it, and its identities and types; comparing these is cheap.

    survey = Survey(model, found, ...)     # after a full walk
    visit = survey.revisit(model)          # the same entries, of the objects that stand there now; None: walk anew
    visit.found, visit.read                # and what each holder held, for whoever has to put it back

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
import operator
import pathlib
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from weightsync.class_facts import ClassFacts

Raw = tuple[Any, Sequence[Any]]  # keys, and what hangs on the holder


class Read(NamedTuple):
    """What one holder held.

    Attributes:
        holder: The object.
        how: The function that read it: one of this module's `read_` functions, or any other.
        keys: As that function gives them.
        values: As that function gives them.
    """

    holder: Any
    how: Callable[[Any], Raw]
    keys: Any
    values: Sequence[Any]


class Visit(NamedTuple):
    """What stands in a model now.

    Attributes:
        found: The entries of a walk.
        read: What each holder held; empty if it was walked anew, or holds something whose inside cannot be seen.
        state: Stands for all of it but bytes; see `Survey.state`.
    """

    found: list[Any]
    read: list[Read]
    state: object | None


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
    """

    def __init__(self, model: torch.nn.Module, found: Sequence[Any], children: Callable[[Any], Any]) -> None:
        self._children = children
        self._make = type(found[0])
        self._found = [tuple(entry)[:-1] for entry in found]
        slots: dict[int, int] = {id(model): 0}
        for entry in found:
            slots.setdefault(id(entry.value), len(slots))
        self._slot_of_entry = [slots[id(entry.value)] for entry in found]
        self._num_slots = len(slots)
        tensors = {slots[id(entry.value)]: entry.value for entry in found if isinstance(entry.value, torch.Tensor)}
        self._tensors = list(tensors)
        self._facts = list(map(_facts, tensors.values()))
        self._places = list(map(_place, tensors.values()))
        self._holders: list[_Holder] = []
        reached = self._record(model, slots)
        self.is_complete = len(reached) == self._num_slots
        self._sees_all_values = not any(
            _is_opaque(value) and id(value) not in slots
            for holder in self._holders
            for value in holder.read(reached[holder.slot])[1]
        )
        self._kinds = list(map(type, reached.values()))
        self._classes = ClassFacts(self._kinds)
        self._state: object = object()

    def _record(self, model: torch.nn.Module, slots: dict[int, int]) -> dict[int, Any]:
        """Visits everything found, parents first; the objects by slot that what holders give leads to."""
        reached = {0: model}
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
            identities, kinds, leaves = list(map(id, values)), list(map(type, values)), list(map(_leaf, values))
            self._holders.append(_Holder(slot, read, keys, identities, kinds, leaves, tuple(gives)))
        return reached

    def _reader(self, node: Any) -> Callable[[Any], Raw]:
        if isinstance(node, torch.nn.Module):
            return read_module
        fast = _READERS.get(type(node))
        if fast is not None:
            return fast
        is_plain = isinstance(node, torch.Tensor) or type(node).__module__ not in _SPECIAL
        if is_plain and hasattr(node, "__dict__") and not isinstance(node, _HOLD_ITEMS) and not _has_slots(type(node)):  # type: ignore[arg-type]  # types are hashable
            return read_attributes
        return self._read_children

    def _read_children(self, node: Any) -> Raw:
        pairs = list(self._children(node))
        return [step for step, _ in pairs], [child for _, child in pairs]

    def revisit(self, model: torch.nn.Module) -> Visit | None:
        """The entries of a walk over `model` as it is now; None if it must be walked anew."""
        objects: list[Any] = [None] * self._num_slots
        objects[0] = model
        try:
            read = self._fill(objects)
        except Exception:  # a key whose comparison fails, a holder that lost what its kind has: a walk tells
            return None
        if read is None:
            return None
        tensors = [objects[slot] for slot in self._tensors]
        if self._facts != list(map(_facts, tensors)):
            return None
        places = list(map(_place, tensors))
        if places != self._places:
            self._places, self._state = places, object()
        if not self._classes.hold():
            self._classes, self._state = ClassFacts(self._kinds), object()
        make = self._make
        found = [make(*entry, objects[slot]) for entry, slot in zip(self._found, self._slot_of_entry, strict=True)]
        return Visit(found, read if self._sees_all_values else [], self.state)

    @property
    def state(self) -> object | None:
        """The same object as long as all plain values, tensors' places and classes' attributes stay.

        None if something hangs there whose inside a survey cannot see, such as an array.
        """
        return self._state if self._sees_all_values else None

    def _fill(self, objects: list[Any]) -> list[Read] | None:
        """Looks up every object from its holder, and gives what each holds; None as soon as something differs."""
        found = []
        for index, (slot, read, old_keys, old_identities, kinds, old_leaves, gives) in enumerate(self._holders):
            node = objects[slot]
            keys, values = read(node)
            if keys != old_keys or list(map(type, values)) != kinds:
                return None
            identities = list(map(id, values))
            if identities != old_identities:
                holder = self._holders[index]
                if not _only_leaves_changed(holder, values):
                    return None
                leaves = list(map(_leaf, values))
                if leaves != old_leaves:
                    self._state = object()
                self._holders[index] = holder._replace(identities=identities, leaves=leaves)
            for position, child in gives:
                objects[child] = values[position]
            found.append(Read(node, read, keys, values))
        return found


REGISTRIES = ("_parameters", "_buffers", "_modules")
# Dicts and sets that torch itself puts on every module, for hooks: nearly always empty, so an empty one is passed over.
TABLES = frozenset(
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, (dict, set)) and name not in REGISTRIES
)
_tables_of: Callable[[dict[str, Any]], tuple[Any, ...]] = operator.itemgetter(*sorted(TABLES))

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


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where its elements lie; None for one that lies nowhere, or in no simple way."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.data_ptr(), tensor.stride()
    except RuntimeError:  # a subclass without storage of its own
        return None


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


def read_module(node: Any) -> Raw:
    """Keys: names of parameters, buffers, modules and attributes, and the lengths of torch's tables."""
    attributes = node.__dict__
    parameters, buffers, modules = attributes["_parameters"], attributes["_buffers"], attributes["_modules"]
    lengths = list(map(len, _tables_of(attributes)))
    keys = [*parameters], [*buffers], [*modules], [*attributes], lengths
    return keys, [*parameters.values(), *buffers.values(), *modules.values(), *attributes.values()]


def read_sequence(node: Any) -> Raw:
    """No keys; the items."""
    return None, list(node)


def read_dict(node: Any) -> Raw:
    """Keys and values."""
    return list(node), list(node.values())


def read_function(node: Any) -> Raw:
    """Keys: code, names of attributes, number of cells; values: both kinds of defaults, cells, attributes."""
    attributes = vars(node)
    cells = [cell.cell_contents for cell in node.__closure__ or ()]  # an empty one raises, and a full walk is made
    keys = node.__code__, list(attributes), len(cells)
    return keys, [node.__defaults__, node.__kwdefaults__, *cells, *attributes.values()]


def _read_method(node: Any) -> Raw:
    return None, (node.__self__, node.__func__)


def read_attributes(node: Any) -> Raw:
    """Names and values."""
    attributes = node.__dict__
    return list(attributes), list(attributes.values())


_READERS: dict[type, Callable[[Any], Raw]] = {
    dict: read_dict,
    list: read_sequence,
    tuple: read_sequence,
    set: read_sequence,
    frozenset: read_sequence,
    types.FunctionType: read_function,
    types.MethodType: _read_method,
}
