"""The gated activation between the two expert GEMMs, as one value.

Why: a MegaMoE launch fuses exactly one activation with scalar parameters. A checkpoint may ask for something the
kernel cannot do (a clamp per expert, an unknown function), and that has to be refused when the layer is built, not
when it is first run.

    swiglu   g = min(gate, c)   u = clamp(up, -c, c)      g * sigmoid(alpha * g) * (u + beta)
    situ     alpha * tanh(gate / alpha) * sigmoid(gate) * (beta * tanh(up / beta)   or, with beta = 0, up)

Use:

    activation = MegaMoEActivation.from_limit(config.swiglu_limit)     # None: plain SwiGLU
    hidden = activation(gate, up)
    kernel(..., **activation.kernel_kwargs())
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

ACTIVATION_NAMES = ("swiglu", "situ")


@dataclass(frozen=True, slots=True)
class MegaMoEActivation:
    """One gated activation that a MegaMoE kernel can fuse.

    Attributes:
        name: "swiglu", or "situ" (Kimi K3).
        clamp: SwiGLU only: gate is limited from above, up from both sides; None leaves them.
        alpha: SwiGLU: factor inside the sigmoid. SiTU: tanh scale of the gate.
        beta: SwiGLU: added to up. SiTU: tanh scale of up; 0 leaves up linear.

    Raises:
        ValueError: The name is unknown, a parameter is not finite, the clamp is negative, or SiTU got a clamp, alpha
            <= 0 or beta < 0.
    """

    name: str = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATION_NAMES:
            raise ValueError(f"unknown MegaMoE activation {self.name!r}; known: {', '.join(ACTIVATION_NAMES)}")
        if not (math.isfinite(self.alpha) and math.isfinite(self.beta)):
            raise ValueError(f"activation alpha and beta must be finite, got alpha={self.alpha}, beta={self.beta}")
        if self.clamp is not None and not self.clamp >= 0:
            raise ValueError(f"activation clamp must be None or >= 0, got {self.clamp}")
        if self.name == "situ" and (self.clamp is not None or self.alpha <= 0 or self.beta < 0):
            raise ValueError(
                "situ takes no clamp, alpha > 0 and beta >= 0, "
                f"got clamp={self.clamp}, alpha={self.alpha}, beta={self.beta}"
            )

    @classmethod
    def from_limit(
        cls, swiglu_limit: float | torch.Tensor | None, *, alpha: float = 1.0, beta: float = 0.0
    ) -> MegaMoEActivation:
        """SwiGLU with the clamp that a model config names.

        Args:
            swiglu_limit: None for no clamp; a number, or a tensor with one element.
            alpha: Factor inside the sigmoid.
            beta: Added to up.

        Raises:
            ValueError: `swiglu_limit` holds one value per expert: the kernel takes a single scalar.
        """
        if isinstance(swiglu_limit, torch.Tensor):
            if swiglu_limit.numel() != 1:
                raise ValueError(
                    f"a swiglu_limit per expert (shape {tuple(swiglu_limit.shape)}) is not supported: the kernel "
                    "takes one "
                    "scalar clamp for all experts of a launch"
                )
            swiglu_limit = float(swiglu_limit)
        clamp = None if swiglu_limit is None or math.isinf(swiglu_limit) else float(swiglu_limit)
        return cls("swiglu", clamp, alpha, beta)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The activation in plain torch, in the dtype of its inputs (float32 in the reference).

        Args:
            gate: Output of w1, any shape.
            up: Output of w3, the same shape.

        Returns:
            A new tensor of the same shape; the inputs are not changed.
        """
        if self.name == "situ":
            gate = self.alpha * torch.tanh(gate / self.alpha) * torch.sigmoid(gate)
            return gate * (self.beta * torch.tanh(up / self.beta) if self.beta else up)
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)

    def kernel_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a DeepGEMM call; defaults are left out, for builds without alpha and beta."""
        kwargs: dict[str, Any] = {"activation_clamp": self.clamp}
        if self.name != "swiglu":
            kwargs["activation"] = self.name
        if self.alpha != 1.0:
            kwargs["activation_alpha"] = self.alpha
        if self.beta != 0.0:
            kwargs["activation_beta"] = self.beta
        return kwargs
