"""What a plan depends on besides the manifest, cheap enough to look at before every push.

signature = Signature.of(model, modes, ["layers.0.expert_map"])
signature.holds(model, modes)       # False: plan again

addresses and layouts of parameters and buffers      a tensor moved, appeared or changed its shape
plain Python values wherever they hang on the model  a rank, a placement list or a loader changed (values.py)
bytes of the tensors that loaders looked at          experts moved
how each module is loaded                            a hook appeared, a layout was recorded
attributes of the modules' classes                   a loader was patched
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightsync.class_facts import ClassFacts
from weightsync.plan.values import values_of
from weightsync.reachable import python_state, visit, walk


@dataclass(eq=False)
class Signature:
    """A state of a model; compare with `holds`."""

    _layout: tuple[Any, ...]
    _values: tuple[Any, ...]
    _looked_at: Mapping[str, torch.Tensor]
    _modes: tuple[Any, ...]
    _classes: ClassFacts
    _python_state: object | None = None  # if it is still this one, layout and values need not be looked at

    @classmethod
    def of(cls, model: torch.nn.Module, modes: Mapping[str, Any], live_reads: Iterable[str]) -> Signature:
        """The present state.

        Args:
            model: The model.
            modes: How each module is loaded.
            live_reads: Paths of tensors whose bytes matter.
        """
        wanted = set(live_reads)
        tensors = {slot.path: slot.tensor for slot in walk(model) if slot.path in wanted} if wanted else {}
        copies = {path: tensor.detach().clone() for path, tensor in tensors.items()}
        classes = ClassFacts(type(found.value) for found in visit(model))
        return cls(_layout_of(model), values_of(model), copies, _modes_of(modes), classes, python_state(model))

    def holds(self, model: torch.nn.Module, modes: Mapping[str, Any]) -> bool:
        """Whether the model is still in this state."""
        if self._modes != _modes_of(modes) or not self._classes.hold():
            return False
        state = python_state(model)
        if state is None or state is not self._python_state:
            if self._layout != _layout_of(model) or self._values != values_of(model):
                return False
            self._python_state = state
        if not self._looked_at:
            return True
        now = {slot.path: slot.tensor for slot in walk(model) if slot.path in self._looked_at}
        return now.keys() == self._looked_at.keys() and all(
            _same_bytes(tensor, now[path]) for path, tensor in self._looked_at.items()
        )


def _modes_of(modes: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((path, module.mode, module.from_record) for path, module in modes.items())


def _layout_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """Identity, address and layout of every registered tensor; a few hundred nanoseconds each."""
    found: list[Any] = []
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None:
                    found.append(name)
                    continue
                strided = tensor.layout == torch.strided
                found.append((
                    name, id(tensor), tensor.data_ptr() if strided else 0, tensor.dtype, tensor.shape,
                    tensor.stride() if strided else None, tensor.requires_grad,
                    getattr(tensor, "weight_loader_numel", None),
                ))  # fmt: skip
    return tuple(found)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )
