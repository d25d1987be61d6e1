"""How tensors are packed for the wire: buckets with a hard byte cap, computed alike on both sides.

    bucket 0                                             bucket 1
    [ tensor a      |pad| tensor b, bytes 0..n-1 ]       [ tensor b, bytes n.. |pad| tensor c ]

Every chunk starts at a multiple of `ALIGNMENT` bytes, so any dtype can be viewed in place. A tensor larger than what
is left of a bucket is split at a multiple of `ALIGNMENT`. The packing depends on the manifest and the cap alone,
never on the local machine, so sender and receiver agree by comparing the cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weightsync.errors import ProtocolError
from weightsync.manifest import ParamMeta

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of one wire tensor inside one bucket.

    Attributes:
        name: Wire name.
        start: First byte within the contiguous tensor.
        num_bytes: Bytes of the part; 0 for an empty tensor.
        offset: First byte within the bucket.
    """

    name: str
    start: int
    num_bytes: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """One unit of transfer: `num_bytes` bytes that hold `chunks`."""

    chunks: tuple[Chunk, ...]
    num_bytes: int

    @cached_property
    def num_payload_bytes(self) -> int:
        """Bytes of the chunks, without the padding between them."""
        return sum(chunk.num_bytes for chunk in self.chunks)

    @cached_property
    def num_bytes_reached(self) -> int:
        """End of the last chunk: what a buffer has to hold at least."""
        return max((chunk.offset + chunk.num_bytes for chunk in self.chunks), default=0)


def plan_buckets(entries: Sequence[ParamMeta], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Packs `entries` in order into buckets of at most `bucket_bytes` bytes.

    Args:
        entries: Tensors in wire order.
        bucket_bytes: Hard cap; rounded down to a multiple of `ALIGNMENT`.

    Raises:
        ProtocolError: The cap is below `ALIGNMENT`.
    """
    cap = bucket_bytes // ALIGNMENT * ALIGNMENT
    if cap <= 0:
        raise ProtocolError(f"bucket_bytes must be at least {ALIGNMENT}, got {bucket_bytes}")
    buckets: list[Bucket] = []
    chunks: list[Chunk] = []
    used = 0
    for entry in entries:
        start = 0
        while True:
            room = cap - used
            part = min(entry.num_bytes - start, room)
            if part or entry.num_bytes == 0:
                chunks.append(Chunk(entry.name, start, part, used))
                used += -(-part // ALIGNMENT) * ALIGNMENT
                start += part
            if used >= cap:
                buckets.append(Bucket(tuple(chunks), used))
                chunks, used = [], 0
            if start >= entry.num_bytes:
                break
    if chunks:
        buckets.append(Bucket(tuple(chunks), used))
    return tuple(buckets)
