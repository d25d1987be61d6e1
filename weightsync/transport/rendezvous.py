"""Where the ranks of a group leave each other their addresses: a key-value store over TCP that asks no name server.

torch's own TCPStore looks up the *name* of both ends of every connection, on both sides, to have it for messages that
nobody reads. An address without a name costs a query to the name server (`::ffff:127.0.0.1` too, which /etc/hosts does
not answer); when the reply is lost, that connection, or the server with everybody on it, stands still for the
resolver's five seconds. It also waits for ever on a port that accepts and says nothing. This store knows numbers only.

    trainer: HostedStore                              engine rank: RemoteStore
    values, in this process's memory   <-- request    one connection per call: {"token", "op", "names", ...}
    one thread accepts, one per call       reply -->  {"values", "number"} or {"error"}

A frame is 4 bytes of magic, 4 of length, and a JSON object; bytes travel as base64. Nothing is unpickled. Who does not
know the token from the trainer's offer is refused. Every wait ends by a deadline, and when the trainer closes its store
the ranks that wait on it hear of it at once.

    store = HostedStore("127.0.0.1", token, deadline_seconds)           # trainer
    store = RemoteStore("127.0.0.1", port, token, deadline_seconds)     # engine rank; both are torch.distributed.Store
    store.close()
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

from weightsync.control import Json, decode, encode, error_from_json, error_to_json
from weightsync.errors import PeerFailed, ProtocolError, TransportError, TransportTimeout, WeightSyncError, shown

_HEADER = struct.Struct(">4sI")
_MAGIC = b"WSKV"
MAX_FRAME_BYTES = 1 << 20
_MAX_SECONDS = 1e6
_MAX_CONNECTIONS = 1024  # served at once; more wait to be accepted
_RETRY_SECONDS = 0.05

_Base: Any = getattr(torch.distributed, "Store", object)  # absent where torch was built without distributed


@dataclass(frozen=True, slots=True)
class _Request:
    token: str
    op: str
    names: list[str] = field(default_factory=list)
    value: str = ""
    expected: str = ""
    amount: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Reply:
    values: list[str] = field(default_factory=list)
    number: int = 0
    error: dict[str, Any] | None = None


def _to_text(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()


def _to_bytes(text: object, what: str) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError(f"{what} must be base64, got {text!r:.80}") from None


class _Values:
    """The keys and values, and the ranks that wait for them.

    Attributes:
        is_closed: Nobody is to wait any more.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.is_closed = False

    def close(self) -> None:
        """Ends every wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def answer(self, request: _Request) -> _Reply:
        """Does what a request says; `wait` and `get` wait up to its `seconds`.

        Raises:
            ProtocolError: It makes no sense.
            TransportTimeout: A key did not come.
            PeerFailed: The store was closed.
        """
        names = request.names
        if request.op in ("set", "add", "compare_set", "delete_key") and len(names) != 1:
            raise ProtocolError(f"{request.op} takes one key, got {len(names)}")
        if not 0 <= request.seconds <= _MAX_SECONDS:
            raise ProtocolError(f"a wait must be 0 to {_MAX_SECONDS:g} seconds, got {request.seconds}")
        value, expected = _to_bytes(request.value, "a value"), _to_bytes(request.expected, "an expected value")
        with self._changed:
            if request.op in ("wait", "get"):
                self._await(names, request.seconds)
                return _Reply([_to_text(self._values[name]) for name in names] if request.op == "get" else [])
            if request.op == "set":
                return self._store(names[0], value)
            if request.op == "add":
                return self._add(names[0], request.amount)
            if request.op == "compare_set":
                return self._compare_set(names[0], expected, value)
            if request.op == "check":
                return _Reply(number=int(all(name in self._values for name in names)))
            if request.op == "delete_key":
                return _Reply(number=int(self._values.pop(names[0], None) is not None))
            if request.op == "num_keys":
                return _Reply(number=len(self._values))
        raise ProtocolError(f"unknown operation {request.op!r:.80}")

    def _await(self, names: Sequence[str], seconds: float) -> None:
        def is_over() -> bool:
            return self.is_closed or all(name in self._values for name in names)

        came = self._changed.wait_for(is_over, seconds)
        if self.is_closed:
            raise PeerFailed("the trainer left before the group was complete")
        if not came:
            missing = [name for name in names if name not in self._values]
            raise TransportTimeout(f"no rank left {shown(missing)} in the trainer's store in {seconds:g} s")

    def _store(self, name: str, value: bytes) -> _Reply:
        self._values[name] = value
        self._changed.notify_all()
        return _Reply([_to_text(value)])

    def _add(self, name: str, amount: int) -> _Reply:
        try:
            number = int(self._values.get(name, b"0")) + amount
        except ValueError:
            raise ProtocolError(f"{name} holds no number, so nothing can be added to it") from None
        self._store(name, str(number).encode())
        return _Reply(number=number)

    def _compare_set(self, name: str, expected: bytes, value: bytes) -> _Reply:
        held = self._values.get(name)
        if held == expected or (held is None and not expected):
            return self._store(name, value)
        return _Reply([_to_text(expected if held is None else held)])


class RendezvousStore(_Base):  # type: ignore[misc]
    """What both sides share: torch's Store, each operation as one request.

    Every operation raises TransportTimeout if its deadline passed, PeerFailed if the other side is gone, ProtocolError
    if it said something else than an answer.
    """

    def __init__(self, token: str, deadline_seconds: float) -> None:
        super().__init__()
        self._token = token
        self.set_timeout(timedelta(seconds=deadline_seconds))

    def _answer(self, request: _Request) -> _Reply:
        raise NotImplementedError

    def _ask(
        self,
        op: str,
        names: Sequence[str] = (),
        value: str | bytes = b"",
        *,
        expected: str | bytes = b"",
        amount: int = 0,
        timeout: timedelta | None = None,
    ) -> _Reply:
        seconds = min((self.timeout if timeout is None else timeout).total_seconds(), _MAX_SECONDS)
        return self._answer(
            _Request(self._token, op, list(names), _to_text(value), _to_text(expected), amount, seconds)
        )

    def _only(self, reply: _Reply) -> bytes:
        if len(reply.values) != 1:
            raise ProtocolError(f"the trainer's store answered {len(reply.values)} values where one was asked for")
        return _to_bytes(reply.values[0], "a value")

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """A value, waiting for it up to the store's timeout."""
        return self._only(self._ask("get", [key]))

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, from 0, and gives the sum."""
        return self._ask("add", [key], amount=amount).number

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Stores the desired value if the key holds the expected one (or nothing, and `expected_value` is empty).

        Returns:
            What the key holds then; the expected value if it holds nothing.
        """
        return self._only(self._ask("compare_set", [key], desired_value, expected=expected_value))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._ask("check", keys).number)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there; up to the store's timeout where none is given."""
        self._ask("wait", keys, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        """Forgets a key; whether it was there."""
        return bool(self._ask("delete_key", [key]).number)

    def num_keys(self) -> int:
        """How many keys are there."""
        return self._ask("num_keys").number

    def clone(self) -> RendezvousStore:
        """The store itself: it may be used by several threads at once."""
        return self

    def close(self) -> None:
        """Frees what the store holds. Idempotent."""


class HostedStore(RendezvousStore):
    """The trainer's side: the values, and the threads that serve them.

    Args:
        host: An address of this machine, under which the engine ranks reach it.
        token: What a rank has to know to be served.
        deadline_seconds: Longest wait for a key that names no timeout, and for a connection to say what it wants.

    Raises:
        TransportError: `host` is no address of this machine.
    """

    def __init__(self, host: str, token: str, deadline_seconds: float) -> None:
        super().__init__(token, deadline_seconds)
        self._values = _Values()
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(address, family=family, backlog=_MAX_CONNECTIONS)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {host!r}; host= must be an address of this machine: {error}"
            ) from error
        self.port = int(listener.getsockname()[1])
        self._finalizer = weakref.finalize(self, _close, listener, self._values)
        self._finalizer.atexit = False  # it would wake threads inside C++ that can't have the interpreter any more
        arguments = (listener, self._values, token, deadline_seconds)
        threading.Thread(target=_accept, args=arguments, name="weightsync-rendezvous", daemon=True).start()

    def _answer(self, request: _Request) -> _Reply:
        return self._values.answer(request)

    def close(self) -> None:
        """Stops serving; ranks that wait hear that the trainer left. Idempotent."""
        self._finalizer()


