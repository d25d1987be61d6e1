"""Kind K: extra memory has a stated bound for any order of arrival, counted in bytes."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import Layer, MoENet, Net, cold, full, push, state_bytes, zeros

from weightsync import CoverageError, Manifest, ReloadError, reload_state, start_reload
from weightsync.transport.buckets import Bucket, Chunk, plan_buckets

LAYERS, SIZE = 6, 1024


def build(hook=None):
    return Net(**{f"l{i}": Layer(hook, a=zeros(SIZE), b=zeros(SIZE)) for i in range(LAYERS)})


def checkpoint(value):
    return {f"l{i}.{name}": full(value + i, SIZE) for i in range(LAYERS) for name in "ab"}


def by_kind(weights):
    return dict(sorted(weights.items(), key=lambda item: item[0][-1]))


ONE_MODULE = 2 * SIZE * 4
ALL = LAYERS * ONE_MODULE


class LargestAllocation(TorchDispatchMode):
    """The largest new storage that an operator makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and not func._schema.is_mutable and not out.is_meta:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def test_in_order_of_modules_one_module_is_staged_and_nothing_held():
    model = cold(build(), checkpoint(1))
    report = push(model, checkpoint(2), "layerwise")
    assert (report.peak_staged_bytes, report.peak_held_bytes) == (ONE_MODULE, 0)


@pytest.mark.parametrize("order", [by_kind, lambda weights: dict(reversed(weights.items()))])
@pytest.mark.parametrize("limit", [0, SIZE * 4, 3 * SIZE * 4, ALL])
def test_spilling_keeps_held_bytes_within_the_limit_for_any_order(order, limit):
    model = cold(build(lambda layer: layer.a.data.neg_()), checkpoint(1))
    report = push(model, order(checkpoint(2)), "layerwise", max_held_bytes=limit)
    assert report.peak_held_bytes <= limit
    assert report.peak_staged_bytes == ONE_MODULE
    assert report.spilled_bytes == 0 or limit < ALL
    assert state_bytes(model) == state_bytes(cold(build(lambda layer: layer.a.data.neg_()), checkpoint(2)))


def test_spilled_tensors_of_every_shape_come_back_bit_for_bit():
    values = {"l.a": full(1, 1, dtype=torch.float64).expand(3), "l.b": zeros(0), "l.c": torch.tensor(5.5),
              "l.d": torch.arange(6, dtype=torch.uint8).view(2, 3).t()}  # fmt: skip
    model = Net(first=Layer(x=zeros(1), y=zeros(1)), l=Layer(**{n[2:]: torch.zeros_like(t) for n, t in values.items()}))
    weights = {"first.x": zeros(1), **values, "first.y": zeros(1)}
    cold(model, weights)
    report = push(model, weights, "layerwise", max_held_bytes=0)
    assert report.spilled_bytes == sum(tensor.nbytes for tensor in values.values())
    for name, tensor in values.items():
        assert torch.equal(getattr(model.l, name[2:]).data, tensor)


def test_writing_through_opens_further_modules_instead_of_holding():
    model = cold(build(), checkpoint(1))
    report = push(model, by_kind(checkpoint(2)), "layerwise", max_held_bytes=0, held_policy="write_through")
    assert (report.peak_held_bytes, report.spilled_bytes) == (0, 0)
    assert report.peak_staged_bytes == ALL
    assert state_bytes(model) == state_bytes(cold(build(), checkpoint(2)))


def test_refusing_happens_before_it_starts_and_names_the_bytes():
    model = cold(build(), checkpoint(1))
    weights = by_kind(checkpoint(2))
    held = (LAYERS - 1) * SIZE * 4
    with pytest.raises(ReloadError, match=f"{held} bytes"):
        start_reload(
            model, mode="layerwise", manifest=Manifest.from_tensors(weights.items()), max_held_bytes=held - 1,
            held_policy="refuse",
        )  # fmt: skip
    assert reload_state(model) == "live"
    report = push(model, weights, "layerwise", max_held_bytes=held, held_policy="refuse")
    assert report.peak_held_bytes == held


