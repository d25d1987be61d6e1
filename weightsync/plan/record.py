"""The dry run: what a model's own loaders would do with the tensors of a manifest, found out without moving a byte.

    recording = record(model, manifest)
    recording.claims        # who writes which bytes of which destination
    recording.names["layers.0.w1.weight"].treatment

`load_weights` runs once over meta tensors (dry_run.py says what is noted and what is executed, examine.py what happens
when it raises). If the loaders change Python state of the model, it runs once more to see which names do so
(side_effects.py): those are interpreted, too. Whatever happens, the model's Python state is put back.

A dry run sees what the loader does in the calling thread: torch's modes hold for one thread. A loader that hands
tensors to threads of its own, and writes live bytes there, is beyond it.
"""

from __future__ import annotations

import fnmatch
import gc
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightsync.errors import LayoutError, shown
from weightsync.manifest import Manifest
from weightsync.plan.examine import Examination
from weightsync.plan.foreign import Foreign
from weightsync.plan.ledger import Ledger, storage_key
from weightsync.plan.loading import observe
from weightsync.plan.regions import Region
from weightsync.plan.side_effects import Watch
from weightsync.plan.tally import overlaps
from weightsync.plan.writes import Claim, Destination, NamePlan, Write, layout_text
from weightsync.python_state import PythonState
from weightsync.reachable import Slot, modules_left_out, walk

Casts = Literal["refuse", "allow"]
_KIND_ORDER = {"parameter": 0, "buffer": 1, "attribute": 2}


@dataclass
class Recording:
    """What a dry run found.

    Attributes:
        destinations: Live tensors that a load may write; parameters first, then buffers, then plain attributes.
        claims: Every write, copied or computed.
        names: What happens to each name; names that failed are not in it.
        refusals: Per name, why its shape, dtype or loader cannot be accepted.
        unexpected: Per name, why no destination takes it.
        mapping: Wire name -> name that was given to the loader, where a wrapper made them differ; a name that landed
            with bare parameter names is mapped to itself.
        live_reads: Paths of live tensors whose values the loader looked at: if they change, the plan is void.
        notes: What else a reader of the plan should know.
        unreached: Names that were not examined, since the loader failed too often before it got to them.
    """

    destinations: tuple[Destination, ...]
    claims: tuple[Claim, ...]
    names: dict[str, NamePlan]
    refusals: dict[str, list[str]] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    mapping: dict[str, str] = field(default_factory=dict)
    live_reads: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()


def record(
    model: torch.nn.Module, manifest: Manifest, *, ignore: Sequence[str] = (), casts: Casts = "refuse"
) -> Recording:
    """Dry-runs `model.load_weights` over the tensors of `manifest`. Executes no write and leaves no trace on the model.

    Args:
        model: The live model, or one whose staged modules hold meta placeholders.
        manifest: What will be on the wire.
        ignore: Patterns (`fnmatch`) of wire names that are not to be loaded.
        casts: "refuse" makes an implicit change of dtype in a copy an error; "allow" lets the loader compute it.

    Returns:
        The findings, bad names among them: nothing is raised for those here.

    Raises:
        LayoutError: The loader writes live tensors in a way that can't be repeated name by name.
    """
    recording, changed = _dry_run(model, manifest, ignore, casts)
    if changed:  # again, to see whose loader did it
        recording, _ = _dry_run(model, manifest, ignore, casts, changed)
    return recording