def _close(listener: socket.socket, values: _Values) -> None:
    values.close()
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which closes it


def _accept(listener: socket.socket, values: _Values, token: str, deadline_seconds: float) -> None:
    """Serves until the listener is shut down; a thread of its own."""
    free = threading.Semaphore(_MAX_CONNECTIONS)

    def serve(connection: socket.socket) -> None:
        try:
            with connection:
                _serve(connection, values, token, deadline_seconds)
        finally:
            free.release()

    with listener:
        while True:
            free.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                if values.is_closed:
                    return
                time.sleep(_RETRY_SECONDS)  # out of file descriptors, or the caller went before it was taken
                free.release()
                continue
            call = threading.Thread(target=serve, args=(connection,), name="weightsync-rendezvous-call", daemon=True)
            try:
                call.start()
            except RuntimeError:  # out of threads: the rank sees its connection close
                connection.close()
                free.release()


def _serve(connection: socket.socket, values: _Values, token: str, deadline_seconds: float) -> None:
    """Answers the one request of a connection."""
    try:
        request = decode(_Request, _receive(connection, time.monotonic() + deadline_seconds, "a rank"))
        if not hmac.compare_digest(request.token.encode(errors="replace"), token.encode()):
            raise ProtocolError("the token is not the one of this trainer's offer: this port belongs to another push")
        reply = values.answer(request)
    except WeightSyncError as error:
        reply = _Reply(error=error_to_json(error))
    except OSError:  # it said nothing in time, or went
        return
    with contextlib.suppress(OSError):  # the rank went; nobody is left to be told
        connection.settimeout(deadline_seconds)
        connection.sendall(_frame(encode(reply)))


