"""The first load of a model, in the order that every reload repeats.

An engine with a loader of its own calls `record_layouts` in it and needs nothing from here. For one without, and for
tests, this is the whole first load:

    model = Model(config)
    cold_load(model, weights)          # records layouts, loads, runs post-load hooks
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.plan.loading import Loader
from weightsync.reload.hooks.post_load import HookGuards, activation_dtype, hooks_in_order
from weightsync.reload.layouts import modules_of, record_layouts
from weightsync.reload.state import state_of, unwrapped


@torch.no_grad()
def cold_load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads a freshly constructed model.

    Args:
        model: As constructed; layouts are recorded unless that was done already.
        weights: `(name, tensor)` pairs; they may be reused afterwards.
    """
    model = unwrapped(model)
    if not state_of(model).records:
        record_layouts(model)
    hooks = hooks_in_order(modules_of(model).items())
    dtype = activation_dtype(model)
    with HookGuards(hooks) as guards:
        Loader(model)(weights)
        guards.allow(hooks)
        for hook in hooks:
            guards.run(hook, dtype)
