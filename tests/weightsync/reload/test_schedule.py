"""The order of staging: one unit at a time, everything written once, nothing lost, whatever the order of arrival."""

from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.reload.schedule import Schedule, peak_held_bytes

ROUTES = {"a1": [0], "a2": [0], "b1": [1], "b2": [1], "c1": [2], "ab": [0, 1]}
NEEDS = {0: {"a1", "a2", "ab"}, 1: {"b1", "b2", "ab"}, 2: {"c1"}}


def needing(name):
    return [unit for unit, names in NEEDS.items() if name in names]


def play(order, *, known=True, late=(), can_hold=lambda: True):
    schedule = Schedule(ROUTES, {u: set(n) if known else None for u, n in NEEDS.items()}, late)
    steps = []
    for name in order:
        steps += [*schedule.arrive(name, can_hold=can_hold()), *schedule.arrived(name, needing(name))]
    return steps, [*steps, *schedule.drain()]


def test_in_order_every_unit_is_opened_written_and_finished_in_turn():
    steps, _ = play(["a1", "a2", "ab", "b1", "b2", "c1"])
    assert [step.action for step in steps if step.unit == 0] == ["open", "write", "write", "write", "finish"]
    assert [(s.action, s.unit) for s in steps if s.action == "hold"] == [("hold", -1)]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.permutations(sorted(ROUTES)), st.booleans(), st.sets(st.integers(0, 2)), st.randoms(use_true_random=False))
def test_whatever_the_order_each_name_is_written_once_per_unit_while_that_is_open(order, known, late, random):
    early, steps = play(order, known=known, late=late, can_hold=lambda: random.random() < 0.7)
    opened, finished, held, written = set(), set(), set(), []
    for step in steps:
        if step.action == "open":
            assert step.unit not in opened
            opened.add(step.unit)
        elif step.action == "finish":
            assert step.unit in opened - finished
            assert step.unit not in late
            finished.add(step.unit)
        elif step.action == "hold":
            held.add(step.name)
        else:
            assert step.unit in opened - finished
            assert step.action == "write" or step.name in held
            written.append((step.name, step.unit))
    assert sorted(written) == sorted((name, unit) for name, units in ROUTES.items() for unit in units)
    assert finished == {0, 1, 2} - late
    if known:
        assert {step.unit for step in early if step.action == "finish"} == finished


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.permutations(sorted(ROUTES)))
def test_with_holding_allowed_one_early_unit_is_open_at_a_time(order):
    _, steps = play(order)
    open_now = 0
    for step in steps:
        open_now += {"open": 1, "finish": -1}.get(step.action, 0)
        assert open_now <= 1


def test_the_peak_of_held_bytes_is_what_a_play_through_holds():
    schedule = Schedule(ROUTES, NEEDS, ())
    sizes = {"a1": 1, "b1": 10, "c1": 100, "b2": 1000, "a2": 1, "ab": 5}
    assert peak_held_bytes(schedule, sizes, needing) == 1115
    schedule = Schedule(ROUTES, NEEDS, ())
    assert peak_held_bytes(schedule, {"a1": 1, "a2": 1, "c1": 7, "ab": 5, "b1": 1, "b2": 1}, needing) == 12
