"""MoE experts in DeepGEMM MegaMoE kernel layout: loaded straight into it, reloaded in place, requantised at finish.

    from megamoe_adapter import MegaMoEExperts, Routing, SharedExpert

    experts = MegaMoEExperts(256, 8, 7168, 2048, fmt="sm100_mxfp8", source="block_fp8", prefix="layers.3.mlp.experts")
    for name, tensor in checkpoint:
        experts.load(name, tensor)
    experts.finish()                               # one layer; finish_layers(all of them) waits for the device once
    y = experts(x, *Routing(top_k=8, routed_scaling_factor=2.5)(logits, bias=bias))

Importing the package loads nothing but this file; a name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "ArrivalError": "arrivals",
    "ExpertNames": "names",
    "FORMATS": "formats",
    "MegaMoEActivation": "activation",
    "MegaMoEExperts": "experts",
    "Placement": "placement",
    "Routing": "routing",
    "SOURCES": "formats",
    "SharedExpert": "shared_experts",
    "finish_layers": "finish",
    "requantize_block_fp8": "requantize",
    "resolve_ep_group": "ep_group",
    "select_format": "selection",
    "support": "kernel",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
