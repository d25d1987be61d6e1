"""Process groups of one connection: gloo between CPUs, NCCL between GPUs.

`ProcessGroupGloo` and `ProcessGroupNCCL` are constructed directly on a TCPStore, so neither side's default process
group is touched and both can be left without a word to anybody.

    group = GlooGroup(store, rank, world, host, deadline_seconds, torch.device("cpu"))
    group.wait(group.broadcast(buffer))
    group.close()
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from weightsync.errors import PeerFailed, TransportError, TransportTimeout

TRAINER_RANK = 0
_RETRY_SECONDS = 0.05
Work = Any
Store = Any
dist: Any = torch.distributed  # what it has depends on how torch was built, and its stubs lack some of it


def host_store(host: str, deadline_seconds: float) -> Store:
    """The trainer's store, on a port that the system picks."""
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=deadline_seconds), False)


def join_store(host: str, port: int, deadline_seconds: float) -> Store:
    """An engine rank's connection to the trainer's store.

    Raises:
        TransportTimeout: It did not answer.
    """
    # A store's own retries go on past its timeout, so a port where nobody listens is found out here.
    end = time.monotonic() + deadline_seconds
    while True:
        left = max(end - time.monotonic(), 0.001)
        try:
            socket.create_connection((host, port), timeout=left).close()
            break
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= end:
                raise TransportTimeout(
                    f"the trainer's store at {host}:{port} did not answer in {deadline_seconds:g} s: {error}"
                ) from error
        time.sleep(_RETRY_SECONDS)
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=max(end - time.monotonic(), 0.001)), False)
    except RuntimeError as error:
        raise TransportTimeout(f"the trainer's store at {host}:{port} did not answer: {error}") from error


class Group:
    """What both kinds share: operations start at once and are waited for on the host.

    Attributes:
        transport: `"gloo"` or `"nccl"`.
        device: Where buffers have to lie.
    """

    transport: str
    device: torch.device
    _group: Any

    def broadcast(self, buffer: torch.Tensor) -> Work:
        """Starts a broadcast from the trainer into every receiver's buffer."""
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER_RANK
        return self._group.broadcast([buffer], options)

    def send(self, buffer: torch.Tensor, rank: int) -> Work:
        """Starts a send to one rank."""
        return self._group.send([buffer], rank, 0)

    def recv(self, buffer: torch.Tensor) -> Work:
        """Starts a receive from the trainer."""
        return self._group.recv([buffer], TRAINER_RANK, 0)

    def wait(self, work: Work | None) -> None:
        """Waits on the host until a work is done; None is done already.

        Raises:
            TransportTimeout: The deadline passed.
            PeerFailed: A peer left the group.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group without waiting for a peer; peers see it go. Idempotent."""
        raise NotImplementedError


# (store, rank, world, address of the trainer, deadline in seconds, device) -> Group
JoinGroup = Callable[[Store, int, int, str, float, torch.device], Group]


class GlooGroup(Group):
    """A gloo group over TCP.

    Gloo ends the whole process when a message is longer than the buffer it meets, so lengths must agree before an
    operation starts; the schedule and the update call see to that.

    Raises:
        TransportTimeout: Not every rank came within the deadline.
    """

    transport = "gloo"

    def __init__(
        self, store: Store, rank: int, world: int, host: str, deadline_seconds: float, device: torch.device
    ) -> None:
        self.device = device
        self._timeout = timedelta(seconds=deadline_seconds)
        store.set_timeout(self._timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        address = host if rank == TRAINER_RANK else local_address(host)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        try:
            self._group = dist.ProcessGroupGloo(store, rank, world, options)
        except RuntimeError as error:
            raise TransportTimeout(f"not all of {world} ranks joined in {deadline_seconds:g} s: {error}") from error
        self._store = store
        _join_leavers_at_exit()

    def wait(self, work: Work | None) -> None:
        """See `Group.wait`."""
        if work is None:
            return
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise mapped_error(error, self._timeout.total_seconds()) from error
        finally:
            del work  # an error's traceback would keep it, and it keeps the sockets open

    def close(self) -> None:
        """See `Group.close`. Gloo's destructor waits for operations under way, so it runs on a thread of its own.

        The thread is joined when the interpreter ends: Python unwinds a daemon thread that wants the interpreter back
        by then, and unwinding through a destructor ends the process.
        """
        group, self._group = self._group, None
        if group is None:
            return
        holder = [group]
        del group
        thread = threading.Thread(target=_leave, args=(holder,), name="weightsync-leave-gloo", daemon=True)
        _leavers.add(thread)
        thread.start()


_EXIT_SECONDS = 10.0  # how long the end of the interpreter waits for groups that are being left
_leavers: set[threading.Thread] = set()


def _leave(holder: list[Any]) -> None:
    holder.clear()
    _leavers.discard(threading.current_thread())


@functools.cache
def _join_leavers_at_exit() -> None:
    """Once per process, before the first group can be left: what was registered later runs before it, and may close."""
    atexit.register(_join_leavers)


def _join_leavers() -> None:
    end = time.monotonic() + _EXIT_SECONDS
    for thread in list(_leavers):
        with contextlib.suppress(RuntimeError):  # not started: nothing to wait for
            thread.join(max(end - time.monotonic(), 0.0))


class NcclGroup(Group):
    """An NCCL group.

    NCCL itself does not notice a peer that is gone: its kernels spin. So the host polls until the deadline, and leaving
    aborts the communicator. The group's own watchdog would end the process instead; it is given a timeout that never
    comes.

    Raises:
        TransportError: This build of torch has no NCCL.
    """

    transport = "nccl"
    _POLL_SECONDS = 2e-5

    def __init__(
        self, store: Store, rank: int, world: int, host: str, deadline_seconds: float, device: torch.device
    ) -> None:
        if not dist.is_nccl_available():
            raise TransportError("this build of torch has no NCCL; use gloo, or install a CUDA build of torch")
        self.device = device
        self._deadline_seconds = deadline_seconds
        store.set_timeout(timedelta(seconds=deadline_seconds))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=7)
        with torch.cuda.device(device):
            self._group = dist.ProcessGroupNCCL(store, rank, world, options)
            # The communicator is made by the first operation; make it now, where a failure can still be told apart.
            self.wait(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)))
        self._store = store

    def wait(self, work: Work | None) -> None:
        """See `Group.wait`."""
        if work is None:
            return
        end = time.monotonic() + self._deadline_seconds
        while not work.is_completed():
            if time.monotonic() > end:
                raise TransportTimeout(f"an NCCL operation did not end in {self._deadline_seconds:g} s: a peer is gone")
            time.sleep(self._POLL_SECONDS)
        try:
            work.wait()  # done already: says whether it failed
        except RuntimeError as error:
            raise mapped_error(error, self._deadline_seconds) from error

    def close(self) -> None:
        """See `Group.close`. Aborting frees the communicator and ends its kernels."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def local_address(host: str) -> str:
    """The address of this machine that packets to `host` leave from."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # datagram: nothing is sent
        return str(probe.getsockname()[0])


def mapped_error(error: RuntimeError, deadline_seconds: float) -> TransportError:
    """A group's RuntimeError as one of ours."""
    text = str(error)
    if "timed out" in text.lower():
        return TransportTimeout(f"a peer did not answer in {deadline_seconds:g} s: {text}")
    return PeerFailed(f"a peer left: {text}")
