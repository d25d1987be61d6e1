"""The demo's checkpoint is what real ones are: names, formats, config; built once; and training really changes it."""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch
from safetensors import safe_open

from megamoe_adapter.demo.checkpoint import (
    INDEX,
    CheckpointSpec,
    build_checkpoint,
    load_config,
    read_checkpoint,
    save_checkpoint,
)
from megamoe_adapter.demo.master import MasterModel
from megamoe_adapter.models.families import FAMILIES
from megamoe_adapter.models.moe_block import dequantised

EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.(experts\.\d+|shared_experts)\.(gate|up|down)_proj\.weight$")


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request, tmp_path_factory):
    return build_checkpoint(CheckpointSpec(request.param), tmp_path_factory.mktemp("checkpoints"))


def test_experts_are_block_fp8_and_the_rest_is_not(checkpoint):
    tensors = dict(read_checkpoint(checkpoint))
    experts = {name: tensor for name, tensor in tensors.items() if EXPERT.match(name)}
    assert len(experts) == 3 * (8 + 1) * 3  # two MoE layers and the MTP layer, 8 routed and one shared expert each
    for name, weight in experts.items():
        scale = tensors.pop(f"{name}_scale_inv")
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        assert tuple(scale.shape) == tuple(size // 128 for size in weight.shape)
        del tensors[name]
    routers = {name for name in tensors if ".mlp.gate." in name}
    assert len(routers) == 6
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if name in routers else torch.bfloat16), name


def test_the_mtp_layer_stands_behind_the_last_layer_under_its_usual_names(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    prefix = f"model.layers.{config['num_hidden_layers']}."
    names = {name.removeprefix(prefix) for name, _ in read_checkpoint(checkpoint) if name.startswith(prefix)}
    outside = {"embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight"}
    outside |= {"shared_head.norm.weight", "shared_head.head.weight"}
    assert outside < names
    assert {"input_layernorm.weight", "mlp.gate.weight", "mlp.experts.7.up_proj.weight_scale_inv"} < names


def test_config_says_how_the_experts_are_quantised_and_which_modules_are_not(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert quantization["fmt"] == "e4m3"
    assert quantization["weight_block_size"] == [128, 128]
    assert config["dtype"] == "bfloat16"
    matrices = {n for n, t in read_checkpoint(checkpoint) if t.dim() == 2 and t.dtype != torch.float8_e4m3fn}
    matrices = {name for name in matrices if not name.endswith("_scale_inv")}
    not_converted = tuple(f"{module}." for module in quantization["modules_to_not_convert"])
    assert {name for name in matrices if not name.startswith(not_converted)} == set()
    experts = {name for name, _ in read_checkpoint(checkpoint) if EXPERT.match(name)}
    assert {name for name in experts if name.startswith(not_converted)} == set()


def test_the_index_names_the_file_of_every_tensor(checkpoint):
    index = json.loads((checkpoint / INDEX).read_text())
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(files) > 1
    found, total = {}, 0
    for file in files:
        with safe_open(checkpoint / file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                found[name] = file
                total += shard.get_tensor(name).nbytes
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == total


def test_the_cache_is_keyed_by_every_parameter_and_read_back_unchanged(tmp_path):
    specs = [CheckpointSpec(), CheckpointSpec(seed=1), CheckpointSpec(vocab=256), CheckpointSpec("deepseek_v3")]
    assert len({spec.key for spec in specs}) == len(specs)
    first = build_checkpoint(CheckpointSpec(vocab=128), tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_checkpoint(CheckpointSpec(vocab=128), tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="multiple of 128, got 200"):
        build_checkpoint(CheckpointSpec(hidden=200), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_equal_specs_give_equal_bytes_and_two_builders_do_not_meet_half_a_folder(tmp_path):
    spec = CheckpointSpec(vocab=128, num_layers=2)
    places = [tmp_path / "shared", tmp_path / "shared", tmp_path / "alone"]
    results: list[object] = []
    threads = [threading.Thread(target=lambda p=p: results.append(build_checkpoint(spec, p))) for p in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 3
    assert len(list((tmp_path / "shared").iterdir())) == 1  # no staging folder is left
    first, second = ({p.name: p.read_bytes() for p in path.iterdir()} for path in {*results})
    assert first == second


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    def broken():
        yield "a", torch.zeros(4)
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        save_checkpoint(tmp_path / "x", CheckpointSpec().config(), broken())
    assert list(tmp_path.iterdir()) == []


def test_training_changes_every_weight_of_its_part_and_none_of_the_other(checkpoint):
    master = MasterModel(load_config(checkpoint))
    before = dict(read_checkpoint(checkpoint))
    master.load(before.items())
    for part, other in (("model", "draft"), ("draft", "model")):
        kept = {name: tensor.clone() for name, tensor in master.named_weights(other)}
        losses = master.train_steps(2, part)
        assert all(torch.isfinite(torch.tensor(losses)))
        after = dict(master.named_weights(part))
        unchanged = [name for name, tensor in after.items() if torch.equal(as_bytes(tensor), as_bytes(before[name]))]
        # An expert that no token was sent to has no gradient; its neighbours must have moved.
        assert {name for name in unchanged if ".experts." not in name} == set()
        assert len(unchanged) < len(after) / 2
        for name, tensor in master.named_weights(other):
            assert torch.equal(as_bytes(tensor), as_bytes(kept[name])), name


def test_the_toy_objective_is_learnt(checkpoint):
    master = MasterModel(load_config(checkpoint))
    master.load(read_checkpoint(checkpoint))
    losses = master.train_steps(25)
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.3


def test_load_and_export_are_inverse_up_to_the_rounding_of_fp8(checkpoint):
    master = MasterModel(load_config(checkpoint))
    tensors = dict(read_checkpoint(checkpoint))
    master.load(tensors.items())
    exported = dict(master.named_weights())
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            value, again = (dequantised(t[name], t[f"{name}_scale_inv"]) for t in (tensors, exported))
            assert (value - again).norm() / value.norm() < 0.01, name
        elif not name.endswith("_scale_inv"):
            assert torch.equal(exported[name], tensor), name


def test_loading_refuses_unknown_and_missing_names(checkpoint):
    master = MasterModel(load_config(checkpoint))
    tensors = dict(read_checkpoint(checkpoint))
    with pytest.raises(ValueError, match="model.extra"):
        master.load([*tensors.items(), ("model.extra", torch.zeros(1))])
    for name in ("model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"):
        with pytest.raises(ValueError, match=name):
            master.load((other, tensor) for other, tensor in tensors.items() if other != name)


def as_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)
