"""MoE experts on DeepGEMM MegaMoE: weights in kernel layout, and the layer's forward.

    experts = MegaMoEExperts(256, 8, 7168, 2048, fmt="sm100_mxfp8", source="block_fp8", prefix="layers.3.mlp.experts")
    experts.load("layers.3.mlp.experts.7.gate_proj.weight", tensor)      # or through param.weight_loader
    ...
    experts.finish()                                # from the model's process_weights_after_loading, once per load
    y = experts(x, topk_ids, topk_weights)          # fused kernel on a GPU that has one, else the plain torch reference

What arrives, and when it is final, is in weights.py. The forward refuses to run on weights that were not finished:
block FP8 that waits for its requantisation looks like MXFP8 and gives noise.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megamoe_adapter.activation import MegaMoEActivation
from megamoe_adapter.bank import Bank
from megamoe_adapter.formats import Format
from megamoe_adapter.interning import interned
from megamoe_adapter.layout import check_shapes
from megamoe_adapter.placement import Placement
from megamoe_adapter.reference import (
    PRECISIONS,
    SM90_L2_GROUP,
    ExpertWeights,
    Numerics,
    over_group,
    routed_experts,
    shared_expert,
)
from megamoe_adapter.shared_experts import SharedExpert, decide_shared
from megamoe_adapter.weights import MegaMoEWeights, log_once

BACKENDS = ("auto", "kernel", "reference")
MAX_TOP_K = 32


class MegaMoEExperts(MegaMoEWeights):
    """One layer's routed experts on this rank, and its shared expert where the kernel fuses it.

    Loading, the reload protocol (`weights_replayed`, `discard_arrivals`) and `finish` are those of `MegaMoEWeights`.

    Args:
        num_experts: Logical experts of the layer.
        top_k: Experts per token.
        hidden: H.
        intermediate: I of one expert.
        fmt: Key of `FORMATS`.
        source: Key of `SOURCES`.
        scale_group: Rows and columns per UE8M0 scale, where the checkpoint's are coarser than its source's own; see
            `Bank.routed`. Scales of any other shape are refused.
        activation: Between the GEMMs.
        shared: The shared expert, if the layer has one and the caller would let it be fused; see `shared_fused`.
        num_redundant_experts: Replicas beyond the logical experts, spread as physical id modulo `num_experts`.
        ep_size: Ranks that the experts are spread over.
        ep_rank: This rank among them.
        ep_group: Their process group; needed for a forward over more than one rank, and by the kernel.
        max_num_tokens: Tokens per rank that the kernel's symmetric buffer is sized for.
        backend: "kernel", "reference", or "auto": the kernel where the tensors and the build allow it.
        precision: Of the reference forward: "kernel" rounds as the kernel does, "exact" does not round activations.
        prefix: Path of the module in the model, for messages and to tell its tensors in `load`.
        deep_gemm_version: Release whose shape limits apply, see `check_shapes`; None for the layout's own.
        device: Where the parameters live; torch's default if None.

    Raises:
        NotImplementedError: The source cannot become the format without loss, or the kernel lacks the activation.
        ValueError: Shapes or counts that do not fit.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        *,
        fmt: str,
        source: str,
        scale_group: tuple[int, int] | None = None,
        activation: MegaMoEActivation | None = None,
        shared: SharedExpert | None = None,
        num_redundant_experts: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        ep_group: dist.ProcessGroup | None = None,
        max_num_tokens: int = 4096,
        backend: str = "auto",
        precision: str = "kernel",
        prefix: str = "experts",
        deep_gemm_version: str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
        placement = _placement(num_experts, num_redundant_experts, ep_size, ep_rank)
        bank = Bank.routed(fmt, source, placement.num_slots, hidden, intermediate, scale_group)
        activation = interned(activation or MegaMoEActivation())
        _check_layer(bank.format, activation, top_k, hidden, intermediate, deep_gemm_version)
        decision = decide_shared(
            bank.format, shared, intermediate=intermediate, kernel_refusal=_fusing_refusal(bank.format, backend)
        )
        log_once(logging.INFO, f"MegaMoE shared expert fused: {decision.fused} ({decision.reason})")
        super().__init__(placement, bank, shared=shared, decision=decision, prefix=prefix, device=device)
        self.activation = activation
        self.top_k = top_k
        self.hidden = hidden
        self.intermediate = intermediate
        self.ep_size = ep_size
        self.ep_group = ep_group
        self.max_num_tokens = max_num_tokens
        self.backend = backend
        self.precision = precision

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        shared_experts: nn.Module | None = None,
    ) -> torch.Tensor:
        """Routed experts, plus the shared expert if it is fused or given; combined over the expert-parallel group.

        Args:
            x: (num_tokens, H) bfloat16; zero tokens are allowed. Every rank of the group calls once per step.
            topk_ids: (num_tokens, top_k) integer *physical* ids, see `routing.to_physical`; -1 is skipped.
            topk_weights: (num_tokens, top_k) float32, final (renormalised and scaled).
            shared_experts: An unfused shared MLP, run on `x` and added.

        Returns:
            (num_tokens, H) bfloat16.

        Raises:
            RuntimeError: Weights arrived and `finish` has not run, or the layer never got any; or backend "kernel"
                cannot run here.
            ValueError: Shapes that do not fit, more tokens than `max_num_tokens`, or a shared MLP beside a fused one.
        """
        if shared_experts is not None and self.shared_fused:
            raise ValueError(f"{self.prefix} fuses the shared expert into MegaMoE; pass shared_experts=None")
        self._check_call(x, topk_ids, topk_weights)
        y = (
            self._run_kernel(x, topk_ids, topk_weights)
            if self._use_kernel(x)
            else self._run_reference(x, topk_ids, topk_weights)
        )
        return y if shared_experts is None else y + shared_experts(x)

    def kernel_weights(self, shared: bool = False) -> tuple[Any, Any]:
        """What a kernel is given for both GEMMs: (weight, scale) pairs, or BF16 weights; they alias the parameters."""
        bank = self.shared_bank if shared else self.bank
        if bank is None:
            raise ValueError(f"{self.prefix} has no fused shared expert ({self.shared_decision.reason})")
        scale_kind = "weight_scale" if bank.scale_is_packed else "weight_scale_inv"
        pairs = []
        for prefix in bank.prefixes:
            weight = getattr(self, f"{prefix}_weight").data
            pairs.append(
                weight if bank.format.scale is None else (weight, getattr(self, f"{prefix}_{scale_kind}").data)
            )
        return pairs[0], pairs[1]

    def _check_call(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> None:
        if self.is_unfinished:
            state = "new weights arrived" if self.arrivals.has_finished else "no complete load was finished yet"
            raise RuntimeError(
                f"{self.prefix}: {state}; call finish() (the model's process_weights_after_loading) before forward"
            )
        expected = (x.shape[0], self.top_k)
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"{self.prefix}: x must be (num_tokens, {self.hidden}), got {tuple(x.shape)}")
        if tuple(topk_ids.shape) != expected or tuple(topk_weights.shape) != expected:
            raise ValueError(
                f"{self.prefix}: topk_ids and topk_weights must be {expected}, got {tuple(topk_ids.shape)} and "
                f"{tuple(topk_weights.shape)}"
            )
        if x.shape[0] > self.max_num_tokens:
            raise ValueError(
                f"{self.prefix}: MegaMoE got {x.shape[0]} tokens, but the symmetric buffer was sized for "
                f"{self.max_num_tokens}"
            )
        if self.ep_size > 1 and self.ep_group is None:
            raise ValueError(f"{self.prefix}: ep_size is {self.ep_size}, so forward needs an ep_group")

    def _use_kernel(self, x: torch.Tensor) -> bool:
        if self.backend == "reference" or (self.backend == "auto" and not x.is_cuda):
            return False
        from megamoe_adapter.kernel import support

        supported = support(self.bank.format.name, x.device)
        if not supported.ok:
            if self.backend == "kernel":
                raise RuntimeError(f"{self.prefix}: {supported.reason}")
            log_once(logging.WARNING, f"MegaMoE runs as plain torch: {supported.reason}")
        return supported.ok

    def _run_kernel(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        from megamoe_adapter import kernel

        return kernel.run(self, x, topk_ids, topk_weights)

    def _l2_group(self, x: torch.Tensor) -> int:
        """Columns per scale between the GEMMs, as the installed Hopper kernel has them."""
        if self.bank.format.arch == "sm90" and x.is_cuda:
            from megamoe_adapter.kernel import build_for, sm90_l2_group

            build = build_for(self.bank.format.name)
            if build is not None:
                return sm90_l2_group(build)
        return SM90_L2_GROUP

    def _run_reference(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        numerics = Numerics.of(
            self.bank.format,
            precision=self.precision,
            l2_group=self._l2_group(x),
            l2_activation_scale=self.l2_activation_scale_value,
        )

        def local(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
            return routed_experts(
                x,
                topk_ids,
                topk_weights,
                self.expert_values,
                self.placement.num_slots,
                self.placement.first_physical,
                self.activation,
                numerics,
            )

        if self.ep_size > 1 and self.ep_group is not None:
            y = over_group(x, topk_ids, topk_weights, self.ep_group, local)
        else:
            y = local(x, topk_ids, topk_weights)
        if self.shared_bank is not None:
            bank = self.shared_bank
            values = ExpertWeights(*bank.dequantize_expert(self, 0))
            shared_numerics = Numerics.of(bank.format, precision=self.precision)
            y = y + shared_expert(x, values, self.activation, shared_numerics)
        return y.to(torch.bfloat16)


@functools.lru_cache(maxsize=256)
def _placement(num_experts: int, num_redundant: int, ep_size: int, ep_rank: int) -> Placement:
    """One for all layers that are placed alike; immutable."""
    return Placement(num_experts, num_redundant, ep_size, ep_rank)


def _check_layer(
    fmt: Format,
    activation: MegaMoEActivation,
    top_k: int,
    hidden: int,
    intermediate: int,
    deep_gemm_version: str | None,
) -> None:
    if activation.name not in fmt.activations:
        raise NotImplementedError(
            f"{fmt.name} ({fmt.kernel}) fuses {', '.join(fmt.activations)}, not {activation.name!r}"
        )
    if fmt.arch == "sm90" and (activation.alpha != 1.0 or activation.beta != 0.0):
        raise NotImplementedError(f"{fmt.kernel} has no activation alpha or beta, got {activation}")
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k must be in 1..{MAX_TOP_K}, got {top_k}")
    check_shapes(fmt, hidden, intermediate, deep_gemm_version)


def _fusing_refusal(fmt: Format, backend: str) -> str | None:
    """Why the kernel that will run cannot fuse a shared expert; None if it can, or if no kernel will run."""
    if backend == "reference" or not fmt.shared_precisions:
        return None
    from megamoe_adapter.kernel import fusing_refusal

    return fusing_refusal(fmt.name)
