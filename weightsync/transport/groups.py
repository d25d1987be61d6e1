"""Process groups of one connection: gloo between CPUs, NCCL between GPUs.

`ProcessGroupGloo` and `ProcessGroupNCCL` are constructed directly on a store, so neither side's default process group
is touched and both can be left without a word to anybody. Gloo has a store of ours (`rendezvous.py`), NCCL has torch's
(`tcp_store.py`).

    store = GlooGroup.host_store(host, token, deadline_seconds)            # rank 0; the others join_store
    group = GlooGroup(store, rank, world, host, deadline_seconds, torch.device("cpu"))
    group.wait(group.broadcast(buffer))
    group.close()
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from weightsync.errors import PeerFailed, TransportError, TransportTimeout
from weightsync.transport.native_threads import in_native_thread, inside_native_code
from weightsync.transport.rendezvous import HostedStore, RemoteStore
from weightsync.transport.tcp_store import host_tcp_store, join_tcp_store

TRAINER_RANK = 0
_SLICE = timedelta(seconds=0.05)
Work = Any
Store = Any
dist: Any = torch.distributed  # what it has depends on how torch was built, and its stubs lack some of it


class Group:
    """What both kinds share: operations start at once and are waited for on the host.

    Attributes:
        transport: `"gloo"` or `"nccl"`.
        device: Where buffers have to lie.
    """

    transport: str
    device: torch.device
    _group: Any

    def __init__(
        self, store: Store, rank: int, world: int, host: str, deadline_seconds: float, device: torch.device
    ) -> None:
        raise NotImplementedError

    @staticmethod
    def host_store(host: str, token: str, deadline_seconds: float) -> Store:
        """The trainer's store, on a `port` that the system picks.

        Args:
            host: An address of this machine, under which the engine ranks reach it.
            token: What a rank has to know to be served, where the store can ask for it.
            deadline_seconds: Longest wait for a rank.

        Raises:
            TransportError: It cannot be made.
        """
        raise NotImplementedError

    @staticmethod
    def join_store(host: str, port: int, token: str, deadline_seconds: float) -> Store:
        """An engine rank's connection to the trainer's store.

        Raises:
            TransportTimeout: It did not answer.
            PeerFailed: Nobody listens there.
            ProtocolError: Something else than the store of this trainer answers.
        """
        raise NotImplementedError

    @staticmethod
    def close_store(store: Store) -> None:
        """Frees what a store holds; on the trainer's side, no rank can join any more. Idempotent."""

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

    def wait(self, work: Work | None, meanwhile: Callable[[], None] | None = None) -> None:
        """Waits on the host until a work is done; None is done already.

        Args:
            work: What `broadcast`, `send` or `recv` gave.
            meanwhile: Called now and then; raises where another channel knows that the wait is in vain. Gloo can be
                asked so for a broadcast alone.

        Raises:
            TransportTimeout: The deadline passed.
            PeerFailed: A peer left the group.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group without waiting for a peer; peers see it go. Idempotent."""
        raise NotImplementedError


class GlooGroup(Group):
    """A gloo group over TCP.

    Gloo ends the whole process when a message is longer than the buffer it meets, so lengths must agree before an
    operation starts; the schedule and the update call see to that.

    Raises:
        TransportTimeout: Not every rank came within the deadline.
        PeerFailed: The trainer left before the group was complete.
    """

    transport = "gloo"

    @staticmethod
    def host_store(host: str, token: str, deadline_seconds: float) -> Store:
        """See `Group.host_store`."""
        return HostedStore(host, token, deadline_seconds)

    @staticmethod
    def join_store(host: str, port: int, token: str, deadline_seconds: float) -> Store:
        """See `Group.join_store`."""
        return RemoteStore(host, port, token, deadline_seconds)

    @staticmethod
    def close_store(store: Store) -> None:
        """See `Group.close_store`."""
        store.close()

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
            with inside_native_code():
                self._group = dist.ProcessGroupGloo(store, rank, world, options)
        except (RuntimeError, TransportTimeout) as error:  # ours comes back through gloo as it is
            raise TransportTimeout(f"not all of {world} ranks joined in {deadline_seconds:g} s: {error}") from error
        self._store = store

    def wait(self, work: Work | None, meanwhile: Callable[[], None] | None = None) -> None:
        """See `Group.wait`."""
        if work is None:
            return
        end = time.monotonic() + self._timeout.total_seconds()
        try:
            while meanwhile is not None and time.monotonic() < end:
                try:
                    work.wait(_SLICE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        break  # failed: the wait below says how
                meanwhile()
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise mapped_error(error, self._timeout.total_seconds()) from error
        finally:
            del work  # an error's traceback would keep it, and it keeps the sockets open

    def close(self) -> None:
        """See `Group.close`. Gloo's destructor waits for operations under way, so it runs on a thread of its own."""
        group, self._group = self._group, None
        if group is None:
            return
        holder = [group]
        del group
        in_native_thread("weightsync-leave-gloo", holder.clear)


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

    @staticmethod
    def host_store(host: str, token: str, deadline_seconds: float) -> Store:
        """See `Group.host_store`; torch's store asks for no token."""
        return host_tcp_store(host, deadline_seconds)

    @staticmethod
    def join_store(host: str, port: int, token: str, deadline_seconds: float) -> Store:
        """See `Group.join_store`."""
        return join_tcp_store(host, port, deadline_seconds)

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

    def wait(self, work: Work | None, meanwhile: Callable[[], None] | None = None) -> None:
        """See `Group.wait`."""
        if work is None:
            return
        end = time.monotonic() + self._deadline_seconds
        while not work.is_completed():
            if meanwhile is not None:
                meanwhile()
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
