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

Shards of all stacks, of whatever layer, that have one shape are one launch: a table on the device says where each lies.

    table (shards, 8) int64:  addresses of the expert's weight, the shard's block scales and the expert's packed scales;
                              half; place of its flag; 3 unused
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from megamoe_adapter.layout import BLOCK, restore_scale_strides
from megamoe_adapter.requantize import StagedShards

BLOCK_ROWS = 64  # divides 128, so a tile has one scale per 128 columns
MAX_WORDS = 2
NUM_WARPS = 4
TABLE_COLUMNS = 8
_COLUMNS = tl.constexpr(TABLE_COLUMNS)


def inspect(stacks: Sequence[StagedShards]) -> torch.Tensor:
    """Flags of every shard, one launch per shape of shards; reads each code once and changes nothing.

    Args:
        stacks: On one CUDA device, the current one (or, under `TRITON_INTERPRET=1`, on CPU); shards in one of them.

    Returns:
        int32 (shards of all stacks + 1,) on the device; the last is nonzero if a shard has `NAN_CODE` or `BAD_SCALE`.
    """
    num_shards = sum(len(stack.shards) for stack in stacks)
    flags = torch.zeros(num_shards + 1, dtype=torch.int32, device=stacks[0].weight.device)
    for table in _tables(stacks):
        _inspect[table.grid](table.shards, flags, num_shards, **table.shape, num_warps=NUM_WARPS)
    return flags


