"""Several endpoints as one: the ranks of one engine, or several engines of one push.

A call goes to all at the same time. A finish is two-phase: every rank runs its hooks and audit, and only when all
have, any of them publishes; else all abort. So no rank ever serves a version that another one failed to reach.

    ranks = [Receiver(model, engine="e", rank=i, world=2) for i, model in enumerate(models)]
    engine = EndpointGroup(ranks)
    serve(engine, port=8000)
"""

from __future__ import annotations

import collections
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from weightsync.control import ABORT, FINISH, SENT, Abort, Endpoint, Finish, Json, decode, encode, primary_error
from weightsync.errors import ProtocolError, TransportTimeout

ABORT_SECONDS = 2.0
_MARGIN_SECONDS = 0.5


_Job = tuple[Future[Any], Callable[..., Any], tuple[object, ...]]
_IDLE_SECONDS = 120.0  # a thread that nobody needed for so long ends
_idle: collections.deque[queue.SimpleQueue[_Job]] = collections.deque()  # one queue per thread that waits for a call
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads


def in_thread(function: Callable[..., Any], *arguments: object) -> Future[Any]:
    """Runs a call on a daemon thread, so that one which never returns does not keep the process alive.

    Threads are kept for later calls: starting one costs more than a call of a small push.
    """
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # whoever awaits it may be cancelled, the call is not
    try:
        mine = _idle.pop()
    except IndexError:
        mine = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(mine,), name="weightsync-call", daemon=True).start()
    mine.put((future, function, arguments))
    return future


def _serve(mine: queue.SimpleQueue[_Job]) -> None:
    """What such a thread does: call after call, as long as they come."""
    while True:
        try:
            job = mine.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            try:
                _idle.remove(mine)
            except ValueError:  # somebody has just taken it, so a call is about to come
                job = mine.get()
            else:
                return
        _carry_out(mine, *job)
        del job  # neither a call nor its result is kept until the next one


def _carry_out(
    mine: queue.SimpleQueue[_Job], future: Future[Any], function: Callable[..., Any], arguments: tuple[object, ...]
) -> None:
    result, error = None, None
    try:
        result = function(*arguments)
    except BaseException as raised:
        error = raised
    _idle.append(mine)  # before the answer: who waits for it finds this thread for the next call
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def result_within(future: Future[Any], seconds: float, what: str) -> Any:
    """A future's result.

    Raises:
        TransportTimeout: It did not come within `seconds`.
        BaseException: What the call raised.
    """
    try:
        return future.result(timeout=max(seconds, 0))
    except TimeoutError as error:
        if future.done():
            raise
        raise TransportTimeout(f"{what} did not answer in {seconds:g} s") from error


class EndpointGroup:
    """Calls all endpoints at once and merges their answers.

    Args:
        endpoints: At least one; closed with the group.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        if not endpoints:
            raise ProtocolError("a push needs at least one engine")
        self._endpoints = tuple(endpoints)

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """See `control.Endpoint.call`. The answer lists the ranks of all endpoints, in order.

        Raises:
            WeightSyncError: If any endpoint failed: the error that says most; the others are its notes.
        """
        if len(self._endpoints) == 1:
            return self._endpoints[0].call(route, body, deadline_seconds)
        if route == FINISH and body.get("phase", "commit") == "commit":
            return self._commit(body, deadline_seconds)
        return self._fan_out(route, body, deadline_seconds)

    def _commit(self, body: Json, deadline_seconds: float) -> Json:
        finish = decode(Finish, {key: value for key, value in body.items() if key not in ("weight_version", SENT)})
        try:
            self._fan_out(FINISH, {**body, "phase": "prepare"}, deadline_seconds)
        except BaseException as error:
            self.abort(Abort(finish.session_id, f"another rank could not finish: {error}"))
            raise
        published = {key: value for key, value in body.items() if key != SENT}  # a call of its own, made now
        return self._fan_out(FINISH, {**published, "phase": "publish"}, deadline_seconds)

    def abort(self, message: Abort, route: str = ABORT) -> None:
        """Aborts on every endpoint that answers within two seconds; one that does not is left to its own deadline.

        Args:
            message: What is given up, and why.
            route: `ABORT`, or `SHUTDOWN` for a trainer that leaves.
        """
        futures = [in_thread(e.call, route, encode(message), ABORT_SECONDS) for e in self._endpoints]
        end = time.monotonic() + ABORT_SECONDS
        for future in futures:
            try:
                future.exception(timeout=max(end - time.monotonic(), 0))
            except TimeoutError:
                continue

    def _fan_out(self, route: str, body: Json, deadline_seconds: float) -> Json:
        futures = [in_thread(e.call, route, body, deadline_seconds) for e in self._endpoints]
        end = time.monotonic() + deadline_seconds + _MARGIN_SECONDS
        ranks: list[Any] = []
        failures: list[BaseException] = []
        for future in futures:
            try:
                answer = result_within(future, end - time.monotonic(), f"{route} on one of {len(futures)} endpoints")
                ranks.extend(answer.get("ranks", []))
            except Exception as error:
                failures.append(error)
        if failures:
            first = primary_error(failures)
            for other in failures:
                if other is not first:
                    first.add_note(f"another endpoint: {type(other).__name__}: {other}")
            raise first
        return {"ranks": ranks}

    def close(self) -> None:
        """Closes every endpoint."""
        for endpoint in self._endpoints:
            endpoint.close()
