"""The MoE layer in plain torch, from kernel layout: the oracle for the fused kernels, and what runs where they cannot.

Why from kernel layout: it reads the very bytes that the kernel reads, through the inverse of the layout maps, so a
shard in the wrong place gives a wrong output here too. It can round where a kernel rounds ("kernel"), or nowhere
("exact").

    x --quantise--> GEMM 1 --bf16 on SM100--> activation --x top-k weight--> quantise --> GEMM 2 --bf16--> sum over
    top-k
                                              (NVFP4: the top-k weight after GEMM 2)

    format        tokens            between the GEMMs                                  after GEMM 2
    sm100_mxfp4   MXFP8 1x32        weight, then MXFP8 1x32                            bf16 per (token, expert), f32 sum
    sm100_mxfp8   MXFP8 1x32        weight, then MXFP8 1x32                            the same
    sm100_bf16    bf16              weight, then bf16                                  the same
    sm100_nvfp4   NVFP4, per token  E2M1 + E4M3 1x16 times one scale for all experts   bf16, then the weight
    sm90_fp8      E4M3, f32 1x128   weight, then E4M3: a power of two per 64 columns   bf16 per (token, expert), f32 sum
                                    (0.1.x of sgl-deep-gemm), or f32 per 128

Use:

    numerics = Numerics.of(FORMATS["sm90_fp8"], precision="kernel")
    routed = routed_experts(x, topk_ids, topk_weights, weights_of, num_slots, first_expert, activation, numerics)
    y = (routed + shared_expert(x, weights, activation, numerics)).bfloat16()

Source: the numerics that DeepGEMM's and sgl-deep-gemm's own tests compare their kernels with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.formats import Format
from megamoe_adapter.quantize import exponent_of, power_of_two
from megamoe_adapter.staging import (
    dequantize_fp8,
    dequantize_mxfp8,
    dequantize_nvfp4,
    quantize_tokens_fp8,
    quantize_tokens_mxfp8,
    quantize_tokens_nvfp4,
)

PRECISIONS = ("kernel", "exact")
SM90_L2_GROUP = 64  # sgl-deep-gemm 0.1.x; 0.2.5 quantises the second GEMM's input per 128 columns, with other scales

Rounding = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's values, float32, in checkpoint order.

    Attributes:
        w1: Gate (I, H).
        w3: Up (I, H).
        w2: Down (H, I).
        l1_alpha: Factor on the first GEMM (NVFP4).
        l2_alpha: Factor on the second GEMM (NVFP4).
    """

    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor
    l1_alpha: float = 1.0
    l2_alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Numerics:
    """Where a kernel rounds.

    Attributes:
        tokens: Rounding of the first GEMM's input.
        gate_up: Rounding of the first GEMM's output.
        hidden: Rounding of the second GEMM's input.
        output: Rounding of the second GEMM's output, per token and expert.
        weight_before_hidden: Whether the top-k weight enters before `hidden` is rounded, or after the second GEMM.
    """

    tokens: Rounding
    gate_up: Rounding
    hidden: Rounding
    output: Rounding
    weight_before_hidden: bool = True

    @classmethod
    def of(
        cls,
        fmt: Format,
        *,
        precision: str = "kernel",
        l2_group: int = SM90_L2_GROUP,
        l2_activation_scale: float = 1.0,
    ) -> Numerics:
        """The rounding of one format.

        Args:
            fmt: A row of the format table.
            precision: "kernel" to round as the kernel does, "exact" for float32 throughout.
            l2_group: SM90: columns per scale between the GEMMs, 64 or 128 by build.
            l2_activation_scale: NVFP4: the scale of the second GEMM's input, over all experts.

        Raises:
            ValueError: An unknown precision.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
        weight_before_hidden = not fmt.has_global_scales
        if precision == "exact":
            return cls(_same, _same, _same, _same, weight_before_hidden)
        if fmt.arch == "sm90":
            hidden = _fp8_by_powers_of_two if l2_group == SM90_L2_GROUP else _fp8
            return cls(_fp8(128), _same, hidden(l2_group), _bf16)
        if fmt.has_global_scales:
            return cls(_nvfp4(None), _bf16, _nvfp4(l2_activation_scale), _bf16, weight_before_hidden)
        between = _bf16 if fmt.scale is None else _mxfp8
        return cls(between, _bf16, between, _bf16)


def routed_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights_of: Callable[[int], ExpertWeights],
    num_slots: int,
    first_expert: int,
    activation: MegaMoEActivation,
    numerics: Numerics,
) -> torch.Tensor:
    """What this rank's experts add to the output.

    Args:
        x: (num_tokens, H), bfloat16 or float32.
        topk_ids: (num_tokens, top_k) physical expert ids; -1 and experts of other ranks add nothing.
        topk_weights: (num_tokens, top_k) float32, final.
        weights_of: Values of a local slot; called only for slots that got tokens.
        num_slots: Local slots E.
        first_expert: Physical id of slot 0.
        activation: Between the GEMMs.
        numerics: Where to round.

    Returns:
        float32 (num_tokens, H), new.
    """
    tokens = numerics.tokens(x.float())
    output = torch.zeros_like(tokens)
    for slot in range(num_slots):
        token, position = (topk_ids == first_expert + slot).nonzero(as_tuple=True)
        if token.numel():
            weight = topk_weights[token, position].float().unsqueeze(-1)
            output.index_add_(0, token, _expert(tokens[token], weight, weights_of(slot), activation, numerics))
    return output


def shared_expert(
    x: torch.Tensor, weights: ExpertWeights, activation: MegaMoEActivation, numerics: Numerics
) -> torch.Tensor:
    """What a fused shared expert adds: every token, weight 1; float32 (num_tokens, H), new."""
    one = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return _expert(numerics.tokens(x.float()), one, weights, activation, numerics)


def over_group(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    group: dist.ProcessGroup,
    local: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Runs `local` on all ranks' tokens and gives this rank the sums of its own; collective.

    Ranks may hold different numbers of tokens, also none. The process group's own timeout bounds each wait.

    Args:
        x: (num_tokens, H) of this rank.
        topk_ids: (num_tokens, top_k).
        topk_weights: (num_tokens, top_k) float32.
        group: The expert-parallel group.
        local: Adds up this rank's experts for the tokens it is given; float32 (any number, H).

    Returns:
        float32 (num_tokens, H).
    """
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([x.shape[0]], device=x.device), group=group)
    sizes = [int(count) for count in counts]
    padded = max(sizes)
    gathered = [_gather(tensor, padded, group) for tensor in (x, topk_ids, topk_weights)]
    # Padding rows are cut out again before anything is computed.
    all_x, all_ids, all_weights = (
        torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]) for parts in gathered
    )
    sums = local(all_x, all_ids, all_weights)
    dist.all_reduce(sums, group=group)
    start = sum(sizes[: dist.get_rank(group)])
    return sums[start : start + x.shape[0]]


