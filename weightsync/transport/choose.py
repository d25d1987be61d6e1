"""Which transport a trainer and all receivers can use, and why: the fastest that everyone has.

same process                         memory          nothing moves
all on one GPU                       ipc             the engine reads trainer memory
all on CPUs of one host              shared_memory   the engine reads trainer memory
every side a GPU of its own          nccl            broadcast over NVLink or the network
anything else                        gloo            broadcast over TCP

name, reason = choose("auto", trainer_facts, [facts_of_rank_0, facts_of_rank_1])
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist

from weightsync.control import Facts
from weightsync.errors import ProtocolError, TransportError
from weightsync.transport import ipc, memory, shared_memory
from weightsync.transport.base import Feed, Link, Sender, unsupported
from weightsync.transport.collective import CollectiveLink, CollectiveSender
from weightsync.transport.groups import GlooGroup, NcclGroup

TRANSPORTS = ("memory", "ipc", "shared_memory", "nccl", "gloo")
ALIASES = {"shm": "shared_memory", "cuda_ipc": "ipc"}
DEFAULT_BUCKET_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


@cache
def _process() -> str:
    return secrets.token_hex(8)


@cache
def _host() -> str:
    """Equal on two processes exactly when one can open the other's memory files."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        time_namespace = "/proc/self/ns/time"  # of newer kernels; within one, monotonic clocks are equal
        clock = os.readlink(time_namespace) if os.path.lexists(time_namespace) else ""
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{clock}/uid {os.getuid()}"
    except OSError:
        return f"{socket.gethostname()}/{_process()}"


def local_facts(device: torch.device) -> Facts:
    """What this process can do with tensors on `device`."""
    cuda = device.type == "cuda"
    return Facts(
        host=_host(),
        process=f"{_process()}/{os.getpid()}",
        device=device.type,
        device_uuid=ipc.device_uuid(device) if cuda else None,
        shared_memory=shared_memory.available(),
        nccl=cuda and dist.is_nccl_available(),
    )


def refusal(transport: str, trainer: Facts, receivers: Sequence[Facts]) -> str | None:
    """Why these sides cannot use `transport`; None if they can."""
    everyone = [trainer, *receivers]
    devices = {facts.device for facts in everyone}
    uuids = [facts.device_uuid for facts in everyone]
    if transport == "memory":
        if any(facts.process != trainer.process for facts in receivers):
            return "trainer and engine are different processes"
        return None if len({*uuids}) == 1 else f"the tensors lie on different devices: {_listed(uuids)}"
    if transport == "ipc":
        if devices != {"cuda"}:
            return f"it needs every side on a GPU, the sides are on {', '.join(facts.device for facts in everyone)}"
        if len({*uuids}) > 1:
            return f"it needs one GPU for all; the trainer is on {uuids[0]}, the receivers on {_listed(uuids[1:])}"
        return None if len({f.host for f in everyone}) == 1 else _apart(trainer, receivers)
    if transport == "shared_memory":
        if any(facts.device != "cpu" for facts in receivers):
            return "an engine is on a GPU"
        if not all(facts.shared_memory for facts in everyone):
            return "not every side has anonymous memory files (Linux)"
        return None if len({f.host for f in everyone}) == 1 else _apart(trainer, receivers)
    if transport == "nccl":
        if not all(facts.nccl for facts in everyone):
            return "not every side has a GPU and NCCL"
        return None if len({*uuids}) == len(everyone) else f"two sides share one GPU: {_listed(uuids)}"
    if transport == "gloo":
        return None if dist.is_gloo_available() else "this build of torch has no gloo"
    raise unknown(transport)


def check_name(asked: str) -> None:
    """Refuses a name that no transport has, before any peer is asked.

    Raises:
        ProtocolError: There is no such transport.
    """
    if asked not in ("auto", *TRANSPORTS, *ALIASES):
        raise unknown(asked)


def unknown(transport: str) -> ProtocolError:
    """The error for a transport that does not exist."""
    known = ", ".join(["auto", *TRANSPORTS, *(f"{alias} (= {name})" for alias, name in ALIASES.items())])
    return ProtocolError(f"unknown transport {transport!r}; known: {known}")


_REASONS = {
    "memory": "trainer and engine are one process",
    "ipc": "trainer and engine share one GPU",
    "shared_memory": "trainer and engine are processes of one host, on CPUs",
    "nccl": "every side has a GPU of its own",
    "gloo": "it works between any two processes",
}


def choose(asked: str, trainer: Facts, receivers: Sequence[Facts]) -> tuple[str, str]:
    """Picks one transport for all receivers.

    Args:
        asked: A transport's name, or `"auto"`.
        trainer: The trainer's side.
        receivers: One per rank, over all engines.

    Returns:
        The name, and the reason in words.

    Raises:
        TransportError: The one that was asked for cannot be used here, with both sides' facts.
        ProtocolError: There is no such transport.
    """
    asked = ALIASES.get(asked, asked)
    if asked != "auto":
        if reason := refusal(asked, trainer, receivers):
            raise unsupported(asked, reason, "use transport='auto' to take what fits")
        return asked, "asked for"
    refused: list[str] = []
    for name in TRANSPORTS:
        reason = refusal(name, trainer, receivers)
        if reason is None:
            against = f" ({'; '.join(refused)})" if refused else ""
            return name, f"{_REASONS[name]}{against}"
        refused.append(f"not {name}: {reason}")
    raise TransportError(f"no transport fits: {'; '.join(refused)}")


def _listed(uuids: Sequence[str | None]) -> str:
    return ", ".join(uuid or "cpu" for uuid in uuids)


def _apart(trainer: Facts, receivers: Sequence[Facts]) -> str:
    other = next(facts.host for facts in receivers if facts.host != trainer.host)
    return f"the sides are on different hosts, pid namespaces or users: {trainer.host} and {other}"


def make_sender(
    transport: str,
    feeds: Mapping[str, Feed],
    *,
    bucket_bytes: int,
    device: torch.device,
    engine_device: str,
    host: str,
    deadline_seconds: float,
) -> Sender:
    """The trainer's half of a transport.

    Args:
        transport: What `choose` gave.
        feeds: Target -> tensors.
        bucket_bytes: Hard cap of a bucket.
        device: The trainer's device.
        engine_device: Type of the engines' device.
        host: Address under which the receivers reach this process.
        deadline_seconds: Longest wait for a peer.
    """
    if transport == "memory":
        return memory.memory_sender(feeds, bucket_bytes, engine_device)
    if transport == "shared_memory":
        return shared_memory.shared_memory_sender(feeds, bucket_bytes)
    if transport == "ipc":
        return ipc.ipc_sender(feeds, bucket_bytes, device)
    if transport == "nccl":
        return CollectiveSender("nccl", NcclGroup, host, feeds, bucket_bytes, device, deadline_seconds)
    cpu = torch.device("cpu")
    return CollectiveSender("gloo", GlooGroup, host, feeds, bucket_bytes, cpu, deadline_seconds)


def make_link(transport: object, device: torch.device) -> Link:
    """The engine rank's half of the transport that an offer names.

    Raises:
        ProtocolError: There is no such transport.
    """
    if transport == "memory":
        return memory.memory_link()
    if transport == "shared_memory":
        return shared_memory.shared_memory_link()
    if transport == "ipc":
        return ipc.ipc_link(device)
    if transport == "nccl":
        return CollectiveLink(NcclGroup, device)
    if transport == "gloo":
        return CollectiveLink(GlooGroup, torch.device("cpu"))
    raise ProtocolError(f"the offer names transport {transport!r}; known: {', '.join(TRANSPORTS)}")
