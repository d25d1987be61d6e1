"""FP8 from floats, and what its scales mean: the pure half of requantize.py's rule, in checkpoint order.

A UE8M0 byte `b` is the factor `2**(b - 127)`. The exponent of a group is the smallest for which nothing exceeds E4M3's
largest value; it is found by comparing integers, and powers of two multiply exactly, so every device gives the same
bytes.

    weight, scale_bytes = quantize_mxfp8(x)            # BF16 or float32 (N, K): E4M3 and one byte per 32 columns
    weight, scale = quantize_block_fp8(x)              # E4M3 and one float32 per 128x128
    values = ue8m0_to_float32(scale_bytes)
"""

from __future__ import annotations

import torch

from megamoe_adapter.layout import BLOCK

E4M3_MAX = 448.0
GROUP = 32


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
    exponent = exponent_of(groups.abs().amax(-1))
    weight = (groups * power_of_two(127 - exponent).unsqueeze(-1)).to(torch.float8_e4m3fn)
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
    value = power_of_two(exponent - 127)
    return torch.where(exponent == 255, torch.nan, torch.where(exponent == 0, 2.0**-127, value))


def exponent_of(amax: torch.Tensor) -> torch.Tensor:
    """Smallest b >= 0 with amax <= 448 * 2**(b - 127), int32, of finite float32 amax >= 0.

    448 is 1.75 * 2**8: b is amax's exponent field less 8, and one more if the mantissa is above 1.75 (field 0x600000).
    """
    return (((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=0)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2.0**exponent`, float32, of int32 exponents in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


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
