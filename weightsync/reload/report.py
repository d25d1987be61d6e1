"""What a finished reload did, as a value.

report = finish_reload(model)
report.num_names, report.num_bytes, report.fallbacks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReloadReport:
    """One finished reload.

    Attributes:
        mode: "direct" or "layerwise", as asked for.
        scope: "full" or "partial".
        version: The version that is live now; None if the push had none.
        num_names: Wire names received.
        num_bytes: Their bytes.
        plan_hash: Hash of the plan that was carried out.
        interpreted: Names whose loader was run, with the reason.
        dropped: Names that this rank does not hold, or that were ignored.
        fallbacks: Modules that were staged although the session is direct, with the reason.
        hooks: Post-load hooks that ran, in order.
        uncalled_hooks: Hooks with arguments that only the model's own code has, and that nothing called.
        host_scalars: Python numbers in the model that changed: path -> (before, after). A captured graph that was given
            one as an argument still has the old one.
        zeroed: Parameters with elements that no name writes, which are zeros now: what they were before the first load
            is not known, since it was neither small nor simple. Let the loader write them, or keep the unprocessed
            tensor under another name and have the hook copy it.
        unobserved: Hooks whose first run nobody saw (`record_layouts` came late, or they were called past their
            instances), so that this reload had to find out by trial which state is theirs.
        added: Paths that hold a tensor now and held none before.
        rebuilt_on_forward: Caches that a module's forward builds for itself: emptied now, built again by the next
            forward, and then at their old address. Run one forward before a captured graph that reads them is
            replayed, or give the module a `refresh_derived()`.
        peak_staged_bytes: The most bytes of staged copies at any time.
        peak_held_bytes: The most bytes of held copies of tensors that came before their turn, or before others that
            their loader needs with them.
        spilled_bytes: Bytes that were held in host memory or a file instead.
        journal_bytes: Old bytes kept for rollback.
        seconds: Time of the stages "plan", "load", "hooks" and "audit".
    """

    mode: str
    scope: str
    version: int | None = None
    num_names: int = 0
    num_bytes: int = 0
    plan_hash: str = ""
    interpreted: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    uncalled_hooks: list[str] = field(default_factory=list)
    host_scalars: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    zeroed: list[str] = field(default_factory=list)
    unobserved: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    rebuilt_on_forward: list[str] = field(default_factory=list)
    peak_staged_bytes: int = 0
    peak_held_bytes: int = 0
    spilled_bytes: int = 0
    journal_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
