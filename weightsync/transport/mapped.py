"""The engine reads the trainer's memory where it lies: what memory, shared memory and CUDA IPC have in common.

    trainer's allocations          engine rank
    A [ w0 | w1 |    w2  ]  ---->  mapped once, one Bucket per allocation, no copy       ("placed")
    B [ w3         ]        ---->
    slot 0, slot 1          <----  tensors that lie in no allocation that can be offered ("staged"):
                                   copied bucket by bucket, the copy of k+1 while k is being read

Which allocation holds a tensor, and how it is named to another process, is all that the three differ in: an
`Exporter` on one side, a `Mapper` on the other. An offer changes, under a new generation, only when the trainer's
allocations do. A push of placed tensors is one `update_weights` call, whatever their number.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from weightsync.control import Json, from_ranges, to_ranges
from weightsync.errors import ProtocolError
from weightsync.manifest import ParamMeta
from weightsync.transport.base import (
    Feed,
    Link,
    Mine,
    Pending,
    Post,
    Progress,
    Sender,
    byte_view,
    checked,
    select,
    take,
    take_int,
)
from weightsync.transport.buckets import Bucket, Chunk, plan_buckets

NUM_SLOTS = 2
_ADDRESS, _IS_CONTIGUOUS = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
NUM_KEPT = 16  # different updates (subsets of names) whose tables are remembered


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: an allocation that can be offered, and the tensor's first byte in it.

    Attributes:
        allocation: Equal for tensors of one allocation, and never equal for two allocations of one process, even if
            the second was given the first one's address after it was freed.
        offset: In bytes.
    """

    allocation: Hashable
    offset: int


class Exporter(ABC):
    """Names the trainer's memory to another process. Owned and closed by one `MappedSender`."""

    @abstractmethod
    def locate(self, tensor: torch.Tensor) -> Place | None:
        """Where a contiguous tensor lies; None if its memory cannot be offered."""

    @abstractmethod
    def handle(self, allocation: Hashable) -> tuple[Json, int]:
        """What a `Mapper` needs to map an allocation, and its size in bytes."""

    @abstractmethod
    def is_current(self, allocation: Hashable) -> bool:
        """Whether it is still the allocation that was located: not once freed, even if its address is in use."""

    @abstractmethod
    def stage(self, num_bytes: int) -> torch.Tensor:
        """New memory that `locate` finds, as uint8; freed by `close`."""

    @abstractmethod
    def fence(self) -> None:
        """Returns when everything that was asked of the device before has been written."""

    @abstractmethod
    def forget(self) -> None:
        """Drops what it keeps of allocations located so far: a new offer is about to be made."""

    @abstractmethod
    def close(self) -> None:
        """Frees staged memory and forgets the rest."""


class Mapper(ABC):
    """Maps what an `Exporter` named. Owned and closed by one `MappedLink`."""

    @abstractmethod
    def open(self, handle: Json, num_bytes: int) -> torch.Tensor:
        """The allocation as a uint8 tensor of `num_bytes` bytes that aliases the trainer's memory.

        Raises:
            ProtocolError: The handle is malformed.
            TransportError: It cannot be mapped here, or is smaller than `num_bytes`.
        """

    @abstractmethod
    def release(self, buffer: torch.Tensor) -> None:
        """Unmaps what `open` gave; the tensor must not be used any more."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """One update's part of the offer."""

    num_placed: int
    placed_bytes: int
    staged: tuple[ParamMeta, ...]
    read_bytes: int


