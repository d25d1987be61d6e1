"""An engine behind HTTP, as an `Endpoint`.

    endpoint = HttpEndpoint("http://127.0.0.1:8000")
    endpoint.call("weight_info", {}, deadline_seconds=5)
    endpoint.close()

It rests on the standard library's client: a push is one call, and a call through a larger client takes twice the time.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import time
from urllib.parse import urlsplit

from weightsync.control import READ_ONLY_ROUTES, Json, error_from_json
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
        self._class, self._host, self._port, self._path = _CLASSES[parts.scheme], host, port, parts.path
        self._idle: list[http.client.HTTPConnection] = []  # appending and popping are atomic
        self._is_closed = False

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """See `control.Endpoint.call`.

        Raises:
            TransportTimeout: No complete answer within the deadline.
            PeerFailed: The server is not there, or hung up.
            ProtocolError: It answered something that is not JSON of ours.
        """
        try:
            status, raw = self._exchange(route, body, deadline_seconds)
        except TimeoutError as error:
            raise TransportTimeout(f"{self.url}/{route} did not answer in {deadline_seconds:g} s ({error})") from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerFailed(f"{self.url}/{route}: {type(error).__name__}: {error}") from error
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

    def _exchange(self, route: str, body: Json, deadline_seconds: float) -> tuple[int, bytes]:
        """Status and body of the answer; the connection goes back to the idle ones if it was read to its end."""
        end = time.monotonic() + deadline_seconds
        connection = self._connection(deadline_seconds)
        try:
            if route in READ_ONLY_ROUTES:
                connection.request("GET", f"{self._path}/{route}")
            else:
                content = json.dumps(body, separators=(",", ":")).encode()
                connection.request("POST", f"{self._path}/{route}", content, {"content-type": "application/json"})
            answer = connection.getresponse()
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


def _is_readable(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))
