# ruff: noqa: ANN001 - the arguments of a Triton kernel are device values, which annotations do not describe
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernel of `segment_copy`: one launch copies every row of a table.

Imported only where Triton runs (a GPU, or `TRITON_INTERPRET=1`). Each program copies one tile of at most `TILE_BYTES`:

    segments (R, 16) int64: source, source offset, destination, n1, n0, run, source strides (1, 0), destination
                            strides (1, 0), tile steps (t1, t0, t_run), destination offset, 2 unused
    tiles (T, 2) int32:     row of `segments`, number of the tile within it
    bases (B,) int64:       address of each source, then of each destination; rewritten to copy between other memory,
                            also under a captured graph

A tile finds the widest unit (16, 8, 4, 2 or 1 bytes) that divides its two addresses, its strides and its run, so
nothing about alignment is fixed when the table is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_BYTES = 32 * 1024
SEGMENT_COLUMNS = 16
_COLUMNS = tl.constexpr(SEGMENT_COLUMNS)
BLOCK = 1024  # units per step of one program
NUM_WARPS = 4


@triton.jit
def _copy_units(
    source, destination, n0, run, num_bytes, ss1, ss0, ds1, ds0,
    ELEMENT: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies a tile in units of BYTES, which divides every argument but `n0`; a unit is one or two ELEMENTs.

    The rounded addresses are values of their own, so that the alignment promised here holds for this width alone.
    """
    LANES: tl.constexpr = BYTES // (ELEMENT.primitive_bitwidth // 8)
    lane = tl.arange(0, LANES)[None, :]
    source_units = tl.multiple_of((source // BYTES * BYTES).to(tl.pointer_type(ELEMENT)), BYTES)
    destination_units = tl.multiple_of((destination // BYTES * BYTES).to(tl.pointer_type(ELEMENT)), BYTES)
    run = run // BYTES
    num_units = num_bytes // BYTES
    for start in range(0, num_units, BLOCK):
        index = start + tl.arange(0, BLOCK)[:, None]
        row = index // run
        column = index - row * run
        i1 = row // n0
        i0 = row - i1 * n0
        at = (i1 * (ss1 // BYTES) + i0 * (ss0 // BYTES) + column) * LANES + lane
        to = (i1 * (ds1 // BYTES) + i0 * (ds0 // BYTES) + column) * LANES + lane
        inside = index < num_units
        tl.store(destination_units + to, tl.load(source_units + at, mask=inside), mask=inside)


@triton.jit
def _copy_tile(segments, tiles, bases, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    segment = segments + tl.load(tiles + 2 * program).to(tl.int64) * _COLUMNS
    tile = tl.load(tiles + 2 * program + 1)

    n1 = tl.load(segment + 3)
    n0 = tl.load(segment + 4)
    run = tl.load(segment + 5)
    ss1 = tl.load(segment + 6)
    ss0 = tl.load(segment + 7)
    ds1 = tl.load(segment + 8)
    ds0 = tl.load(segment + 9)
    t1 = tl.load(segment + 10)
    t0 = tl.load(segment + 11)
    t_run = tl.load(segment + 12)

    tiles_run = tl.cdiv(run, t_run)
    tiles_0 = tl.cdiv(n0, t0)
    first_byte = (tile % tiles_run) * t_run
    first_0 = ((tile // tiles_run) % tiles_0) * t0
    first_1 = (tile // (tiles_run * tiles_0)) * t1
    source = tl.load(bases + tl.load(segment)) + tl.load(segment + 1) + first_1 * ss1 + first_0 * ss0 + first_byte
    destination = tl.load(bases + tl.load(segment + 2)) + tl.load(segment + 13)
    destination += first_1 * ds1 + first_0 * ds0 + first_byte

    n1 = tl.minimum(n1 - first_1, t1).to(tl.int32)
    n0 = tl.minimum(n0 - first_0, t0).to(tl.int32)
    run = tl.minimum(run - first_byte, t_run).to(tl.int32)
    num_bytes = n1 * n0 * run
    bits = source | destination | ss1 | ss0 | ds1 | ds0 | run
    if bits % 16 == 0:
        _copy_units(source, destination, n0, run, num_bytes, ss1, ss0, ds1, ds0, tl.int64, 16, BLOCK)
    elif bits % 8 == 0:
        _copy_units(source, destination, n0, run, num_bytes, ss1, ss0, ds1, ds0, tl.int64, 8, BLOCK)
    elif bits % 4 == 0:
        _copy_units(source, destination, n0, run, num_bytes, ss1, ss0, ds1, ds0, tl.int32, 4, BLOCK)
    elif bits % 2 == 0:
        _copy_units(source, destination, n0, run, num_bytes, ss1, ss0, ds1, ds0, tl.int16, 2, BLOCK)
    else:
        _copy_units(source, destination, n0, run, num_bytes, ss1, ss0, ds1, ds0, tl.int8, 1, BLOCK)


def copy_tiles(segments: torch.Tensor, tiles: torch.Tensor, bases: torch.Tensor) -> None:
    """Launches one program per tile on the current stream of the current device.

    Args:
        segments: (R, 16) int64 on the device.
        tiles: (T, 2) int32 on the device; T at least 1.
        bases: (B,) int64 on the device.
    """
    _copy_tile[(tiles.shape[0],)](segments, tiles, bases, BLOCK=BLOCK, num_warps=NUM_WARPS)
