"""Activations as the kernels read them: quantised tokens, their scales, and where a shared expert looks for those.

Why: the fused kernels dispatch tokens that are quantised already; builds differ in whether they ship an op for that
(sgl-deep-gemm 0.1.4 has none), so it is done here in plain torch, without a host sync: it runs on CPU for the
reference and inside a captured CUDA graph for the kernel, with the same bits.

    format        groups of columns   scale                            stored as
    MXFP8         32                  2^(e-127), e rounded up          uint8, 4 to an int32: (T, H/128)
    FP8 (SM90)    128                 amax/448, no power of two        float32 (T, H/128)
    NVFP4         16, and the token   E4M3 per group, f32 per token    E4M3, 4 to an int32: (T, H/64); float32 (T,)

Use:

    q, exponents = quantize_tokens_mxfp8(x)           # (T, H) e4m3, (T, H/32) uint8
    x_hat = dequantize_mxfp8(q, exponents)            # float32

Source: DeepGEMM's per_token_cast_to_fp8 and ceil_to_ue8m0; vLLM's MegaMoE input staging for NVFP4 and the shared rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from megamoe_adapter.formats import Format
from megamoe_adapter.quantize import ue8m0_to_float32

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MXFP8_GROUP = 32
NVFP4_GROUP = 16
# Below this an activation group counts as zero: DeepGEMM's floor, which keeps 1/scale finite.
MIN_AMAX = 1e-4
MIN_TOKEN_AMAX = 1e-12
MIN_NVFP4_BLOCK_SCALE = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize_tokens_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one power-of-two scale per 32 columns, the exponent rounded up so that nothing saturates.

    Args:
        x: (T, K) bfloat16 or float32, K a multiple of 32.

    Returns:
        E4M3 (T, K) and uint8 exponents (T, K/32); value = e4m3 * 2^(exponent - 127).
    """
    groups = x.float().unflatten(-1, (-1, MXFP8_GROUP))
    bits = (groups.abs().amax(-1).clamp(min=MIN_AMAX) / E4M3_MAX).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)
    exponent = exponent.clamp(1, 254).to(torch.int32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return (groups * inverse.unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), exponent.to(torch.uint8)


def dequantize_mxfp8(q: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32 values of E4M3 with a uint8 UE8M0 exponent per 32 columns; (N, K) and (N, K/32) -> (N, K)."""
    return q.float() * expand_columns(ue8m0_to_float32(exponents), MXFP8_GROUP)


def quantize_tokens_fp8(x: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one float32 scale (amax/448) per `group` columns, the Hopper kernel's input.

    Args:
        x: (T, K) bfloat16 or float32, K a multiple of `group`.
        group: Columns per scale.

    Returns:
        E4M3 (T, K) and float32 scales (T, K/group), row-major.
    """
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1).clamp(min=MIN_AMAX) / E4M3_MAX
    return (groups * (1.0 / scale).unsqueeze(-1)).flatten(-2).to(torch.float8_e4m3fn), scale


def dequantize_fp8(q: torch.Tensor, scale: torch.Tensor, group: int = 128) -> torch.Tensor:
    """float32 values of E4M3 with a float32 scale per `group` columns; (N, K) and (N, K/group) -> (N, K)."""
    return q.float() * expand_columns(scale, group)


def quantize_tokens_nvfp4(
    x: torch.Tensor, token_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E2M1 pairs with one E4M3 scale per 16 columns, relative to one float32 scale per token.

    Args:
        x: (T, K) bfloat16 or float32, K a multiple of 16.
        token_scale: (T,) float32; None takes each token's own amax / (6 * 448).

    Returns:
        uint8 (T, K/2), low nibble the even column; E4M3 (T, K/16); float32 (T,).
    """
    x = x.float()
    if token_scale is None:
        token_scale = x.abs().amax(-1).clamp(min=MIN_TOKEN_AMAX) * (1.0 / (E2M1_MAX * E4M3_MAX))
    groups = (x / token_scale.unsqueeze(-1)).unflatten(-1, (-1, NVFP4_GROUP))
    scale = (groups.abs().amax(-1) * (1.0 / E2M1_MAX)).clamp(MIN_NVFP4_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
    return encode_e2m1((groups / scale.float().unsqueeze(-1)).flatten(-2)), scale, token_scale


def dequantize_nvfp4(packed: torch.Tensor, scale: torch.Tensor, group: int = NVFP4_GROUP) -> torch.Tensor:
    """float32 values of packed E2M1 with an E4M3 scale per `group` columns; (N, K/2) and (N, K/group) -> (N, K)."""
    return decode_e2m1(packed) * expand_columns(scale.float(), group)


def dequantize_mxfp4(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32 values of packed E2M1 with a UE8M0 byte per 32 columns; (N, K/2) and (N, K/32) -> (N, K)."""
    return decode_e2m1(packed) * expand_columns(ue8m0_to_float32(exponents), MXFP8_GROUP)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest E2M1 value, ties to the even code, saturating at 6; two to a byte, low nibble first.

    Args:
        x: (..., K) float32, K even.

    Returns:
        uint8 (..., K/2).
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for index, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        # Between codes `index` and `index + 1`: a tie goes up when `index` is odd, so that the even code wins.
        code += magnitude >= middle if index % 2 else magnitude > middle
    code |= torch.where((x < 0) & (code != 0), 8, 0).to(torch.uint8)
    low_nibble, high_nibble = code[..., ::2], code[..., 1::2]
    return low_nibble | (high_nibble << 4)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """float32 (..., 2K) of bytes (..., K) uint8 or int8, low nibble first."""
    codes = packed.view(torch.uint8)
    codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=packed.device)
    return values[codes.int()]


def expand_columns(scale: torch.Tensor, group: int) -> torch.Tensor:
    """(..., K/group) -> (..., K): each scale over its columns."""
    return scale.repeat_interleave(group, dim=-1)


def shared_scale_rows(num_tokens: int, block_m: int, device: torch.device | str) -> torch.Tensor:
    """Rows where the fused shared expert looks for the scales of tokens 0..num_tokens-1, int64 (num_tokens,).

    Each tile of `block_m` tokens owns a page of 128-row blocks, rows permuted as the tensor core copy wants them:

        tile b = t // B, m = t % B  ->  row b * align(B, 128) + 128 * (m // 128) + 4 * (m % 32) + (m % 128) // 32

    Args:
        num_tokens: Tokens of this launch on this rank.
        block_m: The scheduler's tile for this launch (`get_block_m_for_mega_moe`).
        device: Where to put the result.
    """
    token = torch.arange(num_tokens, device=device)
    tile, m = token // block_m, token % block_m
    page = -(-block_m // 128) * 128
    return tile * page + 128 * (m // 128) + 4 * (m % 32) + (m % 128) // 32


def stage_inputs(
    fmt: Format,
    shared: Format | None,
    buffer: Any,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    shared_rows: torch.Tensor | None,
) -> None:
    """Writes quantised tokens and their routing into the first rows of a symmetric buffer; no host sync.

    Args:
        fmt: Format of the routed experts.
        shared: Format of the fused shared expert; None without one.
        buffer: DeepGEMM's symmetric buffer of the layer; rows past the tokens are left as they are.
        x: (num_tokens, H) bfloat16.
        topk_ids: (num_tokens, top_k); -1 is not routed, and its weight becomes 0.
        topk_weights: (num_tokens, top_k) float32.
        shared_rows: `shared_scale_rows` where the shared expert is MXFP8, else None.
    """
    n = x.shape[0]
    if fmt.input_dtype == "bf16":
        buffer.x[:n].copy_(x)
    elif fmt.input_dtype == "e4m3+f32_1x128":
        tokens, scale = quantize_tokens_fp8(x)
        buffer.x[:n].copy_(tokens)
        buffer.x_sf[:n].copy_(scale)
    elif fmt.input_dtype == "e2m1+e4m3_1x16":
        packed, block_scale, token_scale = quantize_tokens_nvfp4(x)
        buffer.x[:n].view(torch.uint8).copy_(packed)
        buffer.x_sf[:n].copy_(block_scale.view(torch.int32))
        buffer.x_scales[:n].copy_(token_scale)
    else:
        tokens, exponents = quantize_tokens_mxfp8(x)
        buffer.x[:n].copy_(tokens)
        buffer.x_sf[:n].copy_(exponents.view(torch.int32))
    if shared is not None:
        _stage_shared(buffer, x, shared_rows, has_own_tokens=shared.input_dtype != fmt.input_dtype)
    buffer.topk_idx[:n].copy_(topk_ids)
    buffer.topk_weights[:n].copy_(topk_weights.masked_fill(topk_ids < 0, 0.0))


def _stage_shared(buffer: Any, x: torch.Tensor, rows: torch.Tensor | None, *, has_own_tokens: bool) -> None:
    """The fused shared expert's tokens, where the routed ones are in another format, and its scales."""
    tokens, exponents = (x, None) if rows is None else quantize_tokens_mxfp8(x)
    if has_own_tokens:
        buffer.shared_l1_acts[: x.shape[0]].copy_(tokens)
    if exponents is not None:
        buffer.shared_l1_acts_sf.index_copy_(0, rows, exponents.view(torch.int32))
