"""The model whose push is timed on GPUs: layers of one BF16 projection and one `MegaMoEExperts`, in any format.

The checkpoint holds six block-FP8 tensors per expert. It is made from a seed on the device itself, so that the trainer
and whoever checks the engine's bytes make the same one without sending it.

    model = ExpertModel(Sizes(), fmt="sm90_fp8", device="cuda:0")
    model.cold_load(checkpoint(Sizes(), seed=1, device="cuda:0"))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from megamoe_adapter import MegaMoEExperts
from megamoe_adapter.finish import finish_layers

BLOCK = 128


@dataclass(frozen=True)
class Sizes:
    """Shape of the model."""

    num_layers: int = 12
    num_experts: int = 64
    hidden: int = 2048
    intermediate: int = 1024
    top_k: int = 4


def checkpoint(
    sizes: Sizes, seed: int, device: torch.device | str, power_of_two: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """A block-FP8 checkpoint of finite random codes and positive random scales, layer by layer.

    Args:
        sizes: Shape of the model.
        seed: Equal seeds give equal bytes on equal devices.
        device: Where the tensors are made.
        power_of_two: Whether every block scale is a power of two, so that a requantisation rounds nothing.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    h, i = sizes.hidden, sizes.intermediate
    for layer in range(sizes.num_layers):
        yield (
            f"layers.{layer}.proj.weight",
            torch.randn(h, h, device=device, dtype=torch.bfloat16, generator=generator) * 0.02,
        )
        for expert in range(sizes.num_experts):
            for name, (rows, columns) in (("gate_proj", (i, h)), ("up_proj", (i, h)), ("down_proj", (h, i))):
                codes = torch.randint(0, 240, (rows, columns), device=device, dtype=torch.uint8, generator=generator)
                codes = torch.where(codes >= 120, codes + 8, codes)  # skip 0x78..0x7f: keeps NaN and the top binade out
                scale = torch.rand(rows // BLOCK, columns // BLOCK, device=device, generator=generator) + 0.5
                scale = torch.exp2(torch.floor(scale * 4 - 12)) if power_of_two else scale * 2.0**-9
                prefix = f"layers.{layer}.experts.{expert}.{name}."
                yield prefix + "weight", codes.view(torch.float8_e4m3fn)
                yield prefix + "weight_scale_inv", scale


class Layer(nn.Module):
    """One projection and one layer of experts."""

    def __init__(self, sizes: Sizes, fmt: str, index: int, device: torch.device | str) -> None:
        super().__init__()
        self.proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False, device=device, dtype=torch.bfloat16)
        self.proj.weight.requires_grad_(False)
        self.experts = MegaMoEExperts(
            sizes.num_experts,
            sizes.top_k,
            sizes.hidden,
            sizes.intermediate,
            fmt=fmt,
            source="block_fp8",
            prefix=f"layers.{index}.experts",
            device=device,
        )


class ExpertModel(nn.Module):
    """Layers of experts with vLLM's loading contract."""

    supports_direct_reload = True

    def __init__(self, sizes: Sizes, fmt: str, device: torch.device | str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes, fmt, index, device) for index in range(sizes.num_layers))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads by checkpoint name."""
        loaded = set()
        for name, tensor in weights:
            layer = self.layers[int(name.split(".", 2)[1])]
            if name.endswith(".proj.weight"):
                layer.proj.weight.data.copy_(tensor)
            elif layer.experts.load(name, tensor) is None:
                raise KeyError(name)
            loaded.add(name)
        return loaded

    def process_weights_after_loading(self) -> None:
        """Finishes every layer's experts."""
        finish_layers(layer.experts for layer in self.layers)

    def cold_load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What an engine does at its start."""
        self.load_weights(weights)
        self.process_weights_after_loading()
