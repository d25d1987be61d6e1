"""What a push did, as the trainer sees it."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.control import Json


@dataclass(frozen=True)
class PushReport:
    """What one push did.

    Attributes:
        version: The version that is live now, on every rank.
        bytes: Bytes of the tensors that were pushed, each counted once.
        wire_bytes: Bytes that left the trainer: broadcast bytes once, bytes to single ranks once per rank.
        copied_bytes: Bytes that had to be copied on the trainer's side first; 0 when everything was read in place.
        tensors: Number of tensors.
        seconds: Seconds per stage: `handshake` (0 when none was needed), `start`, `transfer`, `finish`; where one
            control call does a whole push of mapped memory, all of it counts as `transfer`, but for what the trainer
            does itself before the engine may read: that is `handshake`, or `start`.
        transport: The transport that was used.
        reason: Why that one.
        ranks: Each rank's own report.
        interpreted: Number of names that ran through the model's own loader, by target.
        digests: Rank number -> digest of every tensor, if they were asked for.
    """

    version: int
    bytes: int
    wire_bytes: int
    copied_bytes: int
    tensors: int
    seconds: dict[str, float]
    transport: str
    reason: str
    ranks: list[Json]
    interpreted: dict[str, int]
    digests: list[Json] | None = None

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole push."""
        return sum(self.seconds.values())

    @property
    def gib_per_s(self) -> float:
        """GiB of tensors per second of the whole push."""
        return self.bytes / 2**30 / self.total_seconds if self.total_seconds else 0.0
