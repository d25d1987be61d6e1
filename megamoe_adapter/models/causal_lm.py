"""Engine models: a transformers decoder and its MTP drafter, MoE blocks replaced by MegaMoE experts.

Both speak the interface that engines and reload share: `load_weights` takes checkpoint names, and
`process_weights_after_loading` of the *model* requantises the experts once everything has arrived.

    model = MegaMoEForCausalLM(config)                     # nothing loaded yet
    draft = MegaMoEDrafter(config)
    cold_load(model, read_checkpoint(directory))           # each takes its own names and leaves the other's
    cold_load(draft, read_checkpoint(directory))
    tokens = generate_greedy(model, prompts, num_new_tokens=8)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megamoe_adapter.models.families import build_causal_lm, is_moe_layer, is_mtp_name
from megamoe_adapter.models.loading import Weights, finish_experts, load_weights
from megamoe_adapter.models.moe_block import DEFAULT_OPTIONS, ExpertOptions, MegaMoEBlock
from megamoe_adapter.models.mtp import MtpDrafter


class MegaMoEForCausalLM(nn.Module):
    """A GLM-4-MoE or DeepSeek-V3 decoder with its experts in MegaMoE kernel layout.

    Parameters carry their checkpoint names, but for the experts. Everything is bfloat16 except router and experts.

    Args:
        config: transformers config of the checkpoint.
        options: How the experts are stored and run.

    Raises:
        NotImplementedError: There is no adapter for the family, or the experts can't be had in that format.
    """

    def __init__(self, config: Any, options: ExpertOptions = DEFAULT_OPTIONS) -> None:
        super().__init__()
        self.config = config
        stock: Any = build_causal_lm(config, moe=False)
        self.model: Any = stock.model
        self.lm_head: nn.Linear = stock.lm_head
        for index, layer in enumerate(self.model.layers):
            if is_moe_layer(config, index):
                layer.mlp = MegaMoEBlock(config, f"model.layers.{index}.mlp", options)
        self.requires_grad_(False).eval()

    def load_weights(self, weights: Weights) -> set[str]:
        """Loads everything but the MTP layer, which is the drafter's; see `loading.load_weights`."""
        return load_weights(self, weights, path_of=lambda name: None if is_mtp_name(self.config, name) else name)

    def process_weights_after_loading(self) -> None:
        """Requantises the experts that got new weights; a no-op where nothing arrived."""
        finish_experts(self)

    def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, T, vocab) and last hidden states (B, T, hidden) of `token_ids` (B, T), both bfloat16."""
        hidden = self.model(input_ids=token_ids, use_cache=False).last_hidden_state
        return self.lm_head(hidden), hidden


class MegaMoEDrafter(MtpDrafter):
    """The MTP layer as a draft model, its experts in MegaMoE kernel layout; arguments as for `MegaMoEForCausalLM`."""

    def __init__(self, config: Any, options: ExpertOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(config, moe=False)
        self.mtp_block.mlp = MegaMoEBlock(config, f"model.layers.{self.layer}.mlp", options)
        self.requires_grad_(False).eval()

    def load_weights(self, weights: Weights) -> set[str]:
        """Loads the MTP layer and leaves every other name to the main model; see `loading.load_weights`."""
        return load_weights(self, weights, path_of=self.parameter_path)

    def process_weights_after_loading(self) -> None:
        """Requantises the experts that got new weights; a no-op where nothing arrived."""
        finish_experts(self)


@torch.inference_mode()
def generate_greedy(model: MegaMoEForCausalLM, prompts: torch.Tensor, num_new_tokens: int) -> torch.Tensor:
    """Appends the most likely token, `num_new_tokens` times.

    Each step runs the whole sequence again: no key-value cache, so nothing that a weight update had to invalidate.

    Args:
        model: The engine's model.
        prompts: (B, T) int64.
        num_new_tokens: Tokens to append.

    Returns:
        (B, num_new_tokens) int64.
    """
    tokens = prompts
    for _ in range(num_new_tokens):
        logits, _ = model(tokens)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[:, prompts.shape[1] :]


@torch.inference_mode()
def draft_greedy(model: MegaMoEForCausalLM, drafter: MtpDrafter, tokens: torch.Tensor) -> torch.Tensor:
    """The drafter's guess for every position of a text: what would follow the next token.

    Args:
        model: The main model, whose hidden states the drafter starts from.
        drafter: The MTP drafter.
        tokens: (B, T) int64, T >= 2.

    Returns:
        (B, T - 1) int64; entry t guesses token t+2.
    """
    _, hidden = model(tokens[:, :-1])
    logits: torch.Tensor = drafter(hidden, tokens[:, 1:])
    return logits.argmax(-1)
