"""A push under way, on the trainer's side: what it has moved so far, and the control calls that are out."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from weightsync.control import Json
from weightsync.trainer.http import BegunCall
from weightsync.worker.group import result_within


@dataclass
class OpenPush:
    """The push under way.

    Attributes:
        version: What it will publish.
        bytes_total: Bytes of everything that may be pushed, for progress.
        seconds: By stage, as in `PushReport`.
        bytes_done: Bytes that have left, for progress.
        wire_bytes, copied_bytes, bytes, tensors: As in `PushReport`, so far.
        calls: Calls that were posted and not waited for.
        around: Start and version, for a single call that does the whole push; else empty.
        begun: That call, if the engine has these already.
        last: The last call that was posted.
    """

    version: int
    bytes_total: int
    seconds: dict[str, float]
    bytes_done: int = 0
    wire_bytes: int = 0
    copied_bytes: int = 0
    bytes: int = 0
    tensors: int = 0
    calls: list[Call] = field(default_factory=list)
    around: Json = field(default_factory=dict)  # start and version, for a single call that does the whole push
    begun: BegunCall | None = None
    last: Call | None = None


class Call:
    """An `update_weights` call under way (see `base.Pending`)."""

    def __init__(self, future: Future[Json], deadline_seconds: float) -> None:
        self._future, self._deadline_seconds = future, deadline_seconds

    def check(self) -> None:
        """See `base.Pending.check`."""
        if self._future.done():
            self._future.result()

    def wait(self) -> None:
        """See `base.Pending.wait`."""
        result_within(self._future, self._deadline_seconds, "update_weights")

    def answer(self) -> Json:
        """What the call answered; it has been waited for."""
        answer: Json = result_within(self._future, 0, "the call")
        return answer

    def error(self, seconds: float) -> BaseException | None:
        """The call's error, if it has one within `seconds`."""
        try:
            return self._future.exception(timeout=max(seconds, 0))
        except TimeoutError:
            return None
