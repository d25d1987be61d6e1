"""An engine behind HTTP, as an `Endpoint`.

    endpoint = HttpEndpoint("http://127.0.0.1:8000")
    endpoint.call("weight_info", {}, deadline_seconds=5)
    begun = endpoint.begin("push_weights", head, deadline_seconds=5)    # the engine acts on the head while more comes
    begun.end(rest, deadline_seconds=5)                                 # the answer; or begun.cut()
    endpoint.close()

It rests on the standard library's client: a push is one call, and a call through a larger client takes twice the time.
A request is written in one piece, for the server to read it in one.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

from weightsync.control import HEAD_BYTES, READ_ONLY_ROUTES, Json, error_from_json
from weightsync.errors import PeerFailed, ProtocolError, TransportTimeout

MAX_ANSWER_BYTES = 256 << 20
MAX_IDLE = 8  # connections kept open between calls
_CONNECT_SECONDS = 5.0
_PART_BYTES = 1 << 20
_CLASSES: dict[str, type[http.client.HTTPConnection]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


class HttpEndpoint:
    """Makes control calls over kept-alive connections; safe to use from several threads.

    Args:
        url: Root of the engine's server, `http://` or `https://`. No proxy of the environment is used.

    Raises:
        ProtocolError: The URL names no server.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ProtocolError(f"{url!r} is no URL of a server: {error}") from error
        if parts.scheme not in _CLASSES or not host:
            raise ProtocolError(f"{url!r} is no URL of a server; one looks like http://127.0.0.1:8000")
        self._class, self._host, self._port = _CLASSES[parts.scheme], host, port
        self._path = quote(parts.path, safe="/%:@!$&'()*+,;=~")
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\ncontent-type: application/json\r\n"
        self._idle: list[http.client.HTTPConnection] = []  # appending and popping are atomic
        self._is_closed = False

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """See `control.Endpoint.call`.

        Raises:
            TransportTimeout: No complete answer within the deadline.
            PeerFailed: The server is not there, or hung up.
            ProtocolError: It answered something that is not JSON of ours.
        """
        if route in READ_ONLY_ROUTES:
            request = self._request("GET", route)
        else:
            content = _encode(body)
            request = self._request("POST", route, f"content-length: {len(content)}\r\n") + content
        end = time.monotonic() + deadline_seconds
        with self._mapped_errors(route, deadline_seconds):
            connection = self._connection(deadline_seconds)
            status, raw = self._exchange(connection, request, route, end)
        return self._value(route, status, raw)

    def begin(self, route: str, head: Json, deadline_seconds: float) -> BegunCall:
        """Makes a call whose body comes in two parts, and sends the first.

        Args:
            route: One of `control.ROUTES` that take a `control.InParts`.
            head: The first part, not empty.
            deadline_seconds: Longest time to wait for a connection.

        Raises:
            TransportTimeout: No connection within the deadline.
            PeerFailed: The server is not there, or hung up.
        """
        content = _encode(head)[:-1]  # the brace is closed at the end of the other part
        told = f"transfer-encoding: chunked\r\n{HEAD_BYTES}: {len(content)}\r\n"
        with self._mapped_errors(route, deadline_seconds):
            connection = self._connection(deadline_seconds)
            try:
                connection.sock.sendall(self._request("POST", route, told) + _chunk(content))
            except BaseException:
                connection.close()
                raise
        return BegunCall(self, route, connection)

    def end(self, begun: BegunCall, rest: Json, deadline_seconds: float) -> Json:
        """See `BegunCall.end`."""
        content = b"," + _encode(rest)[1:]
        end = time.monotonic() + deadline_seconds
        with self._mapped_errors(begun.route, deadline_seconds):
            begun.connection.sock.settimeout(deadline_seconds)
            status, raw = self._exchange(begun.connection, _chunk(content) + _chunk(b""), begun.route, end)
        return self._value(begun.route, status, raw)

    def _request(self, method: str, route: str, more: str = "") -> bytes:
        return f"{method} {self._path}/{route} HTTP/1.1\r\n{self._headers}{more}\r\n".encode()

    @contextmanager
    def _mapped_errors(self, route: str, deadline_seconds: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise TransportTimeout(f"{self.url}/{route} did not answer in {deadline_seconds:g} s ({error})") from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerFailed(f"{self.url}/{route}: {type(error).__name__}: {error}") from error

    def _value(self, route: str, status: int, raw: bytes) -> Json:
        """An answer's content; raises the error that it carries."""
        try:
            value = json.loads(raw)
        except ValueError as error:
            raise ProtocolError(f"{self.url}/{route} answered {status} with no JSON: {raw[:80]!r}") from error
        if not isinstance(value, dict):
            raise ProtocolError(
                f"{self.url}/{route} answered {status} with {type(value).__name__}, an object is expected"
            )
        if "error" in value:
            raise error_from_json(value["error"], self.url)
        if status != 200:
            raise ProtocolError(f"{self.url}/{route} answered {status}: {raw[:200]!r}; is it a weightsync server?")
        ranks = value.get("ranks")
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
            raise ProtocolError(f"{self.url}/{route} answered without a list of ranks: {raw[:200]!r}")
        return value

    def _exchange(
        self, connection: http.client.HTTPConnection, request: bytes, route: str, end: float
    ) -> tuple[int, bytes]:
        """Status and body of the answer; the connection goes back to the idle ones if it was read to its end."""
        try:
            connection.sock.sendall(request)
            answer = http.client.HTTPResponse(connection.sock, method="GET")  # whose answer has a body, as a POST's
            answer.begin()
            raw = self._read(answer, route, end)
        except BaseException:
            connection.close()
            raise
        if answer.will_close or self._is_closed or len(self._idle) >= MAX_IDLE:
            connection.close()
        else:
            self._idle.append(connection)
        return answer.status, raw

    def _connection(self, deadline_seconds: float) -> http.client.HTTPConnection:
        """One that is open: a call is never made twice, so a connection that the server has left is not tried."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            if not _is_readable(connection.sock):  # the end of the connection is all there can be to read
                connection.sock.settimeout(deadline_seconds)
                return connection
            connection.close()
        connection = self._class(self._host, self._port, timeout=min(deadline_seconds, _CONNECT_SECONDS))
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sock.settimeout(deadline_seconds)
        return connection

    def _read(self, answer: http.client.HTTPResponse, route: str, end: float) -> bytes:
        """The body, within the deadline and a size no answer of ours has."""
        parts, size = [], 0
        while part := answer.read1(_PART_BYTES):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{self.url}/{route} answers more than {MAX_ANSWER_BYTES} bytes")
            if time.monotonic() > end:
                raise TransportTimeout(f"{self.url}/{route} did not finish its answer in time")
        if answer.length:  # read1 takes the end of the connection for the end of the body
            raise PeerFailed(f"{self.url}/{route} hung up with {answer.length} bytes of its answer unsent")
        answer.close()  # the connection stays
        return b"".join(parts)

    def close(self) -> None:
        """Closes the connections."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()


class BegunCall:
    """A call of which the first part was sent; it ends in one of two ways.

    Attributes:
        route, connection: What is under way, and where.
    """

    def __init__(self, endpoint: HttpEndpoint, route: str, connection: http.client.HTTPConnection) -> None:
        self._endpoint, self.route, self.connection = endpoint, route, connection
        self._is_answered = False

    def end(self, rest: Json, deadline_seconds: float) -> Json:
        """Sends the other part, not empty, and gives the answer to the call; see `HttpEndpoint.call`."""
        answer = self._endpoint.end(self, rest, deadline_seconds)
        self._is_answered = True
        return answer

    def cut(self) -> None:
        """Hangs up, unless the call was answered: the server learns that there will be no other part."""
        if not self._is_answered:  # else another call may have the connection by now
            self.connection.close()


def _encode(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _chunk(content: bytes) -> bytes:
    """A chunk of a body of unknown length; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def _is_readable(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))
