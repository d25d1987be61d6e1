"""Which bucket travels when, on a collective with receivers that own different tensors.

A tensor that every receiver loads travels once, broadcast to all of them. Any other travels to each of its owners
alone. Each receiver therefore sees two streams, *everyone* and its own; the sender sees one more than there are
receivers:

    wire order      a(all)   e0(0)   e1(1)   b(all)   e2(0)
    everyone        [a ............... b]
    to receiver 0           [e0 .............. e2]
    to receiver 1                    [e1]

A bucket is due when its last chunk has been packed, or at the end of the pass; the order of dues follows from the
manifest, the cap and the owners alone, so both sides compute it and no message says what comes next. Own streams get
`cap / receivers`, so that all of a sender's open buckets together stay within four caps, however many receivers there
are.

    steps = schedule(entries, {EVERYONE: [0, 3], 0: [1, 4]}, bucket_bytes, num_receivers=2)
    [(step.stream, step.bucket.num_bytes) for step in steps]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsync.manifest import ParamMeta
from weightsync.transport.buckets import ALIGNMENT, Bucket, plan_buckets

EVERYONE = -1


@dataclass(frozen=True, slots=True)
class Step:
    """One message.

    Attributes:
        stream: `EVERYONE`, or the index of the only receiver.
        index: Number of the bucket within its stream.
        bucket: What it holds.
    """

    stream: int
    index: int
    bucket: Bucket


def stream_cap(stream: int, bucket_bytes: int, num_receivers: int) -> int:
    """Bucket cap of a stream, in bytes."""
    if stream == EVERYONE or num_receivers == 1:
        return bucket_bytes
    return max(ALIGNMENT, bucket_bytes // num_receivers)


def schedule(
    entries: Sequence[ParamMeta], streams: Mapping[int, Sequence[int]], bucket_bytes: int, num_receivers: int
) -> tuple[Step, ...]:
    """Orders the buckets of several streams.

    Args:
        entries: The whole manifest's entries, in wire order.
        streams: Stream -> ascending indices of the entries it carries.
        bucket_bytes: Hard cap of a bucket of the stream to everyone.
        num_receivers: Receivers in the group.

    Returns:
        Steps in the order in which they are sent. A stream's steps keep their order whatever other streams are given,
        so a receiver that knows two of them agrees with the sender who knows all.
    """
    due: list[tuple[int, int, int, Bucket]] = []
    for stream, indices in streams.items():
        position = {entries[index].name: index for index in indices}
        buckets = plan_buckets([entries[index] for index in indices], stream_cap(stream, bucket_bytes, num_receivers))
        due += [(position[b.chunks[-1].name], stream, number, b) for number, b in enumerate(buckets)]
    due.sort(key=lambda item: item[:3])
    return tuple(Step(stream, number, bucket) for _, stream, number, bucket in due)


def streams_of(owners: Sequence[frozenset[int]], indices: Sequence[int], num_receivers: int) -> dict[int, list[int]]:
    """Sorts entries into streams.

    Args:
        owners: Receivers of each entry of the manifest.
        indices: The entries that travel.
        num_receivers: Receivers in the group.

    Returns:
        `EVERYONE` and each receiver -> ascending entry indices; streams without entries are left out.
    """
    streams: dict[int, list[int]] = {}
    for index in indices:
        keys = [EVERYONE] if len(owners[index]) == num_receivers else sorted(owners[index])
        for key in keys:
            streams.setdefault(key, []).append(index)
    return dict(sorted(streams.items()))
