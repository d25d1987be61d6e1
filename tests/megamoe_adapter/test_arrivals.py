"""Arrival tracking: what is requantised, what is left, what is refused, whatever the order."""

import itertools

import pytest
import torch

from megamoe_adapter.arrivals import SHARDS, SHARED, ArrivalError, ArrivalTracker

REAL = torch.zeros(1)
META = torch.zeros(1, device="meta")


def finished(num_slots=2, **options):
    tracker = ArrivalTracker(num_slots, **options)
    for slot, shard in tracker.keys:
        tracker.mark_weight(slot, shard, REAL)
        tracker.mark_scale(slot, shard, REAL)
    assert tracker.check("layer") is tracker.keys, "the very same tuple, by which callers know that all of it came"
    tracker.clear()
    return tracker


@pytest.mark.parametrize("order", list(itertools.permutations(["weight w1", "scale w1", "weight w3", "scale w3"])))
def test_both_parts_in_any_order_make_a_shard_fresh(order):
    tracker = finished()
    for step in order:
        part, shard = step.split()
        getattr(tracker, f"mark_{part}")(1, shard, REAL, REAL)
    assert tracker.check("layer") == [(1, "w1"), (1, "w3")]
    assert tracker.check("layer") == [(1, "w1"), (1, "w3")], "checking changes nothing"


def test_finish_is_idempotent_and_a_partial_update_names_only_itself():
    tracker = finished()
    assert tracker.check("layer") == []
    tracker.clear()
    assert tracker.check("layer") == []
    tracker.mark_scale(0, "w2", REAL)
    tracker.mark_weight(0, "w2", REAL)
    assert tracker.check("layer") == [(0, "w2")]


@pytest.mark.parametrize(("part", "missing"), [("weight", "scale"), ("scale", "weight")])
def test_one_part_without_the_other_names_layer_expert_shard_and_what_is_missing(part, missing):
    tracker = finished(4)
    getattr(tracker, f"mark_{part}")(3, "w3", REAL)
    with pytest.raises(ArrivalError, match=rf"layers\.7.*expert 11 \(slot 3\) w3: {missing} missing") as caught:
        tracker.check("model.layers.7.mlp.experts", expert_ids=[8, 9, 10, 11])
    assert caught.value.missing == (((3, "w3"), missing),)
    assert isinstance(caught.value, ValueError)
    getattr(tracker, f"mark_{missing}")(3, "w3", REAL)
    assert tracker.check("layer") == [(3, "w3")], "the error lost nothing"


def test_before_the_first_finish_every_shard_must_arrive():
    tracker = ArrivalTracker(2, shared=True)
    for key in tracker.keys[:-1]:
        tracker.mark_weight(*key, REAL)
        tracker.mark_scale(*key, REAL)
    with pytest.raises(ArrivalError, match=r"1 of 9 shards.*shared expert w3: weight and scale missing"):
        tracker.check("layer")
    tracker.forget()
    with pytest.raises(ArrivalError, match=r"9 of 9 shards.*and 4 more"):
        tracker.check("layer")


def test_all_incomplete_shards_are_reported_together():
    tracker = finished()
    tracker.mark_weight(0, "w1", REAL)
    tracker.mark_scale(1, "w2", REAL)
    tracker.mark_weight(1, "w3", REAL)
    tracker.mark_scale(1, "w3", REAL)
    with pytest.raises(ArrivalError) as caught:
        tracker.check("layer")
    assert caught.value.missing == (((0, "w1"), "scale"), ((1, "w2"), "weight"))


@pytest.mark.parametrize("tensors", [(META,), (REAL, META), (META, REAL)])
def test_a_meta_pass_marks_nothing(tensors):
    tracker = finished()
    tracker.mark_weight(0, "w1", *tensors)
    tracker.mark_scale(0, "w2", *tensors)
    assert tracker.check("layer") == []


def test_forgetting_keeps_what_is_known_about_the_first_finish():
    tracker = finished()
    tracker.mark_weight(0, "w1", REAL)
    tracker.forget()
    assert tracker.check("layer") == []


def test_the_shared_expert_has_shards_of_its_own():
    tracker = finished(1, shared=True)
    assert tracker.keys == tuple((slot, shard) for slot in (0, SHARED) for shard in SHARDS)
    tracker.mark_weight(SHARED, "w1", REAL)
    tracker.mark_scale(SHARED, "w1", REAL)
    assert tracker.check("layer") == [(SHARED, "w1")]


@pytest.mark.parametrize("key", [(2, "w1"), (-1, "w1"), (0, "w4"), (SHARED, "w1")])
def test_an_unknown_shard_is_refused(key):
    tracker = ArrivalTracker(2)
    with pytest.raises(ValueError, match="no shard"):
        tracker.mark_weight(*key, REAL)
