"""128-bit digests of tensors' bytes: one launch for a whole model on a GPU, numpy elsewhere, the same value.

    digest(tensor)                   # 32 hex characters
    digest_many(tensors)             # one each; all CUDA tensors of a device in one launch

The digest covers the logical bytes (those of `tensor.contiguous()`) and their number, not shape or dtype. Two 64-bit
lanes, all arithmetic modulo 2^64 or 2^32, so that any order of evaluation gives the same value:

    bytes, zero-padded to blocks of 8 KiB = 2 x 1024 little-endian int32 words   a[0..1023] b[0..1023]
    block j:   h = sum_i int32(a[i] + k0[i]) * int32(b[i] + k1[i])       (k0, k1: fixed random words, four sets)
    lane:      t = sum_j mix(h + (j + 1) * G)                            (mix, G: see `_mix`, `_GAMMA`)
    result:    mix(t + (num_bytes + 1) * G)

For two given tensors of equal size that differ, one lane agrees with a probability of about 2^-31 over the choice of
the fixed words, both with about 2^-62; a difference inside one aligned 4-byte word is always seen. That finds
accidents: a lost, swapped, stale or torn write. It is no cryptographic hash: whoever may choose the bytes can make two
tensors agree.

Source: the block sum is NH of "UMAC: Fast and Secure Message Authentication" (Black et al., CRYPTO 1999) over signed
words; `_mix` is the finaliser of MurmurHash3 (A. Appleby, public domain); the fixed words come from SplitMix64 (Steele
et al., OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import LayoutError
from weightsync.kernels.segment_copy import Backend, choose_backend

BLOCK_BYTES = 8192
HALF_WORDS = BLOCK_BYTES // 8
MAX_STAGED_BYTES = 32 << 20  # temporary copies alive at once
_STEP_BLOCKS = 64  # blocks per numpy operation: 512 KiB stay in the second-level cache

Bytes = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
_GAMMA = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03], np.uint64)


def digest(tensor: torch.Tensor, *, backend: Backend = "auto") -> str:
    """The digest of one tensor; `digest_many` for several."""
    return digest_many([tensor], backend=backend)[0]


def digest_many(tensors: Sequence[torch.Tensor], *, backend: Backend = "auto") -> list[str]:
    """The digest of each tensor, 32 hex characters.

    Reads the tensors in place, except those that are not contiguous or, on a GPU, not aligned to 16 bytes: these are
    copied, about `MAX_STAGED_BYTES` at a time. Waits for the current stream.

    Args:
        tensors: Tensors of any shape, dtype, layout and device.
        backend: "torch" (which stands for numpy here) or "triton" instead of each device's own.

    Raises:
        LayoutError: A tensor has no bytes to read (meta) or is more than its bytes (sparse, quantized, nested).
    """
    for number, tensor in enumerate(tensors):
        what = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else tensor.layout
        if tensor.device.type == "meta" or what is not torch.strided:
            raise LayoutError(
                f"tensor {number} of {len(tensors)} has no strided bytes to digest: it is {what} on "
                f"{tensor.device}; load it first, give its parts, or leave it out"
            )
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        by_device[tensor.device].append(number)
    totals = np.zeros((len(tensors), 2), np.uint64)
    with torch.no_grad():
        for device, numbers in by_device.items():
            sum_lanes = _sum_on_device if choose_backend(device, backend) == "triton" else _sum_on_host
            totals[numbers] = sum_lanes([tensors[number].detach().resolve_conj().resolve_neg() for number in numbers])
    sizes = np.array([tensor.nbytes for tensor in tensors], np.uint64)
    lanes = _mix(totals + (sizes[:, None] + np.uint64(1)) * _GAMMA)
    return [f"{first:016x}{second:016x}" for first, second in lanes.tolist()]


def _mix(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


@cache
def block_keys() -> npt.NDArray[np.int32]:
    """(2, 2, 1024) the fixed words: lane, half of the block, position. Read-only."""
    count = np.arange(1, 2 * HALF_WORDS + 1, dtype=np.uint64)
    z = np.uint64(0x77656967687473) + count * np.uint64(0x9E3779B97F4A7C15)  # the seed spells "weights"
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys = (z ^ (z >> np.uint64(31))).astype("<u8").view("<i4").astype(np.int32).reshape(2, 2, HALF_WORDS)
    keys.flags.writeable = False
    return keys


def _pieces(tensor: torch.Tensor, max_bytes: int) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """The logical bytes in order: first block, 1-D uint8 tensor on the same device, whether it is a temporary copy.

    Every piece starts on a block edge. Copies hold about `max_bytes`: as many slices of the first dim as end on a block
    edge together. `max_bytes` does not cut what is read in place.
    """
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield 0, tensor.reshape(-1).view(torch.uint8), False
        return
    tensor = tensor.squeeze()
    slice_bytes = tensor.nbytes // tensor.shape[0]
    unit = BLOCK_BYTES // math.gcd(BLOCK_BYTES, slice_bytes)
    step = max(max_bytes // slice_bytes // unit, 1) * unit
    for start in range(0, tensor.shape[0], step):
        copy = tensor[start : start + step].clone(memory_format=torch.contiguous_format)
        yield start * slice_bytes // BLOCK_BYTES, copy.view(-1).view(torch.uint8), True


def _sum_on_host(tensors: Sequence[torch.Tensor]) -> U64:
    """(n, 2) lane sums, computed by numpy; tensors elsewhere are fetched piece by piece."""
    lanes = _HostLanes(len(tensors))
    for owner, tensor in enumerate(tensors):
        for first_block, piece, _ in _pieces(tensor, MAX_STAGED_BYTES):
            for start in range(0, piece.nbytes, MAX_STAGED_BYTES):
                data = piece[start : start + MAX_STAGED_BYTES].cpu().numpy()
                lanes.add(owner, first_block + start // BLOCK_BYTES, data)
    return lanes.finish()


class _HostLanes:
    """Sums block values per tensor. Ends of tensors and small tensors are gathered, so that many share an operation."""

    def __init__(self, num_tensors: int) -> None:
        self._totals = np.zeros((num_tensors, 2), np.uint64)
        self._padded = np.zeros((_STEP_BLOCKS, BLOCK_BYTES), np.uint8)
        self._owners: list[int] = []
        self._indices: list[int] = []

    def add(self, owner: int, first_block: int, data: Bytes) -> None:
        whole = len(data) // BLOCK_BYTES
        blocks = data[: whole * BLOCK_BYTES].reshape(whole, BLOCK_BYTES)
        for start in range(0, whole, _STEP_BLOCKS):
            part = blocks[start : start + _STEP_BLOCKS]
            indices = np.arange(len(part), dtype=np.uint64) + np.uint64(first_block + start)
            self._totals[owner] += _block_values(part, indices).sum(axis=0)
        rest = data[whole * BLOCK_BYTES :]
        if len(rest):
            row = self._padded[len(self._owners)]
            row[: len(rest)] = rest
            row[len(rest) :] = 0
            self._owners.append(owner)
            self._indices.append(first_block + whole)
            if len(self._owners) == _STEP_BLOCKS:
                self._flush()

    def finish(self) -> U64:
        self._flush()
        return self._totals

    def _flush(self) -> None:
        values = _block_values(self._padded[: len(self._owners)], np.array(self._indices, np.uint64))
        np.add.at(self._totals, self._owners, values)
        self._owners, self._indices = [], []


def _block_values(blocks: Bytes, indices: U64) -> U64:
    """(n, 2) mixed lane values of whole blocks (n, 8192)."""
    words = blocks.view("<i4").reshape(len(blocks), 2, HALF_WORDS)
    sums = np.empty((len(blocks), 2), np.int64)
    for lane, keys in enumerate(block_keys()):
        shifted = words + keys
        np.multiply(shifted[:, 0], shifted[:, 1], dtype=np.int64).sum(axis=1, out=sums[:, lane])
    return _mix(sums.view(np.uint64) + (indices[:, None] + np.uint64(1)) * _GAMMA)


def _sum_on_device(tensors: Sequence[torch.Tensor]) -> U64:
    """(n, 2) lane sums, computed by the Triton kernel; one launch, and one more per `MAX_STAGED_BYTES` of copies."""
    from weightsync.kernels.digest_triton import DeviceLanes

    lanes = DeviceLanes(len(tensors), tensors[0].device, block_keys())
    staged_bytes = 0
    for owner, tensor in enumerate(tensors):
        for first_block, piece, is_copy in _pieces(tensor, MAX_STAGED_BYTES):
            for start, part, part_is_copy in _aligned(piece):
                lanes.add(owner, first_block + start // BLOCK_BYTES, part)
                staged_bytes += part.nbytes if is_copy or part_is_copy else 0
                if staged_bytes >= MAX_STAGED_BYTES:
                    lanes.launch()
                    staged_bytes = 0
    return lanes.finish()


def _aligned(piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """Parts of 1-D bytes that start at 16-byte addresses and count whole words; what does not is copied and padded."""
    size = piece.nbytes
    whole = size if size % 4 == 0 else size // BLOCK_BYTES * BLOCK_BYTES
    if piece.data_ptr() % 16 == 0:
        if whole:
            yield 0, piece[:whole], False
    else:
        for start in range(0, whole, MAX_STAGED_BYTES):
            yield start, piece[start : min(start + MAX_STAGED_BYTES, whole)].clone(), True
    if whole < size:
        yield whole, torch.nn.functional.pad(piece[whole:], (0, -size % 4)), True
