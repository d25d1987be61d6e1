"""Reload a live model in place: sessions, staging, post-load hooks, address audit, rollback.

`weightsync.reload` names both this package and the context manager, so the package is callable:

    with weightsync.reload(model, mode="layerwise") as session:
        session.load_weights(weights)
    session.report.num_names

In the order in which data goes through it: session, transaction (the lifecycle) -> layouts, layerwise (who is staged,
and how) -> intake (checks and routes each tensor) -> direct, packing, schedule, held (where it goes, and when) ->
hooks/ (post-load hooks, once, in order, and their results into live storage) -> audit. journal: rollback.

What a model may say. vLLM's models have the first three already, the rest are optional extras:

    load_weights(weights)                     the model's loader; without one, names are parameter paths
    parameter.weight_loader(...)              a parameter's loader, called by the model's
    process_weights_after_loading(...)        post-load hook, of a module or of its `quant_method`
    parameter.weight_loader_numel             elements that loaders write; 0: derived, never loaded
    parameter.weight_loader_optional          a checkpoint may lack it; it is then as constructed (with a record)
    supports_direct_reload = True             the live layout is the loaders' layout, before and after the hooks
    refresh_derived()                         recomputes in place what forward otherwise builds lazily
    weights_replayed(calls)                   told which loader calls were replayed as copies
    discard_arrivals()                        told that old bytes were put back
    asleep, pending_expert_moves              true: a reload is refused for now
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from weightsync.reload.session import reload

        return reload(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
