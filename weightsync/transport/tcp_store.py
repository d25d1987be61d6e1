"""torch's TCPStore for NCCL, with an end to every wait.

`ProcessGroupNCCL` has threads of its own that ask its store all its life, and they must not need the interpreter: they
outlive it when a process ends. So NCCL has TCPStore, which is C++ throughout, and its two faults (`rendezvous.py` says
what they are: a lost answer of a name server costs five seconds, and a silent port is waited on for ever) are met from
outside. The trainer's listens on a plain IPv4 socket where it can, so that for addresses in /etc/hosts no thread that
serves others asks a name server. Each attempt runs on a thread; another is started when the ones before it take long,
and the first that is done counts. What another one makes later is dropped.

    store = host_tcp_store("127.0.0.1", deadline_seconds)
    store = join_tcp_store("127.0.0.1", port, deadline_seconds)
"""

from __future__ import annotations

import functools
import queue
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from weightsync.errors import PeerFailed, TransportTimeout
from weightsync.transport.native_threads import in_native_thread

Store = Any
dist: Any = torch.distributed
_PATIENCE_SECONDS = 1.0  # an attempt without a lost answer takes a millisecond
_MAX_ATTEMPTS = 3
_BACKLOG = 1024


def host_tcp_store(host: str, deadline_seconds: float) -> Store:
    """The trainer's store, on a port that the system picks.

    Raises:
        TransportTimeout: No attempt was done by the deadline.
        PeerFailed: torch could not make one, with its reason.
    """

    try:
        is_ipv4 = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0] == socket.AF_INET
    except OSError as error:
        raise PeerFailed(f"{host!r} is no address: {error}") from error

    def make(seconds: float) -> Store:
        timeout = timedelta(seconds=seconds)
        if not is_ipv4:
            return dist.TCPStore(host, 0, None, True, timeout, False)
        with socket.create_server(("", 0), backlog=_BACKLOG) as listener:
            port = listener.getsockname()[1]
            handle = listener.detach()  # the store's own from here
        return dist.TCPStore(host, port, None, True, timeout, False, master_listen_fd=handle)

    return _first(make, f"a store at {host}", deadline_seconds, time.monotonic() + deadline_seconds)


def join_tcp_store(host: str, port: int, deadline_seconds: float) -> Store:
    """An engine rank's connection to the trainer's store.

    Raises:
        TransportTimeout: It did not answer.
        PeerFailed: Nobody listens there, or torch was refused.
    """
    what = f"the trainer's store at {host}:{port}"
    end = time.monotonic() + deadline_seconds
    try:
        socket.create_connection((host, port), timeout=deadline_seconds).close()  # torch would try again, past the end
    except TimeoutError as error:
        raise TransportTimeout(f"{what} did not answer in {deadline_seconds:g} s") from error
    except OSError as error:
        raise PeerFailed(f"{what} cannot be reached: {error}") from error

    def make(seconds: float) -> Store:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=seconds), False)

    return _first(make, what, deadline_seconds, end)


def _first(make: Callable[[float], Store], what: str, deadline_seconds: float, end: float) -> Store:
    """What the first of several attempts gives; the next begins when the ones before it take long."""
    outcomes: queue.SimpleQueue[Store | RuntimeError | OSError] = queue.SimpleQueue()

    def attempt(seconds: float) -> None:
        try:
            outcomes.put(make(seconds))
        except (RuntimeError, OSError) as error:
            outcomes.put(error)

    for number in range(1, _MAX_ATTEMPTS + 1):
        left = max(end - time.monotonic(), 0.001)
        in_native_thread("weightsync-tcp-store", functools.partial(attempt, left))
        try:
            outcome = outcomes.get(timeout=left if number == _MAX_ATTEMPTS else min(left, _PATIENCE_SECONDS))
        except queue.Empty:
            if time.monotonic() >= end:
                break
            continue
        if isinstance(outcome, RuntimeError | OSError):
            kind = TransportTimeout if "timed out" in str(outcome).lower() else PeerFailed
            raise kind(f"{what} did not answer: {outcome}") from outcome
        return outcome
    raise TransportTimeout(f"{what} did not answer in {deadline_seconds:g} s")
