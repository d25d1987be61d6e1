"""One table, bound once, copies the right bytes from any source, and refuses what it cannot prove."""

from __future__ import annotations

import gc
import random
import weakref

import kernel_checks
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import check_random_plan, random_bytes

from weightsync.errors import LayoutError, ReloadError
from weightsync.kernels.segment_copy import SegmentCopy, choose_backend, storage_view, tile_steps
from weightsync.plan.regions import Region
from weightsync.plan.replay import Replay
from weightsync.plan.segments import compile_segments
from weightsync.plan.writes import Write
from weightsync.transport.buckets import Bucket, Chunk


def whole(size: int, key: int = 0) -> Write:
    region = Region.of(torch.zeros(size, dtype=torch.uint8))
    return Write("w", key, region, region)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_random_plans_copy_the_bytes_that_torch_copies(seed):
    check_random_plan(seed, "cpu", "torch")


@pytest.mark.parametrize(
    "check",
    [
        kernel_checks.check_every_alignment_and_run_length,
        kernel_checks.check_tiles_of_long_and_of_transposed_copies,
        kernel_checks.check_sources_can_be_exchanged,
        kernel_checks.check_destinations_can_be_exchanged,
    ],
)
def test_the_torch_backend_passes_the_kernel_checks(check):
    check("cpu", "torch")


def test_a_launch_without_sources_is_refused():
    copy = SegmentCopy(compile_segments([whole(64)]), {0: torch.zeros(64, dtype=torch.uint8)})
    with pytest.raises(ReloadError, match="no sources are bound"):
        copy.launch()
    copy.run([torch.ones(64, dtype=torch.uint8)])
    with pytest.raises(ReloadError, match="no sources are bound"):
        copy.launch()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "reads 1 sources, got 0"),
        ([torch.zeros(63, dtype=torch.uint8)], "at least 64 bytes"),
        ([torch.zeros(64, 2, dtype=torch.uint8)[:, 0]], "not contiguous"),
        ([torch.zeros(64, dtype=torch.uint8, device="meta")], "on meta"),
    ],
)
def test_sources_that_do_not_fit_are_refused_before_a_byte_moves(sources, message):
    live = torch.zeros(64, dtype=torch.uint8)
    copy = SegmentCopy(compile_segments([whole(64)]), {0: live})
    with pytest.raises(LayoutError, match=message):
        copy.run(sources)
    assert not live.any()


def test_storages_on_two_devices_are_refused():
    storages = {0: torch.zeros(8, dtype=torch.uint8), 1: torch.zeros(8, dtype=torch.uint8, device="meta")}
    with pytest.raises(LayoutError, match="serves one device"):
        SegmentCopy(compile_segments([whole(8, 0), whole(8, 1)]), storages)


def test_a_view_stands_for_its_whole_storage():
    base = torch.arange(16, dtype=torch.int32)
    view = storage_view(base[4:6])
    assert view.nbytes == 64
    assert view.data_ptr() == base.data_ptr()


def test_released_destinations_are_let_go_and_nothing_is_copied_before_others_are_bound():
    memory = np.zeros(64, np.uint8)
    alive = weakref.ref(memory)
    copy = SegmentCopy(compile_segments([whole(64)]), {0: torch.from_numpy(memory)})
    source = torch.ones(64, dtype=torch.uint8)
    copy.bind_sources([source])
    copy.release_destinations()
    del memory
    gc.collect()
    assert alive() is None
    with pytest.raises(ReloadError, match="no sources are bound"):
        copy.launch()
    with pytest.raises(ReloadError, match="bind_destinations"):
        copy.run([source])


def test_destinations_that_do_not_fit_are_refused_and_the_old_ones_stay():
    live = torch.zeros(64, dtype=torch.uint8)
    copy = SegmentCopy(compile_segments([whole(64)]), {0: live})
    for other, message in (
        (torch.zeros(63, dtype=torch.uint8), "leave their destination storage"),
        (torch.zeros(64, dtype=torch.uint8, device="meta"), "serves one device"),
    ):
        with pytest.raises(LayoutError, match=message):
            copy.bind_destinations({0: other})
    with pytest.raises(LayoutError, match="no storage was given"):
        copy.bind_destinations({})
    copy.run([torch.ones(64, dtype=torch.uint8)])
    assert live.all()


def test_an_empty_table_needs_no_storage_and_copies_nothing():
    copy = SegmentCopy(compile_segments([], [[]]), {})
    copy.run([torch.zeros(0, dtype=torch.uint8)])
    assert (copy.device, copy.table_bytes) == (None, 0)


