"""Reload a live model in place: sessions, staging, post-load hooks, address audit, rollback.

`weightsync.reload` names both this package and the context manager, so the package is callable:

    with weightsync.reload(model, mode="layerwise") as session:
        session.load_weights(weights)
    session.report.num_names
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
