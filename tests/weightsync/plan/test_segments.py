"""Compiled rows copy the same bytes as torch, however the views are strided and the tensors are split."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import (
    as_bytes,
    assert_storages_equal,
    expected_storages,
    random_buffers,
    random_plan,
    storage_bytes,
)

from weightsync.errors import LayoutError
from weightsync.plan.regions import Region
from weightsync.plan.segments import SegmentTable, compile_segments, group_by_name
from weightsync.plan.writes import Write
from weightsync.transport.buckets import Chunk


def copy_row_by_row(table: SegmentTable, sources: list[np.ndarray], storages: dict[int, np.ndarray]) -> None:
    """What a table means, in the plainest form."""
    for r in range(len(table)):
        source, destination = sources[table.source[r]], storages[int(table.destination[r])]
        for i1 in range(table.sizes[r, 0]):
            for i0 in range(table.sizes[r, 1]):
                index = np.array([i1, i0])
                at = table.source_offset[r] + (index * table.source_strides[r]).sum()
                to = table.destination_offset[r] + (index * table.destination_strides[r]).sum()
                destination[to : to + table.run[r]] = source[at : at + table.run[r]]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_copy_the_bytes_of_any_view_chain(seed):
    writes, wires, views = random_plan(random.Random(seed))
    expected = expected_storages(writes, wires, views)
    table = compile_segments(writes)
    storages = {key: storage_bytes(view) for key, view in views.items()}
    table.check_bounds([wires[name].nbytes for name in table.names], {k: len(b) for k, b in storages.items()})
    copy_row_by_row(table, [as_bytes(wires[name]) for name in table.names], storages)
    assert_storages_equal(storages, expected)
    assert table.num_bytes == sum(write.dest.num_bytes for write in writes)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32))
def test_any_split_over_buffers_copies_the_same_bytes(seed):
    rng = random.Random(seed)
    writes, wires, views = random_plan(rng)
    expected = expected_storages(writes, wires, views)
    buffers, data = random_buffers(wires, rng)
    table = compile_segments(group_by_name(writes), buffers)
    storages = {key: storage_bytes(view) for key, view in views.items()}
    table.check_bounds([len(array) for array in data], {k: len(b) for k, b in storages.items()})
    copy_row_by_row(table, data, storages)
    assert_storages_equal(storages, expected)
    assert table.num_bytes == sum(write.dest.num_bytes for write in writes)


def test_a_contiguous_write_is_one_run_whatever_its_shape():
    live = torch.zeros(4, 6, 8)
    wire = torch.zeros(6, 8)
    write = Write("w", 0, Region.of(live[2].view(3, 2, 8)), Region.of(wire.view(3, 2, 8)))
    table = compile_segments([write])
    assert (len(table), table.run.tolist(), table.sizes.tolist()) == (1, [6 * 8 * 4], [[1, 1]])


def test_the_eight_row_interleave_is_one_row_with_one_strided_dim():
    live = torch.zeros(2, 32, 4, dtype=torch.uint8)  # one expert's w13 is (2I, K) = (32, 4)
    wire = torch.zeros(16, 4, dtype=torch.uint8)
    up = live[1].view(2, 2, 8, 4)[:, 1]
    table = compile_segments([Write("up", 0, Region.of(up), Region.of(wire.view(2, 8, 4)))])
    assert len(table) == 1
    assert table.run.tolist() == [32]
    assert table.sizes.tolist() == [[1, 2]]
    assert table.source_strides.tolist() == [[0, 32]]
    assert table.destination_strides.tolist() == [[0, 64]]
    assert table.destination_offset.tolist() == [32 * 4 + 32]


def test_a_permuted_tensor_that_is_cut_stays_a_handful_of_rows():
    wire, live = torch.zeros(64, 48, dtype=torch.bfloat16), torch.zeros(48, 64, dtype=torch.bfloat16)
    write = Write("w", 0, Region.of(live), Region.of(wire.t()))
    buffers = [[Chunk("w", 0, 3001, 0)], [Chunk("w", 3001, wire.nbytes - 3001, 0)]]
    tables = [compile_segments([write], [chunks]) for chunks in buffers]
    assert all(len(table) <= 4 for table in tables)
    assert sum(table.num_bytes for table in tables) == wire.nbytes


def test_dims_beyond_two_become_rows_of_the_smaller_ones():
    wire = torch.zeros(3, 5, 2, 7, 16, dtype=torch.int16)
    live = torch.zeros(7, 2, 5, 3, 16, dtype=torch.int16)
    table = compile_segments([Write("w", 0, Region.of(live), Region.of(wire.permute(3, 2, 1, 0, 4)))])
    assert len(table) == 6
    assert table.num_bytes == wire.nbytes


def test_short_runs_keep_the_dims_that_are_neighbours_in_memory():
    """Packed scales, MN-major per expert: a row per expert, each a transpose."""
    wire = torch.zeros(40, 64, 5, dtype=torch.int32)
    live = torch.empty_strided((40, 64, 5), (64 * 5, 1, 64), dtype=torch.int32)
    table = compile_segments([Write("w", 0, Region.of(live), Region.of(wire))])
    assert len(table) == 40
    assert table.sizes[0].tolist() == [5, 64]
    assert table.source_strides[0].tolist() == [4, 20]
    assert table.destination_strides[0].tolist() == [256, 4]


def test_locality_never_costs_more_rows_than_allowed():
    shape = (65, 2, 65, 2, 65)  # the neighbours in memory are the dims of size 2
    wire = torch.empty_strided(shape, (16900, 2, 260, 1, 4), dtype=torch.int8, device="meta")
    live = torch.empty_strided(shape, (16900, 1, 260, 2, 4), dtype=torch.int8, device="meta")
    table = compile_segments([Write("w", 0, Region.of(live), Region.of(wire))])
    assert len(table) <= 65 * 4


def test_an_empty_tensor_leaves_no_row():
    empty = Region.of(torch.zeros(0, 4))
    table = compile_segments([Write("w", 0, empty, empty)], [[Chunk("w", 0, 0, 0)]])
    assert (len(table), table.num_bytes, table.num_sources) == (0, 0, 1)
    table.check_bounds([0], {})


def test_names_without_writes_are_left_out():
    region = Region.of(torch.zeros(4))
    buffers = [[Chunk("other", 0, 16, 0), Chunk("w", 0, 16, 256)]]
    table = compile_segments([Write("w", 0, region, region)], buffers)
    assert table.source_offset.tolist() == [256]
    assert table.names[table.name[0]] == "w"


@pytest.mark.parametrize(
    ("dest", "source", "message"),
    [
        (Region(0, (4,), (4,), 4), Region(0, (2, 2), (8, 4), 4), "one shape"),
        (Region(0, (4,), (4,), 4), Region(0, (4,), (4,), 2), "item size"),
        (Region(0, (4,), (0,), 4), Region(0, (4,), (4,), 4), "twice"),
        (Region(16, (4,), (-4,), 4), Region(0, (4,), (4,), 4), "negative"),
    ],
)
def test_a_write_that_is_no_copy_is_refused_by_name(dest, source, message):
    with pytest.raises(LayoutError, match=message) as caught:
        compile_segments([Write("layers.0.w", 0, dest, source)])
    assert caught.value.names == ("layers.0.w",)


@pytest.mark.parametrize(
    ("source_bytes", "destination_bytes", "message"),
    [
        ([63], {3: 64}, "source"),
        ([64], {3: 63}, "destination storage"),
        ([64], {}, "no storage"),
        ([64, 64], {3: 64}, "reads 1 sources"),
    ],
)
def test_bounds_are_checked_against_both_sides(source_bytes, destination_bytes, message):
    region = Region.of(torch.zeros(4, 4))
    table = compile_segments([Write("w", 3, region, region)])
    table.check_bounds([64], {3: 64})
    with pytest.raises(LayoutError, match=message):
        table.check_bounds(source_bytes, destination_bytes)


def test_a_negative_offset_is_out_of_bounds():
    region = Region.of(torch.zeros(4, 4))
    table = compile_segments([Write("w", 0, Region(-4, (4, 4), (16, 4), 4), region)])
    with pytest.raises(LayoutError, match="leave their destination storage"):
        table.check_bounds([64], {0: 64})


def test_many_equal_experts_share_patterns_and_compile_to_one_row_each():
    live = torch.empty(64, 64, 16, dtype=torch.uint8)
    writes = [
        Write(f"{layer}.{expert}.{half}", layer, Region.of(live[expert].view(4, 2, 8, 16)[:, half]),
                  Region.of(torch.empty(32, 16, dtype=torch.uint8).view(4, 8, 16)))
        for layer in range(8) for expert in range(64) for half in range(2)
    ]  # fmt: skip
    table = compile_segments(writes)
    assert len(table) == len(writes)
    assert table.num_bytes == 8 * live.nbytes
