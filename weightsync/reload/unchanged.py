"""What follows from a model's Python state alone is worked out once, and again only when that state is another.

Who has a hook, and how each module is loaded, takes a look at every module; a push every few seconds finds the same.

    hooks, modes = while_unchanged(model, ("line-up", mode), lambda: ...)

Seen: whatever hangs on the model (survey.py), the records, and the hooks and declarations of the modules' classes. What
is kept holds modules and hooks, never a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from weightsync.reachable import python_state, visit
from weightsync.reload.hooks.post_load import HOOK
from weightsync.reload.state import state_of

_NUM_KEPT = 16  # two modes and the numbers, as the model serves and as it is in a session
_OF_CLASSES = (HOOK, "supports_direct_reload", "load_weights", "create_weights")
_T = TypeVar("_T")


def while_unchanged(model: torch.nn.Module, key: Hashable, make: Callable[[], _T]) -> _T:
    """What `make` gave for this key when the model was last as it is now, else what it gives.

    Args:
        model: The model; best within `standing_still`.
        key: Names the result.
        make: Works it out from the model; whoever gets the result changes nothing in it.
    """
    python = python_state(model)
    if python is None:  # something hangs on it whose inside cannot be seen
        return make()
    state = state_of(model)
    now = (key, python, id(state.records), id(state.hooks), _facts_of_classes(model))
    if now not in state.kept:
        found = make()
        while len(state.kept) >= _NUM_KEPT:
            del state.kept[next(iter(state.kept))]
        state.kept[now] = found
    kept: _T = state.kept[now]
    return kept


def _facts_of_classes(model: torch.nn.Module) -> tuple[Any, ...]:
    classes: dict[type, None] = {}
    for found in visit(model):
        if isinstance(found.value, torch.nn.Module):
            classes[type(found.value)] = None
            method = found.value.__dict__.get("quant_method")
            if method is not None:
                classes[type(method)] = None
    return tuple((cls, *(getattr(cls, name, None) for name in _OF_CLASSES)) for cls in classes)