def _dry_run(
    model: torch.nn.Module,
    manifest: Manifest,
    ignore: Sequence[str],
    casts: Casts,
    watched: Sequence[str] | None = None,
) -> tuple[Recording, list[str]]:
    """One run; also returns the paths of holders whose Python state the loaders changed.

    Args:
        model: The model.
        manifest: What will be on the wire.
        ignore: Patterns of names.
        casts: Whether changes of dtype are accepted.
        watched: Holders that an earlier run saw change: names are blamed for that.
    """
    slots = walk(model)
    destinations, tensors = find_destinations(slots)
    ledger = Ledger(destinations, allow_casts=casts == "allow")
    for index, tensor in enumerate(tensors):
        ledger.add_destination(index, tensor)
    ignored = {entry.name for entry in manifest if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in ignore)}
    changed: list[str] = []
    run = Examination(model, ledger, [entry for entry in manifest if entry.name not in ignored])
    state = PythonState.capture(model)
    try:
        observe(model, ledger)
        watch = Watch(model, watched)
        ledger.watch = watch if watched is not None else None
        run.examine()
        if watched is None:
            changed = watch.changed()
        else:
            ledger.begin(None)
        held = _held(ledger)
        _note_new_tensors(model, slots, ledger)
        _refuse_strangers(model, ledger)
    finally:
        state.restore()
        ledger.close()
    recording = _conclude(run, held)
    for name in ignored:
        recording.names[name] = NamePlan(name, "ignored", "matches a pattern of ignore")
    return recording, changed


def find_destinations(slots: Iterable[Slot]) -> tuple[list[Destination], list[torch.Tensor]]:
    """Live tensors with distinct bytes, parameters first; slots of equal bytes become aliases of one destination.

    Raises:
        LayoutError: Parameters or buffers keep their bytes in inner tensors, as DTensors do, where no copy can be seen.
    """
    slots = list(slots)
    inner = [slot.path for slot in slots if slot.kind != "attribute" and is_traceable_wrapper_subclass(slot.tensor)]
    if inner:
        raise LayoutError(
            f"{len(inner)} tensors keep their bytes in inner tensors: {shown(inner)}; a reload writes plain ones only",
            names=inner,
        )
    storages: dict[int, int] = {}
    grouped: dict[tuple[int, Region], list[Slot]] = {}
    for slot in sorted(slots, key=lambda slot: _KIND_ORDER[slot.kind]):
        key = storage_key(slot.tensor) if slot.tensor.layout == torch.strided else 0
        if key == 0:
            continue  # sparse and storage-less tensors have no bytes that a copy could name
        number = storages.setdefault(key, len(storages))
        grouped.setdefault((number, Region.of(slot.tensor).coalesced()), []).append(slot)
    destinations, tensors = [], []
    for (number, _), (first, *others) in grouped.items():
        destinations.append(_destination(first, number, tuple(slot.path for slot in others)))
        tensors.append(first.tensor)
    return destinations, tensors


def _destination(slot: Slot, storage: int, aliases: tuple[str, ...] = (), late: bool = False) -> Destination:
    tensor = slot.tensor
    numel = getattr(tensor, "weight_loader_numel", None)
    shape, region = tuple(tensor.shape), Region.of(tensor)
    is_optional = bool(getattr(tensor, "weight_loader_optional", False))
    return Destination(
        slot.path, aliases, slot.module, slot.kind, shape, tensor.dtype, region, storage, numel, late, is_optional
    )


def _held(ledger: Ledger) -> frozenset[str]:
    """Names whose tensor the model still holds, now that the loader has returned."""
    held = ledger.held()
    if held:
        gc.collect()  # reference cycles hold nothing on purpose
        held = ledger.held()
    return held


