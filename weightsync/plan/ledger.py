"""What a dry run knows of every storage: which wire names its bytes came from, and who claimed which live bytes.

    Ledger.of(tensor) -> Holding | None       nothing is known of constants that a loader makes for itself
        source="w"        the untouched bytes of wire tensor w: a copy from here is a plain `Write`
        names={"w"}       computed from w: a copy from here makes w opaque
        live={3}          computed from live bytes of destination 3
        destinations=(3,) the live storage of destination 3 itself

Storages are known by identity. A weak reference per entry keeps an identity from being used twice, and tells afterwards
whether the model held on to a source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightsync.plan.regions import Region
from weightsync.plan.side_effects import Watch
from weightsync.plan.tally import is_covered, overlaps
from weightsync.plan.writes import Claim, Destination, layout_text

Names = frozenset[str]
Indices = frozenset[int]
NO_NAMES: Names = frozenset()
NO_LIVE: Indices = frozenset()


@dataclass(slots=True)
class Holding:
    """What is known of one storage; see the module's drawing."""

    ref: StorageWeakRef
    names: Names = NO_NAMES
    live: Indices = NO_LIVE
    source: str | None = None
    destinations: tuple[int, ...] = ()


@dataclass
class Ledger:
    """The findings of one dry run.

    Attributes:
        destinations: Live tensors, in the plan's order.
        allow_casts: Whether a copy may change the dtype.
        current: The wire name that is being loaded; None before the first and after the last.
        placeholder: What a value that is not known reads as.
        claims: Every write to a destination.
        nameless: Writes to destinations outside of any name: (destination, region).
        value_reads: Per name that has to be run with the real tensor, why.
        live_reads: (name or None, destination) whose live value the loader looked at.
        dependent: (names, live destinations, destination): a write whose value depends on live bytes.
        touched: Names that any operator or attribute access looked at.
        refusals: Per name, why its shape, dtype or loader cannot be accepted.
        foreign_experts: Names that a `weight_loader` was given with an `expert_id` and did not take.
        watch: Where names' side effects are looked for; None where there are none.
        rebound: Names that put another tensor or storage in a destination's place.
    """

    destinations: list[Destination]
    allow_casts: bool
    current: str | None = None
    placeholder: int = 0
    claims: list[Claim] = field(default_factory=list)
    nameless: list[tuple[int, Region]] = field(default_factory=list)
    value_reads: dict[str, str] = field(default_factory=dict)
    live_reads: set[tuple[str | None, int]] = field(default_factory=set)
    dependent: list[tuple[Names, Indices, int]] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    refusals: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    foreign_experts: dict[str, object] = field(default_factory=dict)
    rebound: set[str] = field(default_factory=set)
    watch: Watch | None = None

    def __post_init__(self) -> None:
        self._writing: tuple[str, ...] = ()
        self._holdings: dict[int, Holding] = {}
        self._by_storage: dict[int, list[Claim]] = defaultdict(list)
        self._elsewhere: dict[int, list[tuple[Names, Region]]] = defaultdict(list)

    def close(self) -> None:
        """Lets go of every storage. What was found stays."""
        self._holdings.clear()
        self._elsewhere.clear()

    def begin(self, name: str | None, *, is_drawn: bool = False) -> None:
        """Notes which name is being loaded now.

        Args:
            name: The name; None after the last.
            is_drawn: Whether the loader asked for it, and so is done with the one before.
        """
        running = (self.current,) if self.current is not None else self._writing
        if self.watch is not None and running:
            names = (*running, name) if name is not None and not is_drawn else running
            self.watch.look(names, self.claims, self.destinations)
            if name is None:
                self.watch.look_at_all(self.claims, self.destinations)
        self._writing = ()
        self.current = name

    # --- who holds what

    def of(self, tensor: torch.Tensor) -> Holding | None:
        """What is known of a tensor's storage."""
        return self._holdings.get(storage_key(tensor))

    def add_destination(self, index: int, tensor: torch.Tensor) -> None:
        """Makes a live tensor's storage known."""
        holding = self._known(tensor)
        holding.destinations = (*holding.destinations, index)

    def add_source(self, name: str, tensor: torch.Tensor) -> None:
        """Makes the meta tensor that stands for a wire tensor known."""
        holding = self._known(tensor)
        holding.source, holding.names = name, frozenset((name,))

    def mark(self, tensor: torch.Tensor, names: Names, live: Indices = NO_LIVE) -> None:
        """Notes that a tensor's bytes depend on `names` and on live bytes; it is no untouched source any more."""
        if names or live:
            holding = self._known(tensor)
            holding.names |= names
            holding.live |= live
            holding.source = None

    def _known(self, tensor: torch.Tensor) -> Holding:
        key = storage_key(tensor)
        holding = self._holdings.get(key)
        if holding is None:
            holding = self._holdings[key] = Holding(StorageWeakRef(tensor.untyped_storage()))
        return holding

    def read(self, tensor: torch.Tensor) -> tuple[Names, Indices]:
        """What the bytes of a tensor depend on; for live bytes, on the names that wrote them earlier in this run."""
        holding = self.of(tensor)
        if holding is None:
            return NO_NAMES, NO_LIVE
        if not holding.destinations:
            return holding.names, holding.live
        region = squeezed(Region.of(tensor))
        index = self._destination_at(holding.destinations, region)
        names: Names = NO_NAMES
        earlier: list[Region] = []
        for claim in reversed(self._by_storage[self.destinations[index].storage]):
            if claim.region == region:
                return names | frozenset(claim.names), NO_LIVE
            if overlaps(claim.region, region):
                names |= frozenset(claim.names)
                earlier.append(claim.region)
        return names, (NO_LIVE if earlier and is_covered(region, earlier) else frozenset((index,)))

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The wire name that a tensor is a view of, if it is one."""
        holding = self.of(tensor)
        return holding.source if holding is not None else None

    def held(self) -> Names:
        """Names whose bytes, or a value computed from them, are still alive. Ask after the load has returned."""
        alive = [h.names for h in self._holdings.values() if h.names and not h.destinations and not h.ref.expired()]
        return frozenset().union(*alive)

    # --- who writes what

    def claim(
        self,
        target: torch.Tensor,
        names: Names,
        live: Indices = NO_LIVE,
        source: Region | None = None,
        region: Region | None = None,
    ) -> None:
        """Notes a write to a live tensor, or to one that may turn out to belong to the model later.

        Args:
            target: The view that is written.
            names: What the value is computed from; without names it belongs to the name being loaded.
            live: Destinations whose live bytes the value depends on.
            source: The wire bytes, squeezed, for a plain copy.
            region: The view's own bytes, squeezed, if the caller has them already.
        """
        holding = self.of(target)
        region = region or squeezed(Region.of(target))
        if holding is None or not holding.destinations:
            self._elsewhere[storage_key(target)].append((names, region))
            return
        index = self._destination_at(holding.destinations, region)
        if not names and self.current is not None:
            names = frozenset((self.current,))
        if not names:
            self.nameless.append((index, region))
            return
        self.add_claim(Claim(tuple(sorted(names)), index, region, source))
        if live:
            self.dependent.append((names, live, index))

    def add_claim(self, claim: Claim) -> None:
        """Notes one write."""
        self.claims.append(claim)
        if self.watch is not None and self.current is None and claim.names != self._writing:
            self.watch.look((*self._writing, *claim.names), self.claims, self.destinations)
            self._writing = claim.names  # the loader drew everything before it began: only its writes tell of a name
        self._by_storage[self.destinations[claim.destination].storage].append(claim)

    def rebind(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        """Notes that a loader gives a live tensor other storage; refused if that changes its layout.

        Args:
            target: The live tensor.
            value: What takes its place; None if only its size changes.
        """
        names, live = self.read(value) if value is not None else (NO_NAMES, NO_LIVE)
        holding = self.of(target)
        if holding is None:
            return
        if value is not None and self.of(value) is holding and Region.of(value) == Region.of(target):
            return
        names = names or frozenset(self._current())
        if value is None or value.shape != target.shape or value.dtype != target.dtype:
            self.refuse_copy(names, target, target if value is None else value, "its loader rebinds a live tensor")
        self.rebound |= names
        self.claim(target, names, live - frozenset(holding.destinations))

    def claims_elsewhere(self, tensor: torch.Tensor) -> list[tuple[Names, Region]]:
        """Writes to a tensor that was no destination when it was written, such as a parameter registered late."""
        return self._elsewhere.get(storage_key(tensor), [])

    def _destination_at(self, candidates: Sequence[int], region: Region) -> int:
        for index in candidates if len(candidates) > 1 else ():
            if _spans(self.destinations[index].region, region):
                return index
        return candidates[0]

    # --- what cannot be planned or accepted

    def refuse(self, names: Iterable[str], message: str) -> None:
        """Notes why names cannot be accepted."""
        for name in names:
            self.refusals[name].append(message)

    def refuse_copy(self, names: Names, target: torch.Tensor, source: torch.Tensor, why: str) -> None:
        """Refuses a copy, with both sides' layouts."""
        holding = self.of(target)
        expected, got = layout_text(target.dtype, target.shape), layout_text(source.dtype, source.shape)
        where = "a tensor outside the model"
        if holding is not None and holding.destinations:
            destination = self.destinations[self._destination_at(holding.destinations, Region.of(target))]
            is_whole = layout_text(destination.dtype, destination.shape) == expected
            where = destination.path if is_whole else f"a part of {destination}"
        self.refuse(names or self._current(), f"{why}: expected {expected} for {where}, got {got}")

    def needs_values(self, names: Iterable[str], reason: str) -> None:
        """Notes that names have to be run with real tensors; the name being loaded too."""
        for name in (*names, *self._current()):
            self.value_reads.setdefault(name, reason)

    def looked_at(self, live: Indices) -> None:
        """Notes that the loader saw live values, which the plan then depends on."""
        self.live_reads.update((self.current, index) for index in live)

    def _current(self) -> tuple[str, ...]:
        return () if self.current is None else (self.current,)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; 0 for a tensor that has none, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def squeezed(region: Region) -> Region:
    """The region without dims of size 1."""
    if 1 not in region.shape:
        return region
    kept = [k for k, size in enumerate(region.shape) if size != 1]
    shape, strides = tuple(region.shape[k] for k in kept), tuple(region.strides[k] for k in kept)
    return Region(region.offset, shape, strides, region.itemsize)


def _spans(outer: Region, inner: Region) -> bool:
    """Whether the first to last byte of `inner` lie within those of `outer`."""
    return outer.offset <= inner.offset and _end(inner) <= _end(outer)


def _end(region: Region) -> int:
    if not region.num_bytes:
        return region.offset
    steps = zip(region.shape, region.strides, strict=True)
    return region.offset + sum((size - 1) * stride for size, stride in steps) + region.itemsize