@pytest.mark.parametrize(
    ("shape", "run"),
    [((1, 1), 1 << 20), ((1, 128), 16384), ((300, 200), 2), ((4096, 4096), 1), ((7, 5), 3000), ((1, 9000), 24)],
)
def test_tiles_are_full_but_never_larger_than_a_program_should_copy(shape, run):
    wire = torch.empty_strided((*shape, run), (3 * shape[1] * run, 3 * run, 1), dtype=torch.uint8, device="meta")
    live = torch.empty_strided((*shape, run), (2 * run, 2 * run * shape[0], 1), dtype=torch.uint8, device="meta")
    steps = tile_steps(compile_segments([Write("w", 0, Region.of(live), Region.of(wire))]), 32768)
    (tile_bytes,) = steps.prod(axis=1)
    assert min(32768, shape[0] * shape[1] * run) / 4 <= tile_bytes <= 32768


def test_the_backend_follows_the_device():
    assert choose_backend(torch.device("cpu")) == "torch"
    assert choose_backend(torch.device("cpu"), "triton") == "triton"
    assert choose_backend(torch.device("cuda"), "torch") == "torch"


@pytest.mark.gpu
def test_random_plans_on_the_gpu():
    for seed in range(200):
        check_random_plan(seed, "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check",
    [
        kernel_checks.check_every_alignment_and_run_length,
        kernel_checks.check_tiles_of_long_and_of_transposed_copies,
        kernel_checks.check_sources_can_be_exchanged,
        kernel_checks.check_destinations_can_be_exchanged,
    ],
)
def test_kernel_checks_on_the_gpu(check):
    check("cuda", "triton")
    check("cuda", "torch")


@pytest.mark.gpu
def test_a_captured_graph_reads_the_source_bound_last():
    size = 100_001
    live = torch.zeros(size, dtype=torch.uint8, device="cuda")
    first, second, third = (random_bytes(size + 3, seed).cuda() for seed in range(3))
    copy = SegmentCopy(compile_segments([whole(size)]), {0: live})
    copy.run([first[:size]])
    copy.bind_sources([first[:size]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy.launch()
    for source in (first[:size], second[:size], third[3:]):  # the last at another alignment
        live.zero_()
        copy.bind_sources([source])
        graph.replay()
        assert torch.equal(live, source)


@pytest.mark.gpu
def test_many_tensors_of_this_process_take_one_launch_and_no_lasting_memory():
    live = torch.zeros(64, 32, 48, dtype=torch.float8_e4m3fn, device="cuda")
    wires = [(str(e), random_bytes(32 * 48, e).view(torch.float8_e4m3fn).view(32, 48).cuda()) for e in range(64)]
    writes = [
        Write(name, 0, Region.of(live[e].view(2, 2, 8, 48).transpose(0, 1)), Region.of(wire.view(2, 2, 8, 48)))
        for e, (name, wire) in enumerate(wires)
    ]
    replay = Replay(writes, {0: live})
    replay.copy_tensors(wires)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        replay.copy_tensors(wires)
    assert torch.cuda.memory_allocated() == before
    expected = torch.stack([w.view(torch.uint8).view(2, 2, 8, 48).transpose(0, 1).reshape(32, 48) for _, w in wires])
    assert torch.equal(live.view(torch.uint8), expected)


@pytest.mark.gpu
def test_host_tensors_and_buffers_reach_the_gpu():
    rng = random.Random(1)
    live = torch.zeros(40, 256, dtype=torch.uint8, device="cuda")
    region = Region.of(torch.zeros(256, dtype=torch.uint8))
    writes = [Write(str(row), 0, Region.of(live[row]), region) for row in range(40)]
    wires = {str(row): random_bytes(256, row) for row in range(40)}
    replay = Replay(writes, {0: live})
    mixed = [(name, wire.cuda() if rng.random() < 0.5 else wire) for name, wire in wires.items()]
    replay.copy_tensors(mixed)
    assert torch.equal(live.cpu(), torch.stack(list(wires.values())))
    live.zero_()
    bucket = Bucket(tuple(Chunk(str(row), 0, 256, row * 256) for row in range(40)), 40 * 256)
    replay.copy_bucket(bucket, torch.cat(list(wires.values())))
    assert torch.equal(live.cpu(), torch.stack(list(wires.values())))