def _note_new_tensors(model: torch.nn.Module, before: list[Slot], ledger: Ledger) -> None:
    """Places that hold another tensor than before, or did not exist: rebound or registered late."""
    old = {slot.path: slot for slot in before}
    paths = {path: index for index, d in enumerate(ledger.destinations) for path in (d.path, *d.aliases)}
    num_storages = 1 + max((d.storage for d in ledger.destinations), default=-1)
    for slot in walk(model):
        known = old.get(slot.path)
        holding = ledger.of(slot.tensor)
        writes = [(names, region) for names, region in ledger.claims_elsewhere(slot.tensor) if names]
        if holding is not None and not writes and not holding.destinations and holding.names:
            writes = [(holding.names, Region.of(slot.tensor))]
        if not writes or (holding is not None and holding.destinations):
            continue
        if known is None and slot.kind == "attribute":
            continue  # the model keeps something of the source, which makes its name opaque
        names = frozenset().union(*(names for names, _ in writes))
        ledger.rebound |= names
        if known is None:
            index = len(ledger.destinations)
            ledger.destinations.append(_destination(slot, num_storages, late=True))
            num_storages += 1
            for writers, region in writes:
                ledger.add_claim(Claim(tuple(sorted(writers)), index, region, None))
            continue
        index = paths[slot.path]
        if known.tensor.shape != slot.tensor.shape or known.tensor.dtype != slot.tensor.dtype:
            ledger.refuse_copy(names, known.tensor, slot.tensor, "its loader puts another tensor in place")
        base = ledger.destinations[index].region
        for writers, region in writes:
            shifted = Region(region.offset - Region.of(slot.tensor).offset + base.offset,
                             region.shape, region.strides, region.itemsize)  # fmt: skip
            same = slot.tensor.stride() == known.tensor.stride()
            ledger.add_claim(Claim(tuple(sorted(writers)), index, shifted if same else base, None))


def _refuse_strangers(model: torch.nn.Module, ledger: Ledger) -> None:
    """Names that write a module that was left out of this model: the one that it belongs to is loaded by itself."""
    for module in modules_left_out(model):
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            for names, _ in ledger.claims_elsewhere(tensor):
                ledger.refuse(
                    names,
                    f"its loader writes a {type(module).__name__} that belongs to another model, which this one shares "
                    "it with; leave the name out here, and send the tensor to that model",
                )


def _conclude(run: Examination, held: frozenset[str]) -> Recording:
    """Turns the ledger into one `NamePlan` per name, and into refusals."""
    ledger = run.ledger
    _refuse_dependent(ledger)
    by_name: dict[str, list[Claim]] = defaultdict(list)
    for claim in ledger.claims:
        for name in claim.names:
            by_name[name].append(claim)
    written_at = {claim.destination for claim in ledger.claims}
    for reader, index in ledger.live_reads:
        if reader is not None and index in written_at:
            where = ledger.destinations[index].path
            reason = f"its loader looks at the live value of {where}, which this load writes"
            ledger.value_reads.setdefault(reader, reason)
    together = _joint(ledger.claims, run.entries)
    names: dict[str, NamePlan] = {}
    unexpected: dict[str, str] = {}
    for name in run.entries:
        looked_up, words = run.failures.get(name, (False, ""))
        if words and (name in by_name or not looked_up):
            entry = run.entries[name]
            ledger.refuse([name], f"its loader raised {words} on {layout_text(entry.dtype, entry.shape)}")
        elif words:
            unexpected[name] = f"the loader raised {words}"
        else:
            plan = _plan_of(name, by_name.get(name, []), ledger, held, together.get(name, ()))
            if plan is not None:
                names[name] = plan
    elsewhere = Foreign(run.loader.module, by_name, ledger.destinations)
    unreached = run.unreached()
    known = names.keys() | unexpected.keys() | ledger.refusals.keys() | set(unreached)
    for name in [name for name in run.entries if name not in known]:
        reason = elsewhere.why(name)
        if reason:
            names[name] = NamePlan(name, "skipped", reason)
        else:
            unexpected[name] = "load_weights wrote nothing from it"
    return Recording(
        tuple(ledger.destinations), tuple(ledger.claims), names, dict(ledger.refusals), unexpected, run.mapping,
        tuple(sorted({ledger.destinations[i].path for who, i in ledger.live_reads if not who or i not in written_at})),
        _notes(ledger), unreached,
    )  # fmt: skip


