"""What one trainer and one rank agreed on, and what a trainer has to say for that.

check_hello(hello, targets=["model"], formats={})        # ProtocolError or ManifestError, before anything is planned
session = Session(hello, plans)
session.silence()                                        # seconds since the trainer was last heard of
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightsync import control
from weightsync.control import Facts, Hello, Json, Start, TargetAccept
from weightsync.errors import ManifestError, ProtocolError, ReloadError, TransportTimeout
from weightsync.manifest import Manifest
from weightsync.transport.base import Link, Mine, missing_targets
from weightsync.transport.buckets import ALIGNMENT
from weightsync.transport.choose import make_link
from weightsync.worker.push import TargetPlan

MAX_DEADLINE_SECONDS = 3600.0
MAX_BUCKET_BYTES = 4 << 30
MAX_TENSOR_BYTES = 1 << 50


@dataclass
class Session:
    """One trainer's ownership of a rank.

    Attributes:
        hello: What the trainer said.
        plans: Target -> what was agreed.
        shares_clock: Whether the trainer is on this host, so that its monotonic clock is ours.
        heard: When the trainer's last call ended, by the monotonic clock.
        link: The transport's half here, once an offer was connected.
        generation: Names the offer that is connected.
        cancelled: Why nothing of this session may be published any more; None while it may.
        ended: Set once the session is over.
        is_watched: Whether a thread looks out for the trainer's silence.
    """

    hello: Hello
    plans: dict[str, TargetPlan]
    shares_clock: bool = False
    heard: float = field(default_factory=time.monotonic)
    link: Link | None = None
    generation: str = ""
    cancelled: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    is_watched: bool = False

    def silence(self) -> float:
        """Seconds since the trainer was last heard of."""
        return time.monotonic() - self.heard

    def refuse_cancelled(self) -> None:
        """Raises ReloadError once the session is cancelled."""
        if self.cancelled is not None:
            raise ReloadError(f"the update was aborted: {self.cancelled}")

    def refuse_late(self, since: float) -> None:
        """Refuses what the trainer has given up.

        Args:
            since: When the call began, by the monotonic clock.

        Raises:
            ReloadError: The session is cancelled.
            TransportTimeout: The trainer's deadline for the call has passed.
        """
        self.refuse_cancelled()
        seconds = time.monotonic() - since
        if seconds >= self.hello.deadline_seconds:
            raise TransportTimeout(
                f"the call took {seconds:.3g} s, the trainer waits for {self.hello.deadline_seconds:g} s: it has given "
                "the push up and may have written over what was read; nothing is published"
            )

    def check_plans(self, own: Json) -> None:
        """Compares the plans that a start call goes by with those that were agreed.

        Args:
            own: The call's part for this rank.

        Raises:
            ProtocolError: The trainer goes by another plan, with both.
        """
        plans = own.get("plans")
        for target, plan in self.plans.items():
            told = plans.get(target) if isinstance(plans, dict) else None
            if told != plan.plan_hash:
                raise ProtocolError(
                    f"target {target!r}: the trainer goes by plan {told}, this rank by plan {plan.plan_hash}"
                )

    def connect(self, start: Start, own: Json, device: torch.device) -> None:
        """Connects to what a start call offers.

        Args:
            start: The call.
            own: Its part for this rank.
            device: Where this rank's tensors lie.

        Raises:
            ProtocolError: The call carries no offer, or a malformed one.
            TransportError: It cannot be connected to.
        """
        if start.offer is None:
            raise ProtocolError(f"offer {start.generation} is not connected here, and the start call does not carry it")
        if self.link is None:
            self.link = make_link(start.offer.get("transport"), device)
        mine = {target: Mine(plan.manifest, plan.owned) for target, plan in self.plans.items()}
        own_offer = own.get("offer", {})
        if not isinstance(own_offer, dict):
            raise ProtocolError(f"the rank's part of the offer must be an object, got {own_offer!r:.80}")
        self.link.connect(start.offer, own_offer, mine, self.hello.deadline_seconds)
        self.generation = start.generation


def check_hello(hello: Hello, targets: Sequence[str], formats: Mapping[str, str]) -> None:
    """Compares what a trainer says with what this rank can take.

    Args:
        hello: The trainer's.
        targets: Names of this rank's targets.
        formats: This rank's formats.

    Raises:
        ProtocolError: Another protocol, a number out of range, an unknown target.
        ManifestError: A format differs, with both values.
    """
    if hello.protocol != control.PROTOCOL_VERSION:
        raise ProtocolError(f"the trainer speaks protocol {hello.protocol}, this engine {control.PROTOCOL_VERSION}")
    if not 0 < hello.deadline_seconds <= MAX_DEADLINE_SECONDS:
        raise ProtocolError(f"deadline_seconds must be in (0, {MAX_DEADLINE_SECONDS:g}], got {hello.deadline_seconds}")
    if not ALIGNMENT <= hello.bucket_bytes <= MAX_BUCKET_BYTES:
        raise ProtocolError(f"bucket_bytes must be in [{ALIGNMENT}, {MAX_BUCKET_BYTES}], got {hello.bucket_bytes}")
    if not hello.targets:
        raise ProtocolError("a push needs at least one target")
    if error := missing_targets(list(hello.targets), targets):
        raise error
    for name in sorted(hello.formats.keys() & formats.keys()):
        said, taken = hello.formats[name], formats[name]
        if said != taken:
            raise ManifestError(f"format {name!r}: the trainer sends {said!r}, this engine takes {taken!r}")
    control.decode(Facts, hello.facts)


def read_manifests(hello: Hello) -> dict[str, Manifest]:
    """The manifest of each target that a trainer names.

    Raises:
        ManifestError: A row is malformed, or a tensor is larger than any memory (even if another size is 0).
    """
    manifests = {target: Manifest.from_rows(rows) for target, rows in hello.targets.items()}
    for manifest in manifests.values():
        for entry in manifest:
            if math.prod(max(size, 1) for size in entry.shape) * entry.dtype.itemsize > MAX_TENSOR_BYTES:
                raise ManifestError(
                    f"{entry.name}: shape {list(entry.shape)!r:.80} of {entry.dtype} has more than {MAX_TENSOR_BYTES} "
                    "bytes",
                    names=[entry.name],
                )
    return manifests


def target_accept(plan: TargetPlan) -> TargetAccept:
    """What the answer to a hello says of one target."""
    return TargetAccept(
        manifest_hash=plan.manifest.hash,
        plan_hash=plan.plan_hash,
        owned=control.to_ranges(plan.owned),
        ignored=control.to_ranges(plan.ignored),
        interpreted=len(plan.interpreted),
    )
