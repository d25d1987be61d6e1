"""One rank of an engine: answers control calls, takes the bytes, and decides who may push.

    idle --init--> joined --start--> updating --finish prepare--> prepared --publish--> joined
                     ^                  |  any failure, abort, silence of the trainer      |
                     +--- (init) idle <-+--------------------------------------------------+

One trainer owns the session; a second is refused while the first was heard of within its deadline. After a failure
both sides forget everything they agreed on, so the next push, of the same trainer or another, starts with a
handshake. A push that its trainer left behind is aborted when the deadline passes without a word.

    receiver = Receiver({"model": model, "draft": draft})
    serve(receiver, port=8000)                                   # or TrainerClient(source, receiver), in one process
    with receiver.serving():
        model(tokens)                                            # never sees half an update
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from weightsync import control
from weightsync.control import Abort, Accept, Check, Finish, Hello, InParts, Json, Start, Update
from weightsync.errors import ProtocolError, ReloadError, TransportError, TransportTimeout
from weightsync.garbage import collection_paused
from weightsync.transport.base import missing_targets
from weightsync.transport.choose import local_facts
from weightsync.worker.checker import answer_check, digests_of
from weightsync.worker.gate import TORN, Gate
from weightsync.worker.group import in_thread
from weightsync.worker.push import Push, live_version, newest_version, plan_target, reload_state
from weightsync.worker.session import Session, check_hello, read_manifests, target_accept
from weightsync.worker.silence import watch

UPDATING, PAUSED = "updating", "paused"
_log = logging.getLogger(__name__)
_numbers = itertools.count()


class Receiver:
    """One rank of an engine.

    Attributes:
        takes_parts: Whether `call` takes a `control.InParts`.

    Args:
        targets: The model, or target name -> model. A push names its targets.
        engine: Names the engine; ranks of one engine share it. Default: unique in this process.
        rank: Rank within the engine.
        world: Number of ranks of the engine.
        rollback: `"none"`, `"host"` or `"device"`: where a push keeps old bytes so that a failure can restore them.
        ignore: fnmatch patterns of wire names to ignore.
        formats: Scale and storage formats by name, compared with the trainer's.
        ready: Says why no update may start now (weights asleep, say), None if one may.
        on_publish: Called with the version before it goes live, as the last part of the prepare phase: drop caches that
            were computed from old weights here. One that raises fails the push on every rank and engine. A push may
            still be given up after the call, so the version named may never go live.
        gate_seconds: How long an update waits for running passes, and a pass for a running update.
    """

    takes_parts = True

    def __init__(
        self,
        targets: nn.Module | Mapping[str, nn.Module],
        *,
        engine: str | None = None,
        rank: int = 0,
        world: int = 1,
        rollback: str = "none",
        ignore: Sequence[str] = (),
        formats: Mapping[str, str] | None = None,
        ready: Callable[[], str | None] | None = None,
        on_publish: Sequence[Callable[[int], None]] = (),
        gate_seconds: float = 30.0,
    ) -> None:
        if not 0 <= rank < world:
            raise ProtocolError(f"rank {rank} is outside a world of {world}")
        self.targets = {"model": targets} if isinstance(targets, nn.Module) else dict(targets)
        self.engine = engine or f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"
        self.rank, self.world = rank, world
        self.device = _device_of(self.targets.values())
        self._rollback, self._ignore = rollback, tuple(ignore)
        self._formats = dict(formats or {})
        self._ready, self._on_publish = ready, tuple(on_publish)
        self._gate, self._gate_seconds = Gate(), gate_seconds
        self._turn = threading.Lock()  # held by the one call that may change a session or a model
        self._guard = threading.Lock()  # held for a moment to look at or set the fields below
        self._session: Session | None = None
        self._push: Push | None = None
        self._busy = 0
        self._timed_handlers: dict[str, Callable[[Json, float], Json]] = {
            control.UPDATE: lambda body, since: self._update(control.decode(Update, body.get("update_info")), since),
            control.FINISH: self._finish,
        }
        self._handlers: dict[str, Callable[[Json], Json]] = {
            control.INIT: lambda body: self._init(control.decode(Hello, body.get("init_info"))),
            control.START: lambda body: self._start(control.decode(Start, body.get("start_info"))),
            control.PUSH: self._whole_push,
            control.ABORT: lambda body: self._abort(control.decode(Abort, body)),
            control.SHUTDOWN: lambda body: self._shutdown(control.decode(Abort, body)),
            control.INFO: lambda body: self.info(),
            control.CHECKER: lambda body: self._check(control.decode(Check, body)),
            control.PAUSE: lambda body: self._pause(body),
            control.RESUME: lambda body: self._resume(),
            control.IS_PAUSED: lambda body: {"is_paused": self._gate.is_closed_for(PAUSED)},
            control.HEALTH: lambda body: {"status": "ok"},
        }

    # ---- for the engine ------------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Around a forward pass: it never sees half an update, and no torn model answers.

        Raises:
            TornModelError: The model is torn.
            ReloadError: An update or a pause lasts longer than `gate_seconds`.
        """
        with self._gate.passing(self._gate_seconds):
            yield

    @property
    def state(self) -> str:
        """`"torn"` if any target is, else `"loading"` if any is, else `"live"`."""
        states = {reload_state(model) for model in self.targets.values()}
        return next((state for state in ("torn", "loading") if state in states), "live")

    @property
    def version(self) -> int | None:
        """The live version of target `"model"`, or of the first target; None before the first push."""
        model = self.targets.get("model", next(iter(self.targets.values())))
        return live_version(model)

    def info(self) -> Json:
        """What `/weight_info` says of this rank."""
        session = self._session
        return {
            "engine": self.engine,
            "rank": self.rank,
            "world": self.world,
            "weight_version": self.version,
            "state": self.state,
            "targets": {n: {"version": live_version(m), "state": reload_state(m)} for n, m in self.targets.items()},
            "session": None if session is None else {"trainer": session.hello.trainer, "silence": session.silence()},
            "bytes_loaded": 0 if self._push is None else self._push.bytes_loaded,
            "is_paused": self._gate.is_closed_for(PAUSED),
        }

    def close(self) -> None:
        """Ends any session: a push under way is aborted, the connection closed."""
        self._cancel(self._session, "the receiver is closed")
        with self._take_turn(self._gate_seconds):
            self._drop("the receiver is closed")

    # ---- calls ---------------------------------------------------------------------------------------------------

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """See `control.Endpoint.call`."""
        received = time.monotonic()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if (timed := self._timed_handlers.get(route)) is not None:
                rest = {key: value for key, value in body.items() if key != control.SENT}
                return {"ranks": [timed(rest, self._since(body.get(control.SENT), received))]}
            if (handler := self._handlers.get(route)) is not None:
                return {"ranks": [handler(body)]}
        raise ProtocolError(f"unknown route {route!r}; known: {', '.join(control.ROUTES)}")

    def _since(self, sent: object, received: float) -> float:
        """When a call began. A trainer on this host says so by the clock that both share: the call may have waited."""
        session = self._session
        if sent is None or session is None or not session.shares_clock:
            return received
        if isinstance(sent, bool) or not isinstance(sent, float | int):
            raise ProtocolError(f"{control.SENT} must be a number, got {sent!r:.80}")
        return min(float(sent), received)

    @contextmanager
    def _take_turn(self, seconds: float) -> Iterator[None]:
        if not self._turn.acquire(timeout=seconds):
            raise TransportTimeout(f"another call holds {self.engine}/{self.rank} for more than {seconds:g} s")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def _owned(self, session_id: str) -> Iterator[Session]:
        """A call of the owner's: counted as a sign of life, and never alongside another."""
        session = self._session
        self._refuse_stranger(session_id)
        if session is None:
            raise ReloadError(
                f"{self.engine}/{self.rank} knows no session {session_id}; init_weight_transfer_engine first"
            )
        with self._guard:
            self._busy += 1
        try:
            with self._take_turn(session.hello.deadline_seconds):
                if self._session is not session:
                    raise ReloadError(f"session {session_id} has ended: {session.cancelled or 'it was given up'}")
                session.refuse_cancelled()
                yield session
        finally:
            with self._guard:
                self._busy -= 1
                session.heard = time.monotonic()

    def _refuse_stranger(self, session_id: str) -> None:
        session = self._session
        if session is not None and session.hello.session_id != session_id:
            raise ReloadError(
                f"{self.engine}/{self.rank} belongs to trainer {session.hello.trainer}, silent for "
                f"{session.silence():.1f} s; another may join once it was silent for "
                f"{session.hello.deadline_seconds:g} s, or after it closes"
            )

    def _init(self, hello: Hello) -> Json:
        check_hello(hello, list(self.targets), self._formats)
        session = self._session
        with self._guard:
            free = session is None or (not self._busy and session.silence() > session.hello.deadline_seconds)
        if not free:
            self._refuse_stranger(hello.session_id)
        with self._take_turn(hello.deadline_seconds):
            if self._session is not session:
                self._refuse_stranger(hello.session_id)
            self._drop(f"trainer {hello.trainer} joins")
            manifests = read_manifests(hello)
            plans = {
                target: plan_target(self.targets[target], manifest, hello.mode, hello.scope, self._ignore, hello.casts)
                for target, manifest in manifests.items()
            }
            facts = local_facts(self.device)
            self._session = Session(hello, plans, shares_clock=hello.facts["host"] == facts.host)
        accept = Accept(
            protocol=control.PROTOCOL_VERSION,
            session_id=hello.session_id,
            engine=self.engine,
            rank=self.rank,
            world=self.world,
            version=max((v for t in plans if (v := newest_version(self.targets[t])) is not None), default=None),
            state=self.state,
            bucket_bytes=hello.bucket_bytes,
            targets={target: control.encode(target_accept(plan)) for target, plan in plans.items()},
            facts=control.encode(facts),
        )
        return control.encode(accept)

    def _start(self, start: Start) -> Json:
        with self._owned(start.session_id) as session, self._failing(session):
            self._open(session, start)
        return {}

    def _update(self, update: Update, since: float) -> Json:
        with self._owned(update.session_id) as session, self._failing(session):
            return self._load(session, update, since)

    def _finish(self, body: Json, since: float) -> Json:
        finish = control.decode(Finish, {key: value for key, value in body.items() if key != "weight_version"})
        with self._owned(finish.session_id) as session, self._failing(session):
            return self._end(session, finish.phase, body.get("weight_version"), since)

    def _whole_push(self, body: Json) -> Json:
        """Start, one update and finish in one call: Python runs while the GPU copies, and while the trainer looks."""
        received = time.monotonic()
        start = control.decode(Start, body.get("start_info"))
        with collection_paused(), self._owned(start.session_id) as session, self._failing(session):
            self._open(session, start)
            rest = body
            if isinstance(body, InParts):
                rest, received = body.rest(session.hello.deadline_seconds)
                session.refuse_cancelled()
                if control.WITHDRAWN in rest:
                    self._give_up(f"the trainer withdrew it: {rest[control.WITHDRAWN]!s:.200}")
                    return {"engine": self.engine, "rank": self.rank, control.WITHDRAWN: True}
            update = control.decode(Update, rest.get("update_info"))
            if update.session_id != start.session_id:
                raise ProtocolError(f"session {start.session_id} starts the push, {update.session_id} its update")
            since = self._since(rest.get(control.SENT), received)
            loaded = self._load(session, update, since, wait=False)
            self._prepare(self._current(session))
            self._wait_for_device()
            return self._end(session, "commit", body.get("weight_version"), since) | loaded

    def _open(self, session: Session, start: Start) -> None:
        """Opens the reload; no byte is read or written."""
        if self._push is not None:
            raise ReloadError("a weight update is under way already; finish or abort it first")
        if self._ready is not None and (reason := self._ready()):
            raise ReloadError(f"no weight update can start now: {reason}")
        own = start.per_rank.get(f"{self.engine}/{self.rank}")
        if not isinstance(own, dict):
            raise ProtocolError(f"the start call has no part for rank {self.engine}/{self.rank}")
        session.check_plans(own)
        self._gate.close(UPDATING, min(self._gate_seconds, session.hello.deadline_seconds))
        hello = session.hello
        self._push = Push(
            self.targets,
            session.plans,
            hello.mode,
            hello.scope,
            self._rollback,
            self._ignore,
            start.version,
            hello.casts,
        )
        if start.generation != session.generation:
            session.connect(start, own, self.device)
        with self._guard:
            is_watched, session.is_watched = session.is_watched, True
        if not is_watched:
            in_thread(watch, session, self._watched_push, self._give_up_silent)

    def _load(self, session: Session, update: Update, since: float, wait: bool = True) -> Json:
        """Takes the bytes of one update."""
        push = self._current(session)
        if error := missing_targets([update.target], list(session.plans)):
            raise error
        if session.link is None:
            raise ProtocolError("no transport is connected")
        own = update.per_rank.get(f"{self.engine}/{self.rank}", {})
        before = push.bytes_loaded
        received = session.link.receive(update.target, update.names, update.data, own)
        if session.link.keeps_buffers:
            push.load(update.target, list(received))
        else:
            for bucket, buffer in received:
                session.refuse_cancelled()
                # gloo receives in host memory; one bucket at a time goes over to the GPU
                push.load(update.target, [(bucket, buffer.to(self.device))])
        if wait:
            self._wait_for_device()
        if session.link.keeps_buffers:
            session.refuse_late(since)  # read in place: after the deadline the trainer may have written there
        return {"bytes": push.bytes_loaded - before}

    def _wait_for_device(self) -> None:
        """Before the trainer is told that it may overwrite what was read."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _end(self, session: Session, phase: str, told: object, since: float) -> Json:
        """Finishes the push, or one phase of that."""
        push = self._current(session)
        if told is not None and told != push.version:
            raise ReloadError(f"the push was started for version {push.version}, finish says {told!r}")
        if phase not in ("commit", "prepare", "publish"):
            raise ProtocolError(f"unknown phase {phase!r}; known: commit, prepare, publish")
        if phase != "publish":
            self._prepare(push)
        if phase == "prepare":
            session.refuse_late(since)
            return {"engine": self.engine, "rank": self.rank, "prepared": True}
        with self._guard:  # a cancel mark is set under it too: before this, or after the version is live
            session.refuse_late(since)
            reports = push.publish()
            self._push = None
        self._gate.open(TORN)
        self._gate.open(UPDATING)
        return {"engine": self.engine, "rank": self.rank, "version": push.version, "targets": reports}

    def _prepare(self, push: Push) -> None:
        """Hooks, audit and `on_publish`: all that can fail, so that publishing cannot. Does its work once per push."""
        push.prepare()
        if not push.is_announced:
            for callback in self._on_publish:
                callback(push.version)
            push.is_announced = True

    def _cancel(self, session: Session | None, reason: str) -> None:
        """Marks a session so that nothing of it is published any more; waits for no call under way."""
        with self._guard:
            if session is not None and session.cancelled is None:
                session.cancelled = reason

    def _abort(self, abort: Abort) -> Json:
        if not abort.force:
            self._refuse_stranger(abort.session_id or "")
        session = self._session
        if session is not None:
            self._cancel(session, abort.reason)
            with self._take_turn(session.hello.deadline_seconds):
                if self._session is session:
                    self._drop(abort.reason)
        return {"engine": self.engine, "rank": self.rank, "state": self.state, "version": self.version}

    def _shutdown(self, abort: Abort) -> Json:
        return self._abort(abort)

    def _check(self, check: Check) -> Json:
        with self._take_turn(self._gate_seconds):
            found = digests_of(self.targets)
        return answer_check(check, found)

    def _pause(self, body: Json) -> Json:
        mode = body.get("mode", "wait")
        if mode not in ("wait", "keep"):
            raise ProtocolError(f"pause knows modes wait and keep, got {mode!r}: requests belong to the engine above")
        self._gate.close(PAUSED, self._gate_seconds)
        return {"status": "paused"}

    def _resume(self) -> Json:
        self._gate.open(PAUSED)
        return {"status": "resumed"}

    # ---- failure -------------------------------------------------------------------------------------------------

    def _current(self, session: Session) -> Push:
        if self._push is None:
            raise ReloadError("no weight update was started; call start_weight_update first")
        return self._push

    @contextmanager
    def _failing(self, session: Session) -> Iterator[None]:
        """Any error inside ends the push and the session: old bytes come back, or the model is torn and says so."""
        try:
            yield
        except BaseException as error:
            self._drop(f"{type(error).__name__}: {error}")
            raise

    def _drop(self, reason: str) -> None:
        """Forgets the session; needs the turn. Never raises for a peer that is gone."""
        session, self._session = self._session, None
        if self._push is not None:
            _log.warning("%s/%d gives up version %d: %s", self.engine, self.rank, self._push.version, reason)
        try:
            self._give_up(reason)
        finally:
            if session is not None:
                session.ended.set()
                if session.link is not None:
                    session.link.close()

    def _give_up(self, reason: str) -> None:
        """Ends the push, if there is one: old bytes come back, or the model is torn and says so."""
        push, self._push = self._push, None
        try:
            if push is not None:
                push.abort(reason)
        finally:
            if self.state == "torn":
                self._gate.shut(TORN)
            self._gate.open(UPDATING)

    def _give_up_silent(self, push: Push, session: Session) -> None:
        """Called by `watch` when the trainer is silent for longer than its deadline."""
        deadline = session.hello.deadline_seconds
        if not self._turn.acquire(timeout=deadline):
            return
        try:
            if self._push is push and not self._busy and session.silence() >= deadline:
                self._cancel(session, f"the trainer was silent for {deadline:g} s")
                self._drop(session.cancelled or "")
        finally:
            self._turn.release()

    def _watched_push(self, session: Session, *, was_idle: bool) -> tuple[Push | None, bool] | None:
        """The push that is open and whether a call is under way; None: there was none for long, watching ends."""
        with self._guard:
            if self._push is None and was_idle:
                session.is_watched = False
                return None
            return self._push, self._busy > 0


def _device_of(models: Sequence[nn.Module] | Any) -> torch.device:
    devices = {t.device for model in models for t in itertools.chain(model.parameters(), model.buffers())}
    devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise TransportError(f"one rank's targets must lie on one device, found {sorted(map(str, devices))}")
    return next(iter(devices), torch.device("cpu"))
