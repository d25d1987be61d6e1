"""An engine's control calls over HTTP: vLLM's route names, JSON bodies, errors as JSON.

    serve(receiver, port=8000)                              # until interrupted

    with BackgroundServer(receiver) as server:              # on a thread of this process
        TrainerClient(source, server.url).push()

An error is `{"error": {"type": "CoverageError", "message": ..., "missing": [...]}}` with a status that fits; the
client raises the same class. Bodies are `{"init_info": {...}}`, `{"start_info": {...}}`, `{"update_info": {...}}`,
`{"weight_version": 7, ...}`. That of `push_weights` may come in two parts: a header `weightsync-head-bytes` says where
the first one ends, in front of a comma between members of the object, and the engine acts on it at once. GET /metrics
speaks Prometheus' text format.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weightsync import control
from weightsync.control import Endpoint, InParts, Json, error_to_json
from weightsync.errors import (
    CoverageError,
    LayoutError,
    ManifestError,
    PeerFailed,
    ProtocolError,
    ReloadError,
    TransportError,
    TransportTimeout,
    WeightSyncError,
)
from weightsync.worker.group import in_thread, result_within

if TYPE_CHECKING:
    from starlette.applications import Starlette

MAX_BODY_BYTES = 256 << 20
CALL_SECONDS = 3600.0
_STATUS: tuple[tuple[type[WeightSyncError], int], ...] = (
    (ProtocolError, 400),
    (TransportTimeout, 504),
    (TransportError, 502),
    (CoverageError, 422),
    (ManifestError, 422),
    (LayoutError, 422),
    (ReloadError, 409),
)


def status_of(error: BaseException) -> int:
    """The HTTP status of an error: 500 for what is not ours."""
    return next((status for cls, status in _STATUS if isinstance(error, cls)), 500)


def parse_body(raw: bytes) -> Json:
    """A request's JSON object; an empty body is an empty object.

    Raises:
        ProtocolError: It is no JSON object.
    """
    if not raw.strip():
        return {}
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def answer_of(route: str, ranks: list[Json]) -> Json:
    """What a route answers: every rank's part, and at the top what vLLM's route of that name gives."""
    answer: Json = {"ranks": ranks}
    if route == control.INFO:
        versions = {rank["weight_version"] for rank in ranks}
        answer["weight_version"] = versions.pop() if len(versions) == 1 else None
        states = {rank["state"] for rank in ranks}
        answer["state"] = next((state for state in ("torn", "loading") if state in states), "live")
    elif route == control.IS_PAUSED:
        answer["is_paused"] = all(rank["is_paused"] for rank in ranks)
    elif route == control.CHECKER and len(ranks) == 1:
        answer |= ranks[0]
    return answer


def create_app(endpoint: Endpoint, *, metrics: bool = True) -> Starlette:
    """The ASGI application, for a server of one's own or to mount beside other routes.

    Args:
        endpoint: A `Receiver`, or an `EndpointGroup` of an engine's ranks.
        metrics: Serve /metrics; needs prometheus_client.
    """
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    recorder = _Metrics() if metrics else None
    takes_parts = getattr(endpoint, "takes_parts", False)

    def route_for(name: str) -> Route:
        async def handle(request: Request) -> Response:
            start = time.perf_counter()
            try:
                body = _Body(request.stream())
                head_bytes = request.headers.get(control.HEAD_BYTES) if name == control.PUSH else None
                if head_bytes is not None and takes_parts:
                    value = await _call_in_parts(endpoint, body, head_bytes)
                else:
                    given = {**request.query_params, **parse_body(await body.read())}
                    value = await asyncio.wrap_future(in_thread(endpoint.call, name, given, CALL_SECONDS))
                status, content = 200, answer_of(name, value["ranks"])
                if takes_parts and name == control.INIT:
                    content[control.TAKES_PARTS] = True
            except Exception as error:
                status, content = status_of(error), {"error": error_to_json(error)}
            if recorder is not None:
                recorder.count(name, status, time.perf_counter() - start, content)
            raw = json.dumps(content, separators=(",", ":")).encode()
            return Response(raw, status, media_type="application/json")

        return Route(f"/{name}", handle, methods=["GET"] if name in control.READ_ONLY_ROUTES else ["POST"])

    routes = [route_for(name) for name in control.ROUTES]
    if recorder is not None:
        kept = recorder

        async def show(request: Request) -> Response:
            return Response(kept.text(), media_type="text/plain; version=0.0.4")

        routes.append(Route("/metrics", show, methods=["GET"]))
    return Starlette(routes=routes)


class _Body:
    """A request's body, as it comes."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream, self._raw = stream, bytearray()

    async def read(self, num_bytes: int = MAX_BODY_BYTES) -> bytes:
        """The next bytes: `num_bytes` of them, or those up to the end.

        Raises:
            ProtocolError: The body is longer than any of ours.
            ClientDisconnect: The client hung up.
        """
        while len(self._raw) < num_bytes:
            part = await anext(self._stream, None)
            if part is None:
                break
            self._raw += part
            if len(self._raw) > MAX_BODY_BYTES:
                raise ProtocolError(f"the body has more than {MAX_BODY_BYTES} bytes")
        raw = bytes(self._raw[:num_bytes])
        del self._raw[:num_bytes]
        return raw


