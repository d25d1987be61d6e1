"""A replay writes what the plan says, from tensors of any layout and from buckets of any split, and nothing else."""

from __future__ import annotations

import gc
import random
import weakref

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
from weightsync.manifest import Manifest
from weightsync.plan import replay as replay_module
from weightsync.plan.regions import Region
from weightsync.plan.replay import Replay
from weightsync.plan.writes import Write
from weightsync.transport.buckets import Bucket, Chunk, plan_buckets


def with_other_layout(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Equal values, perhaps not contiguous, perhaps at an odd place of its storage, perhaps a Parameter."""
    kind = rng.choice(["same", "transposed", "offset", "parameter"])
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "offset":
        padded = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
        padded[3:] = tensor.reshape(-1)
        return padded[3:].view(tensor.shape)
    if kind == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    return tensor


def odd_buffer(data: np.ndarray, offset: int) -> torch.Tensor:
    buffer = torch.zeros(len(data) + offset, dtype=torch.uint8)
    buffer[offset:] = torch.from_numpy(data)
    return buffer[offset:]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_tensors_of_any_layout_give_the_planned_bytes(seed):
    rng = random.Random(seed)
    writes, wires, views = random_plan(rng)
    expected = expected_storages(writes, wires, views)
    replay = Replay(
        writes, {key: view.untyped_storage() if rng.random() < 0.5 else view for key, view in views.items()}
    )
    tensors = [(name, with_other_layout(wire, rng)) for name, wire in wires.items()]
    tensors.append(("not in the plan", torch.ones(3)))
    rng.shuffle(tensors)
    replay.copy_tensors(iter(tensors) if rng.random() < 0.5 else tensors)
    assert_storages_equal({key: storage_bytes(view) for key, view in views.items()}, expected)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_buckets_of_any_split_and_alignment_give_the_planned_bytes(seed):
    rng = random.Random(seed)
    writes, wires, views = random_plan(rng)
    expected = expected_storages(writes, wires, views)
    chunks, data = random_buffers(wires, rng)
    filled = [
        (Bucket(tuple(of_buffer), len(array)), odd_buffer(array, rng.randrange(9)))
        for of_buffer, array in zip(chunks, data, strict=True)
    ]
    replay = Replay(writes, views)
    for fill, together in ((0, False), (255, True)):  # twice: with a new table and a kept one; untouched bytes stay
        for view in views.values():
            storage_bytes(view)[:] = fill
        if together:
            replay.copy_buckets(filled)
        else:
            for bucket, buffer in filled:
                replay.copy_bucket(bucket, buffer)
        wanted = {key: np.where(written_bytes(writes, key, view), expected[key], fill) for key, view in views.items()}
        assert_storages_equal({key: storage_bytes(view) for key, view in views.items()}, wanted)


def written_bytes(writes: list[Write], key: int, view: torch.Tensor) -> np.ndarray:
    mask = torch.zeros(view.untyped_storage().nbytes(), dtype=torch.bool)
    for write in writes:
        if write.destination == key:
            shape, strides = (*write.dest.shape, write.dest.itemsize), (*write.dest.strides, 1)
            mask.as_strided(shape, strides, write.dest.offset).fill_(True)
    return mask.numpy()


def one_expert() -> tuple[list[Write], torch.Tensor, dict[str, torch.Tensor]]:
    """w1 and w3 (16, 4) into one w13 with gate and up interleaved by eight rows."""
    live = torch.zeros(32, 4, dtype=torch.float8_e4m3fn)
    by_half = live.view(2, 2, 8, 4)
    wires = {name: torch.arange(64).view(16, 4).add(start).to(torch.uint8).view(torch.float8_e4m3fn)
             for name, start in (("w1", 0), ("w3", 100))}  # fmt: skip
    writes = [
        Write(name, 0, Region.of(by_half[:, half]), Region.of(wires[name].view(2, 8, 4)))
        for half, name in enumerate(wires)
    ]
    return writes, live, wires


def test_the_interleaved_expert_comes_out_in_kernel_order():
    writes, live, wires = one_expert()
    Replay(writes, {0: live}).copy_tensors(list(wires.items()))
    w1, w3 = (wire.view(torch.uint8) for wire in wires.values())
    expected = torch.cat([w1[:8], w3[:8], w1[8:], w3[8:]])
    assert torch.equal(live.view(torch.uint8), expected)


def test_a_name_may_come_in_another_shape_or_dtype_of_the_same_bytes():
    writes, live, wires = one_expert()
    plain = torch.zeros(64, dtype=torch.uint8)
    wires["w2"] = torch.arange(64, 128, dtype=torch.uint8).view(16, 4)
    writes.append(Write("w2", 1, Region.of(plain), Region.of(torch.zeros(64, dtype=torch.uint8))))
    replay = Replay(writes, {0: live, 1: plain})
    replay.copy_tensors(list(wires.items()))
    expected = live.view(torch.uint8).clone()
    for shape, dtype in (
        ((64,), torch.uint8),
        ((64,), torch.float8_e4m3fn),
        ((8, 1), torch.float64),
        ((1, 8), torch.float64),
    ):
        live.view(torch.uint8).zero_()
        plain.zero_()
        replay.copy_tensors([(name, wire.view(-1).view(dtype).view(shape)) for name, wire in wires.items()])
        assert torch.equal(live.view(torch.uint8), expected), (shape, dtype)
        assert plain.tolist() == list(range(64, 128)), (shape, dtype)


def test_bucket_plans_of_every_size_agree():
    writes, live, wires = one_expert()
    wires["w1"], wires["w3"] = (wire.repeat(8, 4).contiguous() for wire in wires.values())  # (128, 16) each
    live = torch.zeros(256, 16, dtype=torch.float8_e4m3fn)
    by_half = live.view(16, 2, 8, 16)
    writes = [
        Write(name, 0, Region.of(by_half[:, half]), Region.of(wires[name].view(16, 8, 16)))
        for half, name in enumerate(wires)
    ]
    Replay(writes, {0: live}).copy_tensors(list(wires.items()))
    expected = live.clone().view(torch.uint8)
    for cap in (256, 512, 768, 2048, 1 << 20):
        live.view(torch.uint8).zero_()
        replay = Replay(writes, {0: live})
        for bucket in plan_buckets(Manifest.from_tensors(wires.items()).entries, cap):
            buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for chunk in bucket.chunks:
                part = wires[chunk.name].reshape(-1).view(torch.uint8)[chunk.start : chunk.start + chunk.num_bytes]
                buffer[chunk.offset : chunk.offset + chunk.num_bytes] = part
            replay.copy_bucket(bucket, buffer)
        assert torch.equal(live.view(torch.uint8), expected), f"bucket cap {cap}"


def test_a_tensor_smaller_than_the_plan_reads_is_refused_by_name():
    writes, live, wires = one_expert()
    with pytest.raises(LayoutError, match=r"w3: the plan reads 64 bytes") as caught:
        Replay(writes, {0: live}).copy_tensors([("w3", wires["w3"][:8])])
    assert caught.value.names == ("w3",)


def test_a_short_buffer_is_refused_before_a_byte_moves():
    writes, live, _ = one_expert()
    bucket = Bucket((Chunk("w1", 0, 64, 0), Chunk("w3", 0, 64, 256)), 512)
    with pytest.raises(LayoutError, match="at least 320 bytes") as caught:
        Replay(writes, {0: live}).copy_bucket(bucket, torch.ones(319, dtype=torch.uint8))
    assert set(caught.value.names) == {"w1", "w3"}
    assert not live.view(torch.uint8).any()


def test_a_storage_that_is_too_small_or_missing_is_refused_at_binding():
    writes, live, _ = one_expert()
    with pytest.raises(LayoutError, match="leave their destination storage"):
        Replay(writes, {0: live[:31].clone()})
    with pytest.raises(LayoutError, match="no storage was given for destination 0"):
        Replay(writes, {})


def test_a_storage_that_moved_is_refused():
    writes, live, _ = one_expert()
    replay = Replay(writes, {0: live})
    bucket = Bucket((Chunk("w1", 0, 64, 0),), 256)
    replay.copy_bucket(bucket, torch.ones(64, dtype=torch.uint8))
    live.untyped_storage().resize_(1 << 20)
    with pytest.raises(LayoutError, match="moved"):
        replay.copy_bucket(bucket, torch.ones(64, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="moved"):
        replay.copy_tensors([("w1", torch.ones(64, dtype=torch.uint8))])


def test_binding_again_writes_to_the_new_storage_alone():
    writes, live, wires = one_expert()
    replay = Replay(writes, {0: live})
    bucket = Bucket((Chunk("w1", 0, 64, 0),), 256)
    replay.copy_tensors(list(wires.items()))
    replay.copy_bucket(bucket, torch.zeros(64, dtype=torch.uint8))
    before = live.view(torch.uint8).clone()
    new = torch.zeros_like(live)
    replay.bind({0: new})
    replay.copy_tensors(list(wires.items()))
    replay.copy_bucket(bucket, torch.full((64,), 7, dtype=torch.uint8))
    assert new.view(torch.uint8)[:8].eq(7).all()
    assert torch.equal(live.view(torch.uint8), before)


class FreedMemory:
    """Tells whether memory that torch only borrows (a numpy array's) is still referenced."""

    def __init__(self, num_bytes: int) -> None:
        array = np.zeros(num_bytes, np.uint8)
        self._alive = weakref.ref(array)
        self.tensor: torch.Tensor | None = torch.from_numpy(array)

    def is_freed_without_us(self) -> bool:
        self.tensor = None
        gc.collect()
        return self._alive() is None


def test_neither_sources_nor_buffers_are_kept():
    writes, live, _ = one_expert()
    replay = Replay(writes, {0: live})
    buffer, tensor = FreedMemory(64), FreedMemory(64)
    replay.copy_bucket(Bucket((Chunk("w1", 0, 64, 0),), 256), buffer.tensor)
    replay.copy_tensors([("w1", tensor.tensor.view(16, 4))])
    assert buffer.is_freed_without_us()
    assert tensor.is_freed_without_us()


def test_old_storages_are_let_go_when_others_are_bound():
    writes, _, wires = one_expert()
    old = FreedMemory(128)
    replay = Replay(writes, {0: old.tensor})
    replay.copy_tensors(list(wires.items()))
    replay.copy_bucket(Bucket((Chunk("w1", 0, 64, 0),), 256), torch.zeros(64, dtype=torch.uint8))
    replay.bind({0: torch.zeros(128, dtype=torch.uint8)})
    assert old.is_freed_without_us()


def test_storages_of_the_same_sizes_keep_the_tables(monkeypatch):
    writes, live, wires = one_expert()
    replay = Replay(writes, {0: live})
    bucket, whole = Bucket((Chunk("w1", 0, 64, 0),), 256), list(wires.items())
    replay.copy_bucket(bucket, torch.ones(64, dtype=torch.uint8))
    compiled = []
    real = replay_module.compile_segments
    monkeypatch.setattr(replay_module, "compile_segments", lambda *args: compiled.append(args) or real(*args))
    for value in range(3):
        replay.release()
        new = torch.zeros_like(live)
        replay.bind({0: new})
        replay.copy_bucket(bucket, torch.full((64,), value + 1, dtype=torch.uint8))
        assert new.view(torch.uint8)[:8].eq(value + 1).all()
    assert compiled == []
    larger = torch.zeros(256, dtype=torch.uint8)
    replay.bind({0: larger})  # another size: proved and laid out anew
    replay.copy_tensors(whole)
    assert len(compiled) > 0
    assert larger.view(torch.uint8)[:128].eq(_written_once(writes, wires)).all()


def _written_once(writes, wires):
    live = torch.zeros(128, dtype=torch.uint8)
    Replay(writes, {0: live}).copy_tensors(list(wires.items()))
    return live


def test_a_released_replay_keeps_nothing_and_copies_nothing():
    writes, _, wires = one_expert()
    old = FreedMemory(128)
    replay = Replay(writes, {0: old.tensor})
    bucket = Bucket((Chunk("w1", 0, 64, 0),), 256)
    replay.copy_tensors(list(wires.items()))
    replay.copy_bucket(bucket, torch.zeros(64, dtype=torch.uint8))
    replay.release()
    assert old.is_freed_without_us()
    with pytest.raises(LayoutError, match="released"):
        replay.copy_tensors(list(wires.items()))
    with pytest.raises(LayoutError, match="released"):
        replay.copy_bucket(bucket, torch.zeros(64, dtype=torch.uint8))


def test_tables_are_kept_for_so_many_sets_of_buckets():
    writes, live, _ = one_expert()
    replay = Replay(writes, {0: live}, max_tables=2)
    for offset in range(5):
        replay.copy_bucket(Bucket((Chunk("w1", 0, 64, offset),), 256), torch.ones(80, dtype=torch.uint8))
        assert len(replay._parts[0]._compiled) <= 2
        assert len(replay._parts[0]._recent) <= 2


def wide_plan(num_names: int, num_bytes: int):
    """As many names of one row each, and the live storage and the bytes of all of them."""
    live = torch.zeros(num_names, num_bytes, dtype=torch.uint8)
    region = Region.of(torch.zeros(num_bytes, dtype=torch.uint8))
    writes = [Write(str(row), 0, Region.of(live[row]), region) for row in range(num_names)]
    wire = torch.arange(num_names * num_bytes).remainder(251).to(torch.uint8).view(num_names, num_bytes)
    return writes, live, wire


def offer_in(order, wire, num_buckets):
    """The rows of `wire` in this order, in so many buckets of whole names."""
    offer = []
    for part in range(num_buckets):
        names = order[part::num_buckets]
        chunks = tuple(Chunk(str(row), 0, wire.shape[1], wire.shape[1] * place) for place, row in enumerate(names))
        buffer = wire[names].reshape(-1)
        offer.append((Bucket(chunks, buffer.numel()), buffer))
    return offer


@pytest.mark.parametrize("num_buckets", [1, 10])
@pytest.mark.parametrize("at_once", [False, True])
def test_tables_of_offers_that_do_not_come_again_are_let_go(num_buckets, at_once):
    writes, live, wire = wide_plan(40, 8)
    replay = Replay(writes, {0: live})
    rng = random.Random(1)
    for _ in range(40):
        live.zero_()
        offer = offer_in(rng.sample(range(40), 40), wire, num_buckets)
        if at_once:
            replay.copy_buckets(offer)
        else:
            for filled in offer:
                replay.copy_bucket(*filled)
        assert torch.equal(live, wire)
    (part,) = replay._parts
    most = replay_module.NUM_PASSES_KEPT * (1 if at_once else num_buckets)
    assert len(part._compiled) == most
    assert len(part._recent) == most
    assert sum(len(copy.table) for copy in part._compiled.values()) == replay_module.NUM_PASSES_KEPT * 40


def test_equal_buckets_in_new_objects_are_let_go_too():
    writes, live, wire = wide_plan(4, 8)
    replay = Replay(writes, {0: live})
    for _ in range(40):
        replay.copy_buckets(offer_in(range(4), wire, 1))
    (part,) = replay._parts
    assert len(part._compiled) == 1
    assert len(part._recent) == replay_module.NUM_PASSES_KEPT


@pytest.mark.parametrize(
    ("num_names", "num_bytes", "bucket_bytes"), [(300, 256, 256), (2, 38_400, 256), (7, 25_600, 512)]
)
def test_a_fixed_plan_of_many_buckets_compiles_nothing_in_its_second_pass(
    monkeypatch, num_names, num_bytes, bucket_bytes
):
    writes, live, wire = wide_plan(num_names, num_bytes)
    replay = Replay(writes, {0: live})
    entries = Manifest.from_tensors([(str(row), wire[row]) for row in range(num_names)]).entries
    buckets = plan_buckets(entries, bucket_bytes)
    assert len(buckets) >= 300
    compiled = []
    compile_segments = replay_module.compile_segments
    monkeypatch.setattr(
        replay_module, "compile_segments", lambda *given: compiled.append(1) or compile_segments(*given)
    )
    flat, counts = wire.reshape(-1), []
    for number in range(3):
        live.zero_()
        at = 0
        for bucket in buckets:
            replay.copy_bucket(bucket, flat[at : at + bucket.num_bytes])
            at += bucket.num_bytes
        assert torch.equal(live, wire), number
        counts.append(len(compiled))
    assert counts == [len(buckets)] * 3


def test_two_offers_that_alternate_and_an_update_of_a_part_keep_their_tables(monkeypatch):
    writes, live, wire = wide_plan(12, 8)
    replay = Replay(writes, {0: live})
    offers = [offer_in(range(12), wire, 3), offer_in(range(11, -1, -1), wire, 2), offer_in(range(6), wire, 1)]
    compiled = []
    compile_segments = replay_module.compile_segments
    monkeypatch.setattr(
        replay_module, "compile_segments", lambda *given: compiled.append(1) or compile_segments(*given)
    )
    for _ in range(4):
        for offer in offers:
            for filled in offer:
                replay.copy_bucket(*filled)
    assert len(compiled) == 6


def test_a_one_pass_iterator_never_holds_more_than_the_bound(monkeypatch):
    monkeypatch.setattr(replay_module, "MAX_HELD_BYTES", 4 * 64)
    live = torch.zeros(32, 64, dtype=torch.uint8)
    region = Region.of(torch.zeros(64, dtype=torch.uint8))
    writes = [Write(str(row), 0, Region.of(live[row]), region) for row in range(32)]
    alive: list[weakref.ref] = []
    most = 0

    def tensors():
        nonlocal most
        for row in range(32):
            array = np.full(64, row + 1, np.uint8)
            alive.append(weakref.ref(array))
            most = max(most, sum(ref() is not None for ref in alive))
            yield str(row), torch.from_numpy(array)

    Replay(writes, {0: live}).copy_tensors(tensors())
    assert live[:, 0].tolist() == list(range(1, 33))
    assert most <= 6  # four in the batch, the one at hand, and the one being made


def test_equal_buckets_share_a_table_even_if_they_are_new_objects(monkeypatch):
    writes, live, _ = one_expert()
    replay = Replay(writes, {0: live})
    compiled = []
    real = replay_module.compile_segments
    monkeypatch.setattr(replay_module, "compile_segments", lambda *args: compiled.append(args) or real(*args))
    for value in range(3):
        bucket = Bucket((Chunk("w1", 0, 64, 0),), 256)
        replay.copy_bucket(bucket, torch.full((64,), value, dtype=torch.uint8))
    assert len(compiled) == 1
    assert live.view(torch.uint8)[:8].eq(2).all()


def test_a_replay_bound_under_inference_mode_serves_outside_it():
    writes, _, wires = one_expert()
    with torch.inference_mode():
        live = torch.zeros(32, 4, dtype=torch.float8_e4m3fn)
        replay = Replay(writes, {0: live})
    replay.copy_tensors(list(wires.items()))
    replay.copy_bucket(Bucket((Chunk("w1", 0, 64, 0),), 256), torch.ones(64, dtype=torch.uint8))
    assert live.view(torch.uint8)[:8].eq(1).all()
    assert torch.equal(live.view(torch.uint8)[8:16], wires["w3"].view(torch.uint8)[:8])


def test_sources_that_require_grad_are_copied_without_a_graph():
    live = torch.zeros(4, 4, requires_grad=True)
    wire = torch.nn.Parameter(torch.randn(4, 4))
    write = Write("w", 0, Region.of(live), Region.of(wire.detach()))
    Replay([write], {0: live}).copy_tensors([("w", wire)])
    assert live.grad_fn is None
    assert np.array_equal(as_bytes(live.detach()), as_bytes(wire.detach()))
