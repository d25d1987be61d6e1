"""Refuses weights and scales that would make garbage, in formats that finish as they were loaded.

Why: a NaN or infinite scale, or a NaN code in E4M3, turns a whole layer's output to NaN many steps later. All fresh
shards are judged at finish, by reductions without a temporary of the weights' size; the flags stay on the device until
those of all layers can be read at once (finish.py). Only if something is wrong are shards looked at one by one, to be
named. Block FP8 is judged by the pass over codes and scales that requantising needs too (requantize.py).

    E4M3 weight        NaN codes 0x7f and 0xff
    BF16 weight        NaN, inf
    float32 scale      NaN, inf, negative (zero of either sign is legal: a zero block)
    UE8M0 scale        byte 255, which is NaN
    E4M3 scale         NaN codes, negative
    E2M1 weight        every code is a number

Use:

    flag = bank_flags(bank, module, [(0, "w1"), (0, "w2")])                       # on the device
    if flag.item(): refuse_unsound(bank, module, shards, name=name_of, layer=prefix)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megamoe_adapter import layout
from megamoe_adapter.bank import Bank
from megamoe_adapter.names import SHARDS
from megamoe_adapter.requantize import BAD_SCALE, NAN_CODE, StagedShards
from weightsync.errors import shown

UE8M0_NAN = 255
E4M3_MINUS_ZERO = 0x80


def bank_flags(bank: Bank, module: nn.Module, shards: Sequence[tuple[int, str]]) -> torch.Tensor:
    """Whether any of these shards is unusable; int32 (1,) on the tensors' device, without waiting for it.

    Args:
        bank: The pair of weights, in a format without float32 block scales.
        module: Owner of the tensors.
        shards: (slot, shard) of each fresh shard, at least one.
    """
    whole = len(shards) == len(SHARDS) * bank.num_slots
    flags = _whole_bank_flags(bank, module) if whole else [_shard_flags(bank, module, *shard) for shard in shards]
    return torch.stack([flag for pair in flags for flag in pair]).any().to(torch.int32).view(1)


def refuse_unsound(
    bank: Bank,
    module: nn.Module,
    shards: Sequence[tuple[int, str]],
    *,
    name: Callable[[int, str], str],
    layer: str,
) -> None:
    """Looks at shards one by one, after `bank_flags` said that one is unusable.

    Args:
        bank: As for `bank_flags`.
        module: As for `bank_flags`.
        shards: As for `bank_flags`.
        name: What to call a shard in a message.
        layer: Path of the layer, for the message.

    Raises:
        ValueError: A weight or scale is not usable; names each shard and what is wrong with it.
    """
    _raise_unsound(
        [(name(*shard), *torch.stack(_shard_flags(bank, module, *shard)).tolist()) for shard in shards], layer
    )


def refuse_block_fp8(stacks: Sequence[StagedShards], flags: Sequence[int], layer: str) -> None:
    """Judges block FP8 that stays as it is by the flags of `requantize.inspect_stacks`.

    Args:
        stacks: Of one layer.
        flags: Of each of their shards.
        layer: Path of the layer, for the message.

    Raises:
        ValueError: As `refuse_unsound`.
    """
    if not any(flag & (NAN_CODE | BAD_SCALE) for flag in flags):
        return
    shards = [(stack, index) for stack in stacks for index in range(len(stack.shards))]
    names = [name for stack in stacks for name in stack.names]
    named = [
        (name, flag & NAN_CODE, int(bool(flag & BAD_SCALE) and _is_unusable(stack, index)))
        for name, (stack, index), flag in zip(names, shards, flags, strict=True)
    ]
    if any(bad_weight or bad_scale for _, bad_weight, bad_scale in named):
        _raise_unsound(named, layer)


def _is_unusable(stack: StagedShards, index: int) -> bool:
    """Whether a flagged shard's scales are wrong here: 2**127, which the flag means too, only limits requantisation."""
    scale = layout.block_scale_rows(stack.block_scale, *stack.shards[index])
    return not bool((torch.isfinite(scale) & (scale >= 0)).all())


def _raise_unsound(named: Sequence[tuple[str, int, int]], layer: str) -> None:
    """ValueError that lists (name, weight unusable, scale unusable)."""
    found = []
    for name, bad_weight, bad_scale in named:
        if bad_weight:
            found.append(f"{name}: weight holds NaN or infinity")
        if bad_scale:
            found.append(f"{name}: scale is negative, NaN or infinite")
    raise ValueError(
        f"{layer}: {len(found)} unusable tensors: {shown(found)}. Look at the sender's last step and send these shards "
        "again, weight and scale"
    )


def _whole_bank_flags(bank: Bank, module: nn.Module) -> list[tuple[torch.Tensor, ...]]:
    return [
        _flags(bank, bank.tensor(module, "weight", shard), _scale_tensor(bank, module, shard)) for shard in ("w1", "w2")
    ]


def _shard_flags(bank: Bank, module: nn.Module, slot: int, shard: str) -> tuple[torch.Tensor, ...]:
    half = layout.HALF_OF_SHARD.get(shard)
    weight = layout.weight_view(bank.tensor(module, "weight", shard), slot, half)
    scale = _scale_tensor(bank, module, shard)
    if scale is not None:
        scale = layout.scale_view(scale, slot, half)
    return _flags(bank, weight, scale)


def _flags(bank: Bank, weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """(weight unusable, scale unusable), each a bool scalar on the tensors' device."""
    no = torch.zeros((), dtype=torch.bool, device=weight.device)
    return _bad_weight(weight, no), no if scale is None else _bad_scale(bank, scale)


def _scale_tensor(bank: Bank, module: nn.Module, shard: str) -> torch.Tensor | None:
    if bank.format.scale is None:
        return None
    return bank.tensor(module, "weight_scale", shard)


def _bad_weight(weight: torch.Tensor, no: torch.Tensor) -> torch.Tensor:
    if weight.dtype == torch.float8_e4m3fn:
        # The NaN codes are the largest signed byte and the largest unsigned byte: two reductions, no temporary.
        return (weight.view(torch.int8).amax() == 0x7F) | (weight.view(torch.uint8).amax() == 0xFF)
    if weight.dtype == torch.bfloat16:
        low, high = torch.aminmax(weight)
        return ~(torch.isfinite(low) & torch.isfinite(high))
    return no


def _bad_scale(bank: Bank, scale: torch.Tensor) -> torch.Tensor:
    scale_bytes = scale if scale.dtype == torch.uint8 else scale.transpose(-1, -2).view(torch.uint8)
    if bank.format.scale is not None and bank.format.scale.dtype == torch.float8_e4m3fn:
        return ((scale_bytes >= 0x7F) & (scale_bytes != E4M3_MINUS_ZERO)).any()
    return scale_bytes.amax() == UE8M0_NAN
