"""NVFP4's float32 scales: one per expert and projection, beside the block scales.

Why apart from the weights: the kernel takes *one* first-GEMM scale per expert, so gate and up have to agree, and
*one* input scale for the second GEMM, the largest over all experts, also those that live on other ranks. So every
rank loads the scalars of all logical experts, in any order and in any number of updates, and only `finish` compares
and reduces them.

    loaded, L logical experts                         derived at finish, E local slots
    w13_weight_scale_2  (L, 2)  gate, up        ->    l1_alpha (E,)             gate == up, of the slot's expert
    w2_weight_scale_2   (L,)                    ->    l2_alpha (E,)             w2_weight_scale_2 * l2_activation_scale
    w2_input_scale      (L,)                    ->    l2_activation_scale ()    max over all experts, 1 if that is 0
    w13_input_scale     (L, 2)                        not used: tokens are dispatched with a scale of their own

Use:

    scales = GlobalScales(num_experts)
    scales.register(module, device)
    scales.load(module.w2_input_scale, "w2", expert, tensor)
    scales.check(module, layer)                           # ValueError naming the expert if gate and up differ
    scales.derive(module, logical_of_slot)

Source: vLLM 0.33's MegaMoE experts (NVFP4 rules); real weight = e2m1 * block scale * weight_scale_2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megamoe_adapter.layout import HALF_OF_SHARD
from megamoe_adapter.names import ALL_EXPERTS, FUSED_SHARDS, SHARDS
from weightsync.errors import shown

GLOBAL_KINDS = ("weight_scale_2", "input_scale")
# Gate and up are calibrated together; more than this apart they are different scales.
RELATIVE_TOLERANCE = 1e-5
# The loaded tables that a launch needs.
_USED = ("w13_weight_scale_2", "w2_weight_scale_2", "w2_input_scale")


class GlobalScales:
    """The scalars of all logical experts, and what a launch needs of them.

    Args:
        num_experts: Logical experts L.

    Attributes:
        fresh: Bits (see `bit`) of the scalars that arrived since the last finish.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.fresh = 0

    def bit(self, kind: str, expert: int, shard: str) -> int:
        """The integer with one bit set that stands for one scalar."""
        row = self.num_experts * GLOBAL_KINDS.index(kind) + expert
        return 1 << (len(SHARDS) * row + SHARDS.index(shard))

    def register(self, module: nn.Module, num_slots: int, device: torch.device | str | None) -> None:
        """Adds the loaded and the derived parameters to `module`, zeroed."""
        for kind in GLOBAL_KINDS:
            module.register_parameter(f"w13_{kind}", _scalars(self.num_experts, 2, device=device))
            module.register_parameter(f"w2_{kind}", _scalars(self.num_experts, device=device))
        for name, shape in (("l1_alpha", (num_slots,)), ("l2_alpha", (num_slots,)), ("l2_activation_scale", ())):
            derived = _scalars(*shape, device=device)
            derived.weight_loader_numel = 0  # type: ignore[attr-defined]
            module.register_parameter(name, derived)

    def load(self, param: torch.Tensor, shard: str, expert: int, tensor: torch.Tensor) -> None:
        """Writes one scalar.

        Args:
            param: The table, (L, 2) for w1 and w3 or (L,) for w2.
            shard: "w1", "w2" or "w3".
            expert: Logical expert.
            tensor: float32 with one element.

        Raises:
            ValueError: Not one float32 element, or no such expert.
        """
        if tensor.numel() != 1 or tensor.dtype != torch.float32:
            raise ValueError(
                f"global scale of expert {expert} {shard} must be one float32, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"global scale of expert {expert}: there are {self.num_experts} logical experts")
        row = param.data[expert]
        (row if shard == "w2" else row[HALF_OF_SHARD[shard]]).copy_(tensor.reshape(()))

    def check_arrivals(
        self,
        fresh_shards: set[tuple[int, str]],
        local_experts: set[int],
        *,
        first: bool,
        layer: str,
    ) -> None:
        """Checks that scalars came with the weights they belong to.

        Args:
            fresh_shards: (logical expert, shard) of the local shards whose weights did.
            local_experts: Logical experts of this rank.
            first: Whether the layer was never finished: then every scalar of every expert is needed.
            layer: For the message.

        Raises:
            ValueError: A scalar is missing, or arrived without its weight; names the experts.
        """
        fresh = {
            (kind, expert, shard)
            for kind in GLOBAL_KINDS
            for expert in range(self.num_experts)
            for shard in SHARDS
            if self.fresh & self.bit(kind, expert, shard)
        }
        if first:
            needed = {(kind, e, s) for kind in GLOBAL_KINDS for e in range(self.num_experts) for s in SHARDS}
        else:
            needed = {("weight_scale_2", e, s) for e, s in fresh_shards}
        missing = sorted(needed - fresh)
        if missing:
            names = [f"expert {expert} {shard} {kind}" for kind, expert, shard in missing]
            raise ValueError(
                f"{layer}: {len(missing)} NVFP4 scales did not arrive: {shown(names)}; send them, then finish again"
            )
        lone = sorted(
            (e, s)
            for kind, e, s in fresh
            if kind == "weight_scale_2" and e in local_experts and (e, s) not in fresh_shards
        )
        if lone:
            names = [f"expert {expert} {shard}" for expert, shard in lone]
            raise ValueError(
                f"{layer}: {len(lone)} weight_scale_2 arrived without their weight and block scale: {shown(names)}; "
                "they belong "
                "together, send all three"
            )

    def alphas(self, module: nn.Module, slot: int) -> tuple[float, float]:
        """Factors of a slot on the first and the second GEMM as last derived, without the activation scale."""
        activation_scale = float(_data(module, "l2_activation_scale")) or 1.0
        return float(_data(module, "l1_alpha")[slot]), float(_data(module, "l2_alpha")[slot]) / activation_scale

    def derive(self, module: nn.Module, logical_of_slot: Sequence[int]) -> None:
        """Writes the derived scalars in place, from loaded ones that `check` has accepted.

        Args:
            module: Owner of the parameters.
            logical_of_slot: Logical expert of each local slot.
        """
        l1, l2, l2_input = (_data(module, name) for name in _USED)
        slots = torch.tensor(logical_of_slot, dtype=torch.int64, device=l1.device)
        activation_scale = _activation_scale(l2_input)
        _data(module, "l1_alpha").copy_(l1[slots, 0])
        _data(module, "l2_activation_scale").copy_(activation_scale)
        _data(module, "l2_alpha").copy_(l2[slots] * activation_scale)

    def judged(self, module: nn.Module) -> torch.Tensor:
        """What `check` would find, without waiting for the device and changing nothing.

        Returns:
            int32 (2,) there: nonzero if `check` would raise, and the bits of the `l2_activation_scale` that `derive`
            will write, which the kernel takes by value.
        """
        tables = [_data(module, name) for name in _USED]
        bad = torch.stack([~(torch.isfinite(table) & (table >= 0)).all() for table in tables])
        is_bad = bad.any() | _differs(tables[0]).any()
        bits = _activation_scale(tables[2]).view(torch.int32)
        return torch.stack([is_bad.to(torch.int32), bits])

    def check(self, module: nn.Module, layer: str) -> None:
        """Judges the loaded scalars; changes nothing.

        Raises:
            ValueError: Gate and up differ, or a scalar is negative or not finite; names the experts.
        """
        tables = {name: _data(module, name) for name in _USED}
        for name, table in tables.items():
            bad = ~(torch.isfinite(table) & (table >= 0)).view(self.num_experts, -1).all(-1)
            if bool(bad.any()):
                raise ValueError(f"{layer}: {name} is negative or not finite for {_experts(bad)}")
        gate, up = tables["w13_weight_scale_2"].unbind(-1)
        bad = _differs(tables["w13_weight_scale_2"])
        if bool(bad.any()):
            first = int(bad.nonzero()[0])
            raise ValueError(
                f"{layer}: MegaMoE NVFP4 takes one first-GEMM scale per expert, but w1 and w3 weight_scale_2 differ "
                "for "
                f"{_experts(bad)}; expert {first}: w1 {float(gate[first])!r}, w3 {float(up[first])!r}. Export gate "
                "and up "
                "with a common scale"
            )


def split_scalars(
    tensor: torch.Tensor, shard_id: str, expert_id: int, num_experts: int
) -> list[tuple[int, str, torch.Tensor]]:
    """(expert, shard, scalar) of a per-expert scalar, or of all experts' scalars in one tensor: (L,) or (L, shards)."""
    shards = FUSED_SHARDS.get(shard_id, (shard_id,))
    if expert_id != ALL_EXPERTS:
        return [(expert_id, shard, tensor) for shard in shards]
    if (
        tensor.dim() not in (1, 2)
        or tensor.shape[0] != num_experts
        or tensor.numel() not in (num_experts, num_experts * len(shards))
    ):
        raise ValueError(
            f"fused global scales must be ({num_experts},) or ({num_experts}, {len(shards)}), got {tuple(tensor.shape)}"
        )
    columns = tensor.reshape(num_experts, -1).expand(num_experts, len(shards))
    return [(expert, shard, columns[expert, i]) for expert in range(num_experts) for i, shard in enumerate(shards)]


def _differs(gate_up: torch.Tensor) -> torch.Tensor:
    """Experts (L,) whose gate and up scales are not the same."""
    gate, up = gate_up.unbind(-1)
    return (gate - up).abs() > RELATIVE_TOLERANCE * torch.maximum(gate, up)


def _activation_scale(l2_input: torch.Tensor) -> torch.Tensor:
    """The largest input scale of the second GEMM, 1 if that is 0; float32 ()."""
    largest = l2_input.amax()
    return torch.where(largest == 0, torch.ones_like(largest), largest)


def _scalars(*shape: int, device: torch.device | str | None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device), requires_grad=False)


def _data(module: nn.Module, name: str) -> torch.Tensor:
    parameter: torch.Tensor = getattr(module, name)
    return parameter.data


def _experts(bad: torch.Tensor) -> str:
    return "experts " + shown([str(expert) for expert in bad.nonzero().flatten().tolist()])
