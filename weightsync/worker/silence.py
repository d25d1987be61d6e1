"""Looks out for a trainer that falls silent in the middle of a push.

One thread sees to all pushes of a session: it ends with the session, or when no push came for as long as a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weightsync.worker.push import Push
from weightsync.worker.session import Session


class State(Protocol):
    """Asks what is going on."""

    def __call__(self, session: Session, *, was_idle: bool) -> tuple[Push | None, bool] | None:
        """The push that is open, and whether a call is under way; None ends the watch."""
        ...


def watch(session: Session, state: State, give_up: Callable[[Push, Session], None]) -> None:
    """Returns when the session ends, or nothing is to be watched.

    Args:
        session: The trainer's.
        state: What is going on now; `was_idle` says that no push was open at the last look, a deadline ago.
        give_up: Called when the trainer is silent for longer than its deadline while a push is open.
    """
    deadline = session.hello.deadline_seconds
    was_idle = False
    while not session.ended.is_set() and (found := state(session, was_idle=was_idle)) is not None:
        push, is_busy = found
        left = deadline - session.silence()
        if push is not None and left <= 0 and not is_busy:
            give_up(push, session)
            continue
        was_idle = push is None
        session.ended.wait(deadline if is_busy or push is None else max(left, 0.01))
