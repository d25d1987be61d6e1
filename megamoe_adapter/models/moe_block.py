"""The MoE block of the GLM-4-MoE and DeepSeek-V3 families with its experts in MegaMoE kernel layout.

It stands where the stock block of transformers stood and takes the same checkpoint names. The router is computed here
in float32, since DeepGEMM's own gate knows another scoring function. The shared expert runs inside the expert kernel
where that is possible without rounding it further, else beside it.

    layer.mlp = MegaMoEBlock(config, "model.layers.3.mlp", ExpertOptions(fmt="sm100_mxfp8", source="block_fp8"))
    layer.mlp(hidden_states)                                          # (B, T, H) -> (B, T, H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.routing import Routing
from megamoe_adapter.shared_experts import SharedExpert


def routing_of(config: Any) -> Routing:
    """The routing rule of a GLM-4-MoE or DeepSeek-V3 config."""
    return Routing(
        top_k=config.num_experts_per_tok,
        scoring="sigmoid",
        renormalize=config.norm_topk_prob,
        routed_scaling_factor=config.routed_scaling_factor,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
    )


class Router(nn.Module):
    """Scores tokens in float32 and picks their experts.

    Attributes:
        weight: (num_experts, hidden) float32.
        e_score_correction_bias: (num_experts,) float32; moves the choice, not the weights.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        num_experts = config.n_routed_experts
        self.routing = routing_of(config)
        self.weight = nn.Parameter(torch.zeros(num_experts, config.hidden_size, dtype=torch.float32), False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32), False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (num_tokens, top_k) int64 and final weights float32 for tokens `x` (num_tokens, hidden)."""
        return self.routing(F.linear(x.float(), self.weight), bias=self.e_score_correction_bias)


class BlockFp8Linear(nn.Module):
    """A linear layer that keeps the checkpoint's block FP8 as it is; the product is computed in the input's dtype.

    Attributes:
        weight: (out, in) E4M3.
        weight_scale_inv: (ceil(out/128), ceil(in/128)) float32; real weight = weight x block scale.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        blocks = (-(-out_features // 128), -(-in_features // 128))
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=torch.float8_e4m3fn), False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(blocks, dtype=torch.float32), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out), same dtype."""
        return F.linear(x, dequantised(self.weight, self.weight_scale_inv).to(x.dtype))


class SharedMLP(nn.Module):
    """A shared expert that is not fused into the expert kernel: SwiGLU over three linear layers.

    Args:
        hidden: Input and output size.
        intermediate: Its intermediate size.
        source: "block_fp8" or "bf16".

    Raises:
        NotImplementedError: Another source; only a kernel that fuses it takes that.
    """

    def __init__(self, hidden: int, intermediate: int, source: str) -> None:
        super().__init__()
        if source not in ("block_fp8", "bf16"):
            raise NotImplementedError(f"a shared expert beside the kernel must be block_fp8 or bf16, not {source}")
        self.gate_proj = _linear(hidden, intermediate, source)
        self.up_proj = _linear(hidden, intermediate, source)
        self.down_proj = _linear(intermediate, hidden, source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to (..., hidden), same dtype."""
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def _linear(in_features: int, out_features: int, source: str) -> nn.Module:
    if source == "block_fp8":
        return BlockFp8Linear(in_features, out_features)
    return nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)


def dequantised(weight: torch.Tensor, scale_inv: torch.Tensor | None) -> torch.Tensor:
    """float32 values of a checkpoint tensor, times its 128x128 block scales if it has some; a new tensor."""
    value = weight.to(torch.float32, copy=True)
    if scale_inv is None:
        return value
    blocks = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return value.mul_(blocks[: value.shape[0], : value.shape[1]])


@dataclass(frozen=True)
class ExpertOptions:
    """How a model's experts are stored and run; the same for all its layers.

    Attributes:
        fmt: Kernel format, a key of `megamoe_adapter.formats.FORMATS`.
        source: How the checkpoint stores routed and shared experts, a key of `megamoe_adapter.formats.SOURCES`.
        backend: "kernel", "reference" or "auto", see `MegaMoEExperts`.
        precision: Of the reference forward: "kernel" or "exact", see `MegaMoEExperts`.
    """

    fmt: str = "sm100_mxfp8"
    source: str = "block_fp8"
    backend: str = "auto"
    precision: str = "kernel"


DEFAULT_OPTIONS = ExpertOptions()


class MegaMoEBlock(nn.Module):
    """Router, routed experts, shared expert.

    Args:
        config: transformers config of the checkpoint.
        path: Path of this block under its checkpoint name, for messages: "model.layers.3.mlp".
        options: How the experts are stored and run.
    """

    def __init__(self, config: Any, path: str, options: ExpertOptions) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        shared_intermediate = intermediate * config.n_shared_experts
        self.gate = Router(config)
        self.experts = MegaMoEExperts(
            config.n_routed_experts,
            config.num_experts_per_tok,
            hidden,
            intermediate,
            fmt=options.fmt,
            source=options.source,
            activation=MegaMoEActivation.from_limit(getattr(config, "swiglu_limit", None)),
            shared=SharedExpert(options.source, shared_intermediate),
            backend=options.backend,
            precision=options.precision,
            prefix=f"{path}.experts",
        )
        if not self.experts.shared_fused:
            self.shared_experts = SharedMLP(hidden, shared_intermediate, options.source)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to (..., hidden), same dtype."""
        x = hidden_states.flatten(0, -2)
        ids, weights = self.gate(x)
        y: torch.Tensor = self.experts(x, ids, weights, getattr(self, "shared_experts", None))
        return y.view_as(hidden_states)
