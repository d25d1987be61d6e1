"""Fingerprints: where every tensor of a model is, how it is laid out, and a 128-bit digest of its bytes.

Why: "the push succeeded" and "the output changed" are no evidence that the right bytes are in the right place. Two
fingerprints are: one before and one after tell what changed and that nothing moved; one of the pushed and one of a
cold-loaded model tell that the bytes are equal, across processes too.

    before = fingerprint(model)
    ...push...
    diff = fingerprint(model).diff(before)
    diff.differing, diff.moved, diff.added, diff.removed
    Fingerprint.from_json(before.to_json()) == before
    fingerprint(model).expect_equal_bytes(fingerprint(cold))      # VerifyError names what differs
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weightsync.errors import VerifyError, shown
from weightsync.kernels.digest import digest_many
from weightsync.reachable import walk
from weightsync.reload.state import unwrapped

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
FORMAT = "weightsync-fingerprint-1"


class TensorPrint(NamedTuple):
    """One tensor.

    Attributes:
        address: Address of its storage (of its values, if it is sparse or nested); 0 on the meta device. Means
            something in its own process alone.
        storage_offset: First element, in elements.
        shape: Its shape.
        stride: Its strides, in elements; () for a sparse or nested tensor.
        dtype: Its dtype.
        digest: 32 hex characters over the bytes in index order; for a sparse, quantized or nested tensor over all that
            it consists of. "" if there are no bytes (meta, a storage that was freed).
    """

    address: int
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    digest: str

    def has_bytes_of(self, other: TensorPrint) -> bool:
        """Whether the values are bit-identical: equal shape, dtype and digest. Never so where there are no bytes."""
        return self.digest != "" and (self.shape, self.dtype, self.digest) == (other.shape, other.dtype, other.digest)

    def is_placed_like(self, other: TensorPrint) -> bool:
        """Whether a captured graph that reads one reads the other: equal address, offset, shape, stride and dtype."""
        return self[:5] == other[:5]


@dataclass(frozen=True, slots=True)
class FingerprintDiff:
    """What is different in a fingerprint, seen from an earlier (or expected) one.

    Attributes:
        differing: Paths in both whose values differ.
        moved: Paths in both whose address or layout differs.
        added: Paths that only the later one has.
        removed: Paths that only the earlier one has.
    """

    differing: tuple[str, ...]
    moved: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.differing or self.moved or self.added or self.removed)


@dataclass(frozen=True)
class Fingerprint:
    """Every tensor of a model at one moment.

    Attributes:
        rows: By path.
    """

    rows: Mapping[str, TensorPrint]

    def diff(self, before: Fingerprint) -> FingerprintDiff:
        """What is different from `before`, in the order of paths here."""
        both = [path for path in self.rows if path in before.rows]
        return FingerprintDiff(
            differing=tuple(path for path in both if not self.rows[path].has_bytes_of(before.rows[path])),
            moved=tuple(path for path in both if not self.rows[path].is_placed_like(before.rows[path])),
            added=tuple(path for path in self.rows if path not in before.rows),
            removed=tuple(path for path in before.rows if path not in self.rows),
        )

    def expect_equal_bytes(self, expected: Fingerprint) -> None:
        """Compares values and paths, not addresses.

        Raises:
            VerifyError: A value differs, or a path is in one alone.
        """
        diff = self.diff(expected)
        wrong = {"differing": diff.differing, "added": diff.added, "missing": diff.removed}
        parts = [f"{label} ({len(paths)}): {shown(paths)}" for label, paths in wrong.items() if paths]
        if parts:
            raise VerifyError(f"of {len(expected.rows)} expected tensors: {'; '.join(parts)}")

    def to_json(self) -> str:
        """Canonical JSON: `{"format": ..., "tensors": {path: [address, offset, shape, stride, dtype, digest]}}`."""
        rows = {
            path: [
                row.address,
                row.storage_offset,
                row.shape,
                row.stride,
                str(row.dtype).removeprefix("torch."),
                row.digest,
            ]
            for path, row in self.rows.items()
        }
        return json.dumps({"format": FORMAT, "tensors": rows}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Reads `to_json`'s form.

        Raises:
            VerifyError: It is malformed; says where.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise VerifyError(f"a fingerprint must be JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("tensors"), dict):
            raise VerifyError(f"a fingerprint must be an object of format {FORMAT!r} with tensors")
        return cls({path: _parse(path, row) for path, row in data["tensors"].items()})


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """The fingerprint of a model: parameters, buffers, and every other tensor that it reaches.

    Reads every byte once, on the tensors' own device; a tensor that several paths hold is digested once. Waits for the
    current stream.

    Args:
        model: The model; a `torch.compile` wrapper stands for what it wraps.
    """
    slots = walk(unwrapped(model))
    unique = {id(slot.tensor): _parts(slot.tensor) for slot in slots}
    flat = [part for _, parts in unique.values() for part in parts]
    found = iter(digest_many([part for part in flat if _has_bytes(part)]))
    digests = {}
    for key, (words, parts) in unique.items():
        own = [next(found) if _has_bytes(part) else "" for part in parts]
        digests[key] = "" if "" in own else own[0] if not words else _joined(words, parts, own)
    return Fingerprint({slot.path: _print(slot.tensor, digests[id(slot.tensor)]) for slot in slots})


def _parts(tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """Strided tensors that a tensor consists of, values last, and words for what these do not tell; "" if it is one."""
    if tensor.is_meta:
        return "", [tensor]
    if tensor.is_nested:
        return f"nested {tensor.layout}", [part for item in tensor.unbind() for part in _parts(item)[1]]
    if tensor.layout == torch.sparse_coo:
        return f"coo {tuple(tensor.shape)}", [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return str(tensor.layout), [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return str(tensor.layout), [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout != torch.strided:
        return str(tensor.layout), [tensor.to_dense()]
    if not tensor.is_quantized:
        return "", [tensor]
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f"{tensor.qscheme()} {tensor.q_scale()!r} {tensor.q_zero_point()}", [tensor.int_repr()]
    words = f"{tensor.qscheme()} {tensor.q_per_channel_axis()}"
    return words, [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.int_repr()]


def _joined(words: str, parts: list[torch.Tensor], digests: list[str]) -> str:
    shapes = [(str(part.dtype), tuple(part.shape)) for part in parts]
    return hashlib.sha256(f"{words} {shapes} {digests}".encode()).hexdigest()[:32]


def _has_bytes(tensor: torch.Tensor) -> bool:
    if tensor.is_meta:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (int(tensor.storage_offset()) + reach + 1) * tensor.itemsize if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= end


def _print(tensor: torch.Tensor, digest: str) -> TensorPrint:
    shape = (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)
    if tensor.is_nested or tensor.layout != torch.strided:
        has_own = not tensor.is_meta and (tensor.is_nested or tensor.layout in _SPARSE)
        parts = _parts(tensor)[1] if has_own else []
        return TensorPrint(_address(parts[-1]) if parts else 0, 0, shape, (), tensor.dtype, digest)
    address = _address(tensor)
    return TensorPrint(address, int(tensor.storage_offset()), shape, tensor.stride(), tensor.dtype, digest)


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _parse(path: str, row: object) -> TensorPrint:
    if not (isinstance(row, list) and len(row) == 6):
        raise VerifyError(f"{path}: a row must be [address, offset, shape, stride, dtype, digest], got {row!r:.100}")
    address, offset, shape, stride, dtype, digest = row
    if not isinstance(shape, list) or not isinstance(stride, list):
        raise VerifyError(f"{path}: malformed row {row!r:.100}")
    numbers = [address, offset, *shape, *stride]
    if not all(type(number) is int for number in numbers) or not isinstance(digest, str) or not isinstance(dtype, str):
        raise VerifyError(f"{path}: malformed row {row!r:.100}")
    return TensorPrint(address, offset, tuple(shape), tuple(stride), _dtype(path, dtype), digest)


def _dtype(path: str, name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise VerifyError(f"{path}: unknown dtype {name!r}")
    return found
