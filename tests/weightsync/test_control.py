"""Messages survive the wire; whatever else arrives is refused by the name of the field."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync import control, errors
from weightsync.control import Abort, Accept, Hello, Start, Update, decode, encode, error_from_json, error_to_json

HELLO = Hello(
    protocol=control.PROTOCOL_VERSION,
    session_id="s",
    trainer="host:1",
    targets={"model": [["w", "float32", [2]]]},
    mode="direct",
    scope="full",
    bucket_bytes=4096,
    deadline_seconds=5.0,
    formats={},
    facts={},
)
MESSAGES = [
    HELLO,
    Accept(1, "s", "e", 0, 1, None, "live", 4096, {}, {}),
    Start("s", 3, "g", None, {"e/0": {}}),
    Update("s", "model", ["a", "b"], {"placed": True}, {}),
    Abort(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_json(message):
    assert decode(type(message), json.loads(json.dumps(encode(message)))) == message


def test_an_integer_is_taken_where_a_float_is_meant_but_no_bool_where_an_integer_is():
    assert decode(Hello, {**encode(HELLO), "deadline_seconds": 5}).deadline_seconds == 5
    with pytest.raises(errors.ProtocolError, match=r"Hello\.protocol must be int, got bool"):
        decode(Hello, {**encode(HELLO), "protocol": True})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"session_id": 7}, "Hello.session_id must be str"),
        ({"targets": []}, "Hello.targets must be dict"),
        ({"surprise": 1}, "unknown fields: surprise"),
        ({"bucket_bytes": "4096"}, "Hello.bucket_bytes must be int"),
    ],
)
def test_a_wrong_field_is_named(change, words):
    with pytest.raises(errors.ProtocolError, match=words):
        decode(Hello, {**encode(HELLO), **change})


def test_a_missing_field_is_named():
    value = encode(HELLO)
    del value["mode"], value["scope"]
    with pytest.raises(errors.ProtocolError, match="Hello lacks mode, scope"):
        decode(Hello, value)


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_something_else_than_an_object_is_refused(value):
    with pytest.raises(errors.ProtocolError, match="must be a JSON object"):
        decode(Update, value)


def test_names_must_be_strings():
    with pytest.raises(errors.ProtocolError, match="must hold strings only"):
        decode(Update, {**encode(MESSAGES[3]), "names": ["a", 1]})


@given(st.sets(st.integers(0, 60)))
def test_ranges_round_trip(indices):
    ordered = sorted(indices)
    ranges = control.to_ranges(ordered)
    assert control.from_ranges(json.loads(json.dumps(ranges)), 61) == ordered
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize(
    "ranges", [[[0, 0]], [[2, 1]], [[0, 2], [1, 3]], [[0, 11]], [[-1, 2]], [[0]], ["x"], [[True, 2]], {}, [[0.0, 2]]]
)
def test_ranges_that_reach_outside_or_overlap_are_refused(ranges):
    with pytest.raises(errors.ProtocolError):
        control.from_ranges(ranges, 10)


@pytest.mark.parametrize(
    "error",
    [
        errors.CoverageError("half a push", missing=["a"], unexpected=["b", "c"], duplicated=["d"]),
        errors.ManifestError("bad", names=["n"]),
        errors.LayoutError("bad shape", names=["p"]),
        errors.TornModelError("torn"),
        errors.TransportTimeout("late"),
        errors.PeerFailed("gone"),
        errors.VerifyError("differs"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_error_crosses_the_wire_with_its_class_words_and_names(error):
    back = error_from_json(json.loads(json.dumps(error_to_json(error))), "http://engine")
    assert type(back) is type(error)
    assert str(back) == str(error)
    for field in ("missing", "unexpected", "duplicated", "names"):
        if hasattr(error, field):
            assert getattr(back, field) == getattr(error, field)
    assert back.__notes__ == ["raised by http://engine"]


def test_a_class_of_another_module_goes_as_the_base_that_both_sides_know():
    class Special(errors.CoverageError):
        pass

    back = error_from_json(error_to_json(Special("x", missing=["a"])))
    assert type(back) is errors.CoverageError
    assert back.missing == ("a",)


def test_a_bug_on_the_other_side_keeps_its_words_and_traceback():
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        value = error_to_json(error)
    back = error_from_json(json.loads(json.dumps(value)), "engine")
    assert type(back) is errors.PeerFailed
    assert "RuntimeError" in str(back)
    assert any("test_a_bug_on_the_other_side" in note for note in back.__notes__)


@pytest.mark.parametrize(
    "value", [None, "boom", {}, {"type": "SystemExit", "message": "x"}, {"type": "WeightSyncError", "message": 3}]
)
def test_a_malformed_error_is_a_protocol_error(value):
    assert isinstance(error_from_json(value), errors.ProtocolError)


def test_a_refusal_says_more_than_a_death_and_a_death_more_than_a_timeout():
    refusal, death, timeout = errors.CoverageError("r"), errors.PeerFailed("d"), errors.TransportTimeout("t")
    assert control.primary_error([timeout, death, refusal]) is refusal
    assert control.primary_error([timeout, death]) is death
    assert control.primary_error([timeout]) is timeout
