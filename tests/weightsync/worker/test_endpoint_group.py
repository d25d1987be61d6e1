"""Several endpoints answer as one; the first to fail is heard, and nothing is published unless all have prepared."""

import threading

import pytest

from weightsync.control import ABORT, FINISH, INFO, UPDATE, Abort
from weightsync.errors import CoverageError, PeerFailed, ProtocolError, ReloadError, TransportTimeout
from weightsync.worker.group import EndpointGroup, in_thread, result_within


class Rank:
    """Records calls; fails or hangs where it is told to."""

    def __init__(self, name, failures=None):
        self.name, self.failures, self.calls, self.closed = name, failures or {}, [], False
        self.release, self.has_answered = threading.Event(), False

    def call(self, route, body, deadline_seconds):
        phase = body.get("phase")
        self.calls.append((route, phase))
        failure = self.failures.get((route, phase))
        if failure == "hang":
            self.release.wait(60)
            self.has_answered = True
        elif failure is not None:
            raise failure
        return {"ranks": [{"name": self.name}]}

    def close(self):
        self.closed = True


def test_answers_come_in_the_order_of_the_ranks():
    group = EndpointGroup([Rank("a"), Rank("b"), EndpointGroup([Rank("c"), Rank("d")])])
    assert [rank["name"] for rank in group.call(INFO, {}, 60)["ranks"]] == ["a", "b", "c", "d"]


def test_calls_run_at_the_same_time():
    barrier = threading.Barrier(2, timeout=60)

    class Meeting(Rank):
        def call(self, route, body, deadline_seconds):
            barrier.wait()
            return super().call(route, body, deadline_seconds)

    EndpointGroup([Meeting("a"), Meeting("b")]).call(UPDATE, {}, 60)


def test_a_finish_prepares_all_before_any_publishes():
    ranks = [Rank("a"), Rank("b")]
    EndpointGroup(ranks).call(FINISH, {"session_id": "s", "weight_version": 3}, 60)
    for rank in ranks:
        assert rank.calls == [(FINISH, "prepare"), (FINISH, "publish")]


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_a_rank_that_cannot_prepare_stops_all(nested):
    ranks = [Rank("a"), Rank("b", {(FINISH, "prepare"): CoverageError("half", missing=["w"])}), Rank("c")]
    group = EndpointGroup([ranks[0], EndpointGroup(ranks[1:])] if nested else ranks)
    with pytest.raises(CoverageError) as caught:
        group.call(FINISH, {"session_id": "s"}, 60)
    assert caught.value.missing == ("w",)
    for rank in ranks:
        assert (FINISH, "publish") not in rank.calls
        assert (ABORT, None) in rank.calls


def test_the_error_that_says_most_is_raised_and_the_others_are_notes():
    group = EndpointGroup(
        [
            Rank("a", {(UPDATE, None): TransportTimeout("late")}),
            Rank("b", {(UPDATE, None): ReloadError("the hook failed")}),
            Rank("c", {(UPDATE, None): PeerFailed("left")}),
        ]
    )
    with pytest.raises(ReloadError, match="the hook failed") as caught:
        group.call(UPDATE, {}, 60)
    assert sorted(caught.value.__notes__) == [
        "another endpoint: PeerFailed: left",
        "another endpoint: TransportTimeout: late",
    ]


def test_a_rank_that_hangs_is_a_timeout():
    hanging = Rank("b", {(UPDATE, None): "hang"})
    group = EndpointGroup([Rank("a"), hanging])
    with pytest.raises(TransportTimeout, match="did not answer"):
        group.call(UPDATE, {}, 0.2)
    assert not hanging.has_answered, "the group waited for the rank"
    hanging.release.set()


def test_an_abort_reaches_all_even_if_one_fails():
    ranks = [Rank("a", {(ABORT, None): PeerFailed("gone")}), Rank("b")]
    EndpointGroup(ranks).abort(Abort("s", "because"))
    assert all(rank.calls == [(ABORT, None)] for rank in ranks)


def test_closing_closes_all():
    ranks = [Rank("a"), Rank("b")]
    EndpointGroup(ranks).close()
    assert all(rank.closed for rank in ranks)


def test_a_group_of_none_is_refused():
    with pytest.raises(ProtocolError, match="at least one"):
        EndpointGroup([])


def test_a_callers_own_timeout_error_is_not_taken_for_a_late_answer():
    def fail():
        raise TimeoutError("the callee's own")

    with pytest.raises(TimeoutError, match="the callee's own"):
        result_within(in_thread(fail), 60, "it")
