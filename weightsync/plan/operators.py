"""What a dry run must know of each aten operator, looked up once per operator and remembered.

    describe(torch.ops.aten.add_.Tensor).mutates    # ("self",): written in place

Kinds: a *view* shares its input's storage; a *like* takes only shape and dtype from its input; an *overwrite* writes
its destination without reading it; *reads a value* gives something other than a tensor, which the caller may branch on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Bytes unchanged, another Python object or strides: `is_view` does not say so for these.
_ALIASES = frozenset({"detach", "alias", "lift_fresh", "lift", "_reshape_alias", "view", "_unsafe_view"})
_LIKES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEWS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_OVERWRITES = ("fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_")
_METADATA = ("is_pinned", "is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "_version")


@dataclass(frozen=True, slots=True)
class Operator:
    """The traits of one operator overload.

    Attributes:
        name: Name without overload, such as "copy_".
        is_view: The output shares the first input's storage.
        is_like: Only shape, dtype and device of the inputs matter.
        is_overwrite: What is written in place is not read first.
        reads_value: An output is a number or a bool that depends on the inputs' values.
        mutates: Names of the arguments written in place.
        arguments: Argument names in order.
        returns: Per output, the name of the argument it is, or None for a new tensor.
    """

    name: str
    is_view: bool
    is_like: bool
    is_overwrite: bool
    reads_value: bool
    mutates: tuple[str, ...]
    arguments: tuple[str, ...]
    returns: tuple[str | None, ...]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


_KNOWN: dict[Any, Operator] = {}


def describe(func: Any) -> Operator:
    """The traits of an `OpOverload`."""
    known = _KNOWN.get(func)
    if known is None:
        known = _KNOWN[func] = _read_schema(func)
    return known


def _read_schema(func: Any) -> Operator:
    schema = func._schema
    name = schema.name.split("::")[-1]
    written = [
        argument for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write
    ]
    by_alias = {label: argument.name for argument in written for label in argument.alias_info.before_set}
    returns = tuple(
        next((by_alias[label] for label in out.alias_info.before_set if label in by_alias), None)
        if out.alias_info is not None
        else None
        for out in schema.returns
    )
    scalar = any("Tensor" not in str(out.type) for out in schema.returns)
    return Operator(
        name=name,
        is_view=not written and (func.is_view or name in _ALIASES),
        is_like=name in _LIKES or name in _NEWS,
        is_overwrite=name in _OVERWRITES or bool(written and all(argument.is_out for argument in written)),
        reads_value=scalar and name not in _METADATA,
        mutates=tuple(argument.name for argument in written),
        arguments=tuple(argument.name for argument in schema.arguments),
        returns=returns,
    )


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, in lists and tuples too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def map_tensors(value: Any, function: Any) -> Any:
    """`value` with `function` applied to each tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    return value
