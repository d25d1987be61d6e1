"""Model families that the adapters know: where transformers keeps their parts, and how their layers are told apart.

The adapters take everything but the MoE blocks from transformers, by class, so that attention, norms and rotary
embedding are the very code that the family's own implementation runs.

    family = family_of(config)                  # GLM-4-MoE or DeepSeek-V3, by config.model_type
    model = build_causal_lm(config)             # the stock model, experts included
    shell = build_causal_lm(config, moe=False)  # the same without any MoE block: room for ours
    is_moe_layer(config, 3), is_mtp_name(config, "model.layers.61.enorm.weight")
"""

from __future__ import annotations

import copy
import importlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """The transformers classes of one model family.

    Attributes:
        module: Module of transformers that holds them.
        prefix: What their names start with.
    """

    module: str
    prefix: str

    def part(self, name: str) -> Any:
        """A class of the family, by the end of its name: "DecoderLayer", "RMSNorm", "RotaryEmbedding"."""
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(
                f"{self.module} is needed for the model adapters: pip install 'weightsync[demo]'"
            ) from error
        return getattr(module, self.prefix + name)


FAMILIES = {
    "glm4_moe": Family("transformers.models.glm4_moe.modeling_glm4_moe", "Glm4Moe"),
    "deepseek_v3": Family("transformers.models.deepseek_v3.modeling_deepseek_v3", "DeepseekV3"),
}


def family_of(config: Any) -> Family:
    """The family of a transformers config.

    Raises:
        NotImplementedError: There is no adapter for its `model_type`.
    """
    try:
        return FAMILIES[config.model_type]
    except KeyError:
        raise NotImplementedError(
            f"no MegaMoE adapter for model_type {config.model_type!r}; there is one for {', '.join(sorted(FAMILIES))}"
        ) from None


def is_moe_layer(config: Any, layer: int) -> bool:
    """Whether decoder layer `layer` has experts; the MTP layers behind the last decoder layer have them too."""
    return bool(layer >= config.first_k_dense_replace)


def is_mtp_name(config: Any, name: str) -> bool:
    """Whether a checkpoint name belongs to an MTP layer, `model.layers.{num_hidden_layers + j}.*`."""
    match = _LAYER_NAME.match(name)
    return match is not None and int(match[1]) >= config.num_hidden_layers


def build_causal_lm(config: Any, *, moe: bool = True, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The stock transformers model of a config, with random weights and `dtype` parameters, in eval mode.

    Args:
        config: Its transformers config; not modified.
        moe: False makes every layer a dense one, so that no stock expert is ever allocated; the dense MLPs stand
            where MoE blocks are to be put.
        dtype: Dtype of the parameters, but for those that the family keeps in float32 (the router).
    """
    config = copy.deepcopy(config)  # transformers writes the dtype into it
    if not moe:
        config.first_k_dense_replace = config.num_hidden_layers
    family_of(config)
    from transformers import AutoModelForCausalLM

    # Eager attention: explicit masks and plain matmuls, the same numbers on every machine and release of transformers.
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.eval()
