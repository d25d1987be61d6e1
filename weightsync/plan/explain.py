"""`ReloadPlan.explain()`: a plan in words, for the person who has to trust it.

print(plan.explain())
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from weightsync.errors import shown

if TYPE_CHECKING:
    from weightsync.plan.plan import ReloadPlan
    from weightsync.plan.writes import Treatment

_LABELS: dict[Treatment, str] = {
    "copy": "copied as they are",
    "opaque": "computed by their loader",
    "value_dependent": "depend on values",
    "skipped": "not on this rank",
    "ignored": "ignored on request",
}


def explain(plan: ReloadPlan) -> str:
    """The text of `ReloadPlan.explain`."""
    manifest, coverage = plan.manifest, plan.coverage
    lines = [
        f"{len(manifest)} tensors, {manifest.num_bytes:,} bytes on the wire; "
        f"{coverage.written_bytes:,} bytes of {len(plan.destinations)} live tensors are written ({plan.scope} scope)",
    ]
    counts = Counter(name.treatment for name in plan.names.values())
    sizes: Counter[Treatment] = Counter()
    for name in plan.names.values():
        sizes[name.treatment] += manifest.by_name[name.name].num_bytes
    for treatment, label in _LABELS.items():
        if counts[treatment]:
            lines.append(f"  {counts[treatment]:>7} {label}: {sizes[treatment]:,} bytes")
    lines += _interpreted(plan)
    by_reason: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, mode in plan.modules.items():
        by_reason[mode, plan.module_reasons.get(path, "")].append(path or "(the model)")
    for (how, reason), paths in by_reason.items():
        lines.append(f"{how}: {len(paths)} modules, since {reason}: {shown(paths, 3)}")
    for label, names in (("not on this rank", plan.skipped), ("ignored", plan.ignored)):
        if names:
            lines.append(f"{label}: {shown(list(names))}")
    moved = [f"{name} -> {given}" for name, given in plan.mapping.items() if name != given]
    if moved:
        lines.append(f"mapped through wrappers: {shown(moved, 3)}")
    bare = [name for name, given in plan.mapping.items() if name == given]
    if bare:
        lines.append(f"looked up without wrapper components: {shown(bare, 3)}")
    if coverage.padding:
        padded = [f"{path} ({num_bytes:,} bytes)" for path, num_bytes in coverage.padding]
        lines.append(f"padding left as it is: {shown(padded, 3)}")
    if coverage.derived:
        lines.append(f"derived, not loaded: {shown(list(coverage.derived), 3)}")
    if plan.live_reads:
        lines.append(f"valid while these keep their values: {shown(list(plan.live_reads), 3)}")
    lines += plan.notes
    lines.append(f"plan {plan.hash[:16]}")
    return "\n".join(lines)


def _interpreted(plan: ReloadPlan) -> list[str]:
    """Names whose loader runs at push time, grouped by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name in plan.interpreted:
        by_reason[plan.names[name].reason].append(name)
    return [f"    {reason}: {shown(names, 3)}" for reason, names in by_reason.items()]
