"""Reload a live model in place, inside one process: nothing moves, nothing partial gets through.

    python examples/one_process.py

Prints:
    3 tensors have new bytes, 0 moved
    a captured view sees the new weights: True
    refused before a byte changed, nothing would write qk_proj[4:8]
    still the old bytes: True
"""

from __future__ import annotations

import torch
from torch import nn

import weightsync


class TinyModel(nn.Module):
    """Two projections that live fused in one tensor, loaded under their checkpoint names as engines do it."""

    def __init__(self) -> None:
        super().__init__()
        self.qk_proj = nn.Parameter(torch.randn(8, 4))
        self.out = nn.Linear(8, 4)

    def load_weights(self, weights) -> None:
        places = {
            "q_proj.weight": self.qk_proj.data[:4],
            "k_proj.weight": self.qk_proj.data[4:],
            "out.weight": self.out.weight.data,
            "out.bias": self.out.bias.data,
        }
        for name, tensor in weights:
            places[name].copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x @ self.qk_proj.T)


def new_weights(step: int) -> dict[str, torch.Tensor]:
    """What a trainer would send after `step`."""
    torch.manual_seed(step)
    shapes = {"q_proj.weight": (4, 4), "k_proj.weight": (4, 4), "out.weight": (4, 8), "out.bias": (4,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def main() -> None:
    model = TinyModel()
    captured = model.qk_proj.data  # what a CUDA graph would have captured: the memory, not the parameter
    before = weightsync.fingerprint(model)

    with weightsync.reload(model, mode="direct") as session:
        for name, tensor in new_weights(1).items():  # in as many calls as the weights arrive in
            session.load_weights([(name, tensor)])

    diff = weightsync.fingerprint(model).diff(before)
    print(f"{len(diff.differing)} tensors have new bytes, {len(diff.moved)} moved")
    print("a captured view sees the new weights:", torch.equal(captured[:4], new_weights(1)["q_proj.weight"]))

    after = weightsync.fingerprint(model)
    incomplete = new_weights(2)
    del incomplete["k_proj.weight"]
    manifest = weightsync.Manifest.from_tensors(incomplete.items())
    try:
        weightsync.start_reload(model, mode="direct", manifest=manifest)
    except weightsync.CoverageError as error:
        print("refused before a byte changed, nothing would write", *error.missing)
    print("still the old bytes:", not weightsync.fingerprint(model).diff(after).differing)


if __name__ == "__main__":
    main()
