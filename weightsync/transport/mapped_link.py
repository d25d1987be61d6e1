"""The engine rank's half of a mapped transport: maps what was offered, checks every offset, reads it where it lies.

    link.connect(offer, own, mine, deadline_seconds)                 # once per offer
    for bucket, buffer in link.receive("model", None, {"placed": True}, {}):
        ...                                                          # the same Bucket objects in every push
    link.close()                                                     # unmaps

See mapped.py for what an offer says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightsync.control import Json, from_ranges
from weightsync.errors import ProtocolError
from weightsync.transport.base import Link, Mine, select, take, take_int
from weightsync.transport.buckets import Bucket, Chunk, plan_buckets
from weightsync.transport.mapped import NUM_KEPT, NUM_SLOTS, Mapper


@dataclass
class _Target:
    """One target's tables on a rank."""

    mine: Mine
    by_allocation: list[tuple[Bucket, int]]
    staged: list[int]


class MappedLink(Link):
    """The engine rank's half of a mapped transport.

    Args:
        mapper: Maps memory; its mappings are released with the link.
    """

    keeps_buffers = True

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper
        self._mapped: dict[str, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._targets: dict[str, _Target] = {}
        self._bucket_bytes = 0
        self._chosen: dict[tuple[str, bool, tuple[str, ...] | None], tuple[Bucket, ...]] = {}

    def connect(self, offer: Json, own: Json, mine: Mapping[str, Mine], deadline_seconds: float) -> None:
        """See `Link.connect`. What was mapped already and is offered again stays mapped."""
        allocations = take(offer, "allocations", list, "the offer")
        tables = take(offer, "targets", dict, "the offer")
        self._bucket_bytes = take_int(offer, "bucket_bytes", "the offer", low=1)
        self._chosen.clear()
        self._map(allocations)  # type: ignore[arg-type]
        self._slots = [self._slot(row) for row in take(offer, "slots", list, "the offer")]  # type: ignore[attr-defined]
        self._targets = {
            target: self._table(take(tables, target, dict, "the offer's targets"), own_part)  # type: ignore[arg-type]
            for target, own_part in mine.items()
        }

    def _map(self, allocations: Sequence[Json]) -> None:
        wanted: dict[str, tuple[Json, int]] = {}
        for allocation in allocations:
            handle = take(allocation, "handle", dict, "an allocation")
            num_bytes = take_int(allocation, "num_bytes", "an allocation", low=1)
            wanted[json.dumps([handle, num_bytes], sort_keys=True)] = (handle, num_bytes)  # type: ignore[assignment]
        self._targets, self._slots, self._buffers = {}, [], []
        for key in self._mapped.keys() - wanted.keys():
            self._mapper.release(self._mapped.pop(key))
        for key, (handle, num_bytes) in wanted.items():
            if key not in self._mapped:
                self._mapped[key] = self._mapper.open(handle, num_bytes)
        if len(wanted) != len(allocations):
            raise ProtocolError("the offer lists an allocation twice")
        self._buffers = [self._mapped[key] for key in wanted]

    def _slot(self, row: object) -> torch.Tensor:
        number, offset = self._checked_place(row, self._bucket_bytes, "a slot")
        return self._buffers[number][offset : offset + self._bucket_bytes]

    def _checked_place(self, row: object, num_bytes: int, what: str) -> tuple[int, int]:
        """`[allocation, offset]`, checked against the mapping before anything is read."""
        if not (isinstance(row, list) and len(row) == 2 and all(type(n) is int for n in row)):
            raise ProtocolError(f"{what} must be [allocation, offset], got {row!r:.80}")
        number, offset = row
        if not 0 <= number < len(self._buffers):
            raise ProtocolError(f"{what} names allocation {number} of {len(self._buffers)}")
        size = self._buffers[number].numel()
        if not 0 <= offset <= size - num_bytes:
            raise ProtocolError(f"{what}: bytes {offset}..{offset + num_bytes} lie outside a mapping of {size} bytes")
        return number, offset

    def _table(self, table: Json, mine: Mine) -> _Target:
        manifest = mine.manifest
        owned = set(mine.owned)
        chunks: dict[int, list[Chunk]] = {}
        seen: set[int] = set()
        for row in take(table, "placed", list, "a target of the offer"):  # type: ignore[attr-defined]
            if not (isinstance(row, list) and len(row) == 3 and type(row[0]) is int and 0 <= row[0] < len(manifest)):
                raise ProtocolError(f"a placed tensor must be [entry, allocation, offset], got {row!r:.80}")
            entry = manifest.entries[row[0]]
            number, offset = self._checked_place(row[1:], entry.num_bytes, entry.name)
            if row[0] in seen:
                raise ProtocolError(f"{entry.name} is placed twice")
            seen.add(row[0])
            if row[0] in owned:
                chunks.setdefault(number, []).append(Chunk(entry.name, 0, entry.num_bytes, offset))
        staged = from_ranges(table.get("staged"), len(manifest))
        if lost := owned - seen - set(staged):
            raise ProtocolError(
                f"the offer holds no bytes for {manifest.entries[min(lost)].name} ({len(lost)} such names)"
            )
        if staged and len(self._slots) != NUM_SLOTS:
            raise ProtocolError(f"staged tensors need {NUM_SLOTS} slots, the offer has {len(self._slots)}")
        by_allocation = [(Bucket(tuple(c), self._buffers[n].numel()), n) for n, c in sorted(chunks.items())]
        return _Target(mine, by_allocation, staged)

    def receive(
        self, target: str, names: Sequence[str] | None, data: Json, own: Json
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """See `Link.receive`."""
        table = self._targets[target]
        placed = take(data, "placed", bool, "the update")
        key = (target, bool(placed), None if names is None else tuple(names))
        if key not in self._chosen:
            if len(self._chosen) >= NUM_KEPT:
                self._chosen.clear()
            self._chosen[key] = self._choose(table, names) if placed else self._choose_staged(table, names)
        buckets = self._chosen[key]
        if placed:
            for bucket, (_, number) in zip(buckets, table.by_allocation, strict=True):
                if bucket.chunks:
                    yield bucket, self._buffers[number]
            return
        number = take_int(data, "bucket", "the update", high=len(buckets))
        slot = take_int(data, "slot", "the update", high=len(self._slots))
        if buckets[number].chunks:
            yield buckets[number], self._slots[slot]

    @staticmethod
    def _choose(table: _Target, names: Sequence[str] | None) -> tuple[Bucket, ...]:
        """The placed buckets with the chunks of `names` alone; the very same objects when all names are meant."""
        if names is None:
            return tuple(bucket for bucket, _ in table.by_allocation)
        chosen = set(names)
        return tuple(
            Bucket(tuple(c for c in bucket.chunks if c.name in chosen), bucket.num_bytes)
            for bucket, _ in table.by_allocation
        )

    def _choose_staged(self, table: _Target, names: Sequence[str] | None) -> tuple[Bucket, ...]:
        """The staged buckets as the sender packs them, with this rank's chunks alone."""
        manifest, owned = table.mine.manifest, table.mine.owned_names
        entries = [manifest.entries[index] for index in select(manifest, table.staged, names)]
        return tuple(
            Bucket(tuple(c for c in bucket.chunks if c.name in owned), bucket.num_bytes)
            for bucket in plan_buckets(entries, self._bucket_bytes)
        )

    def close(self) -> None:
        """See `Link.close`."""
        self._targets, self._slots, self._buffers = {}, [], []
        self._chosen.clear()
        while self._mapped:
            self._mapper.release(self._mapped.popitem()[1])
