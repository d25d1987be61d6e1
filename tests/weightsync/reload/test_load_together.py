"""Known buckets of whole tensors are taken by units: the same as tensor by tensor, with no Python for each."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import HookedNet, Layer, MoENet, Net, codes, cold, param, state_bytes, zeros

from weightsync import Manifest, ReloadError, start_reload
from weightsync.plan import replay as replay_module
from weightsync.reload import direct, packing
from weightsync.reload.records import Block
from weightsync.reload.state import state_of
from weightsync.transport.buckets import Bucket, Chunk

RANDOM = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def packed(weights, names, offset=0):
    """A bucket that holds these tensors whole."""
    chunks, at = [], offset
    for name in names:
        chunks.append(Chunk(name, 0, weights[name].nbytes, at))
        at += weights[name].nbytes
    return Bucket(tuple(chunks), at)


def fill(bucket, weights):
    buffer = torch.full((bucket.num_bytes,), 0xEE, dtype=torch.uint8)
    for chunk in bucket.chunks:
        buffer[chunk.offset : chunk.offset + chunk.num_bytes] = weights[chunk.name].reshape(-1).view(torch.uint8)
    return buffer


def push(model, weights, calls, **options):
    """Pushes buckets, several in a call."""
    manifest = Manifest.from_tensors([(name, weights[name]) for call in calls for b in call for name in names_of(b)])
    session = start_reload(model, manifest=manifest, **options)
    try:
        for buckets in calls:
            session.load_buckets([(bucket, fill(bucket, weights)) for bucket in buckets])
        return session.finish()
    except BaseException:
        if session.is_open:
            session.abort()
        raise


def names_of(bucket):
    return [chunk.name for chunk in bucket.chunks]


def one_by_one(buckets, entries):
    """A packing of which every tensor is taken by itself."""
    found = packing.packing_of(buckets, entries)
    groups = tuple(dataclasses.replace(group, is_plain=False) for group in found.groups)
    return dataclasses.replace(found, groups=groups)


def what_happened(report):
    return {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if f.name != "seconds"}


@pytest.fixture
def looked_at(monkeypatch):
    """Names of which a tensor was made."""
    names = []

    def counted(buffer, chunk, entry):
        names.append(chunk.name)
        return part_of(buffer, chunk, entry)

    part_of = packing.part_of
    monkeypatch.setattr(packing, "part_of", counted)
    return names


class TiedNet(HookedNet):
    """`out.w` is `l0.w`."""

    def __init__(self, hook, **children):
        super().__init__(hook, **children, out=Layer())
        self.out.w = self.l0.w


def transpose(layer):
    layer.w = param(layer.w.data.t().contiguous())


def derive(layer):
    layer.d = {"sum": layer.w.data + layer.b.data.sum(), "view": layer.w.data.t()}


def look_next_door(layer):
    if hasattr(layer, "neighbour"):
        layer.seen = layer.neighbour().b.data.clone()


HOOKS = {"none": None, "transpose": transpose, "derive": derive, "abroad": look_next_door}


def build(kinds, *, is_tied, ran):
    """Layers with hooks that say when they run; "loader" stands for one whose loader is interpreted."""

    def saying(name, hook):
        def run(layer):
            ran.append(name)
            hook(layer)

        return run if hook else None

    layers = {}
    for i, kind in enumerate(kinds):
        b = param(zeros(2), weight_loader=lambda p, t: p.data.copy_(t * 2)) if kind == "loader" else zeros(2)
        layers[f"l{i}"] = Layer(saying(f"l{i}", HOOKS.get(kind)), w=zeros(2, 3), b=b)
    for i, layer in enumerate(layers.values()):
        neighbour = list(layers.values())[i - 1]
        layer.neighbour = lambda neighbour=neighbour: neighbour

    def total(model):
        ran.append("model")
        model.total = sum(child.b.data.sum() for child in model.children() if hasattr(child, "b"))

    return (TiedNet if is_tied else HookedNet)(total, **layers)


def checkpoint(num_layers, seed):
    shapes = [(f"l{i}.{name}", shape) for i in range(num_layers) for name, shape in (("w", (2, 3)), ("b", (2,)))]
    return {name: codes(100 * seed + 10 * k, *shape) for k, (name, shape) in enumerate(shapes)}


@RANDOM
@given(data=st.data())
def test_together_is_what_one_by_one_is(data):
    kinds = data.draw(st.lists(st.sampled_from([*sorted(HOOKS), "loader"]), min_size=1, max_size=4))
    is_tied = data.draw(st.booleans()) and kinds[0] in ("none", "derive")
    options = {
        "mode": data.draw(st.sampled_from(["direct", "layerwise"])),
        "rollback": data.draw(st.sampled_from(["none", "host", "device"])),
        "held_policy": data.draw(st.sampled_from(["spill", "write_through"])),
        "max_held_bytes": data.draw(st.sampled_from([0, 16, 40, 1000])),
    }
    names = data.draw(st.permutations(sorted(checkpoint(len(kinds), 0))))
    if data.draw(st.booleans()) and not {"transpose", "abroad"} & set(kinds):
        options["scope"] = "partial"
        names = names[: data.draw(st.integers(1, len(names)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(names)), max_size=4)))
    buckets = [
        packed(checkpoint(len(kinds), 0), names[first:last], offset=data.draw(st.sampled_from([0, 4, 256])))
        for first, last in zip([0, *cuts], [*cuts, len(names)], strict=True)
    ]
    split = data.draw(st.integers(0, len(buckets)))
    calls = [part for part in (buckets[:split], buckets[split:]) if part]
    outcomes = []
    for is_together in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_together:
                patch.setattr(direct, "packing_of", one_by_one)
            ran, seen = [], []
            model = cold(build(kinds, is_tied=is_tied, ran=ran), checkpoint(len(kinds), 9))
            for seed in (1, 2, 3):
                try:
                    seen.append(what_happened(push(model, checkpoint(len(kinds), seed), calls, **options)))
                except ReloadError as error:
                    seen.append(str(error))
                seen.append(state_bytes(model))
            outcomes.append((seen, ran))
    assert outcomes[0] == outcomes[1]


def test_a_known_push_makes_no_tensor_of_any_name_and_no_table(looked_at, monkeypatch):
    model = MoENet(3, 4)
    cold(model, model.checkpoint(1))
    weights = model.checkpoint(2)
    names = list(weights)
    calls = [[packed(weights, names[::2]), packed(weights, names[1::2], offset=4)]]
    push(model, weights, calls, mode="layerwise")
    compiled = []
    compile_segments = replay_module.compile_segments
    monkeypatch.setattr(
        replay_module, "compile_segments", lambda *args: compiled.append(args) or compile_segments(*args)
    )
    weights = model.checkpoint(3)
    report = push(model, weights, calls, mode="layerwise")
    assert (looked_at, compiled, report.interpreted) == ([], [], {})
    other = MoENet(3, 4)
    cold(other, weights)
    assert state_bytes(model) == state_bytes(other)


def test_a_unit_with_an_interpreted_name_falls_back_alone(looked_at):
    ran = []
    model = cold(build(["none", "loader", "derive"], is_tied=False, ran=ran), checkpoint(3, 1))
    weights = checkpoint(3, 2)
    push(model, weights, [[packed(weights, sorted(weights))]], mode="layerwise")
    assert sorted(looked_at) == ["l1.b", "l1.w"]
    assert state_bytes(model) == state_bytes(cold(build(["none", "loader", "derive"], is_tied=False, ran=[]), weights))


def test_a_unit_waits_while_another_is_open_that_is_not_complete():
    layers = {name: Layer(w=zeros(4), b=zeros(2)) for name in ("l0", "l1")}
    weights = {"l0.w": codes(1, 4), "l1.w": codes(9, 4), "l0.b": codes(20, 2), "l1.b": codes(30, 2)}
    model = cold(Net(**layers), {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    calls = [[packed(weights, ["l0.w", "l1.w"])], [packed(weights, ["l0.b", "l1.b"])]]
    report = push(model, weights, calls, mode="layerwise")
    assert (report.peak_held_bytes, report.peak_staged_bytes) == (16, 24)
    assert [model.get_parameter(name).tolist() for name in weights] == [tensor.tolist() for tensor in weights.values()]


def test_tensors_on_another_device_go_there_one_by_one(looked_at, monkeypatch):
    model = cold(Net(a=Layer(w=zeros(4)), b=Layer(w=zeros(4))), {"a.w": zeros(4), "b.w": zeros(4)})
    weights = {"a.w": codes(1, 4), "b.w": codes(9, 4)}
    monkeypatch.setattr(replay_module.Replay, "devices", {torch.device("cuda")})
    push(model, weights, [[packed(weights, weights)]], mode="layerwise")
    assert looked_at == ["a.w", "b.w"]
    assert [model.a.w.tolist(), model.b.w.tolist()] == [[1, 2, 3, 4], [9, 10, 11, 12]]


def test_a_unit_that_another_hook_looks_into_stays_staged_until_the_end():
    ran = []
    model = cold(build(["transpose", "abroad", "none"], is_tied=False, ran=ran), checkpoint(3, 1))
    weights = checkpoint(3, 2)
    buckets = [packed(weights, sorted(weights))]
    push(model, weights, [buckets], mode="layerwise")  # finds out that l1 looks into l0
    assert state_of(model).reach
    manifest = Manifest.from_tensors(weights.items())
    session = start_reload(model, mode="layerwise", manifest=manifest)
    weights = checkpoint(3, 3)
    ran.clear()
    session.load_buckets([(bucket, fill(bucket, weights)) for bucket in buckets])
    intake = session._intake
    late = {unit.number for unit in intake.units if unit.is_late}
    assert late
    assert intake.staged.keys() == late
    assert ran == []
    session.finish()
    assert ran[:2] == ["l0", "l1"]
    assert state_bytes(model) == state_bytes(
        cold(build(["transpose", "abroad", "none"], is_tied=False, ran=[]), weights)
    )


@pytest.fixture
def staged_bytes(monkeypatch):
    """Tells how many bytes of staged memory anyone refers to."""
    made = []
    allocate = Block.allocate

    def watched(block, device):
        array = np.array(allocate(block, device).numpy())
        made.append(weakref.ref(array))
        return torch.from_numpy(array)

    def num_bytes():
        gc.collect()
        return sum(array.nbytes for ref in made if (array := ref()) is not None)

    monkeypatch.setattr(Block, "allocate", watched)
    return num_bytes


@pytest.mark.parametrize("kinds", [["none", "none"], ["derive", "loader"]])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_nothing_staged_is_kept_after_a_push(staged_bytes, kinds, is_aborted):
    model = cold(build(kinds, is_tied=False, ran=[]), checkpoint(2, 1))
    weights = checkpoint(2, 2)
    buckets = [packed(weights, ["l0.w", "l1.b"]), packed(weights, ["l1.w", "l0.b"])]
    push(model, weights, [buckets], mode="layerwise")
    base = staged_bytes()
    for seed in (3, 4):
        weights = checkpoint(2, seed)
        session = start_reload(
            model, mode="layerwise", rollback="host", manifest=Manifest.from_tensors(weights.items())
        )
        if is_aborted:
            session.load_buckets([(buckets[0], fill(buckets[0], weights))])
            assert staged_bytes() > base
            session.abort()
        else:
            session.load_buckets([(bucket, fill(bucket, weights)) for bucket in buckets])
            session.finish()
        del session
        assert staged_bytes() == base
