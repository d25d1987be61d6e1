"""The demo's processes: answers in order, errors by name, no wait without an end."""

from __future__ import annotations

import textwrap

import pytest

from megamoe_adapter.demo.child import Child, ChildError

CHILD = """
    import os, time
    from megamoe_adapter.demo.child import ParentLink

    def boom(): raise KeyError("layer 7")
    def noisy(): print("not protocol"); os.write(1, b"nor this"); return "quiet"
    def count(to):
        for i in range(to): link.emit(i=i)
        return to

    link = ParentLink()
    link.answer_requests({"echo": lambda **k: k, "boom": boom, "noisy": noisy, "count": count,
                          "sleep": lambda: time.sleep(60), "die": lambda: os._exit(3)})
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "some_child.py").write_text(textwrap.dedent(CHILD))
    child = Child("some_child", log=tmp_path / "log", environment={"PYTHONPATH": str(tmp_path)})
    yield child
    child.kill()


def test_answers_come_with_their_events_and_in_order(child):
    events = []
    assert child.ask("count", to=3, on_event=events.append) == 3
    assert events == [{"i": 0}, {"i": 1}, {"i": 2}]
    child.send("echo", a=1)
    child.send("echo", a=2)
    assert [child.answer(), child.answer()] == [{"a": 1}, {"a": 2}]


def test_what_the_child_prints_does_not_enter_the_protocol(child):
    assert child.ask("noisy") == "quiet"
    assert child.ask("echo") == {}


def test_an_error_in_the_child_is_told_and_the_child_lives_on(child):
    with pytest.raises(ChildError, match="layer 7") as caught:
        child.ask("boom")
    assert caught.value.kind == "KeyError"
    assert child.ask("echo", x=None) == {"x": None}


def test_a_child_that_dies_is_an_error_and_stays_one(child):
    with pytest.raises(ChildError, match="code 3") as caught:
        child.ask("die")
    assert caught.value.kind == "died"
    with pytest.raises(ChildError):
        child.ask("echo")


def test_a_wait_ends_at_its_deadline(child):
    with pytest.raises(ChildError) as caught:
        child.ask("sleep", deadline_seconds=0.3)
    assert caught.value.kind == "timeout"


def test_close_lets_the_child_end_by_itself(child):
    assert child.ask("echo") == {}
    child.close()
    with pytest.raises(ChildError):
        child.ask("echo")
