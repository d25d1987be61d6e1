"""The trainer's side of the demo: float32 master weights, a toy objective, and the same weights in checkpoint form.

master = MasterModel(config)
master.load(read_checkpoint(directory))
losses = master.train_steps(num_steps=3)                   # AdamW on next-token prediction of counting sequences
master.named_weights(part="model")                   # (checkpoint name, tensor), experts quantised to block FP8
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from megamoe_adapter.models.families import build_causal_lm, is_mtp_name
from megamoe_adapter.models.moe_block import dequantised, routing_of
from megamoe_adapter.models.mtp import MtpDrafter
from megamoe_adapter.quantize import quantize_block_fp8

Part = Literal["model", "draft"]

# Routed and shared experts are block FP8 on the wire; the router is float32, as in the model; the rest is bfloat16.
_EXPERT = re.compile(r"\.mlp\.(experts\.\d+|shared_experts)\.\w+\.weight$")
_ROUTER = re.compile(r"\.mlp\.gate\.")

_LEARNING_RATE = 2e-3
_BIAS_UPDATE_RATE = 1e-3


class MasterModel(nn.Module):
    """The stock transformers model and its MTP drafter in float32, ready to be trained and exported.

    Args:
        config: transformers config of the checkpoint.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model: Any = build_causal_lm(config, dtype=torch.float32)
        self.drafter: Any = MtpDrafter(config, dtype=torch.float32)
        self._data = torch.Generator().manual_seed(0)
        self._optimizers: dict[Part, torch.optim.Optimizer] = {}

    def initialise(self, seed: int) -> None:
        """Fills every weight from a seed: matrices normal, norms near one, correction biases near zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, view in self._views():
            noise = torch.randn(view.shape, generator=generator) * self.config.initializer_range
            view.copy_(1 + noise if name.endswith("norm.weight") else noise)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes a checkpoint's weights, dequantised to float32.

        Raises:
            ValueError: A name is unknown, or weights of this model are missing.
        """
        tensors = dict(weights)
        views = dict(self._views())
        scales = {f"{name}_scale_inv" for name in views if _EXPERT.search(name)}
        if wrong := sorted(tensors.keys() ^ (views.keys() | scales)):
            raise ValueError(f"missing from the checkpoint, or not weights of this model: {', '.join(wrong[:5])}")
        for name, view in views.items():
            view.copy_(dequantised(tensors[name], tensors.get(f"{name}_scale_inv")))

    def named_weights(self, part: Part | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields `(checkpoint name, tensor)`, each scale behind its weight; the tensors alias no master weight.

        Args:
            part: "model" without the MTP layer, "draft" for that layer alone, None for both.
        """
        for name, view in self._views():
            if part is not None and (part == "draft") != is_mtp_name(self.config, name):
                continue
            if _EXPERT.search(name):
                quantised, scale_inv = quantize_block_fp8(view)
                yield name, quantised
                yield f"{name}_scale_inv", scale_inv
            else:
                yield name, view.clone() if _ROUTER.search(name) else view.to(torch.bfloat16)

    def train_steps(self, num_steps: int, part: Part = "model") -> list[float]:
        """Takes optimiser steps on one part, the other frozen; returns the loss of each step.

        The toy objective is next-token prediction on sequences that count in steps, `x[t+1] = (x[t] + step) % vocab`.
        Correction biases follow the load of the experts, as in DeepSeek-V3's balancing without an auxiliary loss.
        """
        module = self.model if part == "model" else self.drafter
        optimizer = self._optimizers.setdefault(part, torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE))
        losses = []
        for _ in range(num_steps):
            tokens = self._batch()
            with _RouterLoads(module, self.config) as loads:
                loss = self._model_loss(tokens) if part == "model" else self._draft_loss(tokens)
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            loads.rebalance(_BIAS_UPDATE_RATE)
            losses.append(loss.item())
        return losses

    def _model_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss

    def _draft_loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = self.model.model(input_ids=tokens[:, :-2], use_cache=False).last_hidden_state
        logits: torch.Tensor = self.drafter(hidden, tokens[:, 1:-1])
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        return loss

    def _batch(self, batch_size: int = 4, num_tokens: int = 24) -> torch.Tensor:
        vocab = self.config.vocab_size
        start = torch.randint(vocab, (batch_size, 1), generator=self._data)
        step = torch.randint(1, 8, (batch_size, 1), generator=self._data)
        tokens: torch.Tensor = (start + step * torch.arange(num_tokens)) % vocab
        return tokens

    def _views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(checkpoint name, float32 view of the master weights)`, one per projection of each expert."""
        mtp = f"model.layers.{self.config.num_hidden_layers}."
        drafter = ((mtp + path.removeprefix("mtp_block."), t) for path, t in self.drafter.state_dict().items())
        for name, tensor in (*self.model.state_dict().items(), *drafter):
            prefix, is_stack, projections = name.partition(".mlp.experts.")
            if not is_stack:
                yield name, tensor
                continue
            names = ("gate_proj", "up_proj") if projections == "gate_up_proj" else (projections,)
            for expert, stacked in enumerate(tensor):
                for projection, view in zip(names, stacked.chunk(len(names)), strict=True):
                    yield f"{prefix}.mlp.experts.{expert}.{projection}.weight", view


class _RouterLoads:
    """Counts, while it is open, how many tokens each router of a module sends to each expert."""

    def __init__(self, module: Any, config: Any) -> None:
        self._routing = routing_of(config)
        self._loads = {m: torch.zeros_like(m.weight[:, 0]) for m in module.modules() if _is_router(m)}
        self._handles: list[Any] = []

    def __enter__(self) -> _RouterLoads:
        self._handles = [router.register_forward_hook(self._count) for router in self._loads]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _count(self, router: Any, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        logits = F.linear(inputs[0].flatten(0, -2), router.weight)
        ids, _ = self._routing(logits, bias=router.e_score_correction_bias)
        self._loads[router] += torch.bincount(ids.flatten(), minlength=logits.shape[1])

    @torch.no_grad()
    def rebalance(self, rate: float) -> None:
        """Moves each correction bias by `rate` towards an even load."""
        for router, load in self._loads.items():
            router.e_score_correction_bias.add_((load.mean() - load).sign(), alpha=rate)


def _is_router(module: nn.Module) -> bool:
    return hasattr(module, "e_score_correction_bias")
