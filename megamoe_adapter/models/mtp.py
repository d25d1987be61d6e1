"""The multi-token-prediction drafter: one more decoder layer that guesses the token after the next.

Checkpoints of the DeepSeek-V3 and GLM families carry it behind the last decoder layer, as `model.layers.{L}.*` with
`L = num_hidden_layers`. An engine holds it as a model of its own (the draft model of speculative decoding), with
loaders and a post-load hook of its own, and a push names it as a target of its own.

    embed(next token) -> enorm ─┐
                                cat -> eh_proj -> decoder layer -> shared_head.norm -> shared_head.head -> logits
    hidden of main model -> hnorm ─┘

    drafter = MtpDrafter(config)                          # stock transformers parts, experts included
    logits = drafter(hidden, next_token_ids)              # (B, T, vocab)
    drafter.parameter_path("model.layers.3.mlp.gate.weight") == "mtp_block.mlp.gate.weight"
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from megamoe_adapter.models.families import family_of, is_mtp_name

# Parts beside the decoder layer; every other name of the MTP layer belongs to the decoder layer.
_OUTSIDE_BLOCK = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head")


class MtpDrafter(nn.Module):
    """The MTP layer of a checkpoint, with its own embedding and head as the checkpoint has them.

    Args:
        config: transformers config with `num_nextn_predict_layers` of 1.
        dtype: Dtype of the parameters, but for the router.
        moe: False leaves a dense MLP where the MoE block is to be put.

    Raises:
        NotImplementedError: The checkpoint has no MTP layer, or more than one.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype = torch.bfloat16, moe: bool = True) -> None:
        super().__init__()
        num_layers = getattr(config, "num_nextn_predict_layers", 0)
        if num_layers != 1:
            raise NotImplementedError(f"the drafter is one MTP layer; num_nextn_predict_layers is {num_layers}")
        family = family_of(config)
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = "eager"
        if not moe:
            self.config.first_k_dense_replace = config.num_hidden_layers + 1
        self.layer = config.num_hidden_layers
        norm, hidden = family.part("RMSNorm"), config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, dtype=dtype)
        self.enorm = norm(hidden, eps=config.rms_norm_eps).to(dtype)
        self.hnorm = norm(hidden, eps=config.rms_norm_eps).to(dtype)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False, dtype=dtype)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # a decoder layer takes no dtype; its router asks for float32 itself
        try:
            self.mtp_block = family.part("DecoderLayer")(self.config, self.layer)
        finally:
            torch.set_default_dtype(default)
        self.rotary_emb = family.part("RotaryEmbedding")(self.config)
        self.shared_head = nn.ModuleDict(
            {
                "norm": norm(hidden, eps=config.rms_norm_eps).to(dtype),
                "head": nn.Linear(hidden, config.vocab_size, bias=False, dtype=dtype),
            }
        )
        self.eval()

    def parameter_path(self, name: str) -> str | None:
        """The path here of a checkpoint name, experts not yet mapped; None if it is not of this MTP layer."""
        if not is_mtp_name(self.config, name):
            return None
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if int(layer) != self.layer:
            return None
        return rest if rest.startswith(_OUTSIDE_BLOCK) else f"mtp_block.{rest}"

    def forward(self, hidden: torch.Tensor, next_token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token after next.

        Args:
            hidden: (B, T, hidden_size), the main model's last hidden states of positions 0..T-1.
            next_token_ids: (B, T) int64, tokens 1..T, which follow each of those positions.

        Returns:
            (B, T, vocab) in the dtype of the parameters; position t guesses token t+2.
        """
        num_tokens = next_token_ids.shape[1]
        joined = torch.cat([self.enorm(self.embed_tokens(next_token_ids)), self.hnorm(hidden)], dim=-1)
        x = self.eh_proj(joined)
        positions = torch.arange(num_tokens, device=x.device).unsqueeze(0)
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.device).triu(1)
        mask = torch.zeros(1, 1, num_tokens, num_tokens, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(future, torch.finfo(x.dtype).min)
        x = self.mtp_block(
            x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary_emb(x, positions)
        )
        logits: torch.Tensor = self.shared_head["head"](self.shared_head["norm"](x))
        return logits
