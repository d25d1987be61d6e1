"""A reload, planned: which wire bytes go to which live bytes, proved complete before the first one moves.

    plan = plan_reload(model, Manifest.from_tensors(weights))
    print(plan.explain())
    plan.names["layers.0.w1.weight"].writes        # copies to replay
    plan.hash                                      # equal on ranks with equal layouts

The plan comes from one dry run of the model's own loaders (record.py) and one proof (coverage.py). It is a plain value
that holds no tensor. It is remembered per model, so that planning the same manifest again costs a look at the
addresses, and made anew when the manifest, the layout, or a value that the loaders looked at has changed.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from weightsync.errors import CoverageError, LayoutError, PlanError, shown
from weightsync.garbage import collection_paused
from weightsync.manifest import Manifest
from weightsync.plan.coverage import Coverage, Scope, prove
from weightsync.plan.loading import Loader, Weights
from weightsync.plan.record import Casts, Recording, record
from weightsync.plan.signature import Signature
from weightsync.plan.writes import Claim, Destination, NamePlan, Treatment, Write
from weightsync.reachable import moving_again, standing_still

__all__ = ["Claim", "Destination", "NamePlan", "ReloadPlan", "Write", "check_plan", "plan_reload"]

Mode = Literal["direct", "layerwise"]
NUM_PLANS_KEPT = 8  # per model: a few manifests times a few options


@dataclass(frozen=True, eq=False)
class ReloadPlan:
    """What a reload of one manifest will do to one model.

    Attributes:
        manifest: What is on the wire.
        destinations: Live tensors that may be written; writes refer to them by index.
        names: What happens to each wire name, in wire order.
        coverage: The proof.
        modules: Path of each module with parameters -> how it is loaded.
        module_reasons: The same modules -> why.
        mode: Of the session.
        scope: "full": everything loadable has to be written. "partial": only what is named changes.
        mapping: Wire name -> name to give to the loader, where a wrapper (LoRA, torch.compile) made them differ. A name
            that is mapped to itself lands while `named_parameters` leaves wrapper components out; `Loader` sees to it.
        live_reads: Paths of live tensors whose values decided where something goes, such as expert maps.
        notes: What else a reader should know.
    """

    manifest: Manifest
    destinations: tuple[Destination, ...]
    names: Mapping[str, NamePlan]
    coverage: Coverage
    modules: Mapping[str, Mode]
    module_reasons: Mapping[str, str]
    mode: Mode
    scope: Scope
    mapping: Mapping[str, str] = field(default_factory=dict)
    live_reads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def writes(self) -> tuple[Write, ...]:
        """Every plain copy, in wire order."""
        return tuple(write for name in self.names.values() for write in name.writes)

    @cached_property
    def skipped(self) -> tuple[str, ...]:
        """Names that belong to another rank; that every name has a rank is for the handshake to prove."""
        return self._treated("skipped")

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Names that matched a pattern of `ignore`."""
        return self._treated("ignored")

    @cached_property
    def interpreted(self) -> tuple[str, ...]:
        """Names that the loaders have to be run for at push time."""
        return tuple(name for name, plan in self.names.items() if plan.treatment in ("opaque", "value_dependent"))

    @cached_property
    def module_order(self) -> tuple[str, ...]:
        """Modules that receive data, in the order in which the wire reaches them."""
        return tuple(self._names_by_module)

    def names_of(self, module: str) -> tuple[str, ...]:
        """Wire names that write a tensor of the module at this path, in wire order."""
        return self._names_by_module.get(module, ())

    def loader(self, model: torch.nn.Module) -> Loader:
        """The model's loader, with this plan's mapping of names: what interpreted names have to be given to."""
        return Loader(model, self.mapping)

    def load(self, model: torch.nn.Module, weights: Weights) -> None:
        """Runs the model's loaders on `weights` without gradients, under the names that they know."""
        with torch.no_grad():
            self.loader(model)(weights)

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the manifest, the destinations' layouts and every treatment and write; no addresses."""
        digest = hashlib.sha256(f"{self.manifest.hash} {self.mode} {self.scope}\n".encode())
        for d in self.destinations:
            numel = d.loadable_numel
            digest.update(f"{d.path} {d.dtype} {d.shape} {d.region.strides} {numel} {d.aliases}\n".encode())
        for plan in self.names.values():
            paths = [self.destinations[index].path for index in plan.destinations]
            digest.update(f"{plan.name} {plan.treatment} {self.mapping.get(plan.name)} {paths}\n".encode())
            for write in plan.writes:
                base = self.destinations[write.destination].region.offset
                dest, source = write.dest, write.source
                to, origin = (dest.offset - base, dest.strides), (source.offset, source.strides)
                digest.update(f"{dest.shape} {dest.itemsize} {to} {origin}\n".encode())
        return digest.hexdigest()

    def explain(self) -> str:
        """The plan for people: counts, bytes, what is interpreted and why, each module's mode, what is left out."""
        from weightsync.plan.explain import explain

        return explain(self)

    def _treated(self, treatment: Treatment) -> tuple[str, ...]:
        return tuple(name for name, plan in self.names.items() if plan.treatment == treatment)

    @cached_property
    def _names_by_module(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, dict[str, None]] = {}
        for name, plan in self.names.items():
            for index in plan.destinations:
                found.setdefault(self.destinations[index].module, {})[name] = None
        return {module: tuple(names) for module, names in found.items()}


