"""The trainer's side of a push: handshake, transport, control, report.

    client = TrainerClient(source=model, url="http://127.0.0.1:8000")
    report = client.push(version=7)                     # handshake at the first push; later ones only move bytes
    report.gib_per_s, report.transport, report.reason

    client.start(version=8)                             # weights and scales in updates of their own
    client.update(weight_names)
    client.update(scale_names)
    report = client.finish()
    client.close()

Several engines, or the ranks of one, are a list of URLs or `Receiver` objects; they get the same version or none
does. After any failure the push is aborted everywhere, the connection is torn down on both sides, and the next push
starts with a handshake.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from types import TracebackType

import torch
from torch import nn

from weightsync import control
from weightsync.control import Abort, Accept, Endpoint, Json, Start, Update
from weightsync.errors import ProtocolError, ReloadError, TransportError
from weightsync.garbage import collection_paused
from weightsync.trainer.handshake import Agreement, HandshakeOptions, shake_hands
from weightsync.trainer.http import BegunCall, HttpEndpoint
from weightsync.trainer.open_push import Call, OpenPush
from weightsync.trainer.report import PushReport
from weightsync.trainer.sources import NamedSource, WeightSource, sources_by_target
from weightsync.worker.group import EndpointGroup, in_thread, result_within

Source = WeightSource | nn.Module
_EXPLAIN_SECONDS = 5.0  # how long a failed push waits for the engines' own words

# How much longer than an engine the trainer waits: what an engine published in time is then known to both.
_ANSWER_SECONDS = 0.25


class TrainerClient:
    """Pushes weights into one or more engines. Not thread-safe: one push at a time.

    Args:
        source: A module, a `WeightSource`, or target name -> either. Plain tensors by name: `TensorSource(tensors)`.
        url: An engine's URL, an `Endpoint` such as a `Receiver` in this process, or a list of them (ranks or engines).
        transport: `"auto"` takes the fastest that all sides have. Or one of `"memory"` (same process), `"ipc"` (CUDA
            IPC, one GPU), `"shared_memory"` (CPUs of one host), `"nccl"` (a GPU for each side), `"gloo"` (TCP, works
            between any two processes); `"shm"` and `"cuda_ipc"` are other names of two of them.
        mode: `"direct"` or `"layerwise"`.
        scope: `"full"`, or `"partial"` to push some of the model's tensors only.
        casts: `"refuse"`: a tensor of another dtype than the engine keeps is an error that names it. `"allow"`: the
            model's own loader casts it, name by name and slower; such names are counted in `PushReport.interpreted`.
        target: The engine's target that a single source feeds.
        bucket_bytes: Hard cap of a bucket; default 16 MiB from a CPU, 256 MiB from a GPU.
        deadline_seconds: Longest silence of a peer: one bucket on a collective, one whole update where memory
            is mapped.
        progress: Called with `(bytes_done, bytes_total)` as bytes leave.
        digests: Ask every rank for its digests after each push.
        formats: Scale and storage formats by name, compared with the engine's.
        host: Address under which engines reach this process, for collectives; default: found from the URL.
        device: Where the tensors lie; default: where the first one does.

    Raises:
        TypeError: The source is none.
        ProtocolError: There is no such transport.
        ValueError: There is no such mode, scope or choice of casts, or no source.
    """

    def __init__(
        self,
        source: Source | Mapping[str, Source],
        url: str | Endpoint | Sequence[str | Endpoint],
        *,
        transport: str = "auto",
        mode: str = "direct",
        scope: str = "full",
        casts: str = "refuse",
        target: str = "model",
        bucket_bytes: int | None = None,
        deadline_seconds: float = 60.0,
        progress: Callable[[int, int], None] | None = None,
        digests: bool = False,
        formats: Mapping[str, str] | None = None,
        host: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._sources = sources_by_target(source, target)
        urls = [url] if isinstance(url, str) or not isinstance(url, Sequence) else list(url)
        self._deadline_seconds = deadline_seconds
        self._progress, self._digests = progress, digests
        self._options = HandshakeOptions(
            transport,
            mode,
            scope,
            bucket_bytes,
            deadline_seconds,
            dict(formats or {}),
            host,
            None if device is None else torch.device(device),
            next((u for u in urls if isinstance(u, str)), None),
            casts,
        )
        self._owned = [HttpEndpoint(u) if isinstance(u, str) else u for u in urls]
        self._group = EndpointGroup(self._owned)
        self._agreement: Agreement | None = None
        self._told: tuple[str, ...] | None = None  # names of a partial push, None for all
        self._push: OpenPush | None = None

    # ---- the push ------------------------------------------------------------------------------------------------

    def push(self, version: int | None = None, names: Sequence[str] | None = None) -> PushReport:
        """Pushes the whole source, or with `scope="partial"` the named tensors, as one update per target.

        Args:
            version: Must be greater than the live one; default: the next.
            names: Names of the single target's source; None for all. With `scope="partial"` the engine is told of these
                alone, so the source may hold others; another set of names is another handshake.

        Raises:
            WeightSyncError: The engine's own refusal, or the transport's failure. Nothing was published.
        """
        self._told = None
        if names is not None and self._options.scope == "partial":
            if len(self._sources) > 1:
                raise ProtocolError(f"names need a single target; this client feeds {', '.join(self._sources)}")
            self._told, names = tuple(names), None
        try:
            with collection_paused():
                self._begin(version, is_whole=names is None and len(self._sources) == 1)
            for target in self._sources:
                self.update(names, target=target)
            return self.finish()
        finally:
            self._told = None

    def start(self, version: int | None = None) -> None:
        """Opens a push on every rank; makes the handshake if there is none, or if the source's tensors changed.

        Raises:
            ReloadError: A push is open already.
            WeightSyncError: See `push`.
        """
        self._begin(version, is_whole=False)

    def _begin(self, version: int | None, *, is_whole: bool) -> None:
        """`start`, or if one control call can do the whole push, what that call has to say first."""
        if self._push is not None:
            raise ReloadError("a push is open already; finish or abort it first")
        begin = time.perf_counter()
        begun = self._begin_ahead(version) if is_whole else None
        agreement = self._agreement if begun is not None else None
        if agreement is None:
            agreement = self._agreed()
        shaken = time.perf_counter()
        self._push = OpenPush(
            _next_version(agreement) if version is None else version,
            sum(feed.wanted_bytes for feed in agreement.feeds.values()),
            {"handshake": shaken - begin, "start": 0.0, "transfer": 0.0, "finish": 0.0},
            begun=begun,
        )
        if begun is not None:
            return
        try:
            self._start(agreement, self._push, is_whole)
        except BaseException as error:
            raise self._failed(error) from error.__cause__
        self._push.seconds["start"] = time.perf_counter() - shaken

    def _begin_ahead(self, version: int | None) -> BegunCall | None:
        """Lets the engine open its session while this side looks whether anything is other than in the last push.

        Returns:
            The call that does the whole push, to be ended with its update; None if nothing was begun, or if it was
            withdrawn since something changed: then the push takes the long way. The engine reads nothing either way.
        """
        agreement, endpoint = self._agreement, self._owned[0]
        if agreement is None or not agreement.is_steady or not agreement.takes_parts or self._told is not None:
            return None
        if not isinstance(endpoint, HttpEndpoint) or not self._is_one_post(agreement):
            return None
        agreement.sender.fence()  # the engine's session must not be open while a training step still runs
        start = Start(
            agreement.session_id,
            _next_version(agreement) if version is None else version,
            agreement.generation,
            None,
            agreement.per_rank({}),
        )
        head = {"start_info": control.encode(start), "weight_version": start.version}
        begun = None
        try:
            begun = endpoint.begin(control.PUSH, head, self._deadline_seconds)
            if self._holds(agreement, self._sources) and agreement.sender.refresh()[0] == agreement.generation:
                return begun
            agreement.is_steady = False
            begun.end({control.WITHDRAWN: "the trainer's tensors changed"}, self._deadline_seconds + _ANSWER_SECONDS)
        except BaseException as error:
            if begun is not None:
                begun.cut()
            raise self._failed(error) from error.__cause__
        return None

    @staticmethod
    def _is_one_post(agreement: Agreement) -> bool:
        """Whether one call can do the whole push. Several ranks must not: all prepare before any of them publishes."""
        return len(agreement.accepts) == 1 and agreement.sender.is_one_post(*agreement.feeds)

    def _start(self, agreement: Agreement, push: OpenPush, is_whole: bool) -> None:
        generation, offer, own = agreement.sender.refresh()
        new = generation != agreement.generation
        agreement.is_steady = not new
        per_rank = agreement.per_rank(own if new else {})
        start = Start(agreement.session_id, push.version, generation, offer if new else None, per_rank)
        body = {"start_info": control.encode(start)}
        if not new and is_whole and self._is_one_post(agreement):
            push.around = body | {"weight_version": push.version}
            return
        if not new:
            self._group.call(control.START, body, self._deadline_seconds)
            return
        # Both at once: the ranks join the group while this side does. Whichever fails first ends the wait.
        calling = in_thread(self._group.call, control.START, body, 2 * self._deadline_seconds)
        meeting = in_thread(agreement.sender.connect, self._deadline_seconds)
        done, _ = wait([calling, meeting], timeout=2 * self._deadline_seconds, return_when=FIRST_EXCEPTION)
        failed = [error for future in done if (error := future.exception()) is not None]
        if meeting in done and meeting.exception() and calling not in done:
            failed += filter(None, [Call(calling, 0).error(self._patience())])
        if failed:
            raise control.primary_error(failed)
        result_within(calling, 0, "start_weight_update")
        result_within(meeting, 0, "the transport")
        agreement.generation = generation

    def update(self, names: Sequence[str] | None = None, *, target: str | None = None) -> int:
        """Moves tensors of one target; any number of times between `start` and `finish`.

        Args:
            names: Which, None for all.
            target: Default: the only one.

        Returns:
            Bytes on the wire.

        Raises:
            WeightSyncError: See `push`.
        """
        push, agreement = self._open()
        begin = time.perf_counter()
        if target is None:
            if len(agreement.feeds) > 1:
                raise ProtocolError(f"say which target: {', '.join(agreement.feeds)}")
            target = next(iter(agreement.feeds))
        elif target not in agreement.feeds:
            raise ProtocolError(f"unknown target {target!r}; this client feeds {', '.join(agreement.feeds)}")
        feed = agreement.feeds[target]
        listed = None if names is None else list(names)

        def post(data: Json, per_rank: Mapping[int, Json], num_waits: int = 1) -> Call:
            own = {agreement.accepts[index].key: part for index, part in per_rank.items()}
            update = Update(agreement.session_id, target, listed, data, own)
            body = {"update_info": control.encode(update), control.SENT: time.monotonic()}
            seconds = self._deadline_seconds * num_waits + _ANSWER_SECONDS
            if push.begun is not None:
                calling = in_thread(push.begun.end, body, seconds)
            else:
                route = control.PUSH if push.around else control.UPDATE
                calling = in_thread(self._group.call, route, body | push.around, seconds)
            call = push.last = Call(calling, self._deadline_seconds + _ANSWER_SECONDS)
            push.calls.append(call)
            return call

        def progress(num_bytes: int) -> None:
            push.bytes_done += num_bytes
            if self._progress is not None:
                self._progress(push.bytes_done, push.bytes_total)

        try:
            sent = agreement.sender.send(target, listed, post, progress)
        except BaseException as error:
            raise self._failed(error) from error.__cause__
        push.calls.clear()
        push.wire_bytes += sent
        push.copied_bytes += agreement.sender.copied_bytes
        push.tensors += len(feed.selected(listed))
        push.bytes += (
            feed.wanted_bytes if listed is None else sum(feed.manifest.by_name[name].num_bytes for name in listed)
        )
        push.seconds["transfer"] += time.perf_counter() - begin
        return sent

    def finish(self) -> PushReport:
        """Ends the push: hooks and audit on every rank, then the version is live on all of them.

        Raises:
            WeightSyncError: See `push`.
        """
        push, agreement = self._open()
        begin = time.perf_counter()
        body = {
            "session_id": agreement.session_id,
            "weight_version": push.version,
            control.SENT: time.monotonic(),
        }
        try:
            if (push.around or push.begun) and push.last is not None:
                answer = push.last.answer()
            else:
                answer = self._group.call(control.FINISH, body, self._deadline_seconds + _ANSWER_SECONDS)
        except BaseException as error:
            raise self._failed(error) from error.__cause__
        push.seconds["finish"] = time.perf_counter() - begin
        self._push = None
        digests = (
            self._group.call(control.CHECKER, {"action": "checksum"}, self._deadline_seconds)["ranks"]
            if self._digests
            else None
        )
        for index, accept in enumerate(agreement.accepts):
            agreement.accepts[index] = _with_version(accept, push.version)
        return PushReport(
            version=push.version,
            bytes=push.bytes,
            wire_bytes=push.wire_bytes,
            copied_bytes=push.copied_bytes,
            tensors=push.tensors,
            seconds=push.seconds,
            transport=agreement.sender.transport,
            reason=agreement.reason,
            ranks=answer["ranks"],
            interpreted=agreement.interpreted,
            digests=digests,
        )

    def abort(self, reason: str = "aborted by the trainer") -> None:
        """Gives up the push under way, everywhere. Does nothing when there is none."""
        if self._push is not None:
            self._tear_down(reason)

    def close(self) -> None:
        """Leaves: engines forget this trainer, and all memory that was exported or staged is free again. Idempotent.

        The next push makes a new handshake, so this may also be used between pushes to give memory back.
        """
        if self._agreement is not None:
            self._tear_down("the trainer closed its connection", control.SHUTDOWN)

    def __enter__(self) -> TrainerClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        for endpoint in self._owned:
            if isinstance(endpoint, HttpEndpoint):
                endpoint.close()

    def _open(self) -> tuple[OpenPush, Agreement]:
        if self._push is None or self._agreement is None:
            raise ReloadError("no push is open; call start first")
        return self._push, self._agreement

    # ---- failure -------------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> BaseException:
        """Tears everything down; gives the error that says most: a rank's own words before what followed from them."""
        push = self._push
        if self._agreement is not None:
            self._agreement.sender.close()
        found = [error]
        end = time.monotonic() + (self._patience() if isinstance(error, TransportError) else 0)
        for call in push.calls if push is not None else ():
            found += [e for e in [call.error(end - time.monotonic())] if e is not None and e is not error]
        first = control.primary_error([e for e in found if isinstance(e, Exception)] or found)
        self._tear_down(f"the trainer failed: {type(first).__name__}: {first}")
        return error if not isinstance(error, Exception) else first

    def _patience(self) -> float:
        return min(_EXPLAIN_SECONDS, self._deadline_seconds)

    def _tear_down(self, reason: str, route: str = control.ABORT) -> None:
        if self._push is not None and self._push.begun is not None:
            self._push.begun.cut()
        agreement, self._agreement, self._push = self._agreement, None, None
        if agreement is not None:
            agreement.sender.close()
            self._group.abort(Abort(agreement.session_id, reason), route)

    # ---- the handshake -------------------------------------------------------------------------------------------

    def _agreed(self) -> Agreement:
        sources = self._sources
        if self._told is not None:
            sources = {target: NamedSource(source, self._told) for target, source in sources.items()}
        if self._agreement is not None:
            if self._holds(self._agreement, sources):
                return self._agreement
            self._tear_down("the trainer's tensors changed")
        session_id = secrets.token_hex(8)
        try:
            self._agreement = shake_hands(self._group, sources, self._options, session_id)
        except BaseException as error:
            self._group.abort(Abort(session_id, f"the handshake failed: {error}"))
            raise
        return self._agreement

    @staticmethod
    def _holds(agreement: Agreement, sources: Mapping[str, WeightSource]) -> bool:
        """Whether the sources declare what the handshake was about."""
        metadata = {target: source.metadata for target, source in sources.items()}
        kept = agreement.metadata
        return all(kept[target] is rows or kept[target] == rows for target, rows in metadata.items())


def _next_version(agreement: Agreement) -> int:
    return max((accept.version for accept in agreement.accepts if accept.version is not None), default=0) + 1


def _with_version(accept: Accept, version: int) -> Accept:
    return control.decode(Accept, {**control.encode(accept), "version": version})
