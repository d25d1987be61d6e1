"""May this model be reloaded now, and may it serve now: checks before a session, and the gate while one is open.

refuse_unready(model)            # asleep, expert moves pending: ReloadError, and nothing has changed
close_gate(model); ...; open_gate(model)

The gate stands before the model itself. A caller that goes past it (`model.forward(x)`, or a submodule called by
itself, such as `model.lm_head(x)`) is not stopped: a gate on every submodule would cost every forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weightsync.errors import ReloadError, TornModelError, shown
from weightsync.reachable import Slot
from weightsync.reload.state import ModelState, state_of
from weightsync.survey import REGISTRIES


def refuse_unready(modules: Mapping[str, torch.nn.Module], slots: Iterable[Slot]) -> None:
    """Refuses a model whose memory is not there, or whose experts are about to move.

    Args:
        modules: Its modules by path.
        slots: Everything that it holds.

    Raises:
        ReloadError: The model is asleep (`asleep` is true, or tensors have no memory), or a module has
            `pending_expert_moves`. The model is unharmed.
    """
    asleep = [path or type(module).__name__ for path, module in modules.items() if _is_set(module, "asleep")]
    if asleep:
        raise ReloadError(f"asleep: {shown(asleep)}; wake the model before its weights are updated")
    registered = [slot for slot in slots if slot.kind != "attribute"]
    unmapped = [slot.path for slot in registered if _has_no_memory(slot.tensor)]
    if unmapped:
        raise ReloadError(
            f"{len(unmapped)} tensors have no memory: {shown(unmapped)}; wake the model (or materialise it) before its "
            "weights are updated"
        )
    moving = [
        path or type(module).__name__ for path, module in modules.items() if _is_set(module, "pending_expert_moves")
    ]
    if moving:
        raise ReloadError(
            f"expert moves are pending in {shown(moving)} and would bring old weights back; finish or cancel them first"
        )


def close_gate(*models: torch.nn.Module) -> None:
    """Makes every forward of the models raise until `open_gate`."""
    state = state_of(models[0])
    if not state.gate:
        for model in {id(model): model for model in models}.values():
            state.gate.append(model.register_forward_pre_hook(_refuser(state), prepend=True))


def open_gate(model: torch.nn.Module) -> None:
    """Lets forwards through again."""
    state = state_of(model)
    for handle in state.gate:
        handle.remove()
    state.gate.clear()


def _refuser(state: ModelState) -> Any:
    def refuse(module: torch.nn.Module, args: Any) -> None:
        if state.status == "torn":
            raise TornModelError(
                "this model holds part old, part new weights and does not serve; a full push repairs it"
            )
        if state.status == "loading":
            raise ReloadError("a reload session is open on this model; finish or abort it before the model serves")

    return refuse


def _is_set(module: torch.nn.Module, name: str) -> bool:
    own, cls = module.__dict__, type(module)
    is_plain = cls.__getattr__ is torch.nn.Module.__getattr__  # then it may only be in one of these places
    if is_plain and name not in own and not hasattr(cls, name) and all(name not in own[table] for table in REGISTRIES):
        return False
    value = getattr(module, name, None)
    return bool(value() if callable(value) else value)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    return tensor.is_meta or tensor.untyped_storage().nbytes() == 0