class MappedSender(Sender):
    """The trainer's half of a mapped transport.

    Args:
        transport: Its name.
        exporter: Names memory; closed with the sender.
        feeds: Target -> tensors.
        bucket_bytes: Size of each of the two slots for staged tensors.
    """

    def __init__(self, transport: str, exporter: Exporter, feeds: Mapping[str, Feed], bucket_bytes: int) -> None:
        self.transport = transport
        self._exporter = exporter
        self._feeds = dict(feeds)
        self._bucket_bytes = bucket_bytes
        self._layout: tuple[list[int], list[bool]] = ([], [])
        self._allocations: dict[Hashable, int] = {}
        self._placed: dict[str, frozenset[int]] = {}
        self._slots: list[torch.Tensor] = []
        self._selections: dict[tuple[str, tuple[str, ...] | None], _Selection] = {}
        self._name = secrets.token_hex(4)
        self._num_offers = 0
        self._offer: Json | None = None

    def refresh(self) -> tuple[str, Json, dict[int, Json]]:
        """See `Sender.refresh`. Costs two comparisons per tensor while nothing changed.

        Shapes and dtypes are the source's `metadata`; strides matter only as far as they are contiguous or not, for
        other tensors are staged.
        """
        residents = {target: feed.resident() for target, feed in self._feeds.items()}
        tensors = [t for by_name in residents.values() if by_name for t in by_name.values()]
        layout = (list(map(_ADDRESS, tensors)), list(map(_IS_CONTIGUOUS, tensors)))
        unchanged = layout == self._layout and all(map(self._exporter.is_current, self._allocations))
        if self._offer is None or not unchanged:
            self._exporter.forget()
            self._selections.clear()
            self._layout, self._allocations = layout, {}
            targets = {target: self._place(target, residents[target]) for target in self._feeds}
            if any(table["staged"] for table in targets.values()) and not self._slots:
                self._slots = [self._exporter.stage(self._bucket_bytes) for _ in range(NUM_SLOTS)]
            slots = [[self._number(place), place.offset] for place in map(self._exporter.locate, self._slots) if place]
            allocations = []
            for allocation in self._allocations:
                handle, num_bytes = self._exporter.handle(allocation)
                allocations.append({"handle": handle, "num_bytes": num_bytes})
            self._offer = {
                "transport": self.transport,
                "bucket_bytes": self._bucket_bytes,
                "allocations": allocations,
                "slots": slots,
                "targets": targets,
            }
            self._num_offers += 1
        return f"{self._name}-{self._num_offers}", self._offer, {}

    def _number(self, place: Place) -> int:
        return self._allocations.setdefault(place.allocation, len(self._allocations))

    def _place(self, target: str, resident: Mapping[str, torch.Tensor] | None) -> Json:
        """The target's table in the offer; remembers which entries are placed."""
        feed = self._feeds[target]
        placed: list[list[int]] = []
        staged: list[int] = []
        empty: list[int] = []
        for index in feed.wanted:
            entry = feed.manifest.entries[index]
            if not entry.num_bytes:
                empty.append(index)
                continue
            place = None
            if resident is not None:
                tensor = checked(entry, resident.get(entry.name))
                if tensor.is_contiguous():
                    place = self._exporter.locate(tensor)
            if place is None:
                staged.append(index)
            else:
                placed.append([index, self._number(place), place.offset])
        if self._allocations:  # no bytes lie anywhere, so they may lie here
            placed += [[index, 0, 0] for index in empty]
        else:
            staged = sorted(staged + empty)
        self._placed[target] = frozenset(row[0] for row in placed)
        return {"placed": placed, "staged": to_ranges(staged)}

    def connect(self, deadline_seconds: float) -> None:
        """Nothing to meet: links map on their own."""

    def is_one_post(self, target: str) -> bool:
        """See `Sender.is_one_post`."""
        part = self._selected(target, self._feeds[target], None)
        return part.num_placed > 0 and not part.staged

    def send(self, target: str, names: Sequence[str] | None, post: Post, progress: Progress) -> int:
        """See `Sender.send`."""
        feed = self._feeds[target]
        part = self._selected(target, feed, names)
        self.copied_bytes = 0
        if part.num_placed:
            self._exporter.fence()
            post({"placed": True}, {}).wait()
            progress(part.placed_bytes)
        if part.staged:
            with closing(feed.tensors(part.staged)) as tensors:
                self._send_staged(tensors, part.staged, post, progress)
        return part.read_bytes

    def _selected(self, target: str, feed: Feed, names: Sequence[str] | None) -> _Selection:
        """What an update of `names` has to move; kept until the offer changes."""
        key = (target, None if names is None else tuple(names))
        if key not in self._selections:
            if len(self._selections) >= NUM_KEPT:
                self._selections.clear()
            entries, placed = feed.manifest.entries, self._placed[target]
            chosen = feed.selected(names)
            self._selections[key] = _Selection(
                num_placed=sum(index in placed for index in chosen),
                placed_bytes=sum(entries[index].num_bytes for index in chosen if index in placed),
                staged=tuple(entries[index] for index in chosen if index not in placed),
                read_bytes=sum(entries[index].num_bytes * len(feed.owners[index]) for index in chosen),
            )
        return self._selections[key]

    def _send_staged(
        self,
        tensors: Iterator[tuple[ParamMeta, torch.Tensor]],
        entries: Sequence[ParamMeta],
        post: Post,
        progress: Progress,
    ) -> None:
        """Copies bucket k+1 into one slot while the receivers read bucket k from the other."""
        current: tuple[ParamMeta, torch.Tensor] | None = None
        pending: Pending | None = None
        before = 0
        for number, bucket in enumerate(plan_buckets(entries, self._bucket_bytes)):
            slot = self._slots[number % NUM_SLOTS]
            for chunk in bucket.chunks:
                if current is None or current[0].name != chunk.name:
                    current = next(tensors)
                    current = (current[0], byte_view(current[1].contiguous()))
                slot[chunk.offset : chunk.offset + chunk.num_bytes].copy_(
                    current[1][chunk.start : chunk.start + chunk.num_bytes]
                )
                self.copied_bytes += chunk.num_bytes
            self._exporter.fence()
            if pending is not None:
                pending.wait()
                progress(before)
            pending = post({"placed": False, "bucket": number, "slot": number % NUM_SLOTS}, {})
            before = sum(chunk.num_bytes for chunk in bucket.chunks)
        for _ in tensors:  # the source ends its own collectives on all trainer ranks
            pass
        if pending is not None:
            pending.wait()
            progress(before)

    def close(self) -> None:
        """See `Sender.close`."""
        self._offer = None
        self._layout, self._allocations, self._placed, self._slots = ([], []), {}, {}, []
        self._selections.clear()
        self._exporter.close()


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
