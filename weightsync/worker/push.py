"""The reload sessions of one push: one per target, opened, fed, finished and given up together.

push = Push(models, plans, "direct", "full", rollback="none", ignore=(), version=7)
push.load("model", [(bucket, buffer)])
push.prepare()                          # hooks and audit of every target; nothing is published yet
push.publish()                          # version 7 is live on every target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightsync.control import Json
from weightsync.errors import ProtocolError
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload
from weightsync.reload.session import ReloadSession, reload_state, start_reload
from weightsync.reload.state import state_of
from weightsync.transport.buckets import Bucket

__all__ = ["Push", "TargetPlan", "live_version", "newest_version", "plan_target", "reload_state"]


def live_version(model: nn.Module) -> int | None:
    """The version of the live bytes; None before the first versioned push and while the model is torn."""
    state = state_of(model)
    return None if state.status == "torn" else state.version


def newest_version(model: nn.Module) -> int | None:
    """The newest version ever published, which the next one has to exceed; None before the first."""
    return state_of(model).newest_version


@dataclass(frozen=True)
class TargetPlan:
    """What a plan says to the transport.

    Attributes:
        manifest: What the trainer will send.
        plan_hash: The plan's hash.
        owned: Entries whose bytes this rank needs, ascending.
        ignored: Entries that it ignores on purpose.
        interpreted: Names that run through the model's own loader in each push.
    """

    manifest: Manifest
    plan_hash: str
    owned: tuple[int, ...]
    ignored: tuple[int, ...]
    interpreted: tuple[str, ...]


_ALLOWED = {
    "mode": ("direct", "layerwise"),
    "scope": ("full", "partial"),
    "rollback": ("none", "host", "device"),
    "casts": ("refuse", "allow"),
}


def _checked(name: str, value: str) -> Any:
    """A word that came over the wire, if it is one of those allowed."""
    if value not in _ALLOWED[name]:
        raise ProtocolError(f"{name} must be one of {', '.join(_ALLOWED[name])}, got {value!r:.80}")
    return value


def plan_target(
    model: nn.Module, manifest: Manifest, mode: str, scope: str, ignore: Sequence[str], casts: str = "refuse"
) -> TargetPlan:
    """Plans one target; free when nothing changed since the last time.

    Raises:
        CoverageError, LayoutError, ManifestError: The model and the manifest do not fit, with every name at fault.
    """
    plan = plan_reload(
        model,
        manifest,
        mode=_checked("mode", mode),
        scope=_checked("scope", scope),
        ignore=tuple(ignore),
        casts=_checked("casts", casts),
    )
    treatment = {name: plan.names[name].treatment for name in manifest.by_name}
    indexed = list(enumerate(manifest))
    return TargetPlan(
        manifest,
        plan.hash,
        tuple(i for i, e in indexed if treatment[e.name] not in ("skipped", "ignored")),
        tuple(i for i, e in indexed if treatment[e.name] == "ignored"),
        tuple(e.name for e in manifest if treatment[e.name] in ("opaque", "value_dependent")),
    )


class Push:
    """One push's reload sessions.

    Attributes:
        version: What `publish` makes live.
        bytes_loaded: Bytes of chunks handed to the sessions so far.
        is_announced: Whether the engine was told of the version that is about to go live.

    Args:
        models: Target name -> model; those of `plans` are opened.
        plans: What was agreed for each target of the push.
        mode: `"direct"` or `"layerwise"`.
        scope: `"full"` or `"partial"`.
        rollback: Where old bytes are kept, see `start_reload`.
        ignore: Patterns of names to ignore.
        version: See above.
        casts: `"refuse"` or `"allow"` changes of dtype by loaders.

    Raises:
        ReloadError: A session cannot be opened, or the version is not newer than the live one.
        ProtocolError: A model's layout gives another plan than the one that was agreed.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        plans: Mapping[str, TargetPlan],
        mode: str,
        scope: str,
        rollback: str,
        ignore: Sequence[str],
        version: int,
        casts: str = "refuse",
    ) -> None:
        self.version = version
        self.bytes_loaded = 0
        self.is_announced = False
        self._sessions: dict[str, ReloadSession] = {}
        options: dict[str, Any] = {
            "mode": _checked("mode", mode),
            "scope": _checked("scope", scope),
            "rollback": _checked("rollback", rollback),
            "ignore": tuple(ignore),
            "version": version,
            "casts": _checked("casts", casts),
        }
        try:
            for target, agreed in plans.items():
                session = start_reload(models[target], manifest=agreed.manifest, **options)
                self._sessions[target] = session
                found = session.plan.hash if session.plan is not None else None
                if found != agreed.plan_hash:
                    raise ProtocolError(
                        f"target {target!r}: plan {agreed.plan_hash} was agreed, the model's layout now gives plan "
                        f"{found}; push again to make a new handshake"
                    )
        except BaseException as error:
            self.abort(f"the push could not start: {error}")
            raise

    def load(self, target: str, filled: Sequence[tuple[Bucket, torch.Tensor]]) -> None:
        """Hands buckets to a target's session; their buffers may be reused when this returns."""
        self._sessions[target].load_buckets(filled)
        self.bytes_loaded += sum(bucket.num_payload_bytes for bucket, _ in filled)

    def prepare(self) -> None:
        """Ends the data: post-load hooks and the audit of every target that is not prepared yet."""
        for session in self._sessions.values():
            session.prepare()

    def publish(self) -> Json:
        """Makes the version live on every target; gives each target's report."""
        reports = {target: session.finish(self.version) for target, session in self._sessions.items()}
        return {target: report_json(report) for target, report in reports.items()}

    def abort(self, reason: str) -> None:
        """Gives up every target's session: old bytes come back where they can, else the model is torn."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            if session.is_open:
                session.abort(reason)


def report_json(report: object) -> Json:
    """The JSON-able fields of a reload report."""
    values = {name: getattr(report, name) for name in getattr(report, "__dataclass_fields__", ())}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
