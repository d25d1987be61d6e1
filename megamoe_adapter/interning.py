"""One object for all equal values: what layers that are alike share.

A reload walks its model for tensors several times per push, wherever Python keeps them. Sixty layers that each hold a
placement, naming rules and an activation of their own make that walk three times as long as sixty that share them.

    self.names = interned(ExpertNames("block_fp8"))
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, TypeVar

_Value = TypeVar("_Value", bound=Hashable)


def interned(value: _Value) -> _Value:
    """The first value that was equal to this one; only for what nobody changes."""
    found: _Value = _first_equal(value)
    return found


@functools.lru_cache(maxsize=1024)
def _first_equal(value: Any) -> Any:
    return value
