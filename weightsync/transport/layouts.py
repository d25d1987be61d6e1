"""Whether thousands of tensors are still laid out as they were: shapes, dtypes, strides. Not their addresses or bytes.

    layouts = Layouts(tensors)
    layouts.hold(tensors)          # True until one of them changed, if only its `.data`

Asked before every push. Reading three properties of a tensor from Python takes a microsecond on a fast machine; torch's
own guards compare a whole list in one call. They are private to torch, so they are taken where they are found, and only
for a yes: whatever they refuse is compared property by property.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:  # another torch
    _TensorGuards = None  # type: ignore[assignment,misc]

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
Facts = tuple[list[torch.Size], list[torch.dtype], list[tuple[Any, ...] | None]]


class Layouts:
    """The layouts of some tensors, in order; keeps none of the tensors alive.

    Args:
        tensors: The tensors.

    Attributes:
        shapes: Of each.
        dtypes: Of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.shapes, self.dtypes, self._strides = _facts(tensors)
        self._guards = _guards(tensors, self.shapes, self._strides)

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these, which may be other objects, are laid out as those were."""
        if len(tensors) != len(self.shapes):
            return False
        if self._guards is not None and self._guards.check(*tensors):
            return True
        return _facts(tensors) == (self.shapes, self.dtypes, self._strides)


def _facts(tensors: Sequence[torch.Tensor]) -> Facts:
    return list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors)), list(map(_stride, tensors))


def _stride(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Strides, and the bits by which its values are not its bytes."""
    if tensor.layout != torch.strided:
        return None
    return (tensor.stride(), tensor.is_neg(), tensor.is_conj())


def _guards(tensors: Sequence[torch.Tensor], shapes: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Torch's guards over these tensors; None where they cannot be had."""
    if _TensorGuards is None or not tensors or None in strides:
        return None
    make: Any = _TensorGuards  # its annotations say less than it takes
    dims = {
        "dynamic_dims_sizes": list(map(list, shapes)),
        "dynamic_dims_strides": [list(stride) for stride, _, _ in strides],
    }
    try:
        guards = make(*tensors, **dims)
        return guards if guards.check(*tensors) else None
    except Exception:  # a private interface: whatever another release makes of it, the properties are there
        return None
