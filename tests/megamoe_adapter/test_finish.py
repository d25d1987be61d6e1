"""Finishing many layers at once: one wait for the device, all layers judged before any is touched."""

import copy

import pytest
import torch
from expert_checkpoints import PAIRS, Checkpoint, assert_same_bytes, byte_image, sizes_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe_adapter import finish
from megamoe_adapter.experts import MegaMoEExperts
from megamoe_adapter.finish import finish_layers
from megamoe_adapter.models.loading import finish_experts
from weightsync.reachable import holders

pytestmark = pytest.mark.filterwarnings("ignore::megamoe_adapter.requantize.RoundingWarning")
NUM_EXPERTS, NUM_LAYERS = 2, 3


def build(fmt, source):
    return [
        MegaMoEExperts(
            NUM_EXPERTS, 1, *sizes_of(fmt), fmt=fmt, source=source, backend="reference", prefix=prefix(index)
        )
        for index in range(NUM_LAYERS)
    ]


def prefix(index):
    return f"layers.{index}.mlp.experts"


def tensors_of(fmt, source, index, seed):
    return Checkpoint(
        source, *sizes_of(fmt), range(NUM_EXPERTS), seed=100 * seed + index, prefix=f"layers.{index}.mlp"
    ).tensors


def load(layers, fmt, source, seed, skip=()):
    for index, layer in enumerate(layers):
        for name, tensor in tensors_of(fmt, source, index, seed).items():
            if name not in skip:
                assert layer.load(name, tensor)


def images(layers):
    return [byte_image(layer) for layer in layers]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: values read as Python numbers, and copies to another device."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.num_waits = 0
        tolist = torch.Tensor.tolist

        def counted(tensor):
            self.num_waits += 1
            return tolist(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", counted)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.num_waits += name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["many layers", "one layer"])
@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_finish_waits_for_the_device_once_whatever_the_number_of_layers(fmt, source, kind, monkeypatch):
    layers = build(fmt, source)[: NUM_LAYERS if kind == "many layers" else 1]
    for seed in (1, 2):  # the second without what a first finish has to find out
        load(layers, fmt, source, seed)
        with monkeypatch.context() as patch, Waits(patch) as waits:
            assert finish_layers(layers) == len(layers) * NUM_EXPERTS * 3
        assert waits.num_waits == 1


def test_a_finish_without_new_data_never_waits(monkeypatch):
    layers = build("sm90_fp8", "block_fp8")
    load(layers, "sm90_fp8", "block_fp8", 1)
    finish_layers(layers)
    with Waits(monkeypatch) as waits:
        assert finish_layers(layers) == 0
    assert waits.num_waits == 0


@pytest.mark.parametrize(("fmt", "source"), PAIRS)
def test_all_layers_at_once_give_the_bytes_of_one_after_another(fmt, source):
    together, apart = build(fmt, source), build(fmt, source)
    for layers in (together, apart):
        load(layers, fmt, source, 1)
    finish_layers(together)
    for layer in apart:
        layer.finish()
    for one, other in zip(images(together), images(apart), strict=True):
        assert_same_bytes(one, other)


@pytest.mark.parametrize(("fmt", "source"), [("sm100_mxfp8", "block_fp8"), ("sm90_fp8", "block_fp8")])
def test_a_nan_in_the_last_layer_leaves_every_layer_as_it_was(fmt, source):
    layers = build(fmt, source)
    load(layers, fmt, source, 1)
    finish_layers(layers)
    load(layers, fmt, source, 2)
    name, tensor = next(
        (n, t) for n, t in tensors_of(fmt, source, 2, 2).items() if "experts.1.up_proj.weight" in n and t.dim() == 2
    )
    tensor.view(torch.uint8)[3, 5] = 0x7F
    layers[2].load(name, tensor)
    before = images(layers)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts: .*expert 1 \(slot 1\) w3"):
        finish_layers(layers)
    for one, other in zip(images(layers), before, strict=True):
        assert_same_bytes(one, other)
    assert all(layer.is_unfinished for layer in layers)


def test_an_incomplete_layer_leaves_the_complete_ones_alone_and_every_layer_has_its_say():
    layers = build("sm100_mxfp8", "block_fp8")
    load(layers, "sm100_mxfp8", "block_fp8", 1)
    finish_layers(layers)
    lost = [
        next(n for n in tensors_of("sm100_mxfp8", "block_fp8", index, 2) if n.endswith("scale_inv")) for index in (1, 2)
    ]
    load(layers, "sm100_mxfp8", "block_fp8", 2, skip=lost)
    before = images(layers)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts: .*scale missing") as caught:
        finish_layers(layers)
    assert [note.partition(":")[0] for note in caught.value.__notes__] == [prefix(2)]
    for one, other in zip(images(layers), before, strict=True):
        assert_same_bytes(one, other)


def test_layers_of_different_formats_are_judged_together():
    pairs = [("sm100_mxfp8", "block_fp8"), ("sm100_nvfp4", "nvfp4_modelopt"), ("sm100_bf16", "bf16")]
    layers = [build(*pair)[index] for index, pair in enumerate(pairs)]
    for index, (layer, pair) in enumerate(zip(layers, pairs, strict=True)):
        for name, tensor in tensors_of(*pair, index, 1).items():
            layer.load(name, tensor)
    expected = copy.deepcopy(layers)
    layers[2].w2_weight.data[1, 0, 0] = float("nan")
    before = images(layers)
    with pytest.raises(ValueError, match=r"layers\.2\..*expert 1 \(slot 1\) w2: weight holds NaN"):
        finish_layers(layers)
    for one, other in zip(images(layers), before, strict=True):
        assert_same_bytes(one, other)
    layers[2].w2_weight.data.copy_(expected[2].w2_weight.data)
    finish_layers(layers)
    for layer, other in zip(layers, expected, strict=True):
        other.finish()
        assert_same_bytes(byte_image(layer), byte_image(other))
    assert layers[1].l2_activation_scale_value == float(layers[1].l2_activation_scale)


def test_a_model_finishes_all_its_layers_with_one_wait(monkeypatch):
    layers = build("sm90_fp8", "block_fp8")
    load(layers, "sm90_fp8", "block_fp8", 1)
    reads = []
    read = finish.host_values
    monkeypatch.setattr(finish, "host_values", lambda flags: reads.append(1) or read(flags))
    finish_experts(nn.ModuleList(layers))
    assert reads == [1]
    assert not any(layer.is_unfinished for layer in layers)


def test_layers_that_are_alike_share_what_never_changes():
    layers = build("sm90_fp8", "block_fp8")
    assert len({id(layer.bank) for layer in layers}) == len({id(layer.names) for layer in layers}) == 1
    alone = len(holders(nn.ModuleList(layers[:1])))
    per_layer = (len(holders(nn.ModuleList(layers))) - alone) / (NUM_LAYERS - 1)
    assert per_layer <= 2  # the module, and its books of arrivals

    layers[0].set_placement([1, 0])
    assert [layer.placement.logical_of_slot for layer in layers] == [(1, 0), (0, 1), (0, 1)]
