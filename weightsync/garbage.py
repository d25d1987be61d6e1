"""Keeps Python's cyclic garbage collector out of a push, and of planning, where all objects stay.

A push makes some thousand objects, which is reason enough for a full collection; that looks at every object of the
process, and takes longer than the whole push. It is put off to after the push, when nobody waits.

    with collection_paused():
        ...
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Inside, no automatic collection starts; only for what ends soon. Does nothing where collection is off already.

    Threads may overlap in it: the first to leave turns collection on again, and none leaves it off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
