"""Buckets through a process group of their own: what gloo and NCCL share.

    trainer = rank 0                                   receiver i = rank i + 1
    pack k into slot k % 2                             wait for k in slot k % 2, check its seal
    broadcast (all own it) or send (one does)  ----->  post the receive of k+1 into the other slot
    pack k+1 while k is under way                      replay k while k+1 arrives

A message is a bucket and its seal: the update's nonce, stream, number and length. A rank that finds another seal has
been sent something else than the schedule says, and refuses it before a byte of it is replayed. The schedule follows
from what the handshake agreed (`streams.schedule`), so no message announces the next.

The group stands on a store of its own (`groups.py`). Every wait has the connection's deadline. When one side gives
up it leaves the group, which the other sees at once (gloo, outside a broadcast) or within its deadline; the trainer
also hears of it from the control call. A group that failed is never used again.

    sender = CollectiveSender("gloo", GlooGroup, host, feeds, bucket_bytes, torch.device("cpu"), deadline_seconds)
    link = CollectiveLink(GlooGroup, torch.device("cpu"))
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from weightsync.control import Json, from_ranges, to_ranges
from weightsync.errors import ProtocolError, TransportError
from weightsync.transport.base import (
    Feed,
    Link,
    Mine,
    Post,
    Progress,
    Sender,
    byte_view,
    is_plain,
    plain,
    select,
    take,
    take_int,
)
from weightsync.transport.buckets import ALIGNMENT, Bucket, Chunk
from weightsync.transport.groups import TRAINER_RANK, Group, Work
from weightsync.transport.streams import EVERYONE, Step, schedule, stream_cap, streams_of

NUM_SLOTS = 2
_SEAL = struct.Struct("<8s8siIQ")
_MAGIC = b"WSBUCKET"
_SEAL_BYTES = _SEAL.size
_KEPT_SCHEDULES = 16


def seal(nonce: bytes, step: Step) -> bytes:
    """The 32 bytes after a bucket's bytes: which message of which update this is."""
    return _SEAL.pack(_MAGIC, nonce, step.stream, step.index, step.bucket.num_bytes)


def check_seal(found: bytes, nonce: bytes, step: Step) -> None:
    """Compares a seal with what the schedule says.

    Raises:
        ProtocolError: Naming expected and found.
    """
    if found == seal(nonce, step):
        return
    magic, got_nonce, stream, index, num_bytes = _SEAL.unpack(found)
    what = f"message {step.index} of stream {step.stream}, update {nonce.hex()}, {step.bucket.num_bytes} bytes"
    if magic != _MAGIC:
        raise ProtocolError(f"expected {what}; got bytes that end with no seal, so the sender sent something else")
    raise ProtocolError(
        f"expected {what}; got message {index} of stream {stream}, update {got_nonce.hex()}, {num_bytes} bytes"
    )


class _Slots:
    """Two buffers per stream, each with room for a seal, made when first used."""

    def __init__(self, device: torch.device, bucket_bytes: int, num_receivers: int) -> None:
        self._device, self._bucket_bytes, self._num_receivers = device, bucket_bytes, num_receivers
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, step: Step) -> torch.Tensor:
        """The slot of a step, as long as its longest message."""
        key = (step.stream, step.index % NUM_SLOTS)
        if key not in self._buffers:
            cap = stream_cap(step.stream, self._bucket_bytes, self._num_receivers) + ALIGNMENT
            self._buffers[key] = torch.empty(cap, dtype=torch.uint8, device=self._device)
        return self._buffers[key]

    def message(self, step: Step) -> torch.Tensor:
        """The bucket's bytes and the seal's."""
        return self.of(step)[: step.bucket.num_bytes + _SEAL_BYTES]


def _widest(view: torch.Tensor) -> torch.Tensor:
    """A uint8 view as int64 where address and length allow: fewer elements to copy."""
    return view.view(torch.int64) if view.data_ptr() % 8 == 0 and view.numel() % 8 == 0 else view