def test_refusing_without_a_manifest_fails_before_the_tensor_is_held():
    model = cold(build(), checkpoint(1))
    before = state_bytes(model)
    session = start_reload(model, mode="layerwise", max_held_bytes=0, held_policy="refuse")
    with pytest.raises(ReloadError, match="max_held_bytes=0"):
        session.load_weights(by_kind(checkpoint(2)))
    session.abort()
    assert (reload_state(model), state_bytes(model)) == ("live", before)


def test_direct_mode_allocates_nothing_that_grows_with_the_model():
    model = MoENet(4, 8)
    cold(model, model.checkpoint(1))
    weights = model.checkpoint(2)
    manifest = Manifest.from_tensors(weights.items())
    push(model, weights, "direct")
    with LargestAllocation() as counted:
        session = start_reload(model, mode="direct", manifest=manifest)
        session.load_weights(weights)
        session.finish()
    assert counted.largest <= max(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_a_tensor_of_which_a_part_never_came_is_missing(mode):
    model = cold(Net(l=Layer(w=zeros(64))), {"l.w": zeros(64)})
    session = start_reload(model, mode=mode, manifest=Manifest.from_tensors([("l.w", full(1, 64))]), rollback="host")
    session.load_bucket(Bucket((Chunk("l.w", 0, 128, 0),), 128), full(1, 64).view(torch.uint8))
    with pytest.raises(CoverageError) as caught:
        session.finish()
    assert caught.value.missing == ("l.w",)
    assert model.l.w.tolist() == [0] * 64


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_parts_that_overlap_are_refused_whole(mode):
    model = cold(Net(l=Layer(w=zeros(64))), {"l.w": zeros(64)})
    session = start_reload(model, mode=mode, manifest=Manifest.from_tensors([("l.w", full(1, 64))]), rollback="host")
    buffer = full(1, 64).view(torch.uint8)
    session.load_bucket(Bucket((Chunk("l.w", 0, 128, 0),), 128), buffer)
    with pytest.raises(CoverageError) as caught:
        session.load_bucket(Bucket((Chunk("l.w", 64, 192, 0),), 192), buffer)
    assert caught.value.duplicated == ("l.w",)
    session.abort()
    assert model.l.w.tolist() == [0] * 64


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
@pytest.mark.parametrize("cap", [256, 512, 4096])
@pytest.mark.parametrize("backwards", [False, True])
def test_buckets_with_split_tensors_give_the_bytes_of_whole_ones(mode, cap, backwards):
    def make():
        layers = {f"l{i}": Layer(hook, w=zeros(50, 7), s=zeros(3)) for i, hook in enumerate([None, double, None])}
        return Net(**layers)

    def double(layer):
        layer.d = layer.w.data * 2

    def weights(seed):
        values = itertools.count(seed)
        return {
            f"l{i}.{name}": full(next(values), *shape)
            for i in range(3)
            for name, shape in (("w", (50, 7)), ("s", (3,)))
        }

    model, sent = cold(make(), weights(1)), weights(40)
    manifest = Manifest.from_tensors(sent.items())
    session = start_reload(model, mode=mode, manifest=manifest)
    buckets = plan_buckets(manifest.entries, cap)
    buffer = torch.empty(cap, dtype=torch.uint8)
    for bucket in reversed(buckets) if backwards else buckets:
        buffer.fill_(255)
        for chunk in bucket.chunks:
            data = sent[chunk.name].view(-1).view(torch.uint8)[chunk.start : chunk.start + chunk.num_bytes]
            buffer[chunk.offset : chunk.offset + chunk.num_bytes].copy_(data)
        session.load_bucket(bucket, buffer)
    report = session.finish()
    assert report.num_names == 6
    assert state_bytes(model) == state_bytes(cold(make(), weights(40)))
