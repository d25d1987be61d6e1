"""What one hook made stays while another one runs: neighbours, a hook of the model above, ties that came later."""

from __future__ import annotations

import pytest
import torch
from toys import MODES

from weightsync import Manifest, record_layouts, reload

WAYS = {
    "rebound": lambda layer: setattr(layer, "out", layer.w.data * 2),
    "data": lambda layer: setattr(layer.out, "data", layer.w.data * 2),
    "in place": lambda layer: layer.out.copy_(layer.w.data * 2),
}
KINDS = ("buffer", "attribute", "derived parameter")


class Doubling(torch.nn.Module):
    def __init__(self, way, kind, start, numel):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(numel), requires_grad=False)
        out = torch.full((numel,), start)
        if kind == "buffer":
            self.register_buffer("out", out)
        elif kind == "attribute":
            self.out = out
        else:
            self.out = torch.nn.Parameter(out, requires_grad=False)
            self.out.weight_loader_numel = 0
        self.way = way if kind != "derived parameter" or way != "rebound" else "data"

    def process_weights_after_loading(self):
        WAYS[self.way](self)


class Net(torch.nn.Module):
    def __init__(self, num_layers, *options):
        super().__init__()
        self.layers = torch.nn.ModuleList(Doubling(*options) for _ in range(num_layers))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)

    def run_hooks(self):
        for layer in self.layers:
            layer.process_weights_after_loading()


class NetWithHook(Net):
    def process_weights_after_loading(self):
        self.total = sum(float(layer.out.sum()) for layer in self.layers)  # made by the hooks below, in the same load

    def run_hooks(self):
        super().run_hooks()
        self.process_weights_after_loading()


def checkpoint(num_layers, value, numel):
    return {f"layers.{i}.w": torch.full((numel,), value + i) for i in range(num_layers)}


def push(model, weights, mode, with_manifest=True):
    manifest = Manifest.from_tensors(weights.items()) if with_manifest else None
    with reload(model, mode=mode, manifest=manifest) as session:
        session.load_weights(weights.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("net", [Net, NetWithHook])
def test_every_layer_keeps_what_its_own_hook_made(net, way, kind, mode):
    for num_layers, start, numel, with_manifest in ((1, 0.0, 2, True), (3, 3.0, 2, False), (3, 0.0, 4096, True)):
        model = net(num_layers, way, kind, start, numel)
        record_layouts(model)
        model.load_weights(checkpoint(num_layers, 1.0, numel).items())
        model.run_hooks()
        addresses = [layer.out.data_ptr() for layer in model.layers]
        for value in (5.0, 6.0, 5.0, 7.0):
            push(model, checkpoint(num_layers, value, numel), mode, with_manifest)
            assert [layer.out.unique().tolist() for layer in model.layers] == [
                [2 * (value + i)] for i in range(num_layers)
            ]
            if net is NetWithHook:
                assert model.total == sum(2 * (value + i) * numel for i in range(num_layers))
        assert [layer.out.data_ptr() for layer in model.layers] == addresses


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_tied_after_a_push_reaches_both_hooks_in_the_same_push(mode):
    model = Net(2, "rebound", "buffer", 0.0, 2)
    record_layouts(model)
    model.load_weights(checkpoint(2, 1.0, 2).items())
    model.run_hooks()
    push(model, checkpoint(2, 2.0, 2), mode)
    model.layers[1].w = model.layers[0].w
    for value in (5.0, 6.0, 7.0):
        push(model, checkpoint(1, value, 2), mode)
        assert [layer.out.tolist() for layer in model.layers] == [[2 * value] * 2] * 2
