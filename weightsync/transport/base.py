"""The one seam of the transports: how bytes get from a trainer's tensors into `(Bucket, buffer)` pairs on a rank.

    trainer: Sender                                     engine rank: Link
      refresh()  what do I offer now? ---- start ---->    connect(offer)
      connect()  meet the links                           (the two run at the same time)
      send(...)  ------------------------ update ---->    receive(...) -> (Bucket, buffer), ...
      close()                                             close()

Control calls carry JSON alone and are made by the client; a transport decides what they say and how many there are.
There are two families. *Mapped* transports (memory, shared memory, CUDA IPC) offer memory once and the link reads it
where it lies. *Collectives* (gloo, NCCL) move buckets through a process group of their own. A link gives the same
`Bucket` objects in every push of an unchanged offer, so that whoever replays them can keep what it compiled.

    sender.connect(deadline_seconds)
    sent = sender.send("model", None, post, progress)
    for bucket, buffer in link.receive("model", None, data, mine):
        session.load_bucket(bucket, buffer)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from weightsync.control import Json
from weightsync.errors import CoverageError, ManifestError, ProtocolError, TransportError, shown
from weightsync.manifest import Manifest, ParamMeta
from weightsync.transport.buckets import Bucket

Progress = Callable[[int], None]


class Pending(Protocol):
    """An `update_weights` call under way on all ranks."""

    def check(self) -> None:
        """Raises the peer's error if the call has failed already; returns at once."""
        ...

    def wait(self) -> None:
        """Waits for the answer of every rank.

        Raises:
            WeightSyncError: A rank's error.
            TransportTimeout: No answer within the deadline.
        """
        ...


class Post(Protocol):
    """Makes an `update_weights` call without waiting for its answer."""

    def __call__(self, data: Json, per_rank: Mapping[int, Json], num_waits: int = 1) -> Pending:
        """Posts the call.

        Args:
            data: What every rank's link is told.
            per_rank: Receiver index -> what that link alone is told.
            num_waits: Waits for a peer that the call spans, each of which may take a deadline.
        """
        ...


@dataclass(frozen=True)
class Feed:
    """The trainer's tensors of one target, and who wants them.

    Attributes:
        manifest: Every tensor in wire order.
        owners: For each entry, the indices of the receivers that load it; empty where all of them ignore it.
        num_receivers: Receivers of the push, over all engines.
        iterate: A fresh pass over `(name, tensor)` in wire order; may run collectives of the trainer's own.
        resident: The tensors by name where they all exist at once, in memory that lasts; else None.
        layout: Stands for the shapes, dtypes and strides of these, as the source last looked at them; None: unknown.
    """

    manifest: Manifest
    owners: tuple[frozenset[int], ...]
    num_receivers: int
    iterate: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    resident: Callable[[], Mapping[str, torch.Tensor] | None]
    layout: Callable[[], object | None] = lambda: None

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """Indices of entries that some receiver loads."""
        return tuple(index for index, owners in enumerate(self.owners) if owners)

    @cached_property
    def wanted_bytes(self) -> int:
        """Bytes of the wanted entries, each counted once."""
        return sum(self.manifest.entries[index].num_bytes for index in self.wanted)

    def selected(self, names: Sequence[str] | None) -> tuple[int, ...]:
        """Indices of the wanted entries among `names`, in wire order.

        Raises:
            CoverageError: A name is not in the manifest.
        """
        return select(self.manifest, self.wanted, names)

    def tensors(self, entries: Sequence[ParamMeta]) -> Generator[tuple[ParamMeta, torch.Tensor], None, None]:
        """The entries' tensors in wire order, checked against the manifest. Close it when stopping early.

        Raises:
            ManifestError: The source gives another order, shape or dtype than it declared, or ends too early.
        """
        resident = self.resident()
        if resident is not None:
            for wanted in entries:
                yield wanted, checked(wanted, resident.get(wanted.name))
            return
        chosen = {entry.name for entry in entries}
        expected = iter(self.manifest)
        pairs = self.iterate()
        with closing(pairs) if isinstance(pairs, Generator) else nullcontext():
            for name, tensor in pairs:
                entry = next(expected, None)
                if entry is None or entry.name != name:
                    raise ManifestError(
                        f"the source gave {name!r} where its metadata says {entry.name if entry else 'the end'!r}; "
                        "iter_full must yield what metadata declares, in that order",
                        names=[name],
                    )
                if name in chosen:
                    yield entry, checked(entry, tensor)
        if (left := next(expected, None)) is not None:
            raise ManifestError(f"the source ended before {left.name!r}", names=[left.name])


def checked(entry: ParamMeta, tensor: torch.Tensor | None) -> torch.Tensor:
    """`tensor`, if it is what `entry` declares; ManifestError with both shapes and dtypes otherwise."""
    if tensor is None:
        raise ManifestError(
            f"{entry.name}: declared in metadata, but the source has no such tensor", names=[entry.name]
        )
    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise ManifestError(
            f"{entry.name}: metadata declares {entry.dtype} {list(entry.shape)}, the source gave "
            f"{tensor.dtype} {list(tensor.shape)}",
            names=[entry.name],
        )
    return tensor