@dataclass
class _Cache:
    """Plans of one model, newest last, each with what it depends on."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: dict[Any, tuple[Signature, ReloadPlan]] = field(default_factory=dict)


_CACHES: weakref.WeakKeyDictionary[torch.nn.Module, _Cache] = weakref.WeakKeyDictionary()
_CACHES_LOCK = threading.Lock()


def plan_reload(
    model: torch.nn.Module,
    manifest: Manifest,
    *,
    mode: Mode = "direct",
    scope: Scope = "full",
    ignore: Iterable[str] = (),
    casts: Casts = "refuse",
    allow_empty: bool = False,
) -> ReloadPlan:
    """Plans a reload of `manifest` into `model`, or returns the plan made before if nothing it depends on has changed.

    Runs on the engine, on each rank. Executes no write and leaves no trace on the model, even if a loader raises.

    Args:
        model: The live model; a `torch.compile` wrapper stands for what it wraps.
        manifest: What will be on the wire.
        mode: "direct" or "layerwise"; modules that may not be loaded directly fall back to layerwise one by one.
        scope: "full" demands every loadable byte; "partial" demands that what is named fits, and leaves the rest.
        ignore: Patterns (`fnmatch`) of wire names that are not to be loaded.
        casts: "refuse" or "allow" implicit changes of dtype.
        allow_empty: Accept a manifest without a name.

    Raises:
        CoverageError: Names or bytes are missing, unexpected or duplicated.
        LayoutError: A shape, dtype or loader does not fit, or a module needs `record_layouts`.
        PlanError: Both at once; it is a CoverageError and a LayoutError.
    """
    from weightsync.reload.layouts import checkpoint_layout, module_modes
    from weightsync.reload.state import unwrapped

    ignore = tuple(ignore)
    _check_options(mode, scope, casts)
    if not len(manifest) and not allow_empty:
        raise CoverageError("the manifest is empty, so nothing would be loaded; pass allow_empty=True if that is meant")
    model = unwrapped(model)
    with _CACHES_LOCK:
        cache = _CACHES.setdefault(model, _Cache())
    key = (manifest.hash, mode, scope, ignore, casts)
    with cache.lock:
        with standing_still(model):
            modes = module_modes(model, mode)
            known = cache.entries.get(key)
            if known is not None and known[0].holds(model, modes):
                cache.entries[key] = cache.entries.pop(key)
                return known[1]
        with collection_paused(), moving_again(model):
            with checkpoint_layout(model, mode):
                recording = record(model, manifest, ignore=ignore, casts=casts)
            plan = _plan_from(recording, manifest, mode, scope, modes)
        if known is not None and known[1].hash == plan.hash:
            plan = known[1]
        cache.entries.pop(key, None)
        cache.entries[key] = (Signature.of(model, modes, recording.live_reads), plan)
        while len(cache.entries) > NUM_PLANS_KEPT:
            cache.entries.pop(next(iter(cache.entries)))
        return plan


def _check_options(mode: str, scope: str, casts: str) -> None:
    options = {
        "mode": (mode, ("direct", "layerwise")),
        "scope": (scope, ("full", "partial")),
        "casts": (casts, ("refuse", "allow")),
    }
    for option, (value, allowed) in options.items():
        if value not in allowed:
            raise ValueError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")


def _plan_from(
    recording: Recording, manifest: Manifest, mode: Mode, scope: Scope, modes: Mapping[str, Any]
) -> ReloadPlan:
    """Proves coverage and makes the plan; raises for everything that is wrong, at once."""
    vague = {name for name, plan in recording.names.items() if plan.treatment == "value_dependent"}
    unseen = frozenset(vague | recording.refusals.keys())
    # What may be left out is as constructed only where loading starts from the recorded module.
    optional = frozenset(
        d.path for d in recording.destinations if d.is_optional and d.module in modes and modes[d.module].from_record
    )
    coverage = prove(recording.destinations, recording.claims, scope=scope, unseen=unseen, optional=optional)
    check_plan(recording, coverage)
    return ReloadPlan(
        manifest=manifest,
        destinations=recording.destinations,
        names={entry.name: recording.names[entry.name] for entry in manifest},
        coverage=coverage,
        modules={path: module.mode for path, module in modes.items()},
        module_reasons={path: module.reason for path, module in modes.items()},
        mode=mode,
        scope=scope,
        mapping=recording.mapping,
        live_reads=recording.live_reads,
        notes=recording.notes,
    )


def check_plan(recording: Recording, coverage: Coverage) -> None:
    """Raises for everything that a dry run and its proof found wrong, all names in one error.

    Raises:
        CoverageError: Names or bytes are missing, unexpected or duplicated.
        LayoutError: A shape, dtype or loader does not fit.
        PlanError: Both at once.
    """
    refused = [f"{name}: {message}" for name, messages in recording.refusals.items() for message in messages]
    refused += [
        f"{path}: weight_loader_numel declares {declared} elements, the load writes {written}"
        for path, declared, written in coverage.wrong_numel
    ]
    wrong = [*recording.refusals, *(path for path, _, _ in coverage.wrong_numel)]
    layout = f"{len(refused)} tensors do not fit: {'; '.join(refused[:5])}{_more(len(refused) - 5)}" if refused else ""
    if recording.unreached:  # only where the loader failed, so one of the two is raised
        layout = layout or "the loader failed too often to examine everything"
        layout += f"; {len(recording.unreached)} names were not examined: {shown(recording.unreached)}"
    missing = [name for name in coverage.missing if name not in recording.refusals]  # a name that came is not missing
    gaps = {"missing": missing, "unexpected": tuple(recording.unexpected), "duplicated": coverage.duplicated}
    if any(gaps.values()):
        reasons = list(dict.fromkeys(f"{name}: {words}" for name, words in recording.unexpected.items()))
        misfits = f"{len(reasons)} names do not fit the model ({shown(reasons, 3)})" if reasons else ""
        is_short = bool(missing or coverage.duplicated)
        incomplete = "; ".join(words for words in ("the load is not complete" if is_short else "", misfits) if words)
        if layout:
            raise PlanError(f"{layout}. {incomplete}", **gaps, names=wrong)
        raise CoverageError(incomplete, **gaps)
    if layout:
        raise LayoutError(layout, names=wrong)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
