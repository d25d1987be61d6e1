"""Push new weights into a live model: proved complete, address-stable, byte-identical to a cold load.

    import weightsync

    weightsync.record_layouts(model)                           # once, before the first load's post-load hooks
    before = weightsync.fingerprint(model)
    with weightsync.reload(model, mode="direct") as session:
        session.load_weights(weights)
    diff = weightsync.fingerprint(model).diff(before)          # diff.differing, diff.moved, diff.added, diff.removed

Names load on first use, so that importing the package costs little more than importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.errors import (
        CoverageError,
        LayoutError,
        ManifestError,
        PeerFailed,
        ProtocolError,
        ReloadError,
        TornModelError,
        TransportError,
        TransportTimeout,
        VerifyError,
        WeightSyncError,
    )
    from weightsync.manifest import Manifest, ParamMeta
    from weightsync.plan.plan import ReloadPlan, plan_reload
    from weightsync.reload.layouts import record_layouts
    from weightsync.reload.report import ReloadReport
    from weightsync.reload.session import (
        abort_reload,
        finish_reload,
        live_version,
        reload,
        reload_state,
        start_reload,
    )
    from weightsync.reload.transaction import ReloadSession
    from weightsync.trainer.client import TrainerClient
    from weightsync.trainer.report import PushReport
    from weightsync.trainer.sources import CheckpointSource, ModuleSource, TensorSource, WeightSource
    from weightsync.verify import Fingerprint, fingerprint
    from weightsync.worker.receiver import Receiver
    from weightsync.worker.server import serve

__all__ = [
    "CheckpointSource",
    "CoverageError",
    "Fingerprint",
    "LayoutError",
    "Manifest",
    "ManifestError",
    "ModuleSource",
    "ParamMeta",
    "PeerFailed",
    "ProtocolError",
    "PushReport",
    "Receiver",
    "ReloadError",
    "ReloadPlan",
    "ReloadReport",
    "ReloadSession",
    "TensorSource",
    "TornModelError",
    "TrainerClient",
    "TransportError",
    "TransportTimeout",
    "VerifyError",
    "WeightSource",
    "WeightSyncError",
    "abort_reload",
    "fingerprint",
    "finish_reload",
    "live_version",
    "plan_reload",
    "record_layouts",
    "reload",
    "reload_state",
    "serve",
    "start_reload",
]

_MODULES = {
    "weightsync.errors": [name for name in __all__ if name.endswith("Error")] + ["PeerFailed", "TransportTimeout"],
    "weightsync.manifest": ["Manifest", "ParamMeta"],
    "weightsync.plan.plan": ["ReloadPlan", "plan_reload"],
    "weightsync.reload.layouts": ["record_layouts"],
    "weightsync.reload.report": ["ReloadReport"],
    "weightsync.reload.session": [
        "abort_reload",
        "finish_reload",
        "live_version",
        "reload",
        "reload_state",
        "start_reload",
    ],
    "weightsync.reload.transaction": ["ReloadSession"],
    "weightsync.trainer.client": ["TrainerClient"],
    "weightsync.trainer.report": ["PushReport"],
    "weightsync.trainer.sources": ["CheckpointSource", "ModuleSource", "TensorSource", "WeightSource"],
    "weightsync.verify": ["Fingerprint", "fingerprint"],
    "weightsync.worker.receiver": ["Receiver"],
    "weightsync.worker.server": ["serve"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    # `weightsync.reload` is also the package of that name, which is callable and calls the function.
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
