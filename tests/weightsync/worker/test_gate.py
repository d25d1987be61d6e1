"""No forward pass runs beside an update, and none waits for ever."""

import threading

import pytest

from weightsync.errors import ReloadError, TornModelError, TransportTimeout
from weightsync.worker.gate import TORN, Gate


def test_an_update_waits_for_the_passes_inside():
    gate = Gate()
    inside, leave, closed = threading.Event(), threading.Event(), threading.Event()

    def forward():
        with gate.passing(5):
            inside.set()
            leave.wait(5)

    def update():
        gate.close("updating", 5)
        closed.set()

    threads = [threading.Thread(target=forward), threading.Thread(target=update)]
    threads[0].start()
    assert inside.wait(5)
    threads[1].start()
    assert not closed.wait(0.1)
    leave.set()
    assert closed.wait(5)
    for thread in threads:
        thread.join(5)


def test_a_pass_waits_for_the_update_and_then_runs():
    gate = Gate()
    gate.close("updating", 1)
    ran = threading.Event()

    def forward():
        with gate.passing(5):
            ran.set()

    thread = threading.Thread(target=forward)
    thread.start()
    assert not ran.wait(0.1)
    gate.open("updating")
    assert ran.wait(5)
    thread.join(5)


def test_a_pass_that_would_wait_too_long_is_an_error_with_the_reason():
    gate = Gate()
    gate.close("paused", 1)
    gate.close("updating", 1)
    with pytest.raises(ReloadError, match="paused, updating for more than 0.01 s"), gate.passing(0.01):
        pass
    gate.open("updating")
    with pytest.raises(ReloadError, match="paused"), gate.passing(0.01):
        pass


def test_an_update_that_would_wait_too_long_leaves_the_gate_open():
    gate = Gate()
    with gate.passing(1):
        with pytest.raises(TransportTimeout, match="1 forward passes did not end"):
            gate.close("updating", 0.01)
        with gate.passing(0.01):
            pass


def test_a_torn_model_refuses_at_once_and_wakes_who_waits():
    gate = Gate()
    gate.close("updating", 1)
    outcome = []

    def forward():
        try:
            with gate.passing(10):
                outcome.append("ran")
        except TornModelError:
            outcome.append("torn")

    thread = threading.Thread(target=forward)
    thread.start()
    gate.shut(TORN)
    thread.join(5)
    assert outcome == ["torn"]
    gate.open("updating")
    with pytest.raises(TornModelError), gate.passing(1):
        pass
    gate.open(TORN)
    with gate.passing(1):
        pass


def test_a_failing_pass_leaves_the_gate():
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.passing(1):
        _ = 1 // 0
    gate.close("updating", 0.01)