def requantize_(stacks: Sequence[StagedShards], flags: torch.Tensor) -> None:
    """Requantises every shard in place, one launch per shape of shards, unless the last of `flags` is set.

    Args:
        stacks: As for `inspect`.
        flags: What `inspect` returned for them.
    """
    fault = flags[-1:]
    for table in _tables(stacks):
        _requantize[table.grid](
            table.shards, fault, **table.shape, NATIVE=_has_native_e4m3(flags.device), num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Table:
    """Shards of one shape on the device, and how a kernel is launched over them."""

    shards: torch.Tensor
    grid: tuple[int]
    shape: dict[str, Any]


# Newest last. A table holds addresses and numbers alone, and its key all that they were made from, so one that was made
# for memory which is gone by now is merely never asked for again.
_kept: dict[tuple[Any, ...], list[_Table]] = {}
NUM_KEPT = 16


def _tables(stacks: Sequence[StagedShards]) -> list[_Table]:
    """The tables of these stacks; made anew when an address, a shape or the choice of shards is another."""
    key = (
        stacks[0].weight.device,
        *(
            (s.weight.data_ptr(), s.block_scale.data_ptr(), _packed_address(s), s.weight.shape, tuple(s.shards))
            for s in stacks
        ),
    )
    tables = _kept.pop(key, None)
    if tables is None:
        tables = _make_tables(stacks)
        while len(_kept) >= NUM_KEPT:
            _kept.pop(next(iter(_kept)), None)
    _kept[key] = tables
    return tables


def _packed_address(stack: StagedShards) -> int:
    """0 for the placeholder of a stack that is only inspected."""
    return 0 if stack.scale.is_meta else restore_scale_strides(stack.scale).data_ptr()


def _make_tables(stacks: Sequence[StagedShards]) -> list[_Table]:
    rows: dict[tuple[int, int, int, int], list[np.ndarray[Any, Any]]] = {}
    first = 0
    for stack in stacks:
        words, halves, per_shard = stack.weight.shape[2] // BLOCK, 2 if stack.is_gated else 1, stack.rows_per_shard
        bits = stack.weight.data_ptr() | _packed_address(stack) | 16
        slot = np.array([slot for slot, _ in stack.shards], np.int64)
        half = np.array([half or 0 for _, half in stack.shards], np.int64)
        table = np.zeros((len(slot), TABLE_COLUMNS), np.int64)
        table[:, 0] = stack.weight.data_ptr() + slot * (per_shard * halves * words * BLOCK)
        table[:, 1] = stack.block_scale.data_ptr() + (slot * halves + half) * (per_shard // BLOCK * words * 4)
        table[:, 2] = _packed_address(stack) + slot * (per_shard * halves * words * 4)
        table[:, 3] = half
        table[:, 4] = first + np.arange(len(slot))
        rows.setdefault((per_shard, words, halves, bits & -bits), []).append(table)
        first += len(slot)
    tables = []
    for (per_shard, words, halves, alignment), parts in rows.items():
        whole = np.concatenate(parts)
        if not len(whole):
            continue
        tile_words = next(size for size in (MAX_WORDS, 1) if words % size == 0)
        tiles = per_shard // BLOCK_ROWS * (words // tile_words)
        shape = {
            "shard_rows": per_shard, "words": words, "HALVES": halves, "BLOCK_ROWS": BLOCK_ROWS, "WORDS": tile_words,
            "ALIGNMENT": alignment,
        }  # fmt: skip
        shards = torch.from_numpy(whole).to(stacks[0].weight.device)
        tables.append(_Table(shards, (tiles * len(whole),), shape))
    return tables


@lru_cache
def _has_native_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def _tile(shards, shard_rows, words, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr):
    """(row of the shard table, half, first row, first word) of this program's tile."""
    tiles_k = words // WORDS
    tiles_n = shard_rows // BLOCK_ROWS
    pid = tl.program_id(0)
    rest = pid % (tiles_k * tiles_n)
    shard = shards + (pid // (tiles_k * tiles_n)).to(tl.int64) * _COLUMNS
    return shard, tl.load(shard + 3).to(tl.int32), rest // tiles_k * BLOCK_ROWS, rest % tiles_k * WORDS


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
    shards, fault, shard_rows, words,
    HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr, ALIGNMENT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One tile; see the module. Pointers: `shards` int64, `fault` int32."""
    shard, half, row0, word0 = _tile(shards, shard_rows, words, BLOCK_ROWS, WORDS)
    weight = tl.multiple_of(tl.load(shard).to(tl.pointer_type(tl.uint8)), ALIGNMENT)
    block_scale = tl.multiple_of(tl.load(shard + 1).to(tl.pointer_type(tl.float32)), 4)
    packed = tl.multiple_of(tl.load(shard + 2).to(tl.pointer_type(tl.int32)), ALIGNMENT)
    num_rows = shard_rows * HALVES
    GROUPS: tl.constexpr = WORDS * 4
    kernel_row = _kernel_rows(row0 + tl.arange(0, BLOCK_ROWS), half, HALVES)
    # Loaded first and used as a mask at the end: its latency hides behind the tile's, which a branch would not allow.
    is_clean = tl.where(tl.load(fault) == 0, kernel_row, -1)[:, None] >= 0

    columns = word0 * 128 + tl.arange(0, WORDS * 128)
    codes = weight + kernel_row[:, None] * (words * 128) + columns[None]
    value = tl.reshape(_decode(tl.load(codes), NATIVE), (BLOCK_ROWS, GROUPS, 32))

    # The rule of requantize.py, per row and group.
    factor = tl.load(block_scale + row0 // 128 * words + word0 + tl.arange(0, GROUPS) // 4)[None, :]
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
    scales = packed + word[None] * num_rows + scale_row[:, None]
    tl.store(codes, requantised, mask=is_clean)
    tl.store(scales, tl.sum(shifted, axis=2), mask=is_clean)


@triton.jit(do_not_specialize=["last"])
def _inspect(
    shards, flags, last, shard_rows, words,
    HALVES: tl.constexpr, BLOCK_ROWS: tl.constexpr, WORDS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """One tile's flags, into the shard's place in `flags` and, if a fault, `flags[last]`."""
    shard, half, row0, word0 = _tile(shards, shard_rows, words, BLOCK_ROWS, WORDS)
    weight = tl.multiple_of(tl.load(shard).to(tl.pointer_type(tl.int32)), ALIGNMENT)  # four codes each
    block_scale = tl.multiple_of(tl.load(shard + 1).to(tl.pointer_type(tl.float32)), 4)
    kernel_row = _kernel_rows(row0 + tl.arange(0, BLOCK_ROWS), half, HALVES)
    columns = word0 * 32 + tl.arange(0, WORDS * 32)
    codes = tl.load(weight + kernel_row[:, None] * (words * 32) + columns[None])
    # A byte of 0x7F (its sign dropped) is a NaN: only there does adding one reach the byte's top bit.
    has_nan = ((codes & 0x7F7F7F7F) + 0x01010101) & -0x7F7F7F80
    scale = tl.load(block_scale + row0 // 128 * words + word0 + tl.arange(0, WORDS))
    is_good = (scale >= 0) & (scale <= 1.7014118346046923e38)  # 2**127
    rounds = (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) != 0
    flag = tl.max(tl.max((has_nan != 0).to(tl.int32), axis=1), axis=0)
    flag |= tl.max((is_good == 0).to(tl.int32), axis=0) << 1
    flag |= tl.max(rounds.to(tl.int32), axis=0) << 2
    # Most tiles of a shard say the same: look first, so that few of them queue for the atomic.
    place = flags + tl.load(shard + 4)
    tl.atomic_or(place, flag, mask=(flag & ~tl.load(place)) != 0)
    tl.atomic_or(flags + last, flag, mask=(flag & 3) != 0)
