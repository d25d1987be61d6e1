"""Router scores to the ids and weights that a MegaMoE launch takes.

Why here and not in the kernel: DeepGEMM's own gate knows one scoring function. A launch wants top-k weights that are
*final* (renormalised and scaled), since the weight enters before the second GEMM's input is quantised, and wants the
routed scaling factor folded into them, so that a fused or added shared expert is not scaled with the routed ones.

    p = sigmoid(z) | softmax(z) | sqrt(softplus(z))           float32, whatever the logits' dtype
    choose by p + bias: inside the best groups where there are groups; weights = p of the chosen, never p + bias
    weights /= sum(weights) if renormalize;  weights *= routed_scaling_factor

Use:

    routing = Routing(top_k=8, scoring="sigmoid", renormalize=True, routed_scaling_factor=2.5)
    topk_ids, topk_weights = routing(x.float() @ gate.float().T, bias=e_score_correction_bias)
    topk_ids, topk_weights = mask_padding(topk_ids, topk_weights, is_padding)
    topk_ids = to_physical(topk_ids, logical_to_physical, num_replicas)     # only with redundant experts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCORING = ("sigmoid", "softmax", "sqrtsoftplus")
# Keeps 0/0 out of the renormalisation when every chosen score underflowed; far below float32 resolution of any real
# sum.
MIN_WEIGHT_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class Routing:
    """How one model picks experts.

    Attributes:
        top_k: Experts per token.
        scoring: "sigmoid" (DeepSeek-V3, GLM), "softmax" (DeepSeek-V2) or "sqrtsoftplus" (DeepSeek-V4).
        renormalize: Divide the chosen weights by their sum (`norm_topk_prob`).
        routed_scaling_factor: Folded into the weights.
        num_groups: Groups of experts; 1 for none (`n_group`).
        topk_groups: Groups that a token may choose from (`topk_group`).

    Raises:
        ValueError: An unknown scoring function, or counts that contradict each other.
    """

    top_k: int
    scoring: str = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in SCORING:
            raise ValueError(f"unknown scoring function {self.scoring!r}; known: {', '.join(SCORING)}")
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"topk_groups must be in 1..num_groups, got {self.topk_groups} of {self.num_groups} groups"
            )
        if self.num_groups > 1 and self.scoring == "sqrtsoftplus":
            raise ValueError("grouped routing is defined for sigmoid and softmax scores, not for sqrtsoftplus")

    def __call__(
        self, logits: torch.Tensor, *, bias: torch.Tensor | None = None, topk_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picks experts for each token.

        Args:
            logits: (num_tokens, num_experts), any float dtype; computed in float32.
            bias: (num_experts,) correction added for the choice alone (`e_score_correction_bias`).
            topk_ids: (num_tokens, top_k) ids chosen elsewhere (DeepSeek-V4's hash layers); their weights are still
                the scores.

        Returns:
            ids int64 and weights float32, both (num_tokens, top_k).

        Raises:
            ValueError: A shape does not fit.

        Source: vLLM's fused_topk_bias and grouped_topk; DeepSeek-V3 technical report, section 2.1.2.
        """
        if logits.dim() != 2:
            raise ValueError(f"logits must be (num_tokens, num_experts), got shape {tuple(logits.shape)}")
        num_tokens, num_experts = logits.shape
        if bias is not None and tuple(bias.shape) != (num_experts,):
            raise ValueError(f"bias must have shape ({num_experts},), got {tuple(bias.shape)}")
        scores = self.scores(logits)
        if topk_ids is None:
            topk_ids = self._choose(scores, bias)
        elif tuple(topk_ids.shape) != (num_tokens, self.top_k):
            raise ValueError(f"topk_ids must have shape ({num_tokens}, {self.top_k}), got {tuple(topk_ids.shape)}")
        topk_ids = topk_ids.to(torch.int64)
        weights = scores.gather(1, topk_ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + MIN_WEIGHT_SUM)
        return topk_ids, weights * self.routed_scaling_factor

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Unbiased scores, float32, (num_tokens, num_experts)."""
        logits = logits.float()
        if self.scoring == "softmax":
            return torch.softmax(logits, -1)
        if self.scoring == "sqrtsoftplus":
            return torch.nn.functional.softplus(logits).sqrt()
        return torch.sigmoid(logits)

    def _choose(self, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        num_experts = scores.shape[1]
        if self.top_k > num_experts // self.num_groups * self.topk_groups or num_experts % self.num_groups:
            raise ValueError(
                f"top_k {self.top_k} does not fit {num_experts} experts in {self.num_groups} equal groups, "
                f"{self.topk_groups} of them usable"
            )
        choice = scores if bias is None else scores + bias.float()
        if self.num_groups > 1:
            groups = choice.unflatten(1, (self.num_groups, -1))
            # With a correction bias a group is as good as its best two experts, without one as its best.
            per_group = groups.amax(-1) if bias is None else groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            kept = torch.zeros_like(per_group, dtype=torch.bool)
            kept.scatter_(1, per_group.topk(self.topk_groups, -1).indices, True)
            choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
        return choice.topk(self.top_k, -1).indices


def mask_padding(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, is_padding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes padding tokens out of the routing: id -1, weight 0.

    Args:
        topk_ids: (num_tokens, top_k) integer.
        topk_weights: (num_tokens, top_k) float32.
        is_padding: (num_tokens,) bool.

    Returns:
        New tensors of the same shapes and dtypes.
    """
    mask = is_padding.unsqueeze(-1)
    return topk_ids.masked_fill(mask, -1), topk_weights.masked_fill(mask, 0.0)


def to_physical(topk_ids: torch.Tensor, logical_to_physical: torch.Tensor, num_replicas: torch.Tensor) -> torch.Tensor:
    """Maps logical expert ids to physical ones, spreading tokens over the replicas of an expert by their position.

    Args:
        topk_ids: (num_tokens, top_k) logical ids; -1 stays -1.
        logical_to_physical: (num_logical, max_replicas) int64; entries past `num_replicas` are not read.
        num_replicas: (num_logical,) int64, at least 1 each.

    Returns:
        (num_tokens, top_k) int64 physical ids. Runs without a host sync, so it can be captured in a CUDA graph.
    """
    flat = topk_ids.flatten().to(torch.int64)
    logical = flat.clamp(min=0)
    position = torch.arange(flat.numel(), device=flat.device)
    physical = logical_to_physical[logical, position % num_replicas[logical]]
    return torch.where(flat < 0, flat, physical).view(topk_ids.shape)
