"""The mixture-of-experts model whose reload is timed on both sides: vLLM-style loaders, random bytes, no forward.

A checkpoint holds six tensors per expert (w1, w2, w3 and their block scales); the model holds them stacked and fused
(w13, w2), so that each tensor lands in a slice of a larger parameter, as in every MoE that vLLM serves. It is imported
by two interpreters with two versions of torch, so it imports torch alone.

    model = SyntheticMoE(SMALL)
    weights = checkpoint(SMALL, seed=1)        # [(name, tensor), ...], 4,608 tensors
    model.load_weights(weights)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a synthetic model; a small `block` keeps small tensors block-scaled too."""

    name: str
    num_layers: int
    num_experts: int
    hidden: int
    intermediate: int
    block: int = BLOCK


CASES = {
    shape.name: shape
    for shape in (
        Shape("small tensors", num_layers=12, num_experts=64, hidden=64, intermediate=32, block=32),
        Shape("larger tensors", num_layers=12, num_experts=64, hidden=512, intermediate=256),
    )
}


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random finite values of a dtype: small bytes for FP8, ordinary numbers for the rest."""
    if dtype == torch.float8_e4m3fn:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=generator).view(dtype)
    return torch.rand(shape, dtype=dtype, generator=generator)


def checkpoint(shape: Shape, seed: int) -> list[tuple[str, torch.Tensor]]:
    """A checkpoint of random bytes, layer by layer, expert by expert."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "w1": (shape.intermediate, shape.hidden),
        "w2": (shape.hidden, shape.intermediate),
        "w3": (shape.intermediate, shape.hidden),
    }
    weights = []
    for layer in range(shape.num_layers):
        for expert in range(shape.num_experts):
            for shard, (rows, columns) in sizes.items():
                name = f"layers.{layer}.experts.{expert}.{shard}"
                weight = random_bytes((rows, columns), torch.float8_e4m3fn, generator)
                scale = random_bytes((-(-rows // shape.block), -(-columns // shape.block)), torch.float32, generator)
                weights += [(f"{name}.weight", weight), (f"{name}.weight_scale_inv", scale)]
    return weights


def load_expert(param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: str, expert_id: int) -> None:
    """Copies one expert's shard to its place: w1 and w3 are halves of w13."""
    destination = param.data[expert_id]
    if shard_id in ("w1", "w3"):
        rows = destination.shape[0] // 2
        destination = destination.narrow(0, 0 if shard_id == "w1" else rows, rows)
    if destination.shape != loaded_weight.shape:
        raise ValueError(f"expected {tuple(destination.shape)}, got {tuple(loaded_weight.shape)}")
    destination.copy_(loaded_weight)


class Experts(nn.Module):
    """The experts of one layer, stacked and fused. Nothing is post-processed, so the live layout is the loaders'."""

    supports_direct_reload = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        e, i, k, b = shape.num_experts, shape.intermediate, shape.hidden, shape.block
        blocks_i, blocks_k = -(-i // b), -(-k // b)
        self.w13_weight = self._parameter((e, 2 * i, k), torch.float8_e4m3fn)
        self.w13_weight_scale_inv = self._parameter((e, 2 * blocks_i, blocks_k), torch.float32)
        self.w2_weight = self._parameter((e, k, i), torch.float8_e4m3fn)
        self.w2_weight_scale_inv = self._parameter((e, blocks_k, blocks_i), torch.float32)

    @staticmethod
    def _parameter(size: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        made = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
        made.weight_loader = load_expert  # type: ignore[attr-defined]
        return made


class SyntheticMoE(nn.Module):
    """Layers of experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(shape.num_layers):
            layer = nn.Module()
            layer.experts = Experts(shape)
            self.layers.append(layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's contract; the name is taken apart once, without a scan over an expert table."""
        params = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            _, layer, _, expert, shard, kind = name.split(".")
            fused = "w2" if shard == "w2" else "w13"
            path = f"layers.{layer}.experts.{fused}_{kind}"
            param = params[path]
            param.weight_loader(param, tensor, shard, int(expert))  # type: ignore[operator]
            loaded.add(path)
        return loaded


def expected_equal(model: nn.Module, weights: list[tuple[str, torch.Tensor]], shape: Shape) -> None:
    """Checks that the model holds the checkpoint, byte for byte.

    Raises:
        SystemExit: It does not: a speed without the right bytes is worth nothing.
    """
    cold = SyntheticMoE(shape)
    cold.load_weights(weights)
    for (path, live), want in zip(model.named_parameters(), cold.parameters(), strict=True):
        if not torch.equal(live.data.view(torch.uint8), want.data.view(torch.uint8)):
            raise SystemExit(f"{path} does not hold the bytes that were sent")


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Least wall time of a call after one warm-up call: what the code costs, without what else the machine did."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages that are made, and are alive together, while it is on.

    Attributes:
        peak: Most bytes alive at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._current = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> AllocatedBytes:
        """Leaves the storages of these tensors out: they were there before."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known or (key in self._alive and not self._alive[key][0].expired()):
                continue
            if key in self._alive:
                self._current -= self._alive[key][1]
            self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
            self._current += storage.nbytes()
            if self._current > self.peak:
                self._forget_dead()
                self.peak = max(self.peak, self._current)
        return result

    def _forget_dead(self) -> None:
        dead = [key for key, (reference, _) in self._alive.items() if reference.expired()]
        self._current -= sum(self._alive.pop(key)[1] for key in dead)
