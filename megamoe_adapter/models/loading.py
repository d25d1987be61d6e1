"""From checkpoint names to parameters: the `load_weights` that the model adapters share.

Every tensor goes through its parameter's own `weight_loader`, never straight into `.data`, so that a reload engine sees
who writes what. An expert's name is parsed, not looked up in a table of all experts: at 58 layers of 256 experts a
checkpoint has 89,088 of them.

    loaded = load_weights(model, weights, path_of=lambda name: name)
    finish_experts(model)                                    # the model's process_weights_after_loading
    cold_load(model, read_checkpoint(directory))             # both, and an error if a parameter got nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.finish import finish_layers

Weights = Iterable[tuple[str, torch.Tensor]]


class LoadableModel(Protocol):
    """What a reload engine, or a cold load, drives."""

    def load_weights(self, weights: Weights) -> set[str]:
        """Loads `(checkpoint name, tensor)` pairs and returns the paths of the parameters that got something."""
        ...

    def process_weights_after_loading(self) -> None:
        """Runs once, after the last tensor of a load."""
        ...


def load_weights(model: nn.Module, weights: Weights, *, path_of: Callable[[str], str | None]) -> set[str]:
    """Loads tensors one after another.

    Args:
        model: Owner of the parameters and of `MegaMoEExperts`.
        weights: `(checkpoint name, tensor)`, in any order; a tensor is not kept.
        path_of: Path in `model` that a checkpoint name belongs to, experts still under their own names; None for a name
            that another model takes (the MTP layer is the drafter's, the rest is the main model's).

    Returns:
        Paths of the parameters and buffers written.

    Raises:
        KeyError: A name that the model has no place for.
        ValueError: A tensor's shape or dtype is not its parameter's.
    """
    names = {module.names for module in model.modules() if isinstance(module, MegaMoEExperts)}
    places: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    loaded = set()
    for name, tensor in weights:
        path = path_of(name)
        if path is None:
            continue
        target = next((target for rules in names if (target := rules.locate(path)) is not None), None)
        if target is not None:
            place: Any = places[target.name]
            place.weight_loader(place, tensor, target.name, target.shard_id, target.expert_id)
            loaded.add(target.name)
        else:
            load_whole(places[path], tensor, name)
            loaded.add(path)
    return loaded


def load_whole(param: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    """Loads a parameter that is one whole checkpoint tensor.

    Raises:
        ValueError: Shape or dtype differ; nothing is cast or broadcast.
    """
    if param.shape != tensor.shape or param.dtype != tensor.dtype:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, its parameter {param.dtype} {tuple(param.shape)}"
        )
    param.data.copy_(tensor)


def finish_experts(model: nn.Module) -> None:
    """Requantises what arrived for all layers' experts and checks that weights and scales came together."""
    finish_layers(module for module in model.modules() if isinstance(module, MegaMoEExperts))


def cold_load(model: Any, weights: Weights) -> None:
    """Loads a fresh model from a checkpoint, with nothing of a reload engine in the way.

    Raises:
        ValueError: Parameters that no tensor was written to.
    """
    loaded = model.load_weights(weights)
    loadable = {path for path, p in model.named_parameters() if getattr(p, "weight_loader_numel", None) != 0}
    missing = sorted(loadable - loaded)
    if missing:
        raise ValueError(f"{len(missing)} parameters got no checkpoint tensor: {', '.join(missing[:5])}")
    model.process_weights_after_loading()
