"""An unchanged model and manifest are planned once; whatever a plan depends on makes a new one."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from planning_toys import assert_replays, plan_for, wire_tensor
from test_plan_loaders import Toy, into, zeros
from torch import nn

from weightsync.manifest import Manifest
from weightsync.plan import plan as planning
from weightsync.plan.plan import plan_reload


@pytest.fixture
def dry_runs(monkeypatch):
    """Counts dry runs."""
    count = [0]
    real = planning.record

    def counted(*args, **kwargs):
        count[0] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(planning, "record", counted)
    return count


WEIGHTS = [("w", wire_tensor((4, 2)))]


def test_the_same_manifest_is_planned_once(dry_runs):
    model = Toy({"w": zeros(4, 2)})
    plan = plan_for(model, WEIGHTS)
    assert plan_for(model, [("w", wire_tensor((4, 2), seed=9))]) is plan
    with torch.no_grad():
        model.w.fill_(3.0)
    assert plan_for(model, WEIGHTS) is plan
    assert dry_runs == [1]


def test_other_options_and_manifests_have_plans_of_their_own(dry_runs):
    model = Toy({"w": zeros(4, 2)}, {"x": into("w", lambda p: p[:1])})
    full = plan_for(model, WEIGHTS)
    partial = plan_for(model, WEIGHTS, scope="partial")
    other = plan_for(model, [("x", wire_tensor((1, 2)))], scope="partial")
    assert len({full.hash, partial.hash, other.hash}) == 3
    assert (plan_for(model, WEIGHTS), plan_for(model, WEIGHTS, scope="partial")) == (full, partial)
    assert dry_runs == [3]


@pytest.mark.parametrize("change", ["storage", "parameter", "new parameter", "shape", "numel"])
def test_another_layout_makes_a_new_plan(change, dry_runs):
    model = Toy({"w": zeros(4, 2)}, {"w": lambda m, t: m.w.data.view(4, 2).copy_(t)})
    plan_for(model, WEIGHTS)
    if change == "storage":
        model.w.data = zeros(4, 2)
    elif change == "parameter":
        model.w = nn.Parameter(zeros(4, 2))
    elif change == "new parameter":
        model.derived = nn.Parameter(zeros(1))
        model.derived.weight_loader_numel = 0
    elif change == "shape":
        model.w.data = zeros(2, 4)
    else:
        model.w.weight_loader_numel = 8
    plan_for(model, WEIGHTS)
    assert dry_runs == [2]


class Placed(nn.Module):
    """Experts by a placement that may change: a list, an array, a helper object's list, or a tensor."""

    def __init__(self, how, placement):
        super().__init__()
        self.w = nn.Parameter(zeros(4, 2), requires_grad=False)
        self.how = how
        self.place(placement)

    def place(self, placement):
        if self.how == "list":
            self.placement = list(placement)
        elif self.how == "array":
            self.placement = np.array(placement)
        elif self.how == "helper":
            self.helper = Helper()
            self.helper.placement = list(placement)
        else:
            self.register_buffer("placement", torch.tensor(placement))

    def load_weights(self, weights):
        placement = self.helper.placement if self.how == "helper" else self.placement
        for name, tensor in weights:
            expert = int(name.split(".")[1])
            for slot, logical in enumerate(placement):
                if int(logical) == expert:
                    self.w.data[slot].copy_(tensor)


class Helper:
    pass


@pytest.mark.parametrize("how", ["list", "array", "helper", "tensor"])
def test_moved_experts_make_a_new_plan(how, dry_runs):
    weights = [(f"experts.{e}.w", wire_tensor((2,), seed=e)) for e in range(4)]
    model = Placed(how, [0, 1, 2, 3])
    first = plan_for(model, weights)
    assert plan_for(model, weights) is first
    if how == "list" or how == "array":
        model.placement[1:3] = [2, 1]
    elif how == "helper":
        model.helper.placement[1:3] = [2, 1]
    else:
        model.placement[1:3] = torch.tensor([2, 1])
    second = plan_for(model, weights)
    assert dry_runs == [2]
    assert second.hash != first.hash
    assert second.names["experts.1.w"].writes[0].dest.offset == 2 * 8
    assert first.live_reads == (("placement",) if how == "tensor" else ())


def test_replicas_of_an_expert_are_each_written():
    weights = [(f"experts.{e}.w", wire_tensor((2,), seed=e)) for e in range(3)]
    plan = assert_replays(lambda: Placed("list", [0, 2, 1, 0]), weights)
    assert len(plan.names["experts.0.w"].writes) == 2


def test_a_counter_that_changes_costs_a_dry_run_but_keeps_the_plan(dry_runs):
    model = Toy({"w": zeros(4, 2)})
    model.steps = 0
    plan = plan_for(model, WEIGHTS)
    model.steps = 1
    assert plan_for(model, WEIGHTS) is plan
    assert dry_runs == [2]


def test_equal_ranks_have_equal_hashes_and_addresses_do_not_matter():
    models = [Toy({"w": zeros(4, 2), "v": zeros(3)}) for _ in range(2)]
    weights = [*WEIGHTS, ("v", wire_tensor((3,)))]
    assert len({plan_for(model, weights).hash for model in models}) == 1
    flat = torch.zeros(64)
    models[0].w.data = flat[13:21].view(4, 2)
    assert plan_for(models[0], weights).hash == plan_for(models[1], weights).hash
    models[0].w.data = torch.zeros(2, 4).t()
    assert plan_for(models[0], weights).hash != plan_for(models[1], weights).hash


def test_a_plan_keeps_no_model_alive():
    model = Toy({"w": zeros(4, 2)})
    plan = plan_for(model, WEIGHTS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert plan.explain()


def test_a_refusal_is_not_remembered():
    model = Toy({"w": zeros(4, 2), "late": zeros(1)})
    with pytest.raises(Exception, match="late"):
        plan_reload(model, Manifest.from_tensors(WEIGHTS))
    del model.late
    assert plan_for(model, WEIGHTS).coverage.missing == ()


def test_a_plan_is_a_plain_value():
    plan = plan_for(Toy({"w": zeros(4, 2)}), WEIGHTS)
    assert copy.deepcopy(plan).hash == plan.hash
    assert plan.names_of("") == ("w",)
    assert plan.module_order == ("",)
    assert plan.modules == {"": "direct"}
    assert [write.name for write in plan.writes] == ["w"]
