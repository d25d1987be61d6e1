"""What an engine declares to be no part of a model is not entered, and does not hide changes elsewhere."""

import pytest
import torch
from torch import nn

from weightsync.errors import LayoutError
from weightsync.manifest import Manifest, ParamMeta
from weightsync.plan.plan import plan_reload
from weightsync.reachable import leave_modules_out, leave_out, python_state, walk
from weightsync.survey import LEFT_OUT


class Config:
    def __init__(self, layers):
        self.layers = layers


def test_objects_of_a_class_that_is_left_out_are_not_entered_and_do_not_hide_changes_elsewhere():
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    model.config, model.steps = Config({"other": other}), 1
    assert "config.layers['other'].weight" in {slot.path for slot in walk(model)}
    assert python_state(model) is not None
    leave_out(Config)
    try:
        assert [slot.path for slot in walk(model)] == ["weight", "bias"]
        state = python_state(model)
        assert state is not None
        assert python_state(model) is state
        model.steps = 2
        assert python_state(model) is not state
    finally:
        LEFT_OUT.discard(Config)


def test_modules_of_another_model_are_left_out_of_one_model_alone():
    embedding = nn.Embedding(3, 2)
    target, draft = nn.ModuleDict({"embed": embedding}), nn.ModuleDict({"embed": embedding, "layer": nn.Linear(2, 2)})
    draft.shortcut = [embedding]
    assert "embed.weight" in {slot.path for slot in walk(draft)}
    leave_modules_out(draft, [embedding])
    assert {slot.path for slot in walk(draft)} == {"layer.weight", "layer.bias"}
    assert [slot.path for slot in walk(target)] == ["embed.weight"]


class Draft(nn.Module):
    """Shares its target's embedding, and has a loader that writes there."""

    def __init__(self, embedding):
        super().__init__()
        self.embed = embedding
        self.layer = nn.Linear(2, 2, bias=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            (self.embed if name == "embed" else self.layer).weight.data.copy_(tensor)


def test_a_name_that_writes_a_module_of_another_model_is_refused():
    draft = Draft(nn.Embedding(3, 2))
    leave_modules_out(draft, [draft.embed])
    layer, embed = ("layer", torch.float32, (2, 2)), ("embed", torch.float32, (3, 2))
    plan = plan_reload(draft, Manifest((ParamMeta(*layer),)))
    assert [destination.path for destination in plan.destinations] == ["layer.weight"]
    with pytest.raises(LayoutError, match=r"embed: its loader writes a Embedding that belongs to another model"):
        plan_reload(draft, Manifest((ParamMeta(*layer), ParamMeta(*embed))))