class RemoteStore(RendezvousStore):
    """An engine rank's side.

    Args:
        host: Address of the trainer.
        port: Port of its store.
        token: From its offer.
        deadline_seconds: Longest wait for an answer, where an operation names no timeout.

    Raises:
        TransportTimeout: Nobody answers.
        PeerFailed: Nobody listens there, or the trainer left.
        ProtocolError: Something else than a trainer's store answers, or the store of another push.
    """

    def __init__(self, host: str, port: int, token: str, deadline_seconds: float) -> None:
        super().__init__(token, deadline_seconds)
        self._address = (host, port)
        self.num_keys()  # a wrong address is found out here

    def _answer(self, request: _Request) -> _Reply:
        end = time.monotonic() + request.seconds
        where = "the trainer's store at {}:{}".format(*self._address)
        try:
            with socket.create_connection(self._address, timeout=max(request.seconds, 0.001)) as connection:
                connection.settimeout(_left(end))
                connection.sendall(_frame(encode(request)))
                reply = decode(_Reply, _receive(connection, end, where))
        except TimeoutError as error:
            raise TransportTimeout(
                f"{where} did not answer {request.op} {shown(request.names)} in {request.seconds:g} s"
            ) from error
        except OSError as error:
            raise PeerFailed(f"{where} cannot be reached: {error}") from error
        if reply.error is not None:
            raise error_from_json(reply.error, where)
        return reply


def _frame(body: Json) -> bytes:
    payload = json.dumps(body).encode()
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes is longer than the {MAX_FRAME_BYTES} that may be sent")
    return _HEADER.pack(_MAGIC, len(payload)) + payload


def _receive(connection: socket.socket, end: float, peer: str) -> object:
    """The JSON value of one frame.

    Raises:
        TimeoutError: It is not there by `end`.
        PeerFailed: The other side went.
        ProtocolError: It is no such frame.
    """
    magic, num_bytes = _HEADER.unpack(_exactly(connection, _HEADER.size, end, peer))
    if magic != _MAGIC or num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"{peer} sent something else than a rendezvous message: {magic!r}, length {num_bytes}")
    payload = _exactly(connection, num_bytes, end, peer)
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError(f"{peer} sent a message that is not JSON: {payload[:40]!r}") from None


def _exactly(connection: socket.socket, num_bytes: int, end: float, peer: str) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        connection.settimeout(_left(end))
        try:
            part = connection.recv(num_bytes - len(received))
        except ConnectionError as error:
            raise PeerFailed(f"{peer} closed the connection: {error}") from error
        if not part:
            raise PeerFailed(f"{peer} closed the connection after {len(received)} of {num_bytes} bytes")
        received += part
    return bytes(received)


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline passed")
    return left
