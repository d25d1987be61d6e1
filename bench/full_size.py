"""DeepSeek-V3 and GLM-5.3-Flash at full size without a weight: engine models on the meta device, and their manifests.

The engine is this project's: transformers' decoder layers, MoE blocks of `megamoe_adapter`. Two things are added, so
that names and bytes are those of a published block-FP8 checkpoint: linear layers outside the experts are block FP8 too
(`BlockFp8Linear`), and the experts can be spread over expert-parallel ranks.

    config = CONFIGS["deepseek_v3"]()                    # 61 layers; CONFIGS["deepseek_v3"](2) has 2 MoE layers
    engine = build(config, "model", ep_size=8, ep_rank=3)   # one rank; "draft" is the MTP layer
    manifest = checkpoint(config, engine)                # what a trainer would send, all experts
    plan_reload(engine, manifest)

What is assumed. Router weights are float32, as the engine keeps them (DeepSeek-V3 was published with bfloat16 ones).
DeepSeek-V3: bfloat16 stay norms, embeddings, heads, `eh_proj`. GLM-5.3-Flash: shapes are transformers' `glm5_next`
defaults; every linear layer of at least 128 rows is block FP8, but for heads and `eh_proj`; its MTP layer has MLA
attention and the parts of DeepSeek-V3's; its vision tower is not pushed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.models.causal_lm import MegaMoEDrafter, MegaMoEForCausalLM
from megamoe_adapter.models.loading import load_weights
from megamoe_adapter.models.moe_block import BlockFp8Linear, ExpertOptions, MegaMoEBlock
from megamoe_adapter.shared_experts import SharedExpert
from weightsync.manifest import Manifest, ParamMeta

BLOCK = 128
NUM_DENSE = 3
NOT_QUANTISED = ("lm_head", "head", "eh_proj")
E4M3, F32 = torch.float8_e4m3fn, torch.float32


def deepseek_v3(num_moe_layers: int = 58) -> Any:
    """DeepSeek-V3's config, with another number of MoE layers behind its three dense ones if asked for."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(num_hidden_layers=NUM_DENSE + num_moe_layers, num_nextn_predict_layers=1)


