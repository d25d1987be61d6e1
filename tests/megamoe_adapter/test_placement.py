"""Placement: every physical expert on one rank, every logical expert somewhere, replicas found."""

import pytest

from megamoe_adapter.placement import Placement


@pytest.mark.parametrize(("experts", "redundant", "ranks"), [(8, 0, 1), (8, 0, 4), (6, 2, 4), (5, 7, 3), (3, 6, 1)])
def test_ranks_share_out_the_physical_experts(experts, redundant, ranks):
    placements = [Placement(experts, redundant, ranks, rank) for rank in range(ranks)]
    everything = [expert for placement in placements for expert in placement.logical_of_slot]
    assert everything == [physical % experts for physical in range(experts + redundant)]
    assert [placement.first_physical for placement in placements] == [
        rank * (experts + redundant) // ranks for rank in range(ranks)
    ]
    for placement in placements:
        for expert in range(experts):
            slots = placement.slots_of(expert)
            assert slots == tuple(slot for slot, e in enumerate(placement.logical_of_slot) if e == expert)


def test_moved_experts_are_found_where_they_are_now():
    placement = Placement(4, 0, 2, 1).moved([0, 2, 1, 3])
    assert placement.logical_of_slot == (1, 3)
    assert placement.slots_of(2) == ()
    assert placement.slots_of(1) == (0,)
    assert placement.moved([0, 1, 2, 3]).logical_of_slot == (2, 3)


@pytest.mark.parametrize("experts", [[0, 1, 2], [0, 1, 2, 4], [0, 1, 1, 3], [0, 1, 2, -1]])
def test_a_placement_that_loses_an_expert_is_refused(experts):
    with pytest.raises(ValueError, match="placement must name 4 physical experts"):
        Placement(4).moved(experts)


@pytest.mark.parametrize("arguments", [(0,), (4, -1), (4, 0, 2, 2), (4, 0, 0, 0), (4, 1, 2, 0)])
def test_counts_that_do_not_fit_are_refused(arguments):
    with pytest.raises(ValueError, match="placement needs|spread evenly"):
        Placement(*arguments)


def test_an_expert_that_does_not_exist_is_not_a_foreign_one():
    for expert in (-1, 4):
        with pytest.raises(ValueError, match="there are 4 logical experts"):
            Placement(4).slots_of(expert)
