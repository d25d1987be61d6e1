"""The values that a plan is made of: who writes which bytes of which live tensor, and how.

    Destination   one live tensor that a load may write, with every path that reaches it
    Write         bytes of a wire tensor that go to bytes of a destination, unchanged
    Claim         bytes of a destination that some names write, copied or computed: what the coverage proof counts
    NamePlan      what happens to one wire name

Regions are bytes from the start of a storage (destinations) or of the contiguous wire tensor (sources).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from weightsync.plan.regions import Region
from weightsync.reachable import Kind

Treatment = Literal["copy", "opaque", "value_dependent", "skipped", "ignored"]


@dataclass(frozen=True, slots=True)
class Destination:
    """A live tensor that a load may write.

    Attributes:
        path: Its first path in the model; a parameter's path comes before a buffer's and a plain attribute's.
        aliases: Further paths that hold the very same bytes (tied parameters, a helper object's reference).
        module: Path of the `nn.Module` that owns it.
        kind: "parameter", "buffer" or "attribute". Only parameters have to be written.
        shape: Shape in elements.
        dtype: Dtype.
        region: Where it lies in its storage, in bytes.
        storage: Number of its storage; destinations with an equal number share bytes.
        loadable_numel: Declared `weight_loader_numel`: elements that the loaders write; None, not declared, means all.
        late: Whether it comes into being during the load, and has no bytes before.
        is_optional: Declared `weight_loader_optional`: a checkpoint may lack it, whole; it is then as constructed.
    """

    path: str
    aliases: tuple[str, ...]
    module: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    region: Region
    storage: int
    loadable_numel: int | None = None
    late: bool = False
    is_optional: bool = False

    def __str__(self) -> str:
        return f"{self.path} {layout_text(self.dtype, self.shape)}"


@dataclass(frozen=True, slots=True)
class Write:
    """A copy of bytes from a wire tensor into a live tensor.

    Attributes:
        name: Wire name.
        destination: Index into the plan's destinations.
        dest: Bytes of the destination's storage.
        source: Bytes of the contiguous wire tensor; the same shape as `dest`, dims paired one to one. A stride is 0
            where the loader expanded the source.
    """

    name: str
    destination: int
    dest: Region
    source: Region


@dataclass(frozen=True, slots=True)
class Claim:
    """Bytes that a load writes.

    Attributes:
        names: Wire names whose values end up there; several if the value is computed from several.
        destination: Index into the destinations.
        region: Bytes of the destination's storage.
        source: Bytes of the wire tensor for an unchanged copy of one name; None for a computed value.
    """

    names: tuple[str, ...]
    destination: int
    region: Region
    source: Region | None


@dataclass(frozen=True, slots=True)
class NamePlan:
    """What happens to one wire name.

    Attributes:
        name: Wire name.
        treatment: "copy": the writes below do it all. "opaque": its destination is known, its value is computed by the
            loader at push time. "value_dependent": the loader reads values, so it is run with the real tensor.
            "skipped": not on this rank. "ignored": matched a pattern of `ignore`.
        reason: Why it is not a copy, in words; "" for a copy.
        writes: For a copy.
        destinations: Indices of every destination it was seen to write.
        together: Names that must go to the loader in one call with this one, since one value is computed from all.
        rebinds: Whether the loader puts another tensor or storage in the destination's place.
    """

    name: str
    treatment: Treatment
    reason: str = ""
    writes: tuple[Write, ...] = ()
    destinations: tuple[int, ...] = ()
    together: tuple[str, ...] = ()
    rebinds: bool = False


def layout_text(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> str:
    """Dtype and shape as messages show them: `bfloat16[4, 6]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