def glm_5_3_flash(num_moe_layers: int = 42) -> Any:
    """GLM-5.3-Flash's text config: KDA in three layers of four, MLA in the fourth."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    return Glm5NextTextConfig(num_hidden_layers=NUM_DENSE + num_moe_layers)


CONFIGS = {"deepseek_v3": deepseek_v3, "glm_5_3_flash": glm_5_3_flash}
TARGETS = ("model", "draft")


class _GlmFlash(nn.Module):
    """The decoder of GLM-5.3-Flash around MegaMoE blocks."""

    def __init__(self, config: Any, options: ExpertOptions) -> None:
        super().__init__()
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel

        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for index, layer in enumerate(self.model.layers):
            if config.mlp_layer_types[index] == "sparse":
                layer.mlp = MegaMoEBlock(config, f"model.layers.{index}.mlp", options)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, weights, path_of=lambda name: name)


class _GlmFlashDrafter(nn.Module):
    """Its MTP layer, under the names that DeepSeek-V3's has."""

    def __init__(self, config: Any, options: ExpertOptions) -> None:
        super().__init__()
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextDecoderLayer, Glm5NextTextRMSNorm

        hidden, self._prefix = config.hidden_size, f"model.layers.{config.num_hidden_layers}."
        one = Glm5NextTextConfig(
            num_hidden_layers=1, layer_types=["indexed_attention"], mlp_layer_types=["dense"], indexer_types=["full"]
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.enorm, self.hnorm = Glm5NextTextRMSNorm(hidden), Glm5NextTextRMSNorm(hidden)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.mtp_block = Glm5NextTextDecoderLayer(one, 0)
        self.mtp_block.mlp = MegaMoEBlock(config, f"{self._prefix}mlp", options)
        head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.shared_head = nn.ModuleDict({"norm": Glm5NextTextRMSNorm(hidden), "head": head})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return load_weights(self, weights, path_of=self._path_of)

    def _path_of(self, name: str) -> str:
        rest = name.removeprefix(self._prefix)
        return rest if rest.partition(".")[0] in self._modules else f"mtp_block.{rest}"


def build(
    config: Any,
    target: str = "model",
    *,
    fmt: str = "sm90_fp8",
    ep_size: int = 1,
    ep_rank: int = 0,
    num_redundant_experts: int = 0,
) -> nn.Module:
    """One rank's engine model on the meta device.

    Args:
        config: One of `CONFIGS`.
        target: "model", or "draft" for the MTP layer.
        fmt: Key of `megamoe_adapter.formats.FORMATS`.
        ep_size: Ranks that the routed experts are spread over; everything else is on each of them.
        ep_rank: Which of them.
        num_redundant_experts: Replicas beyond the checkpoint's experts.
    """
    is_glm = config.model_type == "glm5_next_text"
    classes = (_GlmFlash, _GlmFlashDrafter) if is_glm else (MegaMoEForCausalLM, MegaMoEDrafter)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = classes[TARGETS.index(target)](config, ExpertOptions(fmt=fmt, backend="reference"))
            _quantise_linears(model)
            for block in [module for module in model.modules() if isinstance(module, MegaMoEBlock)]:
                block.experts = _spread(config, block, fmt, ep_size, ep_rank, num_redundant_experts)
    finally:
        torch.set_default_dtype(default)
    return model.requires_grad_(False)


def _quantise_linears(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear and name not in NOT_QUANTISED and child.out_features >= BLOCK:
            module.register_module(name, BlockFp8Linear(child.in_features, child.out_features))
        else:
            _quantise_linears(child)


def _spread(
    config: Any, block: MegaMoEBlock, fmt: str, ep_size: int, ep_rank: int, num_redundant: int
) -> MegaMoEExperts:
    """The block's experts, those of one rank alone."""
    old = block.experts
    return MegaMoEExperts(
        old.placement.num_experts,
        old.top_k,
        old.hidden,
        old.intermediate,
        fmt=fmt,
        source="block_fp8",
        activation=old.activation,
        shared=SharedExpert("block_fp8", config.moe_intermediate_size * config.n_shared_experts),
        num_redundant_experts=num_redundant,
        ep_size=ep_size,
        ep_rank=ep_rank,
        backend="reference",
        prefix=old.prefix,
    )


def checkpoint(config: Any, model: nn.Module) -> Manifest:
    """The manifest of a target, layer by layer as the model has them, each layer's experts first.

    Expert names and shapes are written out here. The others are the model's parameters under their checkpoint names.
    """
    prefix = "" if hasattr(model, "lm_head") else f"model.layers.{config.num_hidden_layers}."
    rows: list[ParamMeta] = []
    for path, module in model.named_modules():
        if isinstance(module, MegaMoEExperts):
            rows += _experts(config, prefix + path.removeprefix("mtp_block."), module.shared_fused)
            continue
        for name, tensor in module.named_parameters(path, recurse=False):
            rows.append(ParamMeta(prefix + name.removeprefix("mtp_block."), tensor.dtype, tuple(tensor.shape)))
    return Manifest(tuple(rows))


def _experts(config: Any, path: str, with_shared: bool) -> Iterator[ParamMeta]:
    """Three projections of each routed expert, and of a fused shared one; each a weight and its block scales."""
    hidden, intermediate = config.hidden_size, config.moe_intermediate_size
    owners = [(f"{path}.{expert}", intermediate) for expert in range(config.n_routed_experts)]
    if with_shared:
        owners.append((path.removesuffix("experts") + "shared_experts", intermediate * config.n_shared_experts))
    for owner, rows in owners:
        shapes = {"gate_proj": (rows, hidden), "up_proj": (rows, hidden), "down_proj": (hidden, rows)}
        for projection, shape in shapes.items():
            yield ParamMeta(f"{owner}.{projection}.weight", E4M3, shape)
            yield ParamMeta(f"{owner}.{projection}.weight_scale_inv", F32, (shape[0] // BLOCK, shape[1] // BLOCK))
