"""What follows from a model's Python state alone is worked out once, and again only when that state is another.

Who has a hook, and how each module is loaded, takes a look at every module; a push every few seconds finds the same.

    hooks, modes = while_unchanged(model, ("line-up", mode), lambda: ...)

Seen: whatever hangs on the model and the attributes of its objects' classes (survey.py), and the records. What is kept
holds modules and hooks, never a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

from weightsync.reachable import python_state
from weightsync.reload.state import state_of

_NUM_KEPT = 16  # two modes and the numbers, as the model serves and as it is in a session
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
    now = (key, python, id(state.records), id(state.hooks))
    if now not in state.kept:
        found = make()
        while len(state.kept) >= _NUM_KEPT:
            del state.kept[next(iter(state.kept))]
        state.kept[now] = found
    kept: _T = state.kept[now]
    return kept
