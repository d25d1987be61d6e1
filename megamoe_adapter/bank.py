"""One pair of expert weights in kernel layout: which parameters it owns, and how a checkpoint shard gets into them.

Why: routed experts and a fused shared expert are stored alike (a shared expert is a bank with one slot and 2-D
tensors), so what a loader, the requantisation and the reference forward need to know about a shard stands here once.

    bank      prefixes                 slots    tensors
    routed    w13_, w2_                E        (E, rows, K)
    shared    shared_l1_, shared_l2_   1        (rows, K)

A bank holds no tensors. It is given the module that owns them each time, because a reload may put other tensors in
their place (staging, or the meta device for a dry run). Every load is a chain of views and one `copy_`, so that a dry
run sees which bytes a checkpoint tensor lands on; sources that have to be computed first (expanded scales, BF16
quantised on arrival) end in the same `copy_`. No loader reads a value.

Use:

    bank = Bank.routed(fmt, source, num_slots, hidden, intermediate)
    bank.register(module, device)
    bank.load(module, module.w13_weight, "weight", "w1", slot, tensor)
    bank.dequantize(module, slot, "w1")            # float32 (I, H), checkpoint order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from megamoe_adapter import layout
from megamoe_adapter.formats import FORMATS, SOURCES, Conversion, Format, ScaleStorage, Source, conversion
from megamoe_adapter.names import SHARDS
from megamoe_adapter.quantize import expand_scale_bytes, quantize_block_fp8, quantize_mxfp8, ue8m0_to_float32
from megamoe_adapter.requantize import (
    E4M3_NAN,
    StagedShards,
)
from megamoe_adapter.staging import dequantize_mxfp4, dequantize_mxfp8, dequantize_nvfp4

ROUTED_PREFIXES = ("w13", "w2")
SHARED_PREFIXES = ("shared_l1", "shared_l2")


@dataclass(frozen=True, slots=True)
class Bank:
    """Storage rules of one pair of weights.

    Attributes:
        format: What the kernel reads.
        source: What the checkpoint holds.
        num_slots: Experts in the bank.
        hidden: H.
        intermediate: I of one expert.
        prefixes: Names of the pair, first GEMM first.
        batched: Whether the tensors have a leading expert dim.
    """

    format: Format
    source: Source
    num_slots: int
    hidden: int
    intermediate: int
    prefixes: tuple[str, str]
    batched: bool

    @classmethod
    def routed(
        cls,
        fmt: str,
        source: str,
        num_slots: int,
        hidden: int,
        intermediate: int,
        scale_group: tuple[int, int] | None = None,
    ) -> Bank:
        """The bank of `num_slots` routed experts.

        Args:
            fmt: Key of `FORMATS`.
            source: Key of `SOURCES`.
            num_slots: Experts in the bank.
            hidden: H.
            intermediate: I of one expert.
            scale_group: Rows and columns per UE8M0 scale where the checkpoint's are coarser than the source's own;
                they are repeated to 1x32, which is exact.

        Raises:
            NotImplementedError: The source cannot become the format without loss.
            ValueError: A name is unknown, or the scale group cannot be repeated to the format's.
        """
        return _routed(
            fmt, source, num_slots, hidden, intermediate, None if scale_group is None else tuple(scale_group)
        )

    @classmethod
    def shared(cls, fmt: str, source: str, hidden: int, intermediate: int) -> Bank:
        """The bank of one shared expert of `intermediate` columns."""
        return _shared(fmt, source, hidden, intermediate)

    @property
    def how(self) -> Conversion:
        """What turns the source into the format."""
        return conversion(self.source.name, self.format.name)

    @property
    def requantises(self) -> bool:
        """Whether `finish` rewrites loaded weights."""
        return self.how is Conversion.REQUANTISE

    @property
    def scale_is_packed(self) -> bool:
        """Whether the kernel reads packed scales (`*_weight_scale`)."""
        return self.format.scale is not None and self.format.scale.storage is ScaleStorage.PACKED

    @property
    def raw_scales(self) -> bool:
        """Whether the loaded block scales are float32 (`*_weight_scale_inv`) rather than packed (`*_weight_scale`)."""
        return self.requantises or (self.format.scale is not None and not self.scale_is_packed)

    @property
    def scale_kind(self) -> str | None:
        """Kind of the parameter that a scale is loaded into; None where no scale is loaded on its own."""
        if self.format.scale is None or self.how is Conversion.QUANTISE:
            return None
        return "weight_scale_inv" if self.raw_scales else "weight_scale"

    def prefix(self, shard: str) -> str:
        """Prefix of the parameter that holds `shard`."""
        return self.prefixes[shard == "w2"]

    def shard_shape(self, shard: str) -> tuple[int, int]:
        """Rows and columns (in weight values) of a shard, as the checkpoint has them."""
        return (self.hidden, self.intermediate) if shard == "w2" else (self.intermediate, self.hidden)

    def register(self, module: nn.Module, device: torch.device | str | None) -> None:
        """Adds this bank's parameters to `module`, zeroed, in kernel layout.

        Derived scales, which no checkpoint tensor is written to, carry `weight_loader_numel = 0`.
        """
        specs = layout.kernel_tensors(self.format, self.source.name, self.num_slots, self.hidden, self.intermediate)
        for name, spec in specs.items():
            kind = name.removeprefix("w13_").removeprefix("w2_")
            if kind not in ("weight", "weight_scale", "weight_scale_inv"):
                continue  # NVFP4 globals are kept for all experts, not per slot; see global_scales.py
            data = torch.zeros(spec.num_bytes, dtype=torch.uint8, device=device).view(spec.dtype)
            data = data.as_strided(spec.shape, spec.stride)
            # A fused shared expert has no expert dim; its only slot is the whole tensor.
            parameter = nn.Parameter(data if self.batched else data[0], requires_grad=False)
            # A scale that is computed from its own weight tensor while loading is written by that tensor's name.
            if not spec.loaded and self.how is not Conversion.QUANTISE:
                parameter.weight_loader_numel = 0  # type: ignore[attr-defined]
            module.register_parameter(self._renamed(name), parameter)

    def tensor(self, module: nn.Module, kind: str, shard: str) -> torch.Tensor:
        """The live tensor of `kind` that holds `shard`, always (slots, rows, columns)."""
        return self._batched(getattr(module, f"{self.prefix(shard)}_{kind}"))

    def load(
        self, module: nn.Module, param: torch.Tensor, kind: str, shard: str, slot: int, tensor: torch.Tensor
    ) -> None:
        """Writes one checkpoint tensor into its place.

        Args:
            module: Owner of the parameters; read only where the weight brings its scale along.
            param: The parameter, or its stand-in during a dry run.
            kind: "weight", or `scale_kind`.
            shard: "w1", "w2" or "w3".
            slot: Local slot.
            tensor: The checkpoint's shard, (rows, columns) as stored; may be strided.

        Raises:
            ValueError: Shape or dtype is not what the shard needs.
        """
        if kind == "weight":
            self._load_weight(module, self._batched(param), shard, slot, tensor)
        elif kind == self.scale_kind:
            self._load_scale(self._batched(param), shard, slot, tensor)
        else:
            raise ValueError(f"{self.prefix(shard)}_{kind} is derived or does not exist; {self._where(shard)}")

    def staged(
        self, module: nn.Module, shards: Sequence[tuple[int, str]], name: Callable[[int, str], str]
    ) -> list[StagedShards]:
        """Freshly loaded E4M3 shards with float32 128x128 scales, as requantize.py takes them.

        Args:
            module: Owner of the tensors.
            shards: (slot, shard) of each.
            name: What to call a shard in a message.

        Returns:
            One stack per GEMM that has fresh shards. In a format that keeps its block scales the packed scales are
            placeholders without memory: such a stack can be inspected, not requantised.
        """
        stacks = []
        whole = len(shards) == len(SHARDS) * self.num_slots
        for gated in (True, False):
            if whole:
                part, halves = _every_shard(self.num_slots, gated)
            else:
                part = tuple(shard for shard in shards if (shard[1] != "w2") == gated)
                halves = _halves_of(part)
            if not part:
                continue
            weight, block_scale = (self._as_it_is(module, kind, gated) for kind in ("weight", "weight_scale_inv"))
            if self.requantises:
                scale = self._as_it_is(module, "weight_scale", gated)
            else:
                scale = _no_scale(self.num_slots, weight.shape[1], weight.shape[2] // layout.BLOCK)
            stacks.append(StagedShards(weight, block_scale, scale, halves, functools.partial(_labels, name, part)))
        return stacks

    def _as_it_is(self, module: nn.Module, kind: str, gated: bool) -> torch.Tensor:
        """As `tensor`, but the parameter itself: an alias costs an operator, which a reload watches in Python."""
        parameter: torch.Tensor = getattr(module, f"{self.prefixes[not gated]}_{kind}")
        return parameter if self.batched else parameter.unsqueeze(0)

    def dequantize(self, module: nn.Module, slot: int, shard: str) -> torch.Tensor:
        """Values of a finished shard, float32, (rows, columns) in checkpoint order, without NVFP4's global scale."""
        half = layout.HALF_OF_SHARD.get(shard)
        rows, columns = self.shard_shape(shard)
        weight = layout.weight_view(self.tensor(module, "weight", shard), slot, half)
        weight = weight.reshape(rows, columns // self.format.values_per_element)
        scale = self.format.scale
        if scale is None:
            return weight.float()
        if scale.storage is ScaleStorage.BLOCK:
            blocks = layout.block_scale_rows(self.tensor(module, "weight_scale_inv", shard), slot, half)
            return weight.float() * blocks.repeat_interleave(layout.BLOCK, 0).repeat_interleave(layout.BLOCK, 1)
        packed = layout.read_packed_scales(self.tensor(module, "weight_scale", shard), slot, half)
        if scale.dtype == torch.float8_e4m3fn:
            return dequantize_nvfp4(weight, packed.view(torch.float8_e4m3fn))
        if self.format.values_per_element == 2:
            return dequantize_mxfp4(weight, packed)
        return dequantize_mxfp8(weight, packed)

    def dequantize_expert(self, module: nn.Module, slot: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`dequantize` of w1, w3 and w2 of one slot."""
        w1, w3, w2 = (self.dequantize(module, slot, shard) for shard in ("w1", "w3", "w2"))
        return w1, w3, w2

    def _load_weight(
        self, module: nn.Module, weight: torch.Tensor, shard: str, slot: int, tensor: torch.Tensor
    ) -> None:
        rows, columns = self.shard_shape(shard)
        self._check(
            shard, "weight", tensor, (rows, columns // self.source.values_per_element), self.source.weight_dtypes
        )
        half = layout.HALF_OF_SHARD.get(shard)
        destination = layout.weight_view(weight, slot, half)
        if self.how is Conversion.QUANTISE:
            tensor = self._quantize(module, shard, slot, tensor, is_dry=weight.is_meta)
        tensor = tensor.view(weight.dtype)
        # Splitting the row dim is a view whatever the strides of the source are.
        destination.copy_(tensor if half is None else tensor.unflatten(0, destination.shape[:2]))

    def _quantize(
        self, module: nn.Module, shard: str, slot: int, tensor: torch.Tensor, *, is_dry: bool
    ) -> torch.Tensor:
        """E4M3 of a BF16 shard, whose scale is written in passing; `finish` finds what was not finite.

        `is_dry`: the weight's parameter is a stand-in on the meta device, so the live scale must be left alone too.
        """
        half = layout.HALF_OF_SHARD.get(shard)
        live = self.tensor(module, "weight_scale" if self.scale_is_packed else "weight_scale_inv", shard)
        destination = torch.empty_like(live, device="meta") if is_dry else live
        if self.scale_is_packed:
            weight, scale = quantize_mxfp8(tensor, check=False)
            layout.write_packed_scales(destination, slot, half, scale)
        else:
            weight, scale = quantize_block_fp8(tensor, check=False)
            layout.block_scale_rows(destination, slot, half).copy_(scale)
        # Torch releases differ in what infinity becomes; a NaN code is what finish looks for.
        codes = weight.view(torch.uint8).masked_fill(~torch.isfinite(tensor), E4M3_NAN)
        return codes.view(weight.dtype)

    def _load_scale(self, scale: torch.Tensor, shard: str, slot: int, tensor: torch.Tensor) -> None:
        rows, columns = self.shard_shape(shard)
        half = layout.HALF_OF_SHARD.get(shard)
        if self.raw_scales:
            shape = (rows // layout.BLOCK, columns // layout.BLOCK)
            self._check(shard, "scale", tensor, shape, self.source.scale_dtypes)
            tensor = ue8m0_to_float32(tensor) if self.how is Conversion.EXPAND else tensor
            layout.block_scale_rows(scale, slot, half).copy_(tensor)
            return
        if self.format.scale is None or self.source.scale_group is None:
            raise ValueError(f"{self.format.name} has no scales; {self._where(shard)}")
        group, kernel_group = self.source.scale_group, self.format.scale.group
        # The declared shape and no other: another shard's scale may tile this one too.
        self._check(shard, "scale", tensor, (rows // group[0], columns // group[1]), self.source.scale_dtypes)
        if group != kernel_group:
            tensor = expand_scale_bytes(tensor, rows, columns // kernel_group[1])
        layout.write_packed_scales(scale, slot, half, tensor)

    def _check(
        self,
        shard: str,
        what: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"MegaMoE {shard} {what} shape {tuple(tensor.shape)} does not match the kernel shard {shape}; "
                f"{self._where(shard)}"
            )
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"MegaMoE {shard} {what} has dtype {tensor.dtype}, expected {names}; {self._where(shard)}. "
                "Nothing is converted in passing: send the checkpoint's own dtype"
            )

    def _where(self, shard: str) -> str:
        return (
            f"parameter {self.prefix(shard)}_*, source {self.source.name} into format {self.format.name}, "
            f"hidden {self.hidden}, intermediate {self.intermediate}"
        )

    def _batched(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data if self.batched else tensor.data.unsqueeze(0)

    def _renamed(self, name: str) -> str:
        first, second = self.prefixes
        return (
            f"{first}_{name.removeprefix('w13_')}"
            if name.startswith("w13_")
            else f"{second}_{name.removeprefix('w2_')}"
        )


# Layers that are alike share one bank: a model is walked for its tensors several times in every reload.
@functools.lru_cache(maxsize=256)
def _routed(
    fmt: str, source: str, num_slots: int, hidden: int, intermediate: int, scale_group: tuple[int, int] | None
) -> Bank:
    conversion(source, fmt)
    bank = Bank(FORMATS[fmt], SOURCES[source], num_slots, hidden, intermediate, ROUTED_PREFIXES, True)
    if scale_group is None or scale_group == bank.source.scale_group:
        return bank
    return replace(bank, source=_regrouped(bank, scale_group))


@functools.lru_cache(maxsize=256)
def _shared(fmt: str, source: str, hidden: int, intermediate: int) -> Bank:
    conversion(source, fmt)
    return Bank(FORMATS[fmt], SOURCES[source], 1, hidden, intermediate, SHARED_PREFIXES, False)


@functools.lru_cache(maxsize=256)
def _every_shard(num_slots: int, gated: bool) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, int | None], ...]]:
    shards = tuple((slot, shard) for slot in range(num_slots) for shard in SHARDS if (shard != "w2") == gated)
    return shards, _halves_of(shards)


def _halves_of(shards: tuple[tuple[int, str], ...]) -> tuple[tuple[int, int | None], ...]:
    return tuple((slot, layout.HALF_OF_SHARD.get(shard)) for slot, shard in shards)


@functools.lru_cache(maxsize=256)
def _no_scale(num_slots: int, rows: int, words: int) -> torch.Tensor:
    """The packed scales of a format that has none: a placeholder without memory, the same for all layers."""
    return layout.allocate_scale(num_slots, rows, words, device="meta")


def _labels(name: Callable[[int, str], str], shards: Sequence[tuple[int, str]]) -> list[str]:
    return [name(slot, shard) for slot, shard in shards]


def _regrouped(bank: Bank, group: tuple[int, int]) -> Source:
    """The bank's source with coarser scales."""
    kernel = bank.format.scale
    fits = kernel is not None and kernel.dtype in bank.source.scale_dtypes and min(group) > 0
    if kernel is None or not fits or any(size % least for size, least in zip(group, kernel.group, strict=True)):
        raise ValueError(
            f"scale_group {group} cannot be repeated to the scales of {bank.format.name} from {bank.source.name}; only "
            "UE8M0 scales of whole 1x32 groups can, else leave it None"
        )
    for shard in ("w1", "w2"):
        shape = bank.shard_shape(shard)
        if shape[0] % group[0] or shape[1] % group[1]:
            raise ValueError(f"scale_group {group} does not divide the {shard} weight {shape}")
    return replace(bank.source, scale_group=group)


def split_gate_up(tensor: torch.Tensor, shard_id: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The shards inside one tensor: itself, or for "w13" its gate rows and its up rows.

    Args:
        tensor: (rows, columns) of a weight or of block scales; gate rows first.
        shard_id: "w1", "w2", "w3" or "w13".

    Yields:
        (shard, view of `tensor`).

    Raises:
        ValueError: The shard id is unknown, or the rows of a "w13" tensor cannot be halved.
    """
    if shard_id in SHARDS:
        yield shard_id, tensor
    elif shard_id == "w13" and tensor.dim() == 2 and tensor.shape[0] % 2 == 0:
        half = tensor.shape[0] // 2
        yield "w1", tensor[:half]
        yield "w3", tensor[half:]
    else:
        raise ValueError(f"unsupported expert shard id {shard_id!r} for a tensor of shape {tuple(tensor.shape)}")
