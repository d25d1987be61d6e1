"""What the package remembers about one model: its lifecycle, its version, its layout records, its plans.

    live -> loading -> live | torn          torn -> loading -> live | torn

The state hangs on the model itself, so that it lives and dies with it; it is not part of `state_dict`. A deep copy of a
model takes the records along, but neither version nor session.

    state_of(model).status     # "live", "loading" or "torn"
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from weightsync.reload.hooks.live_names import LiveNames

if TYPE_CHECKING:
    from weightsync.manifest import Manifest
    from weightsync.reload.direct import BoundPlan
    from weightsync.reload.hooks.first_load import FirstLoad
    from weightsync.reload.hooks.post_load import Recorded
    from weightsync.reload.layouts import ModuleRecord
    from weightsync.reload.transaction import ReloadSession

# What a copy of a model takes along.
_COPIED = (
    *("records", "hooks", "compounding", "harmless", "unread", "latches", "settings", "reach", "reads", "known"),
    "first_handle",
)
Status = Literal["live", "loading", "torn"]
_ATTRIBUTE = "_weightsync_state"


@dataclass(eq=False)
class ModelState:
    """Everything remembered about one model.

    Attributes:
        lock: Held for every change of `status`.
        status: Where the model is in its lifecycle.
        session: The open session, if any.
        version: Version of the live bytes; None if they have none.
        newest_version: Newest version ever published; the next one must be greater.
        records: Layout of each module before its first post-load hook, from `record_layouts`.
        hooks: Post-load hooks as recorded: owner and method of each, by module.
        last_manifest: Manifest of the last finished session, so that the next one need not be told.
        bound: The last plan bound to live tensors, reused while plan and addresses stay the same.
        compounding: Paths of tensors that are not loaded and that hooks were seen to process in place; hooks find their
            recorded value.
        harmless: Paths of tensors that are not loaded, not as recorded, and that hooks were seen not to process.
        unread: Those that are not as recorded and that hooks did not look at so far, so that nothing is known of them.
        latches: Names that hooks set themselves; hooks find the recorded value.
        settings: Names that they do not set, or only count in; hooks find the live value.
        reach: By name of a module-stage hook that ran: modules that it looked into, outside its own and those below.
        reads: The same, of those whose tensors it looked at.
        known: Names of hooks that ran and were looked at.
        first_load: Observes the first load's hooks; None before `record_layouts` and once a reload came.
        first_handle: The number that torch gave next when the model was recorded; see registered.py.
        kept: Results that follow from the model's Python state; see unchanged.py.
        torn_by: What tore the model, for messages.
        gate: Handles of the forward pre-hook that refuses to serve.
    """

    lock: threading.RLock = field(default_factory=threading.RLock)
    status: Status = "live"
    session: ReloadSession | None = None
    version: int | None = None
    newest_version: int | None = None
    records: dict[torch.nn.Module, ModuleRecord] = field(default_factory=dict)
    hooks: Recorded = field(default_factory=dict)
    last_manifest: Manifest | None = None
    bound: BoundPlan | None = None
    compounding: set[str] = field(default_factory=set)
    harmless: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    latches: set[str] = field(default_factory=set)
    settings: LiveNames = field(init=False)
    reach: dict[str, frozenset[str]] = field(default_factory=dict)
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    first_load: FirstLoad | None = None
    first_handle: int = 0
    kept: dict[Hashable, Any] = field(default_factory=dict)
    torn_by: str = ""
    gate: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = LiveNames(self.latches)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        """A copy of a model is as its original was recorded, and lives a life of its own otherwise."""
        if self.first_load is not None:
            self.first_load.settle()
        copied = memo[id(self)] = ModelState()
        for name in _COPIED:
            setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
        return copied

    def end_first_load(self) -> None:
        """Takes in what was observed; called once a reload comes."""
        if self.first_load is not None:
            self.first_load.close()
            self.first_load = None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _fresh_state, ()


def _fresh_state() -> ModelState:
    return ModelState()


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a `torch.compile` wrapper, else the model itself."""
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return unwrapped(inner) if isinstance(inner, torch.nn.Module) else model


def state_of(model: torch.nn.Module) -> ModelState:
    """The state of a model, made on first use; one for a model and its `torch.compile` wrapper."""
    attributes = unwrapped(model).__dict__
    state = attributes.get(_ATTRIBUTE)
    if not isinstance(state, ModelState):
        state = attributes.setdefault(_ATTRIBUTE, ModelState())
    return state
