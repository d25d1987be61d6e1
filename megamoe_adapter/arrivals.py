"""Which shards of a layer have got new bytes since its last finish, weight and block scale apart.

An update may bring an expert's E4M3 weight and its float32 block scale in different `load_weights` calls, in either
order, or bring only some experts. Requantising overwrites the weight in place, so it must run exactly once per shard,
when both parts are new. The tracker holds that and nothing else: no tensors, no values guessed from bytes.

    weight | scale  | at finish
    fresh  | fresh  | requantise
    -      | -      | leave; but before the first finish: missing from the checkpoint, an error
    fresh  | -      | error: the stored scale belongs to the old weight
    -      | fresh  | error: the stored weight was already requantised and cannot be scaled again

    arrivals = ArrivalTracker(num_slots=4)
    arrivals.mark_weight(0, "w1", param, loaded)   # in the weight loader; meta tensors mark nothing
    arrivals.mark_scale(0, "w1", scale_param, loaded_scale)
    fresh = arrivals.check("model.layers.3.mlp.experts")   # every shard is checked before any is touched
    ...requantise `fresh` in place...
    arrivals.clear()                                        # a second finish then has nothing to do
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from weightsync.errors import shown

SHARDS = ("w1", "w2", "w3")
SHARED = "shared"

Key = tuple[int | str, str]  # (local slot, or SHARED for the fused shared expert; shard)


class ArrivalError(ValueError):
    """Shards of a layer are incomplete at finish; nothing was touched.

    Attributes:
        missing: `(key, what)` for each incomplete shard, `what` one of `"weight"`, `"scale"`, `"weight and scale"`.
    """

    def __init__(self, message: str, missing: Sequence[tuple[Key, str]]) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class ArrivalTracker:
    """Fresh weights and fresh scales of one layer's shards.

    The marks are two integers, one bit per shard. They are plain immutable attributes, so whoever restores a module's
    Python state restores them too, walking a model for tensors costs nothing here, and a whole replayed plan is marked
    by one `|=`.

    Args:
        num_slots: Local expert slots, redundant replicas included.
        shared: Whether a fused shared expert has shards of its own.

    Attributes:
        fresh_weights: Bits (see `bit`) of the shards whose weight arrived since the last finish.
        fresh_scales: The same of their scales.
        has_finished: Whether a finish succeeded, and its bytes were not mixed with others since (`void`).
    """

    def __init__(self, num_slots: int, *, shared: bool = False) -> None:
        self.num_slots = num_slots
        self.shared = shared
        self.fresh_weights = 0
        self.fresh_scales = 0
        self.has_finished = False

    @property
    def keys(self) -> tuple[Key, ...]:
        """Every shard of the layer, in the order of their bits."""
        return _keys(self.num_slots, self.shared)

    def bit(self, slot: int | str, shard: str) -> int:
        """The integer with one bit set that stands for a shard.

        Raises:
            ValueError: The layer has no such shard.
        """
        row = self.num_slots if slot == SHARED and self.shared else slot
        if shard not in SHARDS or not isinstance(row, int) or not 0 <= row < self.num_slots + self.shared:
            raise ValueError(f"no shard {(slot, shard)!r} in this layer; it has {shown([repr(k) for k in self.keys])}")
        return 1 << (len(SHARDS) * row + SHARDS.index(shard))

    def mark_weight(self, slot: int | str, shard: str, *tensors: torch.Tensor) -> None:
        """Notes that a shard's weight was written.

        Args:
            slot: Local slot, or `SHARED`.
            shard: `"w1"`, `"w2"` or `"w3"`.
            *tensors: Destination and source; if any of them is on the meta device, nothing was written and nothing
                is marked.

        Raises:
            ValueError: The layer has no such shard.
        """
        self.mark(weights=self._bit_if_written(slot, shard, tensors))

    def mark_scale(self, slot: int | str, shard: str, *tensors: torch.Tensor) -> None:
        """Notes that a shard's block scale was written; arguments as in `mark_weight`."""
        self.mark(scales=self._bit_if_written(slot, shard, tensors))

    def mark(self, *, weights: int = 0, scales: int = 0) -> None:
        """Notes that many shards were written; bits as from `bit`, combined with `|`."""
        self.fresh_weights |= weights
        self.fresh_scales |= scales

    def check(self, layer: str, expert_ids: Sequence[int] | None = None) -> Sequence[Key]:
        """The shards to requantise now, in key order; changes nothing.

        Args:
            layer: Module path, for the message.
            expert_ids: Logical expert of each local slot, for the message.

        Returns:
            Keys whose weight and scale are both fresh, `keys` itself if all are. Empty after a finish without new data.

        Raises:
            ArrivalError: A shard has one part without the other, or the layer was never finished and a shard has
                neither. Names every such shard's layer, expert and missing part (the first few, and the count).
        """
        if not self.fresh_weights and not self.fresh_scales and self.has_finished:
            return []
        keys = self.keys
        if self.fresh_weights == self.fresh_scales == (1 << len(keys)) - 1:
            return keys
        missing: list[tuple[Key, str]] = []
        fresh: list[Key] = []
        for index, key in enumerate(keys):
            weight, scale = self.fresh_weights >> index & 1, self.fresh_scales >> index & 1
            if weight != scale:
                missing.append((key, "scale" if weight else "weight"))
            elif weight:
                fresh.append(key)
            elif not self.has_finished:
                missing.append((key, "weight and scale"))
        if missing:
            parts = [f"{_name(key, expert_ids)}: {what} missing" for key, what in missing]
            raise ArrivalError(
                f"{layer}: {len(missing)} of {len(keys)} shards are incomplete: {shown(parts)}. "
                "A shard is requantised in place once its weight and its block scale have both arrived since the last "
                "finish; send both parts of every shard named here, then finish again",
                missing,
            )
        return fresh

    def clear(self) -> None:
        """Ends a successful finish: nothing is fresh, and untouched shards may stay untouched from now on."""
        self.forget()
        self.has_finished = True

    def void(self) -> None:
        """The bytes are mixed: whatever was finished before counts no more, and every shard is needed again."""
        self.forget()
        self.has_finished = False

    def forget(self) -> None:
        """Drops all marks, for a caller that has put the old bytes back; says nothing about a finish."""
        self.fresh_weights = 0
        self.fresh_scales = 0

    def _bit_if_written(self, slot: int | str, shard: str, tensors: Sequence[torch.Tensor]) -> int:
        bit = self.bit(slot, shard)
        return 0 if any(tensor.is_meta for tensor in tensors) else bit


@functools.lru_cache(maxsize=256)
def _keys(num_slots: int, shared: bool) -> tuple[Key, ...]:
    slots: list[int | str] = [*range(num_slots), *([SHARED] if shared else [])]
    return tuple((slot, shard) for slot in slots for shard in SHARDS)


@dataclass(frozen=True, slots=True)
class Arrived:
    """What some loader calls brought, as bits of `ArrivalTracker` and, for NVFP4, of `GlobalScales`."""

    weights: int = 0
    scales: int = 0
    globals: int = 0

    def __or__(self, other: Arrived) -> Arrived:
        return Arrived(self.weights | other.weights, self.scales | other.scales, self.globals | other.globals)


def union(bits: Iterable[int]) -> int:
    """All bits in one integer."""
    return functools.reduce(operator.or_, bits, 0)


def _name(key: Key, expert_ids: Sequence[int] | None) -> str:
    slot, shard = key
    if isinstance(slot, str):
        return f"shared expert {shard}"
    return f"expert slot {slot} {shard}" if expert_ids is None else f"expert {expert_ids[slot]} (slot {slot}) {shard}"
