# ruff: noqa: ANN001 - the arguments of a Triton kernel are device values, which annotations do not describe
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The in-place requantisation of requantize.py as Triton kernels: each byte read once and written once.

One program takes a tile of one shard: `BLOCK_ROWS` checkpoint rows by `WORDS` * 128 columns, all rows in one 128-row
scale block. In w13 those rows stand in kernel rows 16 (r // 8) + 8 half + r % 8: runs of 8 rows with the other half's
runs between them, so a tile's rows are whole lines of `WORDS` * 128 bytes whatever the interleave.

    codes (rows, words, 4, 32)  -- peak of each 32 -->  exponent (rows, words, 4)  -- 4 bytes -->  int32 (rows, words)
      |                                                    |                            at word * N + utccp(kernel row)
      '-- one multiplication, one cast, in place <---------'

A tile depends on nothing outside itself, so it can be overwritten; there is no temporary in device memory. Where the
hardware converts E4M3 (capability 8.9 and up) the kernel uses it; elsewhere, and in Triton's interpreter, whose cast
does not round to nearest even, the same conversion is done on integers.

    flags = inspect(stacks)        # int32 on the device: NAN_CODE | BAD_SCALE | ROUNDS of each shard, then any fault
    requantize_(stacks, flags)     # changes nothing if the last flag is set; the host need not wait to know
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from megamoe_adapter.layout import BLOCK, restore_scale_strides
from megamoe_adapter.requantize import StagedShards

BLOCK_ROWS = 64  # divides 128, so a tile has one scale per 128 columns
MAX_WORDS = 2
NUM_WARPS = 4


def inspect(stacks: Sequence[StagedShards]) -> torch.Tensor:
    """Flags of every shard, one launch per stack; reads each code once and changes nothing.

    Args:
        stacks: On one CUDA device, the current one (or, under `TRITON_INTERPRET=1`, on CPU); shards in all of them.

    Returns:
        int32 (shards of all stacks + 1,) on the device; the last is nonzero if a shard has `NAN_CODE` or `BAD_SCALE`.
    """
    num_shards = sum(len(stack.shards) for stack in stacks)
    flags = torch.zeros(num_shards + 1, dtype=torch.int32, device=stacks[0].weight.device)
    first = 0
    for stack in stacks:
        grid, shape = _launch(stack)
        _inspect[grid](
            stack.weight.view(torch.int32), stack.block_scale, flags, stack.table, first, num_shards, **shape,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        first += len(stack.shards)
    return flags


def requantize_(stacks: Sequence[StagedShards], flags: torch.Tensor) -> None:
    """Requantises every shard in place, one launch per stack, unless the last of `flags` is set.

    Args:
        stacks: As for `inspect`.
        flags: What `inspect` returned for them.
    """
    for stack in stacks:
        grid, shape = _launch(stack)
        _requantize[grid](
            stack.weight.view(torch.uint8), stack.block_scale, restore_scale_strides(stack.scale), stack.table,
            flags[-1:], **shape, NATIVE=_has_native_e4m3(stack.weight.device), num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


def _launch(stack: StagedShards) -> tuple[tuple[int], dict[str, Any]]:
    """The grid, and the arguments that both kernels share."""
    words = stack.weight.shape[2] // BLOCK
    tile_words = next(size for size in (MAX_WORDS, 1) if words % size == 0)
    tiles = stack.rows_per_shard // BLOCK_ROWS * (words // tile_words)
    shape = {
        "shard_rows": stack.rows_per_shard, "words": words,
        "HALVES": 2 if stack.is_gated else 1, "BLOCK_ROWS": BLOCK_ROWS, "WORDS": tile_words,
    }  # fmt: skip
    return (tiles * len(stack.shards),), shape


@lru_cache
def _has_native_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _tile(shards, shard_rows, words, HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr):
    """(index into the shard table, expert, half, first row, first word) of this program's tile."""
    tiles_k = words // WORDS
    tiles_n = shard_rows // BLOCK_ROWS
    pid = tl.program_id(0)
    index = pid // (tiles_k * tiles_n)
    rest = pid % (tiles_k * tiles_n)
    shard = tl.load(shards + index)
    return index, shard // HALVES, shard % HALVES, rest // tiles_k * BLOCK_ROWS, rest % tiles_k * WORDS


@triton.jit
def _kernel_rows(row, half, HALVES: tl.constexpr):
    """Kernel rows of checkpoint rows of a shard."""
    if HALVES == 2:
        return 16 * (row // 8) + 8 * half + row % 8
    return row


@triton.jit
def _decode(code, NATIVE: tl.constexpr):
    """E4M3 codes (uint8, no NaN) as float32."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = code.to(tl.int32)
    size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120: the bias moves 7 -> 127
    # The sign as a bit: some Triton releases negate by subtracting from zero, which loses the sign of zero.
    return (size.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode(value, NATIVE: tl.constexpr):
    """float32 of size at most 448 as E4M3 codes, nearest even."""
    if NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 the step is 2**-9: adding 2**14, whose own step that is, rounds to it and leaves the count below.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _requantize(
    weight, block_scale, packed, shards, fault, shard_rows, words,
    HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile; see the module. Pointers: `weight` uint8, `block_scale` float32, `packed`, `shards`, `fault` int32."""
    _, expert, half, row0, word0 = _tile(shards, shard_rows, words, HALVES, BLOCK_ROWS, WORDS)
    num_rows = shard_rows * HALVES
    GROUPS: tl.constexpr = WORDS * 4
    kernel_row = _kernel_rows(row0 + tl.arange(0, BLOCK_ROWS), half, HALVES)
    # Loaded first and used as a mask at the end: its latency hides behind the tile's, which a branch would not allow.
    is_clean = tl.where(tl.load(fault) == 0, kernel_row, -1)[:, None] >= 0

    columns = word0 * 128 + tl.arange(0, WORDS * 128)
    codes = weight + expert.to(tl.int64) * num_rows * words * 128 + kernel_row[:, None] * (words * 128) + columns[None]
    value = tl.reshape(_decode(tl.load(codes), NATIVE), (BLOCK_ROWS, GROUPS, 32))

    # The rule of requantize.py, per row and group.
    block_row = (expert * HALVES + half) * (shard_rows // 128) + row0 // 128
    factor = tl.load(block_scale + block_row * words + word0 + tl.arange(0, GROUPS) // 4)[None, :]
    peak = tl.max(tl.abs(value), axis=2)
    is_zero = peak == 0
    is_large = factor >= 1
    factor = tl.where(is_large, factor * 3.814697265625e-06, factor)  # 2**-18
    amax = tl.where(is_zero, 0.001953125, peak) * factor  # 2**-9, the smallest code
    exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 0)
    factor = factor * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    exponent = tl.where(is_zero, 0, tl.where(is_large, exponent + 18, exponent))

    value = value * factor[:, :, None]
    requantised = tl.reshape(_encode(value, NATIVE), (BLOCK_ROWS, WORDS * 128))
    shifted = tl.reshape(exponent, (BLOCK_ROWS, WORDS, 4)) << (8 * tl.arange(0, 4))[None, None, :]
    scale_row = kernel_row // 128 * 128 + kernel_row % 32 * 4 + kernel_row % 128 // 32
    word = word0 + tl.arange(0, WORDS)
    scales = packed + expert.to(tl.int64) * num_rows * words + word[None] * num_rows + scale_row[:, None]
    tl.store(codes, requantised, mask=is_clean)
    tl.store(scales, tl.sum(shifted, axis=2), mask=is_clean)


@triton.jit(do_not_specialize=["first", "last"])
def _inspect(
    weight, block_scale, flags, shards, first, last, shard_rows, words,
    HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One tile's flags, into `flags[first + shard]` and, if a fault, `flags[last]`; `weight` int32: four codes each."""
    index, expert, half, row0, word0 = _tile(shards, shard_rows, words, HALVES, BLOCK_ROWS, WORDS)
    kernel_row = _kernel_rows(row0 + tl.arange(0, BLOCK_ROWS), half, HALVES)
    columns = word0 * 32 + tl.arange(0, WORDS * 32)
    base = weight + expert.to(tl.int64) * shard_rows * HALVES * words * 32
    codes = tl.load(base + kernel_row[:, None] * (words * 32) + columns[None])
    # A byte of 0x7F (its sign dropped) is a NaN: only there does adding one reach the byte's top bit.
    has_nan = ((codes & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
    block_row = (expert * HALVES + half) * (shard_rows // 128) + row0 // 128
    scale = tl.load(block_scale + block_row * words + word0 + tl.arange(0, WORDS))
    is_good = (scale >= 0) & (scale <= 1.7014118346046923e38)  # 2**127
    rounds = (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) != 0
    flag = tl.max(tl.max((has_nan != 0).to(tl.int32), axis=1), axis=0)
    flag |= tl.max((is_good == 0).to(tl.int32), axis=0) << 1
    flag |= tl.max(rounds.to(tl.int32), axis=0) << 2
    # Most tiles of a shard say the same: look first, so that few of them queue for the atomic.
    place = flags + first + index
    tl.atomic_or(place, flag, mask=(flag & ~tl.load(place)) != 0)
    tl.atomic_or(flags + last, flag, mask=(flag & 3) != 0)
