"""Expert weights in DeepGEMM MegaMoE kernel layout: where shards are loaded to, what has arrived, and finishing.

Why: a fused kernel wants gate and up interleaved, scales packed and permuted, and, on SM100, block FP8 requantised.
Doing that after loading means a second copy of the weights and addresses that move. Here every checkpoint shard is
written straight into its final place, so the live layout *is* the loaders' layout, and a reload in place needs no help.

    load_weights --weight_loader--> views + copy_ into kernel layout   (dry run: nothing written, nothing marked)
         |                               |
         |                          arrivals per shard  <--weights_replayed-- a reload that replayed the copies
         v                               v
    process_weights_after_loading --> finish: all shards judged, then block FP8 requantised in place, marks cleared

`MegaMoEExperts` (experts.py) adds the forward; this class is what a reload sees.

    module.w13_weight.weight_loader(module.w13_weight, tensor, "layers.3.mlp.experts.w13_weight", "w1", 7)
    module.load("layers.3.mlp.experts.7.gate_proj.weight", tensor)         # the same, by checkpoint name
    module.finish()
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megamoe_adapter.arrivals import SHARED, ArrivalTracker, Arrived, Key, union
from megamoe_adapter.bank import ROUTED_PREFIXES, SHARED_PREFIXES, Bank, split_gate_up
from megamoe_adapter.finish import finish_layers
from megamoe_adapter.global_scales import GLOBAL_KINDS, GlobalScales, split_scalars
from megamoe_adapter.interning import interned
from megamoe_adapter.names import ALL_EXPERTS, FUSED_SHARDS, SHARDS, ExpertNames, Target, is_same_path, parameter_kind
from megamoe_adapter.placement import Placement
from megamoe_adapter.reference import ExpertWeights
from megamoe_adapter.shared_experts import SharedDecision, SharedExpert

logger = logging.getLogger(__name__)


class MegaMoEWeights(nn.Module):
    """The parameters of one layer's experts on this rank, and of its fused shared expert.

    Parameters (routed; `shared_l1_*` and `shared_l2_*` alike, without the expert dim):
        `w13_weight`, `w2_weight`; packed `*_weight_scale`, or float32 `*_weight_scale_inv`, or both where the first is
        derived from the second at finish. Derived parameters have `weight_loader_numel = 0`. NVFP4: global_scales.py.

    Loading. Each loaded parameter has `weight_loader(param, tensor, name, shard_id, expert_id, return_success=False)`,
    see `weight_loader`. It writes by views and one `copy_`, reads no value, and marks an arrival unless the tensor or
    the parameter is on the meta device.

    Replayed loads. A reload that records the loaders' copies once and replays them later goes past `weight_loader`, so
    nobody would know what arrived. It must then tell the module, after the bytes are in place and before `finish`:

        module.weights_replayed(calls)       # (weight_name, shard_id, expert_id) of each `weight_loader` call

    Pass the same tuple object for the same plan: its marks are worked out once, then a push costs one set union. A
    reload that put the old bytes back calls `module.discard_arrivals()`; one that gave up and left mixed bytes calls
    `module.weights_torn()`, after it restored attributes.

    Args:
        placement: Which experts this rank holds.
        bank: Storage rules of the routed experts.
        shared: The shared expert, or None.
        decision: Whether it is fused.
        prefix: Path of the module in the model, for messages and to tell its tensors in `load`.
        device: Where the parameters live; torch's default if None.
    """

    supports_direct_reload = True

    def __init__(
        self,
        placement: Placement,
        bank: Bank,
        *,
        shared: SharedExpert | None,
        decision: SharedDecision,
        prefix: str,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.placement = placement
        self.bank = bank
        self.prefix = prefix
        self.shared_decision = interned(decision)
        self.shared_bank: Bank | None = None
        if shared is not None and decision.format is not None:
            self.shared_bank = Bank.shared(decision.format, shared.source, bank.hidden, shared.intermediate)
        self.globals = GlobalScales(placement.num_experts) if bank.format.has_global_scales else None
        self.arrivals = ArrivalTracker(placement.num_slots, shared=self.shared_fused)
        self.l2_activation_scale_value = 1.0
        self._has_derived = False
        self.names = interned(
            ExpertNames(
                bank.source.name,
                raw_scales=bank.raw_scales,
                shared_source=self.shared_bank.source.name if self.shared_bank else None,
                shared_raw_scales=self.shared_bank.raw_scales if self.shared_bank else False,
            )
        )
        # Keyed by the calls: a model walked for its tensors is not searched through the keys of a dict.
        self._replayed: dict[tuple[tuple[str, str, int], ...], Arrived] = {}  # a key, since no reload walks over keys
        self._create_parameters(device)

    @property
    def shared_fused(self) -> bool:
        """Whether this module owns the shared expert; if not, the caller builds its MLP and adds its output."""
        return self.shared_decision.fused

    @property
    def is_unfinished(self) -> bool:
        """Whether weights, scales or scalars arrived that no finish has accepted, or no load was ever finished."""
        fresh = self.arrivals.fresh_weights | self.arrivals.fresh_scales
        return not self.arrivals.has_finished or bool(fresh | (self.globals.fresh if self.globals else 0))

    def weight_loader(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int = ALL_EXPERTS,
        return_success: bool = False,
    ) -> bool | None:
        """Writes one checkpoint tensor into kernel layout.

        Args:
            param: The parameter that `weight_name` maps to, or its stand-in during a dry run or staging.
            loaded_weight: As the checkpoint has it, on any device; not kept.
            weight_name: Mapped name ("...experts.w13_weight_scale_inv") or checkpoint name; its last part decides.
            shard_id: "w1" (gate), "w3" (up), "w2" (down); "w13" for a tensor that holds gate rows, then up rows.
            expert_id: Logical expert. `ALL_EXPERTS` (-1) for a tensor whose first dim is all logical experts, and
                for the shared expert.
            return_success: Whether to return if something was written.

        Returns:
            With `return_success`: False if the expert has no slot on this rank or the name is of another shard. Else
            None.

        Raises:
            ValueError: Unknown shard or name, or a shape or dtype that does not fit.
        """
        found = self._classify(weight_name, shard_id)
        written = found is not None and self._load(param, loaded_weight, found[0], found[1], shard_id, expert_id)
        return written if return_success else None

    def load(self, name: str, tensor: torch.Tensor) -> bool | None:
        """Loads a tensor by its checkpoint name, through the parameter's `weight_loader`.

        A name is of these experts if its module path and `prefix` are equal where both say something: one ends with
        the other. "model.layers.1.experts", "layers.1.experts" and "experts" are the same module, "layers.0.experts"
        is another.

        Returns:
            True if written, False if its expert is not on this rank, None if the name is of none of these experts.

        Raises:
            ValueError: As `weight_loader`, and for an expert tensor that these experts have no place for.
        """
        module = self.names.module_of(name)
        if module is None or not is_same_path(module, self.prefix):
            return None
        target = self.locate(name)
        if target is None:
            return None
        param = getattr(self, target.param, None)
        if param is None:
            raise ValueError(f"{name} maps to {target.param}, which {self.prefix} does not have ({self._described()})")
        loaded: bool = param.weight_loader(
            param, tensor, target.name, target.shard_id, target.expert_id, return_success=True
        )
        return loaded

    def locate(self, name: str) -> Target | None:
        """The place of a checkpoint name, see `ExpertNames.locate`; None if it is not an expert's."""
        return self.names.locate(name)

    def expert_params_mapping(self, **kwargs: Any) -> list[tuple[str, str, int, str]]:
        """vLLM's table of (parameter prefix, name fragment, expert, shard); see `ExpertNames.mapping`."""
        return self.names.mapping(self.placement.num_experts, **kwargs)

    def weights_replayed(self, calls: Sequence[tuple[str, str, int]]) -> None:
        """Marks what recorded loader calls have written, after their bytes were put in place without the loaders.

        Args:
            calls: (weight_name, shard_id, expert_id) of each `weight_loader` call whose copies were replayed. Calls
                for experts of other ranks mark nothing. A tuple is worked out once and recognised by identity.

        Raises:
            ValueError: A name or shard that `weight_loader` would refuse.
        """
        calls = tuple(calls)
        if next(iter(self._replayed), None) is not calls:
            arrived = Arrived()
            for name, shard_id, expert_id in calls:
                found = self._classify(name, shard_id)
                if found is not None:
                    arrived |= self._arrived(*found, shard_id, expert_id)
            self._replayed = {calls: arrived}
        self._mark(next(iter(self._replayed.values())))  # not looked up: the hash of all calls takes its time

    def discard_arrivals(self) -> None:
        """Forgets what arrived since the last finish, for a caller that has put the old bytes back."""
        self.arrivals.forget()
        self._forget_globals()

    def weights_torn(self) -> None:
        """The bytes are a mix of two loads: forward and finish refuse until every shard arrived again."""
        self.arrivals.void()
        self._forget_globals()

    def accept_present_weights(self) -> None:
        """Declares the present bytes valid without a load (a dummy start that a full push will replace)."""
        self.arrivals.clear()
        self._forget_globals()

    def set_placement(self, physical_to_logical: Sequence[int]) -> None:
        """Follows an expert rebalancing: later loads go to the slots that now hold each logical expert.

        NVFP4's derived scalars are rewritten in place for the experts that the slots now hold; the bytes that
        `get_expert_weights` gives are the caller's to move. Plans recorded before are stale; the caller re-plans.

        Args:
            physical_to_logical: Logical expert of each physical expert, all ranks.

        Raises:
            ValueError: Wrong length, an unknown expert, or an expert without a slot.
        """
        self.placement = self.placement.moved(physical_to_logical)
        self._replayed = {}
        # Scalars that no finish has judged yet are left to the finish that judges them.
        if self.globals is not None and not self.is_unfinished:
            self.globals.derive(self, self.placement.logical_of_slot)

    def finish(self) -> int:
        """Makes loaded weights final; called once per load from the model's `process_weights_after_loading`.

        A model with several layers calls `finish.finish_layers` with all of them instead, which waits for the device
        once. Every fresh shard is judged first: both parts arrived, scales finite and not negative, no NaN codes. Then
        block FP8 is requantised in place and derived scales are written. Calling it again without new data does
        nothing.

        Returns:
            Number of shards that were fresh.

        Raises:
            ValueError: A shard is incomplete or unusable; names layer, expert, shard and what is wrong. No shard was
                touched.
        """
        return finish_layers([self])

    def requantize_block_fp8(self) -> int:
        """`finish`, under the name that vLLM's model hooks use."""
        return self.finish()

    def expert_values(self, slot: int) -> ExpertWeights:
        """A slot's weights in float32, checkpoint order, read back from kernel layout; new tensors."""
        values = self.bank.dequantize_expert(self, slot)
        if self.globals is None:
            return ExpertWeights(*values)
        return ExpertWeights(*values, *self.globals.alphas(self, slot))

    def get_expert_weights(self) -> list[torch.Tensor]:
        """(slots, -1) views of every per-slot parameter, for moving experts; packed scales in storage order."""
        views = []
        for name, param in self.named_parameters(recurse=False):
            if name.startswith(ROUTED_PREFIXES) and not name.endswith(GLOBAL_KINDS):
                data = param.data
                data = data if data.is_contiguous() else data.transpose(-1, -2)
                views.append(data.view(self.placement.num_slots, -1))
        return views

    def _create_parameters(self, device: torch.device | str | None) -> None:
        banks = [self.bank, *([self.shared_bank] if self.shared_bank else [])]
        for bank in banks:
            bank.register(self, device)
        if self.globals is not None:
            self.globals.register(self, self.placement.num_slots, device)
        loadable: list[tuple[str, tuple[str, str]]] = []
        derived: list[str] = []
        for name, param in self.named_parameters(recurse=False):
            if getattr(param, "weight_loader_numel", None) == 0:
                derived.append(name)
                continue
            for prefix in (*ROUTED_PREFIXES, *SHARED_PREFIXES):
                if name.startswith(f"{prefix}_"):
                    loadable.append((name, (prefix, name.removeprefix(f"{prefix}_"))))
        self._loadable = _as_dict(tuple(loadable))
        self._derived = interned(tuple(derived))
        self._attach_loaders()

    def _attach_loaders(self) -> None:
        """Puts on the parameters what loaders look for there; a copied parameter comes without it."""
        loader = self.weight_loader  # one bound method for all of them
        for name in self._loadable:
            getattr(self, name).weight_loader = loader
        for name in self._derived:
            getattr(self, name).weight_loader_numel = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach_loaders()

    def _classify(self, weight_name: str, shard_id: str) -> tuple[str, str] | None:
        """(prefix, kind) of a name; None if it names a parameter of another shard."""
        if shard_id not in FUSED_SHARDS and shard_id not in SHARDS:
            raise ValueError(f"unsupported expert shard id {shard_id!r}; known: {', '.join((*SHARDS, 'w13'))}")
        last = weight_name.rpartition(".")[2]
        index = int(shard_id == "w2")
        found = self._loadable.get(last)
        if found is not None:
            return found if found[0] in (ROUTED_PREFIXES[index], SHARED_PREFIXES[index]) else None
        shared = "shared_expert" in weight_name
        bank = self.shared_bank if shared else self.bank
        kind = None if bank is None else parameter_kind(bank.source, last, raw_scales=bank.raw_scales)
        prefix = bank.prefixes[index] if bank is not None else ""
        if kind is None or f"{prefix}_{kind}" not in self._loadable:
            raise ValueError(f"{weight_name} maps to nothing in {self.prefix} ({self._described()})")
        return prefix, kind

    def _load(
        self, param: torch.Tensor, tensor: torch.Tensor, prefix: str, kind: str, shard_id: str, expert_id: int
    ) -> bool:
        if self.globals is not None and kind in GLOBAL_KINDS:
            for expert, shard, scalar in split_scalars(tensor, shard_id, expert_id, self.placement.num_experts):
                self.globals.load(param, shard, expert, scalar)
        elif prefix in SHARED_PREFIXES and self.shared_bank is not None:
            for shard, part in split_gate_up(tensor, shard_id):
                self.shared_bank.load(self, param, kind, shard, 0, part)
        else:
            experts = self._experts_in(tensor, expert_id)
            for slot, part in experts:
                for shard, piece in split_gate_up(part, shard_id):
                    self.bank.load(self, param, kind, shard, slot, piece)
            if not experts:
                return False
        if not tensor.is_meta and not param.is_meta:
            self._mark(self._arrived(prefix, kind, shard_id, expert_id))
        return True

    def _experts_in(self, tensor: torch.Tensor, expert_id: int) -> list[tuple[int, torch.Tensor]]:
        """(slot, part of `tensor`) for every local slot that the tensor has something for."""
        if expert_id != ALL_EXPERTS:
            return [(slot, tensor) for slot in self.placement.slots_of(expert_id)]
        if tensor.dim() != 3 or tensor.shape[0] != self.placement.num_experts:
            raise ValueError(
                f"a fused expert tensor must be (num_experts = {self.placement.num_experts}, rows, columns), "
                f"got shape {tuple(tensor.shape)} for {self.prefix}"
            )
        return [(slot, tensor[expert]) for slot, expert in enumerate(self.placement.logical_of_slot)]

    def _arrived(self, prefix: str, kind: str, shard_id: str, expert_id: int) -> Arrived:
        """What one loader call has brought."""
        shards = FUSED_SHARDS.get(shard_id, (shard_id,))
        if self.globals is not None and kind in GLOBAL_KINDS:
            experts = range(self.placement.num_experts) if expert_id == ALL_EXPERTS else (expert_id,)
            return Arrived(globals=union(self.globals.bit(kind, e, shard) for e in experts for shard in shards))
        slots: Sequence[int | str]
        if prefix in SHARED_PREFIXES:
            slots, bank = (SHARED,), self.shared_bank
        else:
            bank = self.bank
            slots = range(self.placement.num_slots) if expert_id == ALL_EXPERTS else self.placement.slots_of(expert_id)
        bits = union(self.arrivals.bit(slot, shard) for slot in slots for shard in shards)
        if kind != "weight":
            return Arrived(scales=bits)
        # Where no scale is loaded on its own, the weight is all there is to wait for.
        return Arrived(weights=bits, scales=bits if bank is not None and bank.scale_kind is None else 0)

    def _mark(self, arrived: Arrived) -> None:
        self.arrivals.mark(weights=arrived.weights, scales=arrived.scales)
        if self.globals is not None:
            self.globals.fresh |= arrived.globals

    def check_arrivals(self) -> Sequence[Key]:
        """The shards that finish has to judge; changes nothing. For finish.py, like the three that follow.

        Raises:
            ValueError: A shard or a scalar is missing.
        """
        fresh = self.arrivals.check(self.prefix, self.placement.logical_of_slot)
        if self.globals is not None:
            self.globals.check_arrivals(
                {(self.placement.logical_of_slot[slot], shard) for slot, shard in fresh if isinstance(slot, int)},
                set(self.placement.logical_of_slot),
                first=not self.arrivals.has_finished,
                layer=self.prefix,
            )
        return fresh

    def fresh_by_bank(self, fresh: Sequence[Key]) -> list[tuple[Bank, tuple[tuple[int, str], ...]]]:
        """(bank, its fresh shards) of every bank that has some."""
        everything = self.arrivals.keys
        if fresh is everything:
            routed, shared = _all_by_bank(self.arrivals.num_slots, self.arrivals.shared)
        else:
            routed, shared = _by_bank(tuple(fresh))
        return [(bank, shards) for bank, shards in ((self.bank, routed), (self.shared_bank, shared)) if bank and shards]

    def shard_name(self, bank: Bank) -> Callable[[int, str], str]:
        """What to call a shard of a bank in a message."""
        if bank is self.shared_bank:
            return lambda slot, shard: f"shared expert {shard}"
        logical = self.placement.logical_of_slot
        return lambda slot, shard: f"expert {logical[slot]} (slot {slot}) {shard}"

    def accept_arrivals(self, activation_scale: float | None) -> None:
        """Derives what follows from the judged scalars, and closes the books.

        Args:
            activation_scale: NVFP4: the value that `l2_activation_scale` gets; None elsewhere.
        """
        if self.globals is not None and activation_scale is not None:
            self._derive_globals(self.globals, activation_scale)
        self.arrivals.clear()
        self._forget_globals()

    def _forget_globals(self) -> None:
        if self.globals is not None:
            self.globals.fresh = 0

    def _derive_globals(self, scales: GlobalScales, value: float) -> None:
        scales.derive(self, self.placement.logical_of_slot)
        if self._has_derived and value != self.l2_activation_scale_value:
            log_once(
                logging.WARNING,
                f"{self.prefix}: l2_activation_scale changed from {self.l2_activation_scale_value} to {value}; the "
                "NVFP4 kernel takes "
                "it by value, so a captured CUDA graph must be captured again",
            )
        self.l2_activation_scale_value = value
        self._has_derived = True

    def _described(self) -> str:
        return (
            f"format {self.bank.format.name} from source {self.bank.source.name}, "
            f"shared expert: {self.shared_decision.reason}"
        )


@functools.lru_cache(maxsize=64)  # most loads bring every shard
def _all_by_bank(num_slots: int, shared: bool) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
    return _by_bank(ArrivalTracker(num_slots, shared=shared).keys)


def _by_bank(fresh: tuple[Key, ...]) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
    """(slot, shard) of the routed experts, and of the shared expert, whose only slot is 0."""
    routed = tuple((slot, shard) for slot, shard in fresh if isinstance(slot, int))
    return routed, tuple((0, shard) for slot, shard in fresh if slot == SHARED)


@functools.lru_cache(maxsize=256)
def _as_dict(items: tuple[tuple[str, tuple[str, str]], ...]) -> dict[str, tuple[str, str]]:
    return dict(items)


@functools.cache
def log_once(level: int, message: str) -> None:
    """Logs a message the first time only; layers of one model would else repeat it."""
    logger.log(level, message)
