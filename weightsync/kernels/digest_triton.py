# ruff: noqa: ANN001 - the arguments of a Triton kernel are device values, which annotations do not describe
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernel of `digest`: block values of many tensors, summed per tensor, in one launch.

Imported only where Triton runs (a GPU, or `TRITON_INTERPRET=1`). Each program sums up to `TILE_BLOCKS` blocks:

    parts (P, 4) int64:       address of the first byte, number of 4-byte words, first block, number of the tensor
    tiles (T, 2) int32:       row of `parts`, number of the tile within it
    keys (2, 2, 1024) int32:  see `digest.block_keys`
    totals (n, 2) int64:      one pair of lanes per tensor

Sums are modulo 2^64, so the order in which programs add to a total does not matter.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

BLOCK_BYTES = 8192
TILE_BLOCKS = 16
NUM_WARPS = 4
_TILE_WORDS = tl.constexpr(TILE_BLOCKS * BLOCK_BYTES // 4)
_TILE_BLOCKS = tl.constexpr(TILE_BLOCKS)
_HALF = tl.constexpr(1024)
_GAMMA_0 = tl.constexpr(0x9E3779B97F4A7C15)
_GAMMA_1 = tl.constexpr(0xD1B54A32D192ED03)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def _block_sum(a, b, key_a, key_b):
    return tl.sum((a + key_a).to(tl.int64) * (b + key_b).to(tl.int64), axis=0).to(tl.uint64, bitcast=True)


@triton.jit
def _digest_tile(parts, tiles, keys, totals):
    program = tl.program_id(0).to(tl.int64)
    part = parts + 4 * tl.load(tiles + 2 * program).to(tl.int64)
    tile = tl.load(tiles + 2 * program + 1).to(tl.int64)
    words = tl.multiple_of((tl.load(part) + tile * (_TILE_WORDS * 4)).to(tl.pointer_type(tl.int32)), 16)
    num_words = tl.minimum(tl.load(part + 1) - tile * _TILE_WORDS, _TILE_WORDS).to(tl.int32)
    block = (tl.load(part + 2) + tile * _TILE_BLOCKS).to(tl.uint64)
    owner = tl.load(part + 3)

    at = tl.arange(0, _HALF)
    key_0a = tl.load(keys + at)
    key_0b = tl.load(keys + _HALF + at)
    key_1a = tl.load(keys + 2 * _HALF + at)
    key_1b = tl.load(keys + 3 * _HALF + at)
    total_0 = tl.zeros((), tl.uint64)
    total_1 = tl.zeros((), tl.uint64)
    whole = num_words // (2 * _HALF) * (2 * _HALF)
    for start in range(0, whole, 2 * _HALF):  # without a mask, so that 16 bytes are loaded at once
        a = tl.load(words + start + at)
        b = tl.load(words + start + _HALF + at)
        block += 1
        total_0 += _mix(_block_sum(a, b, key_0a, key_0b) + block * _GAMMA_0)
        total_1 += _mix(_block_sum(a, b, key_1a, key_1b) + block * _GAMMA_1)
    if whole < num_words:
        a = tl.load(words + whole + at, mask=whole + at < num_words, other=0)
        b = tl.load(words + whole + _HALF + at, mask=whole + _HALF + at < num_words, other=0)
        block += 1
        total_0 += _mix(_block_sum(a, b, key_0a, key_0b) + block * _GAMMA_0)
        total_1 += _mix(_block_sum(a, b, key_1a, key_1b) + block * _GAMMA_1)
    tl.atomic_add(totals + 2 * owner, total_0.to(tl.int64, bitcast=True))
    tl.atomic_add(totals + 2 * owner + 1, total_1.to(tl.int64, bitcast=True))


class DeviceLanes:
    """Collects parts of tensors, and sums their block values on the device.

    Args:
        num_tensors: Number of totals.
        device: Where all parts are.
        keys: (2, 2, 1024) int32.
    """

    def __init__(self, num_tensors: int, device: torch.device, keys: npt.NDArray[np.int32]) -> None:
        self._device = device
        self._keys = torch.tensor(keys, device=device)
        self._totals = torch.zeros((num_tensors, 2), dtype=torch.int64, device=device)
        self._parts: list[tuple[int, int, int, int]] = []
        self._alive: list[torch.Tensor] = []

    def add(self, owner: int, first_block: int, part: torch.Tensor) -> None:
        """Adds contiguous bytes at a 16-byte address, a multiple of 4 many; keeps them alive until the launch."""
        self._parts.append((part.data_ptr(), part.nbytes // 4, first_block, owner))
        self._alive.append(part)

    def launch(self) -> None:
        """Sums what was added, on the current stream."""
        parts = np.array(self._parts, np.int64).reshape(-1, 4)
        counts = -(-parts[:, 1] // (TILE_BLOCKS * BLOCK_BYTES // 4))
        tiles = np.empty((int(counts.sum()), 2), np.int32)
        tiles[:, 0] = np.repeat(np.arange(len(parts)), counts)
        tiles[:, 1] = np.arange(len(tiles)) - np.repeat(np.cumsum(counts) - counts, counts)
        if len(tiles):
            arguments = (torch.from_numpy(array).to(self._device) for array in (parts, tiles))
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                _digest_tile[(len(tiles),)](*arguments, self._keys, self._totals, num_warps=NUM_WARPS)
        self._parts, self._alive = [], []

    def finish(self) -> npt.NDArray[np.uint64]:
        """(n, 2) totals; waits for the device."""
        self.launch()
        return self._totals.cpu().numpy().view(np.uint64)
