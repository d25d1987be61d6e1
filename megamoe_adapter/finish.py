"""Ends a load for many layers at once: all of them judged, with one wait for the device, before any is touched.

Why at once: judging a layer means reading every code on the device and asking for the result. Asked layer by layer,
the device is drained as often as there are layers, and Python runs in between; asked once, all of it is enqueued behind
the copies that are still running.

    arrivals of every layer      on the host: did weight and scale both come?       -> the layer, the shards
    soundness of every layer     on the device, one flag per shard, read together   -> the layer, the shards, what
    requantise, derive, clear    only now, and only if nothing was wrong anywhere

    finish_layers([layer.experts for layer in model.layers])
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megamoe_adapter.bank import Bank
from megamoe_adapter.requantize import (
    StagedShards,
    inspect_stacks,
    is_deferred,
    refuse_faults,
    requantize_stacks_,
)
from megamoe_adapter.soundness import bank_flags, refuse_block_fp8, refuse_unsound

if TYPE_CHECKING:
    from megamoe_adapter.weights import MegaMoEWeights


def finish_layers(layers: Iterable[MegaMoEWeights]) -> int:
    """Makes the loaded weights of these layers final; see `MegaMoEWeights.finish`, which does it for one.

    Layers without new data are left alone.

    Args:
        layers: The layers, each once.

    Returns:
        Number of shards that were fresh, over all layers.

    Raises:
        ValueError: A shard is incomplete or unusable; names layer, expert, shard and what is wrong. The errors of
            further layers are its notes. No shard of any layer was touched.
    """
    fresh = []
    with _Errors() as errors:
        for layer in layers:
            with errors.noted():
                found = _Fresh.of(layer)
                if found is not None:
                    fresh.append(found)
    by_device: dict[torch.device, list[_Fresh]] = {}
    for part in fresh:
        by_device.setdefault(part.device, []).append(part)
    # Enqueued on every device before one is waited for.
    judged = [_Judgement(parts, is_all=len(by_device) == 1) for parts in by_device.values()]
    with _Errors() as errors:
        for judgement in judged:
            judgement.collect(errors)
    for judgement in judged:
        judgement.carry_out()
    return sum(part.num_shards for part in fresh)


@dataclass
class _Fresh:
    """What arrived in one layer.

    Attributes:
        layer: The layer.
        device: Where it lies.
        num_shards: Fresh shards.
        requantised: Block FP8 that finish rewrites.
        kept: Block FP8 that stays as it is.
        others: Banks of other formats, with their fresh shards.
    """

    layer: MegaMoEWeights
    device: torch.device
    num_shards: int
    requantised: list[StagedShards] = field(default_factory=list)
    kept: list[StagedShards] = field(default_factory=list)
    others: list[tuple[Bank, Sequence[tuple[int, str]]]] = field(default_factory=list)

    @classmethod
    def of(cls, layer: MegaMoEWeights) -> _Fresh | None:
        """None if nothing arrived.

        Raises:
            ValueError: A shard or a scalar is missing.
        """
        keys = layer.check_arrivals()
        if not keys and not (layer.globals is not None and layer.globals.fresh):
            return None
        found = cls(layer, next(layer.parameters()).device, len(keys))
        for bank, shards in layer.fresh_by_bank(keys):
            if bank.requantises:
                found.requantised += bank.staged(layer, shards, layer.shard_name(bank))
            elif bank.raw_scales:
                found.kept += bank.staged(layer, shards, layer.shard_name(bank))
            else:
                found.others.append((bank, shards))
        return found


class _Judgement:
    """The fresh shards of one device: judged there, asked once.

    All flags are one int32 tensor: [requantised shards, fault | kept shards, fault | other banks | scalars
    and the bits of the activation scale, of each layer that has them].
    """

    def __init__(self, parts: Sequence[_Fresh], *, is_all: bool) -> None:
        self._parts = parts
        self._requantised = [stack for part in parts for stack in part.requantised]
        self._kept = [stack for part in parts for stack in part.kept]
        self._activation_scales: dict[int, float] = {}
        found: list[torch.Tensor] = []
        if self._requantised:
            found.append(inspect_stacks(self._requantised))
        if self._kept:
            found.append(inspect_stacks(self._kept))
        found += [bank_flags(bank, part.layer, shards) for part in parts for bank, shards in part.others]
        for part in parts:
            if part.layer.globals is not None:
                found.append(part.layer.globals.judged(part.layer))
        self._flags = found[0] if len(found) == 1 else torch.cat(found)
        # Asked on the device, the flags need no wait in between; but they say nothing of what is judged beside them.
        is_alone = is_all and len(found) == 1 and bool(self._requantised)
        self._is_done = is_alone and is_deferred(self._requantised)
        if self._is_done:
            requantize_stacks_(self._requantised, self._flags)

    def collect(self, errors: _Errors) -> None:
        """Waits for the flags and notes the error of every layer that has one."""
        flags = _Reader(host_values(self._flags))
        of_requantised = [flags.take(_count(part.requantised)) for part in self._parts]
        flags.take(1 if self._requantised else 0)
        of_kept = [flags.take(_count(part.kept)) for part in self._parts]
        is_kept_bad = any(flags.take(1 if self._kept else 0))
        of_others = [[any(flags.take(1)) for _ in part.others] for part in self._parts]
        of_scalars = [flags.take(2 if part.layer.globals is not None else 0) for part in self._parts]
        for part, requantised, kept, others, scalars in zip(
            self._parts, of_requantised, of_kept, of_others, of_scalars, strict=True
        ):
            layer = part.layer
            with errors.noted():
                if is_kept_bad:
                    refuse_block_fp8(part.kept, kept, layer.prefix)
                for (bank, shards), is_bad in zip(part.others, others, strict=True):
                    if is_bad:
                        refuse_unsound(bank, layer, shards, name=layer.shard_name(bank), layer=layer.prefix)
                if layer.globals is not None:
                    if scalars[0]:
                        layer.globals.check(layer, layer.prefix)
                    self._activation_scales[id(layer)] = struct.unpack("<f", struct.pack("<i", scalars[1]))[0]
                if part.requantised:
                    refuse_faults(layer.prefix, part.requantised, requantised)

    def carry_out(self) -> None:
        """Rewrites what is to be requantised, derives what follows, and closes the books."""
        if self._requantised and not self._is_done:
            requantize_stacks_(self._requantised, self._flags[: _count(self._requantised) + 1])
        for part in self._parts:
            part.layer.accept_arrivals(self._activation_scales.get(id(part.layer)))


def host_values(flags: torch.Tensor) -> list[int]:
    """The one place where finishing waits for a device."""
    return list(flags.tolist())


class _Reader:
    """Takes values off a list from the front."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> Sequence[int]:
        self._at += count
        return self._values[self._at - count : self._at]


class _Errors:
    """Lets every layer have its say: raises the first error at the end, with the others as notes."""

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    def noted(self) -> _Errors._Noting:
        return _Errors._Noting(self._found)

    def __enter__(self) -> _Errors:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._found:
            first, *others = self._found
            for other in others:
                first.add_note(str(other))
            raise first

    class _Noting:
        def __init__(self, found: list[ValueError]) -> None:
            self._found = found

        def __enter__(self) -> None:
            return None

        def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
            if isinstance(error, ValueError):
                self._found.append(error)
                return True
            return False


def _count(stacks: Sequence[StagedShards]) -> int:
    return sum(len(stack.shards) for stack in stacks)