def _expert(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    weights: ExpertWeights,
    activation: MegaMoEActivation,
    numerics: Numerics,
) -> torch.Tensor:
    gate = numerics.gate_up(tokens @ weights.w1.T * weights.l1_alpha)
    up = numerics.gate_up(tokens @ weights.w3.T * weights.l1_alpha)
    hidden = activation(gate, up)
    if numerics.weight_before_hidden:
        hidden = hidden * weight
    output = numerics.output(numerics.hidden(hidden) @ weights.w2.T * weights.l2_alpha)
    return output if numerics.weight_before_hidden else output * weight


def _gather(tensor: torch.Tensor, num_rows: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    mine = tensor.new_zeros(num_rows, *tensor.shape[1:])
    mine[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    return parts


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _mxfp8(x: torch.Tensor) -> torch.Tensor:
    return dequantize_mxfp8(*quantize_tokens_mxfp8(x))


def _fp8(group: int) -> Rounding:
    def rounding(x: torch.Tensor) -> torch.Tensor:
        return dequantize_fp8(*quantize_tokens_fp8(x, group), group)

    return rounding


def _fp8_by_powers_of_two(group: int) -> Rounding:
    """The scale is the least power of two by which nothing exceeds 448, as the 0.1.x kernel has it between GEMMs."""

    def rounding(x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, group))
        scale = power_of_two(exponent_of(groups.abs().amax(-1)).clamp(min=1) - 127).unsqueeze(-1)
        rounded: torch.Tensor = (groups / scale).to(torch.float8_e4m3fn).float() * scale
        return rounded.flatten(-2)

    return rounding


def _nvfp4(scale: float | None) -> Rounding:
    def rounding(x: torch.Tensor) -> torch.Tensor:
        fixed = None if scale is None else torch.full(x.shape[:1], scale, device=x.device)
        packed, blocks, token_scale = quantize_tokens_nvfp4(x, fixed)
        return dequantize_nvfp4(packed, blocks) * token_scale.unsqueeze(-1)

    return rounding
