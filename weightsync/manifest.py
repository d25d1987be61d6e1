"""What a push carries: the name, shape and dtype of every tensor on the wire, in wire order.

A `Manifest` is a plain value. Both sides hash it the same way, so that a push can be agreed on by comparing 64
characters, and it crosses the wire as JSON.

    manifest = Manifest.from_tensors(model.state_dict().items())
    manifest.num_bytes, manifest.hash
    Manifest.from_json(manifest.to_json()) == manifest
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from weightsync.errors import ManifestError, shown

# The one table of wire dtypes: wire name -> torch dtype. Names are torch's own, without the "torch." prefix; sizes come
# from torch, so there is no second table to drift.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
        torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    )
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a dtype; ManifestError if it cannot travel."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ManifestError(f"dtype {dtype} cannot travel; supported: {', '.join(DTYPES)}")
    return name


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a wire name; ManifestError if there is none."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise ManifestError(f"unknown wire dtype {name!r}; supported: {', '.join(DTYPES)}") from None


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One tensor on the wire.

    Attributes:
        name: Its name in the checkpoint, which is what the engine's `load_weights` expects.
        dtype: Its dtype on the wire.
        shape: Its full shape; `()` for a scalar.
        num_bytes: Bytes of the contiguous tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int = field(
        init=False, repr=False, compare=False
    )  # asked for many times per name when a push is planned

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ManifestError(f"a wire name must be a non-empty string, got {self.name!r}")
        shape = tuple(self.shape)
        if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in shape):
            raise ManifestError(f"{self.name}: shape must hold sizes >= 0, got {self.shape!r}", names=[self.name])
        object.__setattr__(self, "shape", shape)
        dtype_name(self.dtype)
        object.__setattr__(self, "num_bytes", math.prod(shape) * self.dtype.itemsize)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """Every tensor of one push, in wire order. Names are unique.

    Raises:
        ManifestError: A name stands twice.
    """

    entries: tuple[ParamMeta, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        if len(self.by_name) != len(self.entries):
            seen: set[str] = set()
            twice = [e.name for e in self.entries if e.name in seen or seen.add(e.name)]  # type: ignore[func-returns-value]
            raise ManifestError(
                f"{len(twice)} names stand more than once in the manifest: {shown(twice)}; send each tensor once",
                names=twice,
            )

    @classmethod
    def from_tensors(cls, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """The manifest of `(name, tensor)` pairs; reads shapes and dtypes alone."""
        return cls(tuple(ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in named_tensors))

    @cached_property
    def by_name(self) -> dict[str, ParamMeta]:
        """Entry of each name."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the canonical JSON: equal exactly when the entries and their order are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(entry.num_bytes for entry in self.entries)

    def to_json(self) -> str:
        """Canonical JSON: `[[name, dtype, [shape]], ...]` in wire order, no spaces."""
        return json.dumps([[e.name, dtype_name(e.dtype), list(e.shape)] for e in self.entries], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads `to_json`'s form; ManifestError says what is malformed."""
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"a manifest must be JSON: {error}") from error
        return cls.from_rows(rows)

    @classmethod
    def from_rows(cls, rows: object) -> Manifest:
        """Reads `[[name, dtype, [shape]], ...]`, already parsed; ManifestError says which row is malformed."""
        if not isinstance(rows, list):
            raise ManifestError(f"a manifest must be a list of [name, dtype, shape], got {type(rows).__name__}")
        entries = []
        for index, row in enumerate(rows):
            if not (isinstance(row, list) and len(row) == 3 and isinstance(row[2], list)):
                raise ManifestError(f"manifest row {index} must be [name, dtype, shape], got {row!r:.100}")
            entries.append(ParamMeta(row[0], parse_dtype(row[1]), tuple(row[2])))
        return cls(tuple(entries))

    def __iter__(self) -> Iterator[ParamMeta]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.by_name
