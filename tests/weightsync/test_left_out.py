"""What an engine declares to be no part of a model is not entered, and does not hide changes elsewhere."""

from torch import nn

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