def select(manifest: Manifest, indices: Sequence[int], names: Sequence[str] | None) -> tuple[int, ...]:
    """Those of `indices` whose entry is among `names` (None: all), in wire order.

    Raises:
        CoverageError: A name is not in the manifest, or stands twice.
    """
    if names is None:
        return tuple(indices)
    chosen = set(names)
    unknown = [name for name in names if name not in manifest]
    if unknown or len(chosen) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(chosen) != len(names) else []
        raise CoverageError(
            "names of one update must be names of the manifest, each once", unexpected=unknown, duplicated=twice
        )
    return tuple(index for index in indices if manifest.entries[index].name in chosen)


@dataclass(frozen=True)
class Mine:
    """What one rank loads of one target: its manifest and the entries its plan takes."""

    manifest: Manifest
    owned: tuple[int, ...]

    @cached_property
    def owned_names(self) -> frozenset[str]:
        """Names of the owned entries."""
        return frozenset(self.manifest.entries[index].name for index in self.owned)


class Sender(ABC):
    """The trainer's half. One object per connection; not thread-safe.

    Attributes:
        transport: Its name.
        copied_bytes: Bytes that the last `send` had to copy on the trainer's side first.
    """

    transport: str
    copied_bytes: int = 0

    @abstractmethod
    def refresh(self) -> tuple[str, Json, dict[int, Json]]:
        """What is offered now: `(generation, offer, per receiver index)`.

        The generation is the same string as last time exactly when nothing has to be connected anew.
        """

    @abstractmethod
    def connect(self, deadline_seconds: float) -> None:
        """Meets the links; called while the receivers handle the start call that carries a new offer.

        Raises:
            TransportTimeout: Somebody did not come.
        """

    def fence(self) -> None:  # noqa: B027  nothing to wait for where bytes are copied out
        """Returns when all that was asked of the trainer's device is written, where its memory is read in place."""

    def is_one_post(self, target: str) -> bool:
        """Whether `send` of the whole target makes one control call, so that it may carry start and finish too."""
        return False

    @abstractmethod
    def send(self, target: str, names: Sequence[str] | None, post: Post, progress: Progress) -> int:
        """Moves the tensors of one update and returns when every receiver has read them.

        Args:
            target: Which target.
            names: The names of this update, None for all.
            post: Makes control calls.
            progress: Told the number of bytes each time some have left.

        Returns:
            Bytes on the wire: each receiver's own bytes, bytes broadcast to all counted once.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees every handle, buffer and group. Idempotent; never raises for a peer that is gone."""


class Link(ABC):
    """The engine rank's half. One object per connection.

    Attributes:
        keeps_buffers: Whether all buffers of an update stay valid until the update is over, as mapped memory does.
    """

    keeps_buffers = False

    @abstractmethod
    def connect(self, offer: Json, own: Json, mine: Mapping[str, Mine], deadline_seconds: float) -> None:
        """Maps the offered memory or joins the offered group; called again when the offer changes.

        Args:
            offer: What the sender's `refresh` gave for all.
            own: What it gave for this receiver.
            mine: What this rank loads, by target.
            deadline_seconds: Longest wait for the peer.

        Raises:
            ProtocolError: The offer is malformed, or reaches outside the memory it offers.
            TransportError: The memory cannot be mapped or the group cannot be joined.
        """

    @abstractmethod
    def receive(
        self, target: str, names: Sequence[str] | None, data: Json, own: Json
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The update's buckets; unless `keeps_buffers`, a buffer is valid until the next one is asked for.

        Args:
            target: Which target.
            names: The names of this update, None for all.
            data: What the sender posted for all.
            own: What it posted for this receiver.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmaps and leaves. Idempotent; never waits for a peer."""


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that `is_plain` as a one-dimensional uint8 view (aliases the input)."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes, as they lie, are its values: contiguous, and no bit negates or conjugates them."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it `is_plain`, else a copy that is."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def take(value: Mapping[str, object], name: str, kind: type, what: str) -> object:
    """A field of a peer's JSON object, checked for its type.

    Raises:
        ProtocolError: It is missing or of another type.
    """
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{what} must be an object, got {value!r:.80}")
    item = value.get(name)
    if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
        raise ProtocolError(f"{what} needs {name!r} as {kind.__name__}, got {item!r:.80}")
    return item


def take_int(value: Mapping[str, object], name: str, what: str, *, low: int = 0, high: int | None = None) -> int:
    """An integer field of a peer's JSON object, within `[low, high)`.

    Raises:
        ProtocolError: It is missing, no integer, or out of range.
    """
    item = take(value, name, int, what)
    if not isinstance(item, int) or item < low or (high is not None and item >= high):
        raise ProtocolError(f"{what}: {name!r} must be in [{low}, {'inf' if high is None else high}), got {item!r}")
    return item


def unsupported(transport: str, reason: str, remedy: str) -> TransportError:
    """The error for a transport that these two sides cannot use."""
    return TransportError(f"transport {transport!r} cannot be used: {reason}; {remedy}")


def missing_targets(asked: Sequence[str], known: Sequence[str]) -> ProtocolError | None:
    """An error if a target is asked for that the other side does not have."""
    if unknown := [name for name in asked if name not in known]:
        return ProtocolError(f"unknown targets: {shown(unknown)}; this engine has {', '.join(known)}")
    return None