def _refuse_dependent(ledger: Ledger) -> None:
    """Values computed from live bytes that this very load writes differ each time: no reload could repeat them."""
    written: dict[int, list[Region]] = defaultdict(list)
    for claim in ledger.claims:
        written[ledger.destinations[claim.destination].storage].append(claim.region)
    for names, live, target in ledger.dependent:
        for index in live & {i for i in live if written[ledger.destinations[i].storage]}:
            source, where = ledger.destinations[index], ledger.destinations[target].path
            ledger.refuse(
                names,
                f"its loader computes {where} from the old bytes of {source.path}, which this load writes; "
                "a reload would apply it to its own result",
            )
    for index, region in ledger.nameless:
        number = ledger.destinations[index].storage
        if any(
            ledger.destinations[c.destination].storage == number and overlaps(c.region, region) for c in ledger.claims
        ):
            path = ledger.destinations[index].path
            raise LayoutError(
                f"{path}: load_weights writes it outside of any weight and weights write it too, so it can't be "
                "repeated weight by weight; write it where its weight is loaded",
                names=[path],
            )


def _joint(claims: Sequence[Claim], wire_order: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Names that one value is computed from, closed over shared names, in wire order."""
    groups: dict[str, set[str]] = {}
    for claim in claims:
        if len(claim.names) > 1:
            merged = set(claim.names).union(*(groups.get(name, ()) for name in claim.names))
            for name in merged:
                groups[name] = merged
    place = {name: index for index, name in enumerate(wire_order)} if groups else {}
    return {name: tuple(sorted(group, key=place.__getitem__)) for name, group in groups.items()}


def _plan_of(
    name: str, claims: list[Claim], ledger: Ledger, held: frozenset[str], together: tuple[str, ...]
) -> NamePlan | None:
    """The plan of one name; None if it wrote nothing and nothing says why."""
    indices = tuple(dict.fromkeys(claim.destination for claim in claims))
    rebinds = name in ledger.rebound
    if name in ledger.value_reads:
        return NamePlan(name, "value_dependent", ledger.value_reads[name], (), indices, together, rebinds)
    if not claims:
        if name in held:
            return NamePlan(name, "opaque", "the model keeps the tensor after loading it", (), (), together, rebinds)
        if name in ledger.foreign_experts:
            return NamePlan(name, "skipped", f"expert {ledger.foreign_experts[name]} is not on this rank")
        return None
    reason = _why_opaque(claims, ledger, name in held, rebinds, together)
    if reason:
        return NamePlan(name, "opaque", reason, (), indices, together, rebinds)
    writes = tuple(
        dict.fromkeys(Write(name, claim.destination, claim.region, claim.source) for claim in claims if claim.source)
    )
    return NamePlan(name, "copy", "", writes, indices)


def _why_opaque(claims: list[Claim], ledger: Ledger, held: bool, rebinds: bool, together: tuple[str, ...]) -> str:
    paths = shown(list(dict.fromkeys(ledger.destinations[claim.destination].path for claim in claims)), 2)
    if rebinds:
        return f"its loader puts another tensor in the place of {paths}"
    if together:
        return f"one value is computed from {shown(together, 3)}"
    if any(claim.source is None for claim in claims):
        return f"its loader computes what it writes to {paths}"
    if held:
        return "the model keeps the tensor after loading it"
    distinct = list(dict.fromkeys((claim.destination, claim.region, claim.source) for claim in claims))
    effects = ledger.watch.effects if ledger.watch is not None else {}
    for name in dict.fromkeys(name for claim in claims for name in claim.names):
        if name in effects:
            return f"its loader also changes Python state of the model: {effects[name]}"
    if len(distinct) > 1 and _overlap_each_other(
        [region for _, region, _ in distinct], [d for d, _, _ in distinct], ledger
    ):
        return f"its loader writes some bytes of {paths} more than once"
    return ""


def _overlap_each_other(regions: list[Region], indices: list[int], ledger: Ledger) -> bool:
    pairs: dict[int, list[Region]] = defaultdict(list)
    for region, index in zip(regions, indices, strict=True):
        mine = pairs[ledger.destinations[index].storage]
        if any(overlaps(region, other) for other in mine):
            return True
        mine.append(region)
    return False


def _notes(ledger: Ledger) -> tuple[str, ...]:
    paths = sorted({ledger.destinations[index].path for index, _ in ledger.nameless})
    return (
        (f"load_weights writes {shown(paths)} outside of any weight; a reload leaves that as it is",) if paths else ()
    )
