"""Threads that are inside C++ when the interpreter ends.

Python unwinds a thread that wants the interpreter back after it has ended, and unwinding through a C++ destructor, or
through C++ that calls Python, ends the process with an error. So what may be under way by then is counted, and the end
of the interpreter waits for it, a few seconds at most: longer than a resolver waits for its name server.

    with inside_native_code():
        group = torch.distributed.ProcessGroupGloo(store, rank, world, options)
    in_native_thread("weightsync-leave-gloo", holder.clear)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

_EXIT_SECONDS = 10.0
_changed = threading.Condition()
_num_inside = 0


@contextlib.contextmanager
def inside_native_code() -> Iterator[None]:
    """Counts the calling thread as inside C++."""
    _wait_at_exit()
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def in_native_thread(name: str, function: Callable[[], object]) -> None:
    """Runs a function on a daemon thread of its own that counts as inside C++ until it ends.

    Raises:
        RuntimeError: No thread can be started.
    """
    _wait_at_exit()

    def run() -> None:
        try:
            function()
        finally:
            _count(-1)

    _count(1)
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        _count(-1)
        raise


def _count(change: int) -> None:
    global _num_inside
    with _changed:
        _num_inside += change
        _changed.notify_all()


@functools.cache
def _wait_at_exit() -> None:
    """Once per process, before anything is counted: what is registered later runs before it, and may still close."""
    atexit.register(_wait)


def _wait() -> None:
    with _changed:
        _changed.wait_for(lambda: _num_inside == 0, _EXIT_SECONDS)
