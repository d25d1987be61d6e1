"""Keeps forward passes and weight updates apart.

A pass enters the gate; an update closes it, which waits for the passes inside to leave; a torn model keeps it shut.
Pausing is a second, independent reason to be closed.

    gate = Gate()
    with gate.passing(timeout_seconds=30):
        model(tokens)
    gate.close("updating", deadline_seconds=10)      # no pass is inside any more
    gate.open("updating")
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.errors import ReloadError, TornModelError, TransportTimeout

TORN = "torn"


class Gate:
    """Reasons to be closed, and a count of the passes inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reasons: set[str] = set()
        self._inside = 0

    @contextmanager
    def passing(self, timeout_seconds: float) -> Iterator[None]:
        """One forward pass; waits until the gate is open.

        Raises:
            TornModelError: The model is torn.
            ReloadError: The gate did not open in time.
        """
        with self._changed:
            opened = self._changed.wait_for(lambda: not self._reasons or TORN in self._reasons, timeout_seconds)
            if TORN in self._reasons:
                raise TornModelError("the model's weights are part old, part new; push all of them to repair it")
            if not opened:
                raise ReloadError(
                    f"the engine is {', '.join(sorted(self._reasons))} for more than {timeout_seconds:g} s"
                )
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self, reason: str, deadline_seconds: float) -> None:
        """Lets no new pass in and waits for those inside to leave.

        Raises:
            TransportTimeout: They did not leave in time; the gate is then open again for this reason.
        """
        with self._changed:
            self._reasons.add(reason)
            if not self._changed.wait_for(lambda: self._inside == 0, deadline_seconds):
                self._reasons.discard(reason)
                self._changed.notify_all()
                raise TransportTimeout(f"{self._inside} forward passes did not end in {deadline_seconds:g} s")

    def shut(self, reason: str) -> None:
        """Lets no new pass in, without waiting."""
        with self._changed:
            self._reasons.add(reason)
            self._changed.notify_all()

    def open(self, reason: str) -> None:
        """Takes one reason away; passes enter when none is left."""
        with self._changed:
            self._reasons.discard(reason)
            self._changed.notify_all()

    def is_closed_for(self, reason: str) -> bool:
        """Whether this reason holds now."""
        return reason in self._reasons
