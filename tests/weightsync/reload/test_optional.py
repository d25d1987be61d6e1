"""What a checkpoint may lack (`weight_loader_optional`) is after every reload as construction, or the push, left it."""

import pytest
import torch
from torch import nn

from weightsync.errors import CoverageError
from weightsync.manifest import Manifest
from weightsync.reload.layouts import record_layouts
from weightsync.reload.session import finish_reload, reload, start_reload

SENTINEL = -1.0


class Attention(nn.Module):
    """Has a scale that a checkpoint may lack; its hook consumes and deletes it, as vLLM's attention layers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_k_scale", torch.zeros(()))
        self.create_scales()

    def create_scales(self):
        self.k_scale = nn.Parameter(torch.full((2,), SENTINEL), requires_grad=False)
        self.k_scale.weight_loader_optional = True

    def process_weights_after_loading(self):
        largest = float(self.k_scale.max())
        self._k_scale.fill_(1.0 if largest == SENTINEL else largest)
        del self.k_scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.proj = Attention(), nn.Linear(2, 2, bias=False)

    def load_weights(self, weights):
        tensors = {**dict(self.named_parameters())}
        for name, tensor in weights:
            path, _, part = name.partition("#")
            target = tensors[path].data
            (target[: tensor.shape[0]] if part else target).copy_(tensor)


def loaded(weights):
    model = Model()
    record_layouts(model)
    model.load_weights(weights.items())
    model.attn.process_weights_after_loading()
    return model


PLAIN = {"proj.weight": torch.full((2, 2), 3.0)}
SCALED = {**PLAIN, "attn.k_scale": torch.tensor([0.25, 0.5])}


def push(model, weights, mode, manifest):
    told = Manifest.from_tensors(weights.items()) if manifest else None
    session = start_reload(model, mode=mode, manifest=told)
    session.load_weights(weights.items())
    return finish_reload(model), session


@pytest.mark.parametrize("manifest", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_a_scale_that_comes_is_taken_and_one_that_does_not_is_as_constructed(mode, manifest):
    model = loaded(PLAIN)
    address = model.attn._k_scale.data_ptr()
    for weights, scale in [(SCALED, 0.5), (PLAIN, 1.0), (SCALED, 0.5), (SCALED, 0.5), (PLAIN, 1.0)]:
        report, session = push(model, weights, mode, manifest)
        assert model.attn._k_scale.item() == scale == loaded(weights).attn._k_scale.item()
        assert model.attn._k_scale.data_ptr() == address
        assert not hasattr(model.attn, "k_scale")
        assert report.hooks.count("attn.process_weights_after_loading") == 1
        assert session.plan.coverage.left_out == (() if weights is SCALED else ("attn.k_scale",))


def test_a_scale_that_comes_in_part_is_missing_its_rest():
    model = loaded(PLAIN)
    weights = {**PLAIN, "attn.k_scale#0": torch.tensor([0.25])}
    with pytest.raises(CoverageError, match=r"k_scale"), reload(model) as session:
        session.load_weights(weights.items())


def test_other_parameters_are_still_missing():
    model = loaded(PLAIN)
    with pytest.raises(CoverageError, match=r"proj\.weight"), reload(model) as session:
        session.load_weights([("attn.k_scale", SCALED["attn.k_scale"])])


def test_without_a_record_to_start_from_nothing_may_be_left_out():
    model = nn.Linear(2, 2)
    model.bias.weight_loader_optional = True
    model.load_weights = lambda weights: [dict(model.named_parameters())[n].data.copy_(t) for n, t in weights]
    with pytest.raises(CoverageError, match="bias"), reload(model) as session:
        session.load_weights([("weight", torch.zeros(2, 2))])


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_a_partial_push_leaves_a_scale_that_it_does_not_name(mode):
    model = loaded(SCALED)
    with reload(model, mode=mode, scope="partial") as session:
        session.load_weights(PLAIN.items())
    assert model.attn._k_scale.item() == 0.5