async def _call_in_parts(endpoint: Endpoint, body: _Body, head_bytes: str) -> Json:
    """A whole push that the engine begins with the first part of the body.

    Whatever happens, the body is read to its end before this returns: a connection that is closed with bytes unread
    may lose the answer.
    """
    if not (head_bytes.isascii() and head_bytes.isdigit()):
        raise ProtocolError(f"{control.HEAD_BYTES} must be a number of bytes, got {head_bytes!r:.80}")
    head = parse_body(await body.read(min(int(head_bytes), MAX_BODY_BYTES)) + b"}")
    arrival: Future[tuple[Json, float]] = Future()

    def rest(seconds: float) -> tuple[Json, float]:
        value: tuple[Json, float] = result_within(arrival, seconds, "the trainer, whose push was opened,")
        return value

    calling = asyncio.wrap_future(in_thread(endpoint.call, control.PUSH, InParts(head, rest), CALL_SECONDS))
    try:
        tail = (await body.read()).lstrip()
        arrival.set_result((parse_body(b"{" + tail.removeprefix(b",")), time.monotonic()))
    except ProtocolError as error:
        arrival.set_exception(error)
    except BaseException as error:
        arrival.set_exception(PeerFailed(f"the trainer hung up in the middle of a push: {type(error).__name__}"))
        if not isinstance(error, Exception):
            raise
    answer: Json = await calling
    return answer


class _Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        self._calls = Counter("weightsync_calls", "Control calls", ["route", "status"], registry=self._registry)
        self._seconds = Histogram(
            "weightsync_call_seconds",
            "Duration of control calls",
            ["route"],
            registry=self._registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        self._bytes = Counter("weightsync_loaded_bytes", "Bytes loaded, over all ranks", registry=self._registry)
        self._version = Gauge("weightsync_version", "Live weight version", registry=self._registry)
        self._failures = Counter("weightsync_failures", "Failed calls", ["type"], registry=self._registry)

    def count(self, route: str, status: int, seconds: float, content: Json) -> None:
        """Counts one call."""
        self._calls.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if "error" in content:
            self._failures.labels(content["error"]["type"]).inc()
            return
        if route in (control.UPDATE, control.PUSH):
            self._bytes.inc(sum(rank.get("bytes", 0) for rank in content["ranks"]))
        if route in (control.FINISH, control.PUSH):
            versions = [rank["version"] for rank in content["ranks"] if "version" in rank]
            if versions:
                self._version.set(min(versions))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))


def _uvicorn(endpoint: Endpoint, metrics: bool) -> Any:
    import uvicorn

    # "warning" and no access log: one line per control call would be noise in an engine's log.
    config = uvicorn.Config(
        create_app(endpoint, metrics=metrics),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=600,
    )
    return uvicorn.Server(config)


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    # With the protocol given, asyncio turns Nagle's algorithm off; without, every answer would wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def serve(endpoint: Endpoint, host: str = "127.0.0.1", port: int = 8000, *, metrics: bool = True) -> None:
    """Serves until the process is interrupted. There is no authentication: bind to an address only trainers reach.

    Args:
        endpoint: A `Receiver`, or an `EndpointGroup` of an engine's ranks.
        host: Address to bind.
        port: Port to bind; 0 picks one.
        metrics: Serve /metrics.
    """
    server = _uvicorn(endpoint, metrics)
    with _bound_socket(host, port) as listener:
        server.run(sockets=[listener])


class BackgroundServer:
    """A server on a thread of this process; a context manager.

    Attributes:
        url: Where it listens.

    Args:
        endpoint: A `Receiver`, or an `EndpointGroup` of an engine's ranks.
        host: Address to bind.
        port: Port to bind; 0 picks one.
        metrics: Serve /metrics.
        start_seconds: Longest wait for it to come up.

    Raises:
        TransportTimeout: It did not come up.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        metrics: bool = True,
        start_seconds: float = 10.0,
    ) -> None:
        self._server = _uvicorn(endpoint, metrics)
        self._listener = _bound_socket(host, port)
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="weightsync-server", daemon=True
        )
        self._thread.start()
        end = time.monotonic() + start_seconds
        while not self._server.started:
            if time.monotonic() > end or not self._thread.is_alive():
                raise TransportTimeout(f"the server did not come up on {self.url} in {start_seconds:g} s")
            time.sleep(0.002)

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, seconds: float = 5.0) -> None:
        """Stops the server; waits for calls under way for at most `seconds`."""
        self._server.should_exit = True
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(1.0)
        self._listener.close()
