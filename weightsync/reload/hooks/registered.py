"""Hooks of torch's own (`register_forward_hook` and the like) that a post-load hook registers: in every load again.

Those of the loads before have to go, as a first load leaves them: one of each. Told by their code, and by their number,
since torch counts all that were ever registered.

    registered = Registered(modules, since=state.first_handle)
    ...post-load hooks...
    registered.drop_older()
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import torch

from weightsync.survey import TABLES


class Registered:
    """What is registered on some modules before post-load hooks run.

    Args:
        modules: The modules.
        since: The first number that came after construction; what is older stays.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], since: int) -> None:
        self._since = since
        self._before = [
            (module, {name: set(table) for name in TABLES if (table := module.__dict__[name])}) for module in modules
        ]

    def drop_older(self) -> None:
        """Removes what post-load hooks registered in earlier loads, of what they have registered again since."""
        for module, before in self._before:
            for name in TABLES:
                table = module.__dict__[name]
                if not isinstance(table, dict) or len(table) < 2:
                    continue
                old = before.get(name, set())
                again = {_code_of(hook) for number, hook in table.items() if number not in old}
                for number in [n for n in table if n in old and n >= self._since and _code_of(table[n]) in again]:
                    _remove(module, number)


def next_number() -> int:
    """The number that torch gives to what is registered next."""
    return int(torch.utils.hooks.RemovableHandle.next_id)


def _remove(module: torch.nn.Module, number: int) -> None:
    for name in TABLES:
        table = module.__dict__[name]
        if isinstance(table, dict):
            table.pop(number, None)
        else:
            table.discard(number)


def _code_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "hook", hook)  # torch wraps some, to keep the module from being kept alive
    function = getattr(hook, "__func__", hook)
    return function.__code__ if isinstance(function, types.FunctionType) else type(hook)
