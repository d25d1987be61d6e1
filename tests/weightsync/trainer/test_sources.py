"""Sources declare exactly what they yield, notice what changed, and quantise as checkpoints are quantised."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightsync.errors import LayoutError, ManifestError
from weightsync.trainer.quantize import BlockFP8Source, quantize_block_fp8
from weightsync.trainer.sources import _SAFETENSORS, CheckpointSource, ModuleSource, TensorSource


def declared_equals_yielded(source):
    pairs = list(source.iter_full())
    assert [m.name for m in source.metadata] == [name for name, _ in pairs]
    for meta, (_, tensor) in zip(source.metadata, pairs, strict=True):
        assert (meta.dtype, meta.shape) == (tensor.dtype, tuple(tensor.shape))
    return dict(pairs)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("transient", torch.ones(2), persistent=False)


def test_a_module_gives_parameters_and_persistent_buffers_each_once():
    module = Tied()
    source = ModuleSource(module)
    assert set(declared_equals_yielded(source)) == {"embed.weight", "kept"}
    assert set(source.resident()) == {"embed.weight", "kept"}
    assert source.manifest.num_bytes == 5 * 3 * 4 + 8


def test_metadata_is_the_same_object_until_the_module_changes():
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    source = ModuleSource(module)
    first = source.metadata
    module[0].weight.data.add_(1)
    assert source.metadata is first
    module[0].weight = nn.Parameter(torch.zeros(2, 3))
    assert source.metadata is first, "another tensor of the same shape needs no new handshake"
    assert source.resident()["0.weight"] is module[0].weight
    module[1].bias = None
    assert [m.name for m in source.metadata] == ["0.weight", "0.bias", "1.weight"]
    module[1].register_parameter("extra", nn.Parameter(torch.zeros(1)))
    assert "1.extra" in [m.name for m in source.metadata]
    module[0].weight = nn.Parameter(torch.zeros(7, 3))
    assert source.metadata[0].shape == (7, 3)


def test_names_are_changed_and_left_out():
    module = nn.Linear(3, 2)
    source = ModuleSource(module, rename=lambda n: None if n == "bias" else f"model.{n}")
    assert list(declared_equals_yielded(source)) == ["model.weight"]
    with pytest.raises(ManifestError, match="two tensors are renamed to 'x'"):
        _ = ModuleSource(module, rename=lambda n: "x").metadata


def test_a_sharded_tensor_is_gathered_and_not_resident():
    class Shard(torch.Tensor):
        def detach(self):
            return self

        def full_tensor(self):
            return torch.full((2, 2), 7.0)

    module = nn.Module()
    module.register_buffer("w", torch.zeros(2, 2).as_subclass(Shard))
    source = ModuleSource(module)
    assert source.resident() is None
    assert torch.equal(dict(source.iter_full())["w"], torch.full((2, 2), 7.0))


def test_tensors_may_be_exchanged_between_pushes():
    tensors = {"a": torch.zeros(2)}
    source = TensorSource(tensors)
    first = source.metadata
    tensors["a"] = torch.ones(2)
    assert source.metadata is first
    tensors["b"] = torch.ones(3)
    assert [m.name for m in source.metadata] == ["a", "b"]
    del tensors["a"]
    assert [m.name for m in source.metadata] == ["b"]


def test_a_checkpoint_gives_its_tensors_and_notices_a_new_file(tmp_path):
    tensors = {name.lower(): torch.zeros(3).to(dtype) for name, dtype in _SAFETENSORS.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        got = declared_equals_yielded(CheckpointSource(path))
        assert {n: t.dtype for n, t in got.items()} == {n: t.dtype for n, t in tensors.items()}
    source = CheckpointSource(tmp_path)
    first = source.metadata
    assert source.metadata is first
    save_file({"new": torch.arange(5.0)}, tmp_path / "model.safetensors")
    assert torch.equal(declared_equals_yielded(source)["new"], torch.arange(5.0))


def test_an_index_is_followed_and_its_lies_are_named(tmp_path):
    save_file({"a": torch.ones(2), "stale": torch.ones(9)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert set(declared_equals_yielded(CheckpointSource(tmp_path))) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "c": "2.safetensors"}}))
    with pytest.raises(ManifestError, match="lacks tensors") as caught:
        _ = CheckpointSource(tmp_path).metadata
    assert caught.value.names == ("c",)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ManifestError, match=r"gone\.safetensors"):
        _ = CheckpointSource(tmp_path).metadata


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="no safetensors checkpoint"):
        _ = CheckpointSource(tmp_path).metadata


# ---- block FP8 -------------------------------------------------------------------------------------------------------


def dequantize(weight, scale):
    rows, cols = weight.shape
    return weight.float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 5), (1, 300)])
def test_block_fp8_is_within_half_a_step_of_every_value(shape):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=generator) * 3).bfloat16()
    weight, scale = quantize_block_fp8(x)
    assert weight.shape == x.shape
    assert scale.shape == tuple(-(-n // 128) for n in shape)
    error = (dequantize(weight, scale) - x.float()).abs()
    step = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert bool((error <= torch.maximum(x.float().abs() / 16 * 1.001, step * 2**-10 * 1.001)).all())


def test_the_largest_value_of_a_block_is_the_largest_code():
    x = torch.zeros(128, 256)
    x[5, 7], x[9, 200] = -3.0, 0.5
    weight, scale = quantize_block_fp8(x)
    assert weight[5, 7].float() == -448
    assert weight[9, 200].float() == 448
    assert torch.equal(scale, torch.tensor([[3.0, 0.5]]) / 448)


def test_codes_and_power_of_two_scales_survive_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[torch.isfinite(codes)]
    x = torch.zeros(128, 128)
    x.view(-1)[: codes.numel()] = codes * 2.0**-9
    weight, scale = quantize_block_fp8(x)
    assert torch.equal(dequantize(weight, scale), x)


def test_a_zero_block_is_zero_and_can_be_divided():
    weight, scale = quantize_block_fp8(torch.zeros(128, 128))
    assert not weight.float().any()
    assert float(scale) == 2.0**-126


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(value):
    x = torch.zeros(4, 4)
    x[1, 1] = value
    source = BlockFP8Source(TensorSource({"w": x}), select=lambda n: True)
    with pytest.raises(LayoutError, match="w: .*not finite") as caught:
        list(source.iter_full())
    assert caught.value.names == ("w",)


def test_a_quantising_source_declares_what_it_yields():
    tensors = {"e.weight": torch.randn(130, 260).bfloat16(), "norm": torch.ones(3)}
    source = BlockFP8Source(TensorSource(tensors), select=lambda n: n.startswith("e."))
    got = declared_equals_yielded(source)
    assert list(got) == ["e.weight", "e.weight_scale_inv", "norm"]
    assert source.metadata is source.metadata
    with pytest.raises(LayoutError, match="takes a matrix"):
        _ = BlockFP8Source(TensorSource(tensors), select=lambda n: True).metadata
