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
from functools import cached_property

import torch

from megamoe_adapter.layout import BLOCK, GATE, block_scale_rows, restore_scale_strides, scale_view, weight_view
from weightsync.errors import shown

E4M3_MAX = 448.0
E4M3_NAN = 0x7F  # and 0xFF
GROUP = 32
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


def quantize_mxfp8(x: torch.Tensor, *, check: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 or float32 to MXFP8 with one rounding.

    Args:
        x: (N, K), K a multiple of 32.
        check: Whether to refuse values that are not finite, which waits for a GPU and is impossible on meta tensors.

    Returns:
        As `requantize_block_fp8`.

    Raises:
        ValueError: K is not a multiple of 32, the dtype is another, or a value is not finite.
    """
    groups = _float_matrix(x, GROUP, check).view(x.shape[0], -1, GROUP)
    exponent = _exponent(groups.abs().amax(-1))
    weight = (groups * _power_of_two(127 - exponent).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return weight.view(x.shape), exponent.to(torch.uint8)


def quantize_block_fp8(x: torch.Tensor, *, check: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 or float32 to block FP8: E4M3 with one float32 scale `max |x| / 448` per 128x128.

    Args:
        x: (N, K); the last blocks may be partial.
        check: As in `quantize_mxfp8`.

    Returns:
        float8_e4m3fn (N, K) and float32 (ceil(N / 128), ceil(K / 128)), at least 2**-126 so that it can divide.

    Raises:
        ValueError: Not a matrix of bfloat16 or float32, or a value is not finite.
    """
    real = _float_matrix(x, 1, check)
    rows, cols = x.shape
    padded = torch.nn.functional.pad(real, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scale = (blocks.abs().amax((1, 3)) / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    weight = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return weight.view(padded.shape)[:rows, :cols].contiguous(), scale


def expand_scale_bytes(scale: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """UE8M0 scales of coarser blocks, repeated to one per row and K group; exact.

    Args:
        scale: (scale rows, scale columns), uint8 or float8_e8m0fnu.
        rows: Weight rows; a multiple of the scale rows.
        groups: K groups per row; a multiple of the scale columns.

    Returns:
        uint8 (rows, groups).

    Raises:
        ValueError: The dtype is another, or the scales do not tile (rows, groups).
    """
    scale_bytes = _ue8m0_bytes(scale)
    if scale.ndim != 2 or not all(scale.shape) or rows % scale.shape[0] or groups % scale.shape[1]:
        raise ValueError(f"scale shape {tuple(scale.shape)} does not tile ({rows}, {groups})")
    tall = scale_bytes.repeat_interleave(rows // scale.shape[0], 0)
    return tall.repeat_interleave(groups // scale.shape[1], 1)


def ue8m0_to_float32(scale: torch.Tensor) -> torch.Tensor:
    """The float32 value `2**(b - 127)` of UE8M0 bytes (uint8 or float8_e8m0fnu); exact, NaN for b = 255.

    Raises:
        ValueError: The dtype is another.
    """
    exponent = _ue8m0_bytes(scale).to(torch.int32)
    value = _power_of_two(exponent - 127)
    return torch.where(exponent == 255, torch.nan, torch.where(exponent == 0, 2.0**-127, value))


# In place, kernel layout.


@dataclass(frozen=True)
class StagedShards:
    """Shards of one kernel tensor whose E4M3 codes and block scales are both fresh.

    Attributes:
        weight: (E, N, K) float8_e4m3fn in kernel layout; overwritten. K a multiple of 128, a shard's rows too.
        block_scale: (E, N / 128, K / 128) float32, checkpoint order (gate blocks, then up blocks); only read.
        scale: (E, N, K / 128) int32 packed, MN-major; overwritten.
        shards: `(slot, half)`: half is `GATE` or `UP` for w13, None for w2. One stack holds one kind only.
        labels: Name of each shard, for messages; made up if empty.
    """

    weight: torch.Tensor
    block_scale: torch.Tensor
    scale: torch.Tensor
    shards: Sequence[tuple[int, int | None]]
    labels: Sequence[str] = field(default=())

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
        bad = [shard for shard in self.shards if not 0 <= shard[0] < experts or shard[1] not in self._halves]
        if bad or len(set(self.shards)) != len(self.shards):
            raise ValueError(f"shards must be distinct (slot < {experts}, half in {self._halves}), got {self.shards}")
        if self.labels and len(self.labels) != len(self.shards):
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

    @cached_property
    def table(self) -> torch.Tensor:
        """int32 (shards,) on the weight's device: slot, or 2 * slot + half."""
        indices = [slot if half is None else 2 * slot + half for slot, half in self.shards]
        if indices == list(range(len(indices))):  # a full update: no transfer from the host
            return torch.arange(len(indices), dtype=torch.int32, device=self.weight.device)
        return torch.tensor(indices, dtype=torch.int32, device=self.weight.device)

    @property
    def names(self) -> list[str]:
        """A name for each shard."""
        halves = {None: "w2", GATE: "w1"}
        return list(self.labels) or [f"slot {slot} {halves.get(half, 'w3')}" for slot, half in self.shards]


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

    def names() -> list[str]:
        return [name for stack in stacks for name in stack.names]

    if stacks[0].weight.is_cuda:
        # The second pass asks the first one's flags on the device, so nothing waits in between.
        _raise_faults(layer, names, _requantize_on_gpu(stacks))
        return
    _raise_faults(layer, names, [flag for stack in stacks for flag in inspect_shards(stack)])
    for stack in stacks:
        for slot, half in stack.shards:
            requantize_shard_(stack.weight, stack.scale, slot, half, block_scale_rows(stack.block_scale, slot, half))


def _requantize_on_gpu(stacks: Sequence[StagedShards]) -> list[int]:
    """Both passes, then the flags of each shard: if one has a fault, no stack was changed."""
    try:
        from megamoe_adapter import requantize_triton
    except ImportError as error:
        raise RuntimeError("requantising on a GPU needs Triton: pip install triton") from error
    with torch.cuda.device(stacks[0].weight.device):
        flags = requantize_triton.inspect(stacks)
        requantize_triton.requantize_(stacks, flags)
        return list(flags.tolist()[:-1])


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
    """Flags (`NAN_CODE | BAD_SCALE | ROUNDS`) of each shard of a stack; the torch reference, changes nothing."""
    return [
        inspect(weight_view(stack.weight, slot, half), block_scale_rows(stack.block_scale, slot, half))
        for slot, half in stack.shards
    ]


def inspect(weight: torch.Tensor, scale: torch.Tensor) -> int:
    """Flags of one shard: E4M3 codes of any shape and their float32 scales."""
    has_nan = any(
        bool(((part.view(torch.uint8) & 0x7F) == E4M3_NAN).any())
        for part in weight.split(max(1, _SLAB_ELEMENTS // max(1, weight[:1].numel())))
    )
    is_bad = not bool(((scale >= 0) & (scale <= MAX_SCALE)).all())
    rounds = bool((scale.contiguous().view(torch.int32) & 0x7FFFFF).any())
    return NAN_CODE * has_nan | BAD_SCALE * is_bad | ROUNDS * rounds


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
    exponent = _exponent(peak * factor)
    factor = factor * _power_of_two(127 - exponent)
    exponent = torch.where(is_zero, 0, exponent + 18 * is_large)
    codes = groups.mul_(factor.unsqueeze(-1)).view(rows, cols).to(torch.float8_e4m3fn)
    return codes, exponent.to(torch.uint8)


def _exponent(amax: torch.Tensor) -> torch.Tensor:
    """Smallest b >= 0 with amax <= 448 * 2**(b - 127), int32, of finite float32 amax >= 0.

    448 is 1.75 * 2**8: b is amax's exponent field less 8, and one more if the mantissa is above 1.75 (field 0x600000).
    """
    return (((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=0)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2.0**exponent`, float32, of int32 exponents in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


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


def _float_matrix(x: torch.Tensor, multiple: int, check: bool) -> torch.Tensor:
    if x.dtype not in (torch.bfloat16, torch.float32) or x.ndim != 2 or x.shape[1] % multiple:
        raise ValueError(
            f"the source must be bfloat16 or float32 (N, K) with K a multiple of {multiple}, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if check and not bool(torch.isfinite(x).all()):
        raise ValueError(
            f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are not finite; FP8 cannot hold them"
        )
    return x.to(torch.float32, memory_format=torch.contiguous_format)


def _ue8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"UE8M0 scales must be uint8 or float8_e8m0fnu, got {scale.dtype}")
    return scale.view(torch.uint8)


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
            stacklevel=3,
        )
