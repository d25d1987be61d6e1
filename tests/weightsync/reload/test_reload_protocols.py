"""What a module may say, and be told: loaders that keep books, derived state of its own, a model on another device."""

import pytest
import torch
from torch import nn
from toys import MODES, HookedNet, Net, cold, full, param, push, push_in_chunks, zeros

from weightsync import reload_state, start_reload

both_modes = pytest.mark.parametrize("mode", MODES)


class Bookkeeper(nn.Module):
    """Notes which expert's weight arrived; a replayed copy goes past its loader, so it wants to be told."""

    supports_direct_reload = True

    def __init__(self):
        super().__init__()
        self.w = param(zeros(3, 2), weight_loader=self.weight_loader)
        self.arrived = 0
        self.told = []
        self.num_discards = 0

    def weight_loader(self, parameter, tensor, weight_name, shard_id, expert_id, return_success=False):
        parameter.data[expert_id].copy_(tensor)
        if not tensor.is_meta:
            self._mark(expert_id)
        return True if return_success else None

    def weights_replayed(self, calls):
        self.told.append(calls)
        for weight_name, shard_id, expert_id in calls:
            assert (weight_name, shard_id) == ("experts.w", "w1")
            self._mark(expert_id)

    def discard_arrivals(self):
        self.num_discards += 1
        self.arrived = 0

    def finish(self):
        assert self.arrived in (0, 0b111)
        if self.arrived:
            self.w.data.mul_(2)
        self.arrived = 0

    def _mark(self, expert):
        self.arrived |= 1 << expert


class BookkeepingNet(HookedNet):
    def __init__(self):
        super().__init__(lambda model: model.experts.finish(), experts=Bookkeeper(), l=Net())
        self.l.w = param(zeros(2))

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "l.w":
                self.l.w.data.copy_(tensor)
                continue
            parameter = self.experts.w
            parameter.weight_loader(parameter, tensor, "experts.w", "w1", int(name[-1]), return_success=True)


def weights(value):
    return {"l.w": full(value, 2)} | {f"e{i}": full(value + i, 2) for i in range(3)}


@both_modes
@pytest.mark.parametrize("size", [1, 2, 4])
def test_replayed_copies_are_told_to_the_module_before_its_hook(mode, size):
    model = cold(BookkeepingNet(), weights(1))
    for value in (10, 20):
        push_in_chunks(model, weights(value), mode, size)
        assert model.experts.w[:, 0].tolist() == [2 * value, 2 * value + 2, 2 * value + 4]
    push(model, weights(30), mode)
    push(model, weights(40), mode)
    assert model.experts.told[-1] is model.experts.told[-2]
    assert model.experts.w[2].tolist() == [84, 84]


@both_modes
def test_a_partial_push_tells_only_what_came(mode):
    model = cold(BookkeepingNet(), weights(1))
    push(model, {"l.w": full(7, 2)}, mode, scope="partial")
    assert model.experts.told == []
    with pytest.raises(AssertionError):
        push(model, {"e1": full(7, 2)}, mode, scope="partial", rollback="host")
    assert model.experts.told[-1:] in ([], [(("experts.w", "w1", 1),)])
    assert (reload_state(model), model.experts.arrived, model.experts.num_discards) == ("live", 0, 1)
    assert model.experts.w[1].tolist() == [4, 4]


@both_modes
def test_loaders_that_keep_books_note_nothing_while_a_reload_is_planned(mode):
    model = cold(BookkeepingNet(), weights(1))
    session = start_reload(model, mode=mode, rollback="host")
    session.load_weights(weights(5))
    assert model.experts.arrived == 0
    session.abort()
    assert model.experts.w.tolist() == [[2, 2], [4, 4], [6, 6]]


def test_a_class_that_registers_its_subclasses_gets_no_new_one():
    registered = []

    class Registered(HookedNet):
        def __init_subclass__(cls):
            registered.append(cls)

    model = Registered(lambda model: setattr(model, "total", model.w.data.sum().view(1)))
    model.w = param(zeros(2))
    cold(model, {"w": full(1, 2)})
    push(model, {"w": full(4, 2)}, "layerwise")
    assert (model.total.tolist(), registered, type(model)) == ([8], [], Registered)


@both_modes
def test_a_model_that_changed_its_dtype_as_a_whole_before_the_first_load_is_recorded_again(mode):
    from toys import Layer

    from weightsync import record_layouts

    def hook(layer):
        layer.w.data = layer.w.data.t().contiguous()

    model = Net(l=Layer(hook, w=zeros(2, 3)))
    record_layouts(model)
    model.bfloat16()
    record_layouts(model)
    cold(model, {"l.w": full(1, 2, 3, dtype=torch.bfloat16)})
    push(model, {"l.w": full(3, 2, 3, dtype=torch.bfloat16)}, mode)
    assert model.l.w.tolist() == [[3, 3]] * 3
