"""FP8 rounding for experts: block FP8 to MXFP8, BF16 to either, and the in-place requantisation of a whole layer.

Block FP8 keeps E4M3 codes with one float32 scale per 128x128; the SM100 kernel reads E4M3 codes with one UE8M0 byte `b`
(a factor `2**(b - 127)`) per row and 32 columns. The exponent is the smallest for which nothing exceeds E4M3's largest
value, so no code saturates:

    real = e4m3(code) * scale                        in float32
    b    = smallest in 0..254 with max |real| <= 448 * 2**(b - 127);  0 for a group of zeros
    code'= E4M3 nearest-even of real / 2**(b - 127)

Only two steps can round, the float32 product and the last cast; exponents are compared as integers, and powers of two
multiply exactly. So every device gives the same bytes, and where a scale is a power of two (and normal) the result
equals the source in value. Codes are found from the source alone, so a repeated push cannot compound.

    weight, scale_bytes = requantize_block_fp8(weight, weight_scale_inv)      # one shard, checkpoint order
    requantize_layer_("layers.3.mlp.experts", [StagedShards(w13, w13_scale_inv, w13_scale, [(0, GATE), (0, UP)])])

The second form works in place in kernel layout (layout.py), all shards checked before any is touched: one Triton launch
per stack on a GPU (requantize_triton.py), torch in slabs of a few MiB elsewhere, same bytes.

Source: the rule is that of vLLM 0.33's torch MXFP8 quantiser on the dequantised weight, with the logarithm replaced by
the exact comparison; tests/golden holds its bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from megamoe_adapter.formats import INTERLEAVE_ROWS
from megamoe_adapter.layout import (
    BLOCK,
    GATE,
    block_scale_rows,
    restore_scale_strides,
    scale_view,
    weight_view,
)
from megamoe_adapter.quantize import GROUP, exponent_of, power_of_two
from weightsync.errors import shown

E4M3_NAN, E4M3_MINUS_NAN = 0x7F, 0xFF
GROUPS_PER_BLOCK = BLOCK // GROUP
MAX_SCALE = 2.0**127  # above it, a code of 448 has no UE8M0 exponent

# Flags of `inspect`, one integer per shard.
NAN_CODE = 1
BAD_SCALE = 2
ROUNDS = 4

_SLAB_ELEMENTS = 1 << 20  # of one pass of the torch path: 4 MiB of float32
_has_warned = False


class RoundingWarning(UserWarning):
    """A block scale is not a power of two, so requantising rounds the weights (about 2.5 % relative L2)."""


# Plain functions, checkpoint order.


def requantize_block_fp8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block FP8 to MXFP8, one shard.

    Args:
        weight: (N, K) float8_e4m3fn, K a multiple of 32.
        scale: (ceil(N / 128), ceil(K / 128)) float32; `real = weight * scale` ("scale_inv" in checkpoints).

    Returns:
        `(weight, scale)`: float8_e4m3fn (N, K) and UE8M0 bytes, uint8 (N, K / 32). Neither aliases the input.

    Raises:
        ValueError: A shape or dtype is wrong, a scale is negative, not finite or above 2**127, or a code is NaN.
    """
    _check_block_fp8(weight, scale)
    _raise_faults("requantize_block_fp8", lambda: ["the weight"], [inspect(weight, scale)])
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    scale_bytes = torch.empty(weight.shape[0], weight.shape[1] // GROUP, dtype=torch.uint8, device=weight.device)
    for rows, blocks in _slabs(*weight.shape):
        out[rows], scale_bytes[rows] = _requantize_rows(weight[rows], scale[blocks])
    return out, scale_bytes


# In place, kernel layout.


@dataclass(frozen=True)
class StagedShards:
    """Shards of one kernel tensor whose E4M3 codes and block scales are both fresh.

    Attributes:
        weight: (E, N, K) float8_e4m3fn in kernel layout; overwritten. K a multiple of 128, a shard's rows too.
        block_scale: (E, N / 128, K / 128) float32, checkpoint order (gate blocks, then up blocks); only read.
        scale: (E, N, K / 128) int32 packed, MN-major; overwritten.
        shards: `(slot, half)`: half is `GATE` or `UP` for w13, None for w2. One stack holds one kind only.
        labels: Name of each shard, for messages, or what gives them when a message needs them; made up if empty.
    """

    weight: torch.Tensor
    block_scale: torch.Tensor
    scale: torch.Tensor
    shards: Sequence[tuple[int, int | None]]
    labels: Sequence[str] | Callable[[], Sequence[str]] = field(default=())

    def __post_init__(self) -> None:
        experts, rows, cols = self.weight.shape if self.weight.ndim == 3 else (0, 0, 0)
        gated = self.is_gated
        block_rows = 2 * BLOCK if gated else BLOCK
        if self.weight.dtype != torch.float8_e4m3fn or not experts or rows % block_rows or cols % BLOCK:
            raise ValueError(
                f"a staged weight must be float8_e4m3fn (E, N, K) with N a multiple of {block_rows} and K of {BLOCK}, "
                f"got {self.weight.dtype} {tuple(self.weight.shape)}"
            )
        if not self.weight.is_contiguous():
            raise ValueError(f"a staged weight must be contiguous, got strides {self.weight.stride()}")
        blocks = (experts, rows // BLOCK, cols // BLOCK)
        scale = self.block_scale
        if scale.dtype != torch.float32 or tuple(scale.shape) != blocks or not scale.is_contiguous():
            raise ValueError(
                f"block scales must be float32 {blocks}, contiguous, "
                f"got {scale.dtype} {tuple(scale.shape)} with strides {scale.stride()}"
            )
        words = (experts, rows, cols // BLOCK)
        if tuple(self.scale.shape) != words:
            raise ValueError(f"packed scales must be {words}, got {tuple(self.scale.shape)}")
        restore_scale_strides(self.scale)
        if not _are_shards(tuple(self.shards), experts, self._halves):
            raise ValueError(f"shards must be distinct (slot < {experts}, half in {self._halves}), got {self.shards}")
        if self.labels and not callable(self.labels) and len(self.labels) != len(self.shards):
            raise ValueError(f"{len(self.shards)} shards need as many labels, got {len(self.labels)}")

    @property
    def is_gated(self) -> bool:
        """Whether the stack is w13: its shards are halves."""
        return bool(self.shards) and self.shards[0][1] is not None

    @property
    def _halves(self) -> tuple[int | None, ...]:
        return (0, 1) if self.is_gated else (None,)

    @property
    def rows_per_shard(self) -> int:
        """Checkpoint rows of one shard."""
        return self.weight.shape[1] // 2 if self.is_gated else self.weight.shape[1]

    @property
    def names(self) -> list[str]:
        """A name for each shard."""
        halves = {None: "w2", GATE: "w1"}
        labels = self.labels() if callable(self.labels) else self.labels
        return list(labels) or [f"slot {slot} {halves.get(half, 'w3')}" for slot, half in self.shards]


@lru_cache(maxsize=256)  # every push has the same shards as the one before
def _are_shards(shards: tuple[tuple[int, int | None], ...], experts: int, halves: tuple[int | None, ...]) -> bool:
    return len(set(shards)) == len(shards) and all(0 <= slot < experts and half in halves for slot, half in shards)


def requantize_layer_(layer: str, stacks: Sequence[StagedShards]) -> None:
    """Requantises every shard of every stack in place; checks all of them before it touches any.

    Warns once per process (`RoundingWarning`) if a scale is not a power of two.

    Args:
        layer: Module path, for messages.
        stacks: What is fresh; stacks without shards are skipped. All on one device.

    Raises:
        ValueError: A block scale is negative, not finite or above 2**127, or a code is NaN; names the layer and the
            shards. Nothing was changed.
    """
    stacks = [stack for stack in stacks if stack.shards]
    if not stacks:
        return
    flags = inspect_stacks(stacks)
    if is_deferred(stacks):
        requantize_stacks_(stacks, flags)  # asks the flags on the device, so nothing waits in between
    refuse_faults(layer, stacks, flags.tolist()[:-1])
    if not is_deferred(stacks):
        requantize_stacks_(stacks, flags)


def is_deferred(stacks: Sequence[StagedShards]) -> bool:
    """Whether `requantize_stacks_` may be called before the host has seen the flags: it asks them on the device."""
    return stacks[0].weight.is_cuda


def inspect_stacks(stacks: Sequence[StagedShards]) -> torch.Tensor:
    """Flags of every shard of every stack, without waiting for a device; changes nothing.

    Args:
        stacks: Of any number of layers, at least one shard among them; all on one device.

    Returns:
        int32 (shards of all stacks + 1,) on that device: `NAN_CODE | BAD_SCALE | ROUNDS` of each shard, in order; the
        last is nonzero if one of them has `NAN_CODE` or `BAD_SCALE`.
    """
    if stacks[0].weight.is_cuda:
        with torch.cuda.device(stacks[0].weight.device):
            flags: torch.Tensor = _triton().inspect(stacks)
            return flags
    flags = torch.cat([shard_flags(stack) for stack in stacks if stack.shards])
    return torch.cat([flags, (flags & (NAN_CODE | BAD_SCALE)).ne(0).any().to(torch.int32).view(1)])


def requantize_stacks_(stacks: Sequence[StagedShards], flags: torch.Tensor) -> None:
    """Requantises every shard in place; on a GPU nothing, if the last of `flags` is set.

    Args:
        stacks: As for `inspect_stacks`.
        flags: What it returned for them; elsewhere than on a GPU, the caller has looked at them.
    """
    if is_deferred(stacks):
        with torch.cuda.device(stacks[0].weight.device):
            _triton().requantize_(stacks, flags)
        return
    for stack in stacks:
        for slot, half in stack.shards:
            requantize_shard_(stack.weight, stack.scale, slot, half, block_scale_rows(stack.block_scale, slot, half))


def _triton() -> Any:
    try:
        from megamoe_adapter import requantize_triton
    except ImportError as error:
        raise RuntimeError("block-FP8 experts on a GPU need Triton: pip install triton") from error
    return requantize_triton


def requantize_shard_(
    weight_ENK: torch.Tensor, scale_ENW: torch.Tensor, slot: int, half: int | None, block_scale: torch.Tensor
) -> None:
    """The torch reference of the in-place requantisation, one shard, unchecked values.

    Args:
        weight_ENK: (E, N, K) float8_e4m3fn in kernel layout; the shard's rows are overwritten.
        scale_ENW: (E, N, K / 128) int32 packed, MN-major; the shard's bytes are overwritten.
        slot: Local slot.
        half: `GATE`, `UP`, or None for w2.
        block_scale: (rows / 128, K / 128) float32 of this shard, rows a multiple of 128.
    """
    weights = weight_view(weight_ENK.view(torch.uint8), slot, half)  # (R, K), or (R / 8, 8, K) interleaved
    scales = scale_view(scale_ENW, slot, half)  # (R / 128, 4, 32, W, 4), or (R / 64, 4, 2, 8, W, 4)
    cols = weight_ENK.shape[-1]
    num_rows = weights.shape[:-1].numel()
    weight_step, scale_step = num_rows // weights.shape[0], num_rows // scales.shape[0]
    for rows, blocks in _slabs(num_rows, cols):
        slab = weights[rows.start // weight_step : rows.stop // weight_step]
        codes = slab.reshape(-1, cols).view(torch.float8_e4m3fn)
        codes, scale_bytes = _requantize_rows(codes, block_scale[blocks])
        slab.copy_(codes.view(torch.uint8).view(slab.shape))
        words = scales[rows.start // scale_step : rows.stop // scale_step]
        words.copy_(scale_bytes.view(words.shape))


def inspect_shards(stack: StagedShards) -> list[int]:
    """`shard_flags` as integers."""
    return list(shard_flags(stack).tolist())


def shard_flags(stack: StagedShards) -> torch.Tensor:
    """Flags (`NAN_CODE | BAD_SCALE | ROUNDS`) of each shard of a stack, int32 (shards,); changes nothing.

    The torch reference: reductions alone, so there is no temporary of the codes' size.
    """
    experts, halves = stack.weight.shape[0], stack._halves
    if tuple(stack.shards) == _all_shards(experts, halves):
        cols = stack.weight.shape[-1]
        codes = stack.weight.view(experts, -1, len(halves), INTERLEAVE_ROWS * cols)
        return _flags(codes, stack.block_scale.view(experts, len(halves), -1), (1, 3)).view(-1)
    parts = [
        _flags(weight_view(stack.weight, slot, half), block_scale_rows(stack.block_scale, slot, half).reshape(-1), None)
        for slot, half in stack.shards
    ]
    return torch.stack(parts) if parts else torch.empty(0, dtype=torch.int32)


@lru_cache(maxsize=256)
def _all_shards(experts: int, halves: tuple[int | None, ...]) -> tuple[tuple[int, int | None], ...]:
    return tuple((slot, half) for slot in range(experts) for half in halves)


def inspect(weight: torch.Tensor, scale: torch.Tensor) -> int:
    """Flags of one shard: E4M3 codes of any shape and their float32 scales."""
    if not weight.numel():
        return 0
    return int(_flags(weight, scale.reshape(-1), None))


def _flags(codes: torch.Tensor, scale: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """Flags of each shard, int32: codes reduced over `dims` (None: all), scales (..., blocks) over the last."""
    # The NaN codes are the largest signed byte and the largest unsigned byte.
    signed, unsigned = codes.view(torch.int8), codes.view(torch.uint8)
    high, low = (part.amax() if dims is None else part.amax(dims) for part in (signed, unsigned))
    has_nan = (high == E4M3_NAN) | (low == E4M3_MINUS_NAN)
    is_bad = ~((scale >= 0) & (scale <= MAX_SCALE)).all(-1)
    rounds = (scale.view(torch.int32) & 0x7FFFFF).ne(0).any(-1)
    return NAN_CODE * has_nan.to(torch.int32) + BAD_SCALE * is_bad.to(torch.int32) + ROUNDS * rounds.to(torch.int32)


# The rule.


def _requantize_rows(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule on rows that start at a block boundary: E4M3 (n, K) and its blocks to E4M3 (n, K), bytes (n, K / 32)."""
    rows, cols = weight.shape
    groups = weight.to(torch.float32, memory_format=torch.contiguous_format).view(rows, cols // GROUP, GROUP)
    peak = groups.abs().amax(-1)
    is_zero = peak == 0
    peak.masked_fill_(is_zero, 2.0**-9)  # any code will do: the factor stays finite, and 0 times it is 0
    factor = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(GROUPS_PER_BLOCK, 1)[:, : groups.shape[1]]
    # Keep the product below float32's end: a scale >= 1 is lowered by 2**18, which the exponent then gives back.
    is_large = factor >= 1
    factor = torch.where(is_large, factor * 2.0**-18, factor)
    exponent = exponent_of(peak * factor)
    factor = factor * power_of_two(127 - exponent)
    exponent = torch.where(is_zero, 0, exponent + 18 * is_large)
    codes = groups.mul_(factor.unsqueeze(-1)).view(rows, cols).to(torch.float8_e4m3fn)
    return codes, exponent.to(torch.uint8)


def _slabs(rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
    """(rows, block rows) of consecutive parts, each whole blocks of rows and about `_SLAB_ELEMENTS` elements."""
    blocks = max(1, _SLAB_ELEMENTS // (BLOCK * max(1, cols)))
    for start in range(0, -(-rows // BLOCK), blocks):
        yield slice(start * BLOCK, min(rows, (start + blocks) * BLOCK)), slice(start, start + blocks)


# Checks.


def _check_block_fp8(weight: torch.Tensor, scale: torch.Tensor) -> None:
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2 or weight.shape[1] % GROUP:
        raise ValueError(
            f"the weight must be float8_e4m3fn (N, K) with K a multiple of {GROUP}, "
            f"got {weight.dtype} {tuple(weight.shape)}"
        )
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    if scale.dtype != torch.float32 or tuple(scale.shape) != blocks:
        raise ValueError(f"the scale must be float32 {blocks}, got {scale.dtype} {tuple(scale.shape)}")


def refuse_faults(layer: str, stacks: Sequence[StagedShards], flags: Sequence[int]) -> None:
    """ValueError for what cannot be requantised; a warning, once, for what is rounded.

    Args:
        layer: Module path, for the message.
        stacks: The layer's.
        flags: Of each of their shards.

    Raises:
        ValueError: See `requantize_layer_`.
    """
    _raise_faults(layer, lambda: [name for stack in stacks for name in stack.names], flags)


def _raise_faults(layer: str, names: Callable[[], Sequence[str]], flags: Sequence[int]) -> None:
    """ValueError for what cannot be requantised; a warning, once, for what is rounded."""
    global _has_warned
    if any(flag & (BAD_SCALE | NAN_CODE) for flag in flags):
        faults = []
        for name, flag in zip(names(), flags, strict=True):
            if flag & BAD_SCALE:
                faults.append(f"{name} has a block scale that is negative, not finite or above 2**127")
            if flag & NAN_CODE:
                faults.append(f"{name} has NaN among its E4M3 codes")
        raise ValueError(
            f"{layer}: cannot requantise, nothing was changed: {shown(faults)}. "
            "Send these shards again from a checkpoint without them"
        )
    if not _has_warned and any(flag & ROUNDS for flag in flags):
        _has_warned = True
        warnings.warn(
            f"{layer}: block scales are not all powers of two, so requantising to MXFP8 rounds the weights; "
            "it is exact when every block scale is a power of two (said once)",
            RoundingWarning,
            stacklevel=4,
        )
