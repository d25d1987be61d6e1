"""Wrapped models take the same names: LoRA's `base_layer`, torch.compile's `_orig_mod`, data parallelism's `module`."""

import pytest
import torch
from planning_toys import assert_replays, plan_for, randomised, replay, treatments, wire_tensor
from test_plan_loaders import Experts, expert_weights, zeros
from torch import nn

from weightsync.errors import CoverageError
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload


class Wrap(nn.Module):
    """What LoRA puts around a layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_scale = 0.5

    def forward(self, x):
        return self.base_layer(x)


class Compiled(nn.Module):
    """What torch.compile puts around a submodule, as far as names go."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(3, 6, bias=False)
        self.out = nn.Linear(3, 3)
        self.experts = Experts(2, 0, 2)


class ByName(nn.Module):
    """Looks names up in `named_parameters()`, with fused names, as vLLM's models do."""

    def __init__(self, wrap=lambda model: None):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        wrap(self)

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if ".experts." in name:
                prefix, rest = name.split(".experts.")
                expert, shard, _ = rest.split(".")
                param = params[f"{prefix}.experts.w2" if shard == "w2" else f"{prefix}.experts.w13"]
                param.weight_loader(param, tensor, name, shard_id=shard, expert_id=int(expert))
                continue
            for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
                if f".{part}." in name:
                    params[name.replace(part, "qkv_proj")].data[2 * index : 2 * index + 2].copy_(tensor)
                    break
            else:
                params[name].data.copy_(tensor)


def checkpoint():
    weights = []
    for layer in range(2):
        prefix = f"layers.{layer}"
        shapes = {"q_proj.weight": (2, 3), "k_proj.weight": (2, 3), "v_proj.weight": (2, 3), "out.weight": (3, 3)}
        weights += [(f"{prefix}.{n}", wire_tensor(s, seed=layer * 50 + i)) for i, (n, s) in enumerate(shapes.items())]
        weights.append((f"{prefix}.out.bias", wire_tensor((3,), seed=layer * 50 + 9)))
        weights += [(f"{prefix}.{name}", tensor + layer) for name, tensor in expert_weights(2)]
    return weights


def wrap_out(model):
    for layer in model.layers:
        layer.out = Wrap(layer.out)


def wrap_fused(model):
    wrap_out(model)
    for layer in model.layers:
        layer.qkv_proj = Wrap(layer.qkv_proj)


def wrap_experts(model):
    for layer in model.layers:
        layer.experts = Wrap(layer.experts)


def wrap_layers(model):
    model.layers = nn.ModuleList(Compiled(layer) for layer in model.layers)


def wrap_twice(model):
    wrap_fused(model)
    wrap_experts(model)
    wrap_layers(model)


@pytest.mark.parametrize("wrap", [wrap_out, wrap_fused, wrap_experts, wrap_layers, wrap_twice])
def test_names_land_in_the_wrapped_modules(wrap):
    plain = randomised(ByName())
    plain.load_weights(checkpoint())
    model = randomised(ByName(wrap))
    plan = plan_for(model, checkpoint())
    assert set(treatments(plan).values()) == {"copy"}
    replay(plan, model, checkpoint())

    def unwrapped_names(module):
        return {
            ".".join(c for c in name.split(".") if c not in ("base_layer", "_orig_mod")): tensor.tolist()
            for name, tensor in module.named_parameters()
        }

    assert unwrapped_names(model) == unwrapped_names(plain)


def test_the_mapping_is_recorded_for_the_names_that_needed_it():
    plan = plan_for(ByName(wrap_fused), checkpoint())
    assert plan.mapping["layers.1.q_proj.weight"] == "layers.1.q_proj.base_layer.weight"
    assert plan.mapping["layers.0.out.bias"] == "layers.0.out.base_layer.bias"
    assert not any("experts" in name for name in plan.mapping)
    assert "mapped through wrappers" in plan.explain()


def test_a_name_that_lands_with_bare_parameter_names_is_mapped_to_itself():
    plan = plan_for(ByName(wrap_experts), checkpoint())
    assert plan.mapping == {name: name for name, _ in checkpoint() if "experts" in name}
    assert "without wrapper components" in plan.explain()


def test_an_interpreted_name_is_given_to_the_loader_under_its_mapped_name():
    class Scales(ByName):
        def load_weights(self, weights):
            super().load_weights((name, tensor * 2) for name, tensor in weights)

    model = randomised(Scales(wrap_twice))
    weights = checkpoint()
    plan = plan_for(model, weights)
    assert set(treatments(plan).values()) == {"opaque"}
    replay(plan, model, weights)
    assert torch.equal(model.layers[1]._orig_mod.out.base_layer.weight, dict(weights)["layers.1.out.weight"] * 2)


def test_a_name_that_is_mapped_already_is_left_alone():
    weights = [(name.replace(".out.", ".out.base_layer."), tensor) for name, tensor in checkpoint()]
    plan = plan_for(ByName(wrap_out), weights)
    assert plan.mapping == {}
    assert set(treatments(plan).values()) == {"copy"}


def test_a_name_that_only_looks_alike_is_not_mapped():
    model = nn.Sequential(Wrap(nn.Linear(2, 2, bias=False)))
    weights = [("0.weight", wire_tensor((2, 2)))]
    assert treatments(plan_for(model, weights)) == {"0.weight": "copy"}
    with pytest.raises(CoverageError) as caught:
        plan_reload(model, Manifest.from_tensors([*weights, ("0.weigh", wire_tensor((2, 2))), ("10.weight", zeros(1))]))
    assert set(caught.value.unexpected) == {"0.weigh", "10.weight"}


@pytest.mark.parametrize("loader", ["load_weights", "by name"])
def test_a_compiled_model_is_planned_as_what_it_wraps(loader):
    inner = ByName() if loader == "load_weights" else nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    weights = checkpoint() if loader == "load_weights" else [(n, t + 1) for n, t in inner.state_dict().items()]
    compiled = torch.compile(inner, backend="eager")
    plan = plan_for(compiled, weights)
    assert plan is plan_for(inner, weights)
    assert set(treatments(plan).values()) == {"copy"}
    assert not any("_orig_mod" in d.path for d in plan.destinations)


def test_a_data_parallel_wrapper_is_stepped_through():
    class Parallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    plan = plan_for(Parallel(ByName()), checkpoint())
    assert set(treatments(plan).values()) == {"copy"}
    assert all(d.path.startswith("module.") for d in plan.destinations)


def test_a_multimodal_wrapper_hands_names_to_its_inner_model():
    class Multimodal(nn.Module):
        def __init__(self):
            super().__init__()
            self.language_model = ByName()
            self.vision = nn.Linear(2, 2)

    weights = [(f"language_model.{n}", t) for n, t in checkpoint()]
    weights += [("vision.weight", wire_tensor((2, 2))), ("vision.bias", wire_tensor((2,)))]
    plan = assert_replays(Multimodal, weights)
    assert set(treatments(plan).values()) == {"copy"}


def test_the_layers_of_another_pipeline_stage_are_skipped():
    class Missing(nn.Identity):
        """Stands for a layer of another stage."""

    class Stage(ByName):
        def load_weights(self, weights):
            super().load_weights((n, t) for n, t in weights if not n.startswith("layers.1."))

    def wrap(model):
        model.layers[1] = Missing()

    plan = plan_for(Stage(wrap), checkpoint())
    assert set(plan.skipped) == {name for name, _ in checkpoint() if name.startswith("layers.1.")}
    assert "layers.1 holds no tensor" in plan.names["layers.1.out.weight"].reason
