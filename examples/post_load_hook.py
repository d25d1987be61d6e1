"""A layer that its post-load hook turns into another layout: recorded once, it is reloaded in place like any other.

    python examples/post_load_hook.py

Prints:
    without record_layouts: LayoutError
    the kernel's tensors moved: 0, the layer computes with the new weights: True
    runs of the hook, in two loads: 2
"""

from __future__ import annotations

import torch
from torch import nn

import weightsync


class ScaledLinear(nn.Module):
    """Loads a weight and its scale; the hook leaves one transposed, scaled weight, which its kernel wants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(4, 1), requires_grad=False)
        self.hook_runs = 0

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter((self.weight * self.scale).T.contiguous(), requires_grad=False)
        del self.scale
        self.hook_runs += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = ScaledLinear()

    def load_weights(self, weights) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def weights_of(step: int) -> dict[str, torch.Tensor]:
    """What a checkpoint holds after `step`."""
    torch.manual_seed(step)
    return {"layer.weight": torch.randn(4, 8), "layer.scale": torch.rand(4, 1)}


def started(record: bool) -> Model:
    """What an engine does at its start: construct, load, run the hooks."""
    model = Model()
    if record:
        weightsync.record_layouts(model)  # after construction, before the first hook
    model.load_weights(weights_of(0).items())
    model.layer.process_weights_after_loading()
    return model


def main() -> None:
    new = weights_of(1)
    manifest = weightsync.Manifest.from_tensors(new.items())
    try:
        weightsync.start_reload(started(record=False), manifest=manifest)
    except weightsync.WeightSyncError as error:
        print("without record_layouts:", type(error).__name__)

    model = started(record=True)
    before = weightsync.fingerprint(model)
    with weightsync.reload(model, mode="direct", manifest=manifest) as session:
        session.load_weights(new.items())

    moved = weightsync.fingerprint(model).diff(before).moved
    x = torch.randn(2, 8)
    right = torch.equal(model.layer(x), x @ (new["layer.weight"] * new["layer.scale"]).T.contiguous())
    print(f"the kernel's tensors moved: {len(moved)}, the layer computes with the new weights: {right}")
    print("runs of the hook, in two loads:", model.layer.hook_runs)


if __name__ == "__main__":
    main()