@dataclass(frozen=True)
class _Schedule:
    """The sender's steps of one update, and the same by entry name for sources that come one tensor at a time."""

    selected: tuple[int, ...]
    steps: tuple[Step, ...]
    by_name: Mapping[str, Sequence[tuple[Step, Chunk]]]
    told: Mapping[int, Json]

    @classmethod
    def of(cls, feed: Feed, selected: tuple[int, ...], bucket_bytes: int) -> _Schedule:
        streams = streams_of(feed.owners, selected, feed.num_receivers)
        steps = schedule(feed.manifest.entries, streams, bucket_bytes, feed.num_receivers)
        by_name: dict[str, list[tuple[Step, Chunk]]] = {}
        told = {i: {"messages": 0, "bytes": 0} for i in range(feed.num_receivers)}
        for step in steps:
            for chunk in step.bucket.chunks:
                by_name.setdefault(chunk.name, []).append((step, chunk))
            for i in told if step.stream == EVERYONE else [step.stream]:
                told[i]["messages"] += 1
                told[i]["bytes"] += step.bucket.num_bytes
        for parts in by_name.values():
            parts.sort(key=lambda part: (part[0].stream, part[0].index))
        return cls(selected, steps, by_name, told)


class CollectiveSender(Sender):
    """The trainer's half.

    Args:
        transport: `"gloo"` or `"nccl"`.
        kind: The group's class.
        host: Address under which the receivers reach this process.
        feeds: Target -> tensors.
        bucket_bytes: Hard cap of a bucket.
        device: Where buckets are packed.
        deadline_seconds: Longest wait for a peer.
    """

    def __init__(
        self,
        transport: str,
        kind: type[Group],
        host: str,
        feeds: Mapping[str, Feed],
        bucket_bytes: int,
        device: torch.device,
        deadline_seconds: float,
    ) -> None:
        self.transport = transport
        self._kind, self._host, self._device = kind, host, device
        self._feeds = dict(feeds)
        self._bucket_bytes = bucket_bytes
        self._num_receivers = next(iter(self._feeds.values())).num_receivers
        self._name = secrets.token_hex(8)
        self._token = secrets.token_hex(16)
        self._store = kind.host_store(host, self._token, deadline_seconds)
        self._group: Group | None = None
        self._slots = _Slots(device, bucket_bytes, self._num_receivers)
        self._schedules: dict[tuple[str, tuple[str, ...] | None], _Schedule] = {}
        self._copies: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._addresses: dict[str, list[int]] = {}

    def refresh(self) -> tuple[str, Json, dict[int, Json]]:
        """See `Sender.refresh`. The offer is the same for the life of the group."""
        offer = {
            "transport": self.transport,
            "host": self._host,
            "port": self._store.port,
            "token": self._token,
            "name": self._name,
            "receivers": self._num_receivers,
            "bucket_bytes": self._bucket_bytes,
        }
        everyone = {
            target: to_ranges(index for index in feed.wanted if len(feed.owners[index]) == self._num_receivers)
            for target, feed in self._feeds.items()
        }
        return self._name, offer, {i: {"index": i, "everyone": everyone} for i in range(self._num_receivers)}

    def connect(self, deadline_seconds: float) -> None:
        """See `Sender.connect`."""
        world = self._num_receivers + 1
        self._group = self._kind(self._store, TRAINER_RANK, world, self._host, deadline_seconds, self._device)

    def send(self, target: str, names: Sequence[str] | None, post: Post, progress: Progress) -> int:
        """See `Sender.send`."""
        if self._group is None:
            raise TransportError("the group is not connected; every start call with a new offer needs connect()")
        group, feed = self._group, self._feeds[target]
        plan = self._schedule(target, feed, names)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a step may still be writing, on whatever stream
        nonce = secrets.token_bytes(8)
        pending = post({"nonce": nonce.hex()}, plan.told, len(plan.steps) + 1)
        under_way: dict[tuple[int, int], Work] = {}
        sent = 0

        def finish(key: tuple[int, int]) -> None:
            # A rank that fails can't leave from inside a broadcast; what it says over the control call comes first.
            group.wait(under_way.pop(key, None), pending.check if key[0] == EVERYONE else None)

        def claim(step: Step) -> None:
            pending.check()
            finish((step.stream, step.index % NUM_SLOTS))

        def launch(step: Step) -> None:
            nonlocal sent
            message = self._slots.message(step)
            mark = torch.frombuffer(bytearray(seal(nonce, step)), dtype=torch.uint8)
            message[step.bucket.num_bytes :].copy_(mark)
            to_all = step.stream == EVERYONE
            work = group.broadcast(message) if to_all else group.send(message, step.stream + 1)
            under_way[step.stream, step.index % NUM_SLOTS] = work
            payload = sum(chunk.num_bytes for chunk in step.bucket.chunks)
            sent += payload
            progress(payload)

        try:
            self._pack(target, feed, plan, claim, launch)
            self.copied_bytes = sent
            for key in list(under_way):
                finish(key)
        finally:
            under_way.clear()  # works hold the sockets open, and an error's traceback holds this frame
        pending.wait()
        return sent

    def _pack(
        self,
        target: str,
        feed: Feed,
        plan: _Schedule,
        claim: Callable[[Step], None],
        launch: Callable[[Step], None],
    ) -> None:
        """Fills every step's slot, in order: `claim` it first, `launch` it when it is full."""
        resident = self._contiguous_residents(target, feed, plan)
        if resident is not None:
            for step in plan.steps:
                claim(step)
                torch._foreach_copy_(*self._copy_lists(step, resident))
                launch(step)
        else:
            with closing(feed.tensors([feed.manifest.entries[index] for index in plan.selected])) as tensors:
                for entry, tensor in tensors:
                    source = byte_view(plain(tensor))
                    for step, chunk in plan.by_name[entry.name]:
                        if chunk is step.bucket.chunks[0]:
                            claim(step)
                        part = source[chunk.start : chunk.start + chunk.num_bytes]
                        self._slots.of(step)[chunk.offset : chunk.offset + chunk.num_bytes].copy_(part)
                        if chunk is step.bucket.chunks[-1]:
                            launch(step)

    def _schedule(self, target: str, feed: Feed, names: Sequence[str] | None) -> _Schedule:
        key = (target, None if names is None else tuple(names))
        if key not in self._schedules:
            if len(self._schedules) >= _KEPT_SCHEDULES:
                self._schedules.clear()
                self._copies.clear()
            self._schedules[key] = _Schedule.of(feed, feed.selected(names), self._bucket_bytes)
        return self._schedules[key]

    def _contiguous_residents(self, target: str, feed: Feed, plan: _Schedule) -> Mapping[str, torch.Tensor] | None:
        """The source's tensors if packing lists can be kept for them; forgets the lists when an address changed."""
        resident = feed.resident()
        if resident is None:
            return None
        tensors = [resident[feed.manifest.entries[index].name] for index in plan.selected]
        if not all(map(is_plain, tensors)):
            return None
        addresses = [tensor.data_ptr() for tensor in resident.values()]
        if addresses != self._addresses.get(target):
            self._addresses[target] = addresses
            self._copies.clear()
        return resident

    def _copy_lists(
        self, step: Step, resident: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Destination and source views of one bucket, made once per step."""
        key = id(step)
        if key not in self._copies:
            slot = self._slots.of(step)
            to, source = [], []
            for chunk in step.bucket.chunks:
                if chunk.num_bytes:
                    a = _widest(slot[chunk.offset : chunk.offset + chunk.num_bytes])
                    b = _widest(byte_view(resident[chunk.name])[chunk.start : chunk.start + chunk.num_bytes])
                    same = a.dtype == b.dtype
                    to.append(a if same else a.view(torch.uint8))
                    source.append(b if same else b.view(torch.uint8))
            self._copies[key] = (to, source)
        return self._copies[key]

    def close(self) -> None:
        """See `Sender.close`."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._kind.close_store(self._store)
        self._copies.clear()
        self._schedules.clear()


class CollectiveLink(Link):
    """The engine rank's half.

    Args:
        kind: The group's class.
        device: Where buckets are received.
    """

    def __init__(self, kind: type[Group], device: torch.device) -> None:
        self._kind, self._device = kind, device
        self._group: Group | None = None
        self._index = 0
        self._num_receivers = 0
        self._bucket_bytes = 0
        self._deadline_seconds = 0.0
        self._slots: _Slots | None = None
        self._mine: dict[str, Mine] = {}
        self._everyone: dict[str, frozenset[int]] = {}
        self._schedules: dict[tuple[str, tuple[str, ...] | None], tuple[Step, ...]] = {}

    def connect(self, offer: Json, own: Json, mine: Mapping[str, Mine], deadline_seconds: float) -> None:
        """See `Link.connect`."""
        host, port = str(take(offer, "host", str, "the offer")), take_int(offer, "port", "the offer", high=65536)
        token = str(take(offer, "token", str, "the offer"))
        self._num_receivers = take_int(offer, "receivers", "the offer", low=1)
        self._bucket_bytes = take_int(offer, "bucket_bytes", "the offer", low=ALIGNMENT)
        self._index = take_int(own, "index", "the offer", high=self._num_receivers)
        tables = take(own, "everyone", dict, "the offer")
        self._mine = dict(mine)
        self._everyone = {}
        for target, part in mine.items():
            shared = from_ranges(tables.get(target), len(part.manifest))  # type: ignore[attr-defined]
            if stray := set(shared) - set(part.owned):
                name = part.manifest.entries[min(stray)].name
                raise ProtocolError(
                    f"{name} is to be broadcast, but this rank does not load it ({len(stray)} such names)"
                )
            self._everyone[target] = frozenset(shared)
        self._schedules.clear()
        self.close()
        self._slots = _Slots(self._device, self._bucket_bytes, self._num_receivers)
        store = self._kind.join_store(host, port, token, deadline_seconds)
        world = self._num_receivers + 1
        self._group = self._kind(store, self._index + 1, world, host, deadline_seconds, self._device)

    def receive(
        self, target: str, names: Sequence[str] | None, data: Json, own: Json
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """See `Link.receive`."""
        if self._group is None or self._slots is None:
            raise TransportError("the group is not connected")
        group, slots = self._group, self._slots
        steps = self._steps(target, names)
        told = (take_int(own, "messages", "the update"), take_int(own, "bytes", "the update"))
        if told != (mine := (len(steps), sum(step.bucket.num_bytes for step in steps))):
            raise ProtocolError(
                f"the trainer will send {told[0]} messages of {told[1]} bytes together, this rank expects {mine[0]} "
                f"of {mine[1]}: the two sides pack differently"
            )
        try:
            nonce = bytes.fromhex(str(data.get("nonce")))
        except ValueError:
            raise ProtocolError(f"the update's nonce must be hexadecimal, got {data.get('nonce')!r:.80}") from None

        def post(step: Step) -> Work:
            message = slots.message(step)
            return group.broadcast(message) if step.stream == EVERYONE else group.recv(message)

        arriving = post(steps[0]) if steps else None
        try:
            for number, step in enumerate(steps):
                group.wait(arriving)
                message = slots.message(step)
                check_seal(bytes(message[step.bucket.num_bytes :].tolist()), nonce, step)
                arriving = post(steps[number + 1]) if number + 1 < len(steps) else None
                yield step.bucket, slots.of(step)[: step.bucket.num_bytes]
        finally:
            arriving = None  # works hold the sockets open, and an error's traceback holds this frame

    def _steps(self, target: str, names: Sequence[str] | None) -> tuple[Step, ...]:
        """This rank's part of the schedule; the very same objects for the same names."""
        key = (target, None if names is None else tuple(names))
        if key not in self._schedules:
            if len(self._schedules) >= _KEPT_SCHEDULES:
                self._schedules.clear()
            mine, shared = self._mine[target], self._everyone[target]
            streams: dict[int, list[int]] = {}
            for index in select(mine.manifest, mine.owned, names):
                streams.setdefault(EVERYONE if index in shared else self._index, []).append(index)
            streams = dict(sorted(streams.items()))
            self._schedules[key] = schedule(mine.manifest.entries, streams, self._bucket_bytes, self._num_receivers)
        return self._schedules[key]

    def close(self) -> None:
        """See `Link.close`."""
        group, self._group = self._group, None
        if group is not None:
            group.close()
