"""Any split of a checkpoint into calls, in any order, in any mode, with any hooks, gives the bytes of a cold load."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import MODES, Captured, Experts, HookedNet, Layer, MoENet, Net, codes, cold, param, state_bytes, zeros

from weightsync import Manifest, start_reload
from weightsync.transport.buckets import plan_buckets

RANDOM = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def transpose(layer):
    layer.w = param(layer.w.data.t().contiguous())


def derive(layer):
    layer.d = {"sum": layer.w.data + layer.b.data.sum(), "view": layer.w.data.t()}


def latch_and_free(layer):
    if getattr(layer, "_done", False):
        return
    layer._done, layer.packed = True, torch.cat([layer.w.data.view(-1), layer.b.data])
    layer.w = layer.b = None


def in_place(layer):
    layer.w.data.copy_(layer.w.data.roll(1, 0).clone() * 3)


LAYER_HOOKS = {"none": None, "transpose": transpose, "derive": derive, "latch": latch_and_free, "in place": in_place}


def scale_children(model):
    model.total = sum(child.w.data.sum() for child in model.children() if getattr(child, "w", None) is not None)


MODEL_HOOKS = {"none": None, "total": scale_children}


def build(layer_hooks, model_hook):
    layers = {f"l{i}": Layer(LAYER_HOOKS[hook], w=zeros(2, 3), b=zeros(2)) for i, hook in enumerate(layer_hooks)}
    hook = MODEL_HOOKS[model_hook]
    return Net(**layers) if hook is None else HookedNet(hook, **layers)


def checkpoint(num_layers, seed):
    shapes = {"w": (2, 3), "b": (2,)}
    names = [(f"l{i}.{name}", shape) for i in range(num_layers) for name, shape in shapes.items()]
    return {name: codes(100 * seed + 10 * k, *shape) for k, (name, shape) in enumerate(names)}


@RANDOM
@given(data=st.data())
def test_random_splits_and_orders_give_the_bytes_of_a_cold_load(data):
    layer_hooks = data.draw(st.lists(st.sampled_from(sorted(LAYER_HOOKS)), min_size=1, max_size=4))
    model_hook = data.draw(st.sampled_from(sorted(MODEL_HOOKS)))
    model = cold(build(layer_hooks, model_hook), checkpoint(len(layer_hooks), 1))
    graph = Captured(model)
    for seed in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        weights = checkpoint(len(layer_hooks), seed)
        items = data.draw(st.permutations(list(weights.items())))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=3)))
        with_manifest = data.draw(st.booleans())
        session = start_reload(
            model,
            mode=data.draw(st.sampled_from(MODES)),
            manifest=Manifest.from_tensors(items) if with_manifest else None,
            rollback=data.draw(st.sampled_from(["none", "host", "device"])),
            max_held_bytes=data.draw(st.sampled_from([0, 16, 40, 1000])),
            held_policy=data.draw(st.sampled_from(["spill", "write_through"])),
        )
        for first, last in zip([0, *cuts], [*cuts, len(items)], strict=True):
            session.load_weights(items[first:last])
        session.finish()
        graph.check(model)
        assert state_bytes(model) == state_bytes(cold(build(layer_hooks, model_hook), weights))


@RANDOM
@given(data=st.data())
def test_random_aborts_leave_the_old_bytes_and_the_next_push_is_whole(data):
    layer_hooks = data.draw(st.lists(st.sampled_from(sorted(LAYER_HOOKS)), min_size=1, max_size=3))
    model_hook = data.draw(st.sampled_from(sorted(MODEL_HOOKS)))
    model = cold(build(layer_hooks, model_hook), checkpoint(len(layer_hooks), 1))
    graph, before = Captured(model), state_bytes(model)
    items = data.draw(st.permutations(list(checkpoint(len(layer_hooks), 2).items())))
    mode = data.draw(st.sampled_from(MODES))
    manifest = Manifest.from_tensors(items) if data.draw(st.booleans()) else None
    session = start_reload(model, mode=mode, manifest=manifest, rollback="host")
    sent = data.draw(st.integers(0, len(items)))
    session.load_weights(items[:sent])
    if sent == len(items) and data.draw(st.booleans()):
        session.prepare()
    assert session.abort() == "live"
    graph.check(model)
    assert state_bytes(model) == before
    session = start_reload(model, mode=mode)
    session.load_weights(items)
    session.finish()
    graph.check(model)
    assert state_bytes(model) == state_bytes(cold(build(layer_hooks, model_hook), dict(items)))


@RANDOM
@given(data=st.data())
def test_random_buckets_of_experts_give_the_bytes_of_a_cold_load(data):
    local = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    model = MoENet(2, 3, local)
    cold(model, model.checkpoint(1))
    weights = model.checkpoint(2)
    manifest = Manifest.from_tensors(data.draw(st.permutations(list(weights.items()))))
    buckets = plan_buckets(manifest.entries, data.draw(st.sampled_from([256, 512, 1024])))
    session = start_reload(model, mode=data.draw(st.sampled_from(MODES)), manifest=manifest)
    for bucket in data.draw(st.permutations(buckets)):
        buffer = torch.full((bucket.num_bytes,), 255, dtype=torch.uint8)
        for chunk in bucket.chunks:
            source = weights[chunk.name].view(-1).view(torch.uint8)
            buffer[chunk.offset : chunk.offset + chunk.num_bytes] = source[chunk.start : chunk.start + chunk.num_bytes]
        session.load_bucket(bucket, buffer)
    session.finish()
    assert isinstance(model.layers[0].experts, Experts)
    assert state_bytes(model) == state_bytes(cold(MoENet(2, 3, local), weights))
