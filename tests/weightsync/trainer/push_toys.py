"""Small engines and trainers for the tests of pushes; not a test module."""

from __future__ import annotations

import torch
from torch import nn

from weightsync.manifest import Manifest

HIDDEN = 8


class Toy(nn.Module):
    """Loads by name; holds sizes that no alignment divides: odd bytes, a scalar, an empty tensor, FP8."""

    supports_direct_reload = True

    def __init__(self, value: float = 0.0, layers: int = 3):
        super().__init__()
        generator = torch.Generator().manual_seed(int(value * 1000) + 1)

        def make(*shape, dtype=torch.float32):
            data = torch.randn(shape, generator=generator)
            return nn.Parameter(data.to(dtype), requires_grad=False)

        for layer in range(layers):
            block = nn.Module()
            block.weight = make(HIDDEN, 5)
            block.sixteen = make(3, 7, dtype=torch.bfloat16)
            block.eight = make(5, dtype=torch.float8_e4m3fn)
            block.raw = nn.Parameter(
                torch.randint(0, 255, (3,), generator=generator, dtype=torch.uint8), requires_grad=False
            )
            self.add_module(f"layer{layer}", block)
        self.scalar = make()
        self.big = make(40, 33)

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)

    def forward(self, x):
        return x @ self.big


class ExpertToy(nn.Module):
    """One rank of an expert-parallel engine: a shared weight on every rank, each expert on its owners only."""

    supports_direct_reload = True

    def __init__(self, owned, value: float = 0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(int(value * 1000) + 1)
        self.owned = list(owned)
        self.shared = nn.Parameter(torch.randn(HIDDEN, 6, generator=generator), requires_grad=False)
        self.experts = nn.Parameter(torch.randn(len(self.owned), HIDDEN, 4, generator=generator), requires_grad=False)
        self.experts.weight_loader = self.load_expert

    def load_expert(self, param, tensor, name, shard_id, expert_id, return_success=False):
        if expert_id not in self.owned:
            return False
        param.data[self.owned.index(expert_id)].copy_(tensor)
        return True

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "shared":
                self.shared.data.copy_(tensor)
            else:
                _, expert, _ = name.split(".")
                self.experts.weight_loader(self.experts, tensor, name, "w1", int(expert), return_success=True)


def expert_tensors(num_experts: int, value: float) -> dict[str, torch.Tensor]:
    """What a trainer of `ExpertToy` engines pushes."""
    generator = torch.Generator().manual_seed(int(value * 1000) + 7)
    tensors = {"shared": torch.randn(HIDDEN, 6, generator=generator)}
    for expert in range(num_experts):
        tensors[f"experts.{expert}.weight"] = torch.randn(HIDDEN, 4, generator=generator)
    return tensors


def state_bytes(module: nn.Module) -> dict[str, bytes]:
    """Every parameter's bytes."""
    return {n: bytes(p.detach().reshape(-1).view(torch.uint8).tolist()) for n, p in module.named_parameters()}


def addresses(module: nn.Module) -> dict[str, int]:
    """Every parameter's address."""
    return {n: p.data_ptr() for n, p in module.named_parameters()}


def manifest_of(module: nn.Module) -> Manifest:
    """What a push of this module carries."""
    return Manifest.from_tensors(module.named_parameters())


def refill(module: nn.Module, value: float) -> None:
    """Other values in the same storages, as an optimiser step leaves them."""
    other = type(module)(value)
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)
