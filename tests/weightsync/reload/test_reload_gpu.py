"""On a GPU: a real CUDA graph replays to the new weights, memory stays flat, and no staged byte is uninitialised."""

import gc

import pytest
import torch
from toys import MODES, HookedNet, Layer, MoENet, cold, param, push, push_in_chunks

pytestmark = pytest.mark.gpu
both_modes = pytest.mark.parametrize("mode", MODES)
SIZE = 1 << 16


class Graphed(HookedNet):
    """Derives a transposed copy, a scale that lives in a dict, and a sum over children."""

    def __init__(self):
        def layer_hook(layer):
            layer.t = layer.w.data.t().contiguous()
            layer.scales = {"s": layer.w.data.abs().amax().view(1)}

        def model_hook(model):
            model.total = (model.l.w.data + model.m.w.data).sum().view(1)

        layers = {"l": Layer(layer_hook, w=torch.zeros(64, 32)), "m": Layer(w=torch.zeros(64, 32))}
        super().__init__(model_hook, **layers)

    def forward(self, x):
        return (x @ self.m.w) @ self.l.t * self.l.scales["s"] + self.total


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"{name}.w": torch.randn(64, 32, generator=generator).cuda() for name in "lm"}


@both_modes
@pytest.mark.parametrize("rollback", ["none", "host", "device"])
def test_a_captured_graph_replays_to_the_new_weights(mode, rollback):
    with torch.device("cuda"):
        model = Graphed()
    cold(model, weights(0))
    x = torch.randn(8, 64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(x)
    for seed in (1, 2, 1):
        push_in_chunks(model, weights(seed), mode, rollback=rollback)
        garbage = [torch.full((SIZE,), float("nan"), device="cuda") for _ in range(16)]
        graph.replay()
        torch.cuda.synchronize()
        with torch.device("cuda"):
            fresh = Graphed()
        cold(fresh, weights(seed))
        with torch.no_grad():
            assert torch.equal(out, fresh(x))
            assert torch.equal(out, model(x))
        del garbage


@both_modes
def test_device_memory_is_flat_over_many_reloads(mode):
    with torch.device("cuda"):
        model = Graphed()
    cold(model, weights(0))
    sent = weights(1)
    for _ in range(3):
        push(model, sent, mode)
    before = settled_memory()
    for _ in range(20):
        push(model, sent, mode)
    assert settled_memory() == before


def settled_memory():
    gc.collect()  # what earlier tests left in reference cycles is not ours
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_direct_mode_allocates_less_than_one_tensor():
    with torch.device("cuda"):
        model = MoENet(4, 8)
        for layer in model.layers:
            layer.experts.w13 = param(torch.zeros(8, 2048, 256), weight_loader=layer.experts.weight_loader)
            layer.experts.w2 = param(torch.zeros(8, 256, 1024), weight_loader=layer.experts.weight_loader)
            layer.experts.intermediate = 1024
    shapes = {"w1": (1024, 256), "w2": (256, 1024), "w3": (1024, 256)}
    sent = {
        f"layers.{layer}.experts.{expert}.{shard}": torch.randn(shape, device="cuda")
        for layer in range(4)
        for expert in range(8)
        for shard, shape in shapes.items()
    }
    cold(model, sent)
    push(model, sent, "direct")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    push(model, sent, "direct")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1024 * 256 * 4
    assert torch.equal(model.layers[3].experts.w2[7], sent["layers.3.experts.7.w2"])


def test_device_tensors_spill_to_host_memory_and_come_back():
    with torch.device("cuda"):
        model = HookedNet(
            lambda model: None, **{f"l{i}": Layer(a=torch.zeros(SIZE), b=torch.zeros(SIZE)) for i in range(3)}
        )
    sent = {f"l{i}.{name}": torch.full((SIZE,), 10.0 * i + ord(name), device="cuda") for name in "ab" for i in range(3)}
    cold(model, sent)
    report = push(model, sent, "layerwise", max_held_bytes=0)
    assert report.peak_held_bytes == 0
    assert report.spilled_bytes > 0
    assert torch.equal(model.l2.b, sent["l2.b"])
