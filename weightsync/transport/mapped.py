"""The engine reads the trainer's memory where it lies: what memory, shared memory and CUDA IPC have in common.

    trainer's allocations          engine rank
    A [ w0 | w1 |    w2  ]  ---->  mapped once, one Bucket per allocation, no copy       ("placed")
    B [ w3         ]        ---->
    slot 0, slot 1          <----  tensors that lie in no allocation that can be offered ("staged"):
                                   copied bucket by bucket, the copy of k+1 while k is being read

Which allocation holds a tensor, and how it is named to another process, is all that the three differ in: an
`Exporter` on one side, a `Mapper` on the other. An offer changes, under a new generation, only when the trainer's
allocations do. A push of placed tensors is one `update_weights` call, whatever their number. The engine's half is
mapped_link.py.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain

import torch

from weightsync.control import Json, to_ranges
from weightsync.manifest import ParamMeta
from weightsync.transport.base import (
    Feed,
    Pending,
    Post,
    Progress,
    Sender,
    byte_view,
    checked,
    is_plain,
    plain,
)
from weightsync.transport.buckets import plan_buckets

NUM_SLOTS = 2
_ADDRESS = torch.Tensor.data_ptr
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
        self._layout: tuple[list[int], list[object]] = ([], [])
        self._allocations: dict[Hashable, int] = {}
        self._placed: dict[str, frozenset[int]] = {}
        self._slots: list[torch.Tensor] = []
        self._selections: dict[tuple[str, tuple[str, ...] | None], _Selection] = {}
        self._name = secrets.token_hex(4)
        self._num_offers = 0
        self._offer: Json | None = None

    def refresh(self) -> tuple[str, Json, dict[int, Json]]:
        """See `Sender.refresh`. Costs one look at each tensor's address while nothing changed.

        Shapes and dtypes are the source's `metadata`, which was just looked at; strides matter only as far as they are
        contiguous or not, for other tensors are staged.
        """
        residents = {target: feed.resident() for target, feed in self._feeds.items()}
        tensors = list(chain.from_iterable(by_name.values() for by_name in residents.values() if by_name))
        laid_out: list[object] = [feed.layout() for feed in self._feeds.values()]
        if None in laid_out:
            laid_out = list(map(is_plain, tensors))
        layout = (list(map(_ADDRESS, tensors)), laid_out)
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
                if is_plain(tensor):
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

    def fence(self) -> None:
        """See `Sender.fence`."""
        self._exporter.fence()

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
                    current = (current[0], byte_view(plain(current[1])))
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
