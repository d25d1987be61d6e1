"""The handshake: who is there, what they load, which transport fits, and every difference refused before a byte moves.

agreement = shake_hands(group, sources, HandshakeOptions(...), session_id)
agreement.accepts, agreement.feeds, agreement.sender
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch

from weightsync import control
from weightsync.control import Accept, Facts, Hello, Json, TargetAccept
from weightsync.errors import CoverageError, ManifestError, ProtocolError
from weightsync.manifest import Manifest, ParamMeta, dtype_name
from weightsync.trainer.sources import WeightSource
from weightsync.transport.base import Feed, Sender
from weightsync.transport.choose import DEFAULT_BUCKET_BYTES, check_name, choose, local_facts, make_sender
from weightsync.transport.groups import local_address
from weightsync.worker.group import EndpointGroup


@dataclass(frozen=True)
class HandshakeOptions:
    """What the user asked for; see `TrainerClient`.

    Raises:
        ProtocolError: There is no such transport.
        ValueError: There is no such mode, scope or choice of casts.
    """

    transport: str
    mode: str
    scope: str
    bucket_bytes: int | None
    deadline_seconds: float
    formats: Mapping[str, str]
    host: str | None
    device: torch.device | None
    url: str | None
    casts: str = "refuse"

    def __post_init__(self) -> None:
        check_name(self.transport)
        for option, value, known in (
            ("mode", self.mode, ("direct", "layerwise")),
            ("scope", self.scope, ("full", "partial")),
            ("casts", self.casts, ("refuse", "allow")),
        ):
            if value not in known:
                raise ValueError(f"{option} must be one of {', '.join(known)}, got {value!r}")


@dataclass
class Agreement:
    """What a handshake gave; forgotten as a whole.

    Attributes:
        session_id: Names the trainer towards the engines.
        metadata: Target -> what its source declared; the handshake holds as long as it does.
        accepts: Every rank's answer, in the order of receiver indices.
        feeds: Target -> tensors and owners.
        plans: For each rank, target -> plan hash.
        interpreted: Target -> number of names that run through the model's own loader.
        sender: The transport's half here.
        reason: Why this transport.
        takes_parts: Whether the engine takes a push in two parts.
        generation: Names the offer that is connected.
        is_steady: Whether the last push found it connected already: the next one will too, most likely.
    """

    session_id: str
    metadata: dict[str, list[ParamMeta]]
    accepts: list[Accept]
    feeds: dict[str, Feed]
    plans: list[dict[str, str]]
    interpreted: dict[str, int]
    sender: Sender
    reason: str
    takes_parts: bool
    generation: str = ""
    is_steady: bool = False

    def per_rank(self, own: Mapping[int, Json]) -> Json:
        """What a start call says to each rank: the plans it goes by, and its own part of a new offer."""
        return {
            accept.key: {"plans": self.plans[index], "offer": own.get(index, {})}
            for index, accept in enumerate(self.accepts)
        }


def shake_hands(
    group: EndpointGroup, sources: Mapping[str, WeightSource], options: HandshakeOptions, session_id: str
) -> Agreement:
    """Says hello to every rank and agrees on plans and a transport.

    Args:
        group: All endpoints of the push.
        sources: Target -> source.
        options: What the user asked for.
        session_id: A new one.

    Raises:
        WeightSyncError: A rank's refusal, or ranks that contradict each other.
    """
    metadata = {target: source.metadata for target, source in sources.items()}
    manifests = {target: Manifest(tuple(rows)) for target, rows in metadata.items()}
    device = options.device or device_of(sources)
    facts = local_facts(device)
    bucket_bytes = options.bucket_bytes or DEFAULT_BUCKET_BYTES[device.type]
    hello = Hello(
        protocol=control.PROTOCOL_VERSION,
        session_id=session_id,
        trainer=f"{socket.gethostname()}:{os.getpid()}",
        targets={
            target: [[entry.name, dtype_name(entry.dtype), list(entry.shape)] for entry in manifest]
            for target, manifest in manifests.items()
        },
        mode=options.mode,
        scope=options.scope,
        bucket_bytes=bucket_bytes,
        deadline_seconds=options.deadline_seconds,
        formats=dict(options.formats),
        facts=control.encode(facts),
        casts=options.casts,
    )
    answer = group.call(control.INIT, {"init_info": control.encode(hello)}, options.deadline_seconds)
    accepts = [control.decode(Accept, rank) for rank in answer["ranks"]]
    check_accepts(hello, manifests, accepts)
    targets = [{t: control.decode(TargetAccept, a.targets.get(t)) for t in manifests} for a in accepts]
    owners = {t: owners_of(m, accepts, [row[t] for row in targets]) for t, m in manifests.items()}
    name, reason = choose(options.transport, facts, [control.decode(Facts, a.facts) for a in accepts])
    feeds = {
        target: Feed(manifest, owners[target], len(accepts), source.iter_full, source.resident, source.layout)
        for (target, manifest), source in zip(manifests.items(), sources.values(), strict=True)
    }
    sender = make_sender(
        name,
        feeds,
        bucket_bytes=bucket_bytes,
        device=device,
        engine_device=str(accepts[0].facts["device"]),
        host=options.host or own_address(options.url, facts, accepts),
        deadline_seconds=options.deadline_seconds,
    )
    plans = [{target: accept.plan_hash for target, accept in row.items()} for row in targets]
    interpreted = {target: max(row[target].interpreted for row in targets) for target in manifests}
    takes_parts = answer.get(control.TAKES_PARTS) is True
    return Agreement(session_id, metadata, accepts, feeds, plans, interpreted, sender, reason, takes_parts)


def device_of(sources: Mapping[str, WeightSource]) -> torch.device:
    """Where the first resident tensor lies; else the GPU in use, if any."""
    for source in sources.values():
        for tensor in (source.resident() or {}).values():
            return tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def own_address(url: str | None, facts: Facts, accepts: Sequence[Accept]) -> str:
    """The address under which the ranks reach this process: the loopback if all are on this host."""
    if url is None or all(accept.facts["host"] == facts.host for accept in accepts):
        return "127.0.0.1"
    return local_address(urlsplit(url).hostname or "127.0.0.1")


def check_accepts(hello: Hello, manifests: Mapping[str, Manifest], accepts: Sequence[Accept]) -> None:
    """Compares every rank's answer with what was said, and the ranks with each other.

    Raises:
        ProtocolError: Another protocol, session or bucket size; a rank of an engine missing or there twice.
        ManifestError: A rank read another manifest.
    """
    seen: dict[str, set[int]] = {}
    for accept in accepts:
        for name in ("protocol", "session_id", "bucket_bytes"):
            said, heard = getattr(hello, name), getattr(accept, name)
            if said != heard:
                raise ProtocolError(f"rank {accept.key} answers {name} {heard!r}, the trainer said {said!r}")
        for target, manifest in manifests.items():
            said, heard = manifest.hash, accept.targets.get(target, {}).get("manifest_hash")
            if said != heard:
                raise ManifestError(
                    f"target {target!r}: the trainer's manifest is {said}, rank {accept.key} read {heard}"
                )
        ranks = seen.setdefault(accept.engine, set())
        if accept.rank in ranks:
            raise ProtocolError(f"rank {accept.rank} of engine {accept.engine} answers twice; list each rank once")
        ranks.add(accept.rank)
    for accept in accepts:
        missing = sorted(set(range(accept.world)) - seen[accept.engine])
        if missing:
            raise ProtocolError(
                f"engine {accept.engine} has {accept.world} ranks, ranks {missing} are not among the endpoints; "
                "a push has to reach all of them"
            )


def owners_of(
    manifest: Manifest, accepts: Sequence[Accept], targets: Sequence[TargetAccept]
) -> tuple[frozenset[int], ...]:
    """Which receivers load each entry; entries with equal owners share one set.

    Raises:
        CoverageError: No rank of some engine loads a name or ignores it on purpose.
    """
    size = len(manifest)
    # A bit per entry and receiver, a byte per entry and engine: sets would take gigabytes for 256 receivers.
    masks = [0] * size
    taken = {accept.engine: bytearray(size) for accept in accepts}
    for index, (accept, target) in enumerate(zip(accepts, targets, strict=True)):
        mine = taken[accept.engine]
        for entry in control.from_ranges(target.owned, size):
            masks[entry] |= 1 << index
            mine[entry] = 1
        for entry in control.from_ranges(target.ignored, size):
            mine[entry] = 1
    for engine, mine in taken.items():
        if 0 in mine:
            names = [entry.name for index, entry in enumerate(manifest) if not mine[index]]
            raise CoverageError(f"no rank of engine {engine} takes these names", unexpected=names)
    sets = {mask: frozenset(i for i in range(len(accepts)) if mask >> i & 1) for mask in set(masks)}
    return tuple(sets[mask] for mask in masks)
