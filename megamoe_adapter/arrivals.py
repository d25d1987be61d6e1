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

from collections.abc import Sequence

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

    Plain attributes of plain sets, so that whoever restores a module's Python state restores the marks too.

    Args:
        num_slots: Local expert slots, redundant replicas included.
        shared: Whether a fused shared expert has shards of its own.
    """

    def __init__(self, num_slots: int, *, shared: bool = False) -> None:
        slots: list[int | str] = [*range(num_slots), *([SHARED] if shared else [])]
        self.keys: tuple[Key, ...] = tuple((slot, shard) for slot in slots for shard in SHARDS)
        self._known = frozenset(self.keys)
        self.fresh_weights: set[Key] = set()
        self.fresh_scales: set[Key] = set()
        self.has_finished = False

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
        self._mark(self.fresh_weights, (slot, shard), tensors)

    def mark_scale(self, slot: int | str, shard: str, *tensors: torch.Tensor) -> None:
        """Notes that a shard's block scale was written; arguments as in `mark_weight`."""
        self._mark(self.fresh_scales, (slot, shard), tensors)

    def check(self, layer: str, expert_ids: Sequence[int] | None = None) -> list[Key]:
        """The shards to requantise now, in key order; changes nothing.

        Args:
            layer: Module path, for the message.
            expert_ids: Logical expert of each local slot, for the message.

        Returns:
            Keys whose weight and scale are both fresh. Empty after a finish without new data.

        Raises:
            ArrivalError: A shard has one part without the other, or the layer was never finished and a shard has
                neither. Names every such shard's layer, expert and missing part (the first few, and the count).
        """
        missing: list[tuple[Key, str]] = []
        for key in self.keys:
            weight, scale = key in self.fresh_weights, key in self.fresh_scales
            if weight != scale:
                missing.append((key, "scale" if weight else "weight"))
            elif not weight and not self.has_finished:
                missing.append((key, "weight and scale"))
        if missing:
            parts = [f"{_name(key, expert_ids)}: {what} missing" for key, what in missing]
            raise ArrivalError(
                f"{layer}: {len(missing)} of {len(self.keys)} shards are incomplete: {shown(parts)}. "
                "A shard is requantised in place once its weight and its block scale have both arrived since the last "
                "finish; send both parts of every shard named here, then finish again",
                missing,
            )
        return [key for key in self.keys if key in self.fresh_weights]

    def clear(self) -> None:
        """Ends a successful finish: nothing is fresh, and untouched shards may stay untouched from now on."""
        self.forget()
        self.has_finished = True

    def forget(self) -> None:
        """Drops all marks, for a caller that has put the old bytes back; says nothing about a finish."""
        self.fresh_weights.clear()
        self.fresh_scales.clear()

    def _mark(self, fresh: set[Key], key: Key, tensors: Sequence[torch.Tensor]) -> None:
        if key not in self._known:
            raise ValueError(f"no shard {key!r} in this layer; it has {shown([repr(k) for k in self.keys])}")
        if not any(tensor.is_meta for tensor in tensors):
            fresh.add(key)


def _name(key: Key, expert_ids: Sequence[int] | None) -> str:
    slot, shard = key
    if isinstance(slot, str):
        return f"shared expert {shard}"
    return f"expert slot {slot} {shard}" if expert_ids is None else f"expert {expert_ids[slot]} (slot {slot}) {shard}"
