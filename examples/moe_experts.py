"""MoE experts in the layout of DeepGEMM's MegaMoE kernels, reloaded in place: weights and block scales come apart.

    python examples/moe_experts.py

Prints:
    sm90_fp8: 0 tensors moved, equal to a cold load of the same checkpoint: True
    refused without scales, nothing would write experts.w13_weight_scale_inv experts.w2_weight_scale_inv
    sm100_mxfp8: 0 tensors moved, equal to a cold load of the same checkpoint: True
    refused without scales, nothing would write experts.w13_weight_scale_inv experts.w2_weight_scale_inv
"""

from __future__ import annotations

import torch
from torch import nn

import weightsync
from megamoe_adapter import MegaMoEExperts

SHAPES = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}  # of one expert: I is 256, H is 512


class Model(nn.Module):
    def __init__(self, fmt: str, weights) -> None:
        super().__init__()
        self.experts = MegaMoEExperts(4, 2, 512, 256, fmt=fmt, source="block_fp8", prefix="mlp.experts")
        weightsync.record_layouts(self)  # after construction, before the first hook
        self.load_weights(weights.items())
        self.process_weights_after_loading()

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.experts.load(name, tensor)

    def process_weights_after_loading(self) -> None:
        self.experts.finish()  # SM100 has no block FP8: it is requantised to MXFP8, in place


def checkpoint(step: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Block-FP8 weights after `step`, and their scales, one for 128 x 128 values: powers of two, so MXFP8 is exact."""
    torch.manual_seed(step)
    weights, scales = {}, {}
    for path, (n, k) in ((f"mlp.experts.{e}.{name}", shape) for e in range(4) for name, shape in SHAPES.items()):
        weights[f"{path}.weight"] = torch.randn(n, k).to(torch.float8_e4m3fn)
        scales[f"{path}.weight_scale_inv"] = torch.exp2(torch.randint(-9, -5, (n // 128, k // 128)).float())
    return weights, scales


def main() -> None:
    (old_weights, old_scales), (weights, scales) = checkpoint(0), checkpoint(1)
    new = weights | scales
    for fmt in ("sm90_fp8", "sm100_mxfp8"):
        model = Model(fmt, old_weights | old_scales)
        before = weightsync.fingerprint(model)
        with weightsync.reload(model, mode="direct", manifest=weightsync.Manifest.from_tensors(new.items())) as session:
            session.load_weights(weights.items())
            session.load_weights(scales.items())
        after, cold = weightsync.fingerprint(model), weightsync.fingerprint(Model(fmt, new))
        moved, is_equal = after.diff(before).moved, not after.diff(cold).differing
        print(f"{fmt}: {len(moved)} tensors moved, equal to a cold load of the same checkpoint: {is_equal}")
        try:
            weightsync.start_reload(model, mode="direct", manifest=weightsync.Manifest.from_tensors(weights.items()))
        except weightsync.CoverageError as error:
            print("refused without scales, nothing would write", *error.missing)


if __name__ == "__main__":
    main()
