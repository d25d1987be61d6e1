"""The order of messages follows from manifest, cap and owners, the same on every side."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.manifest import ParamMeta
from weightsync.transport.streams import EVERYONE, schedule, stream_cap, streams_of

CASES = st.tuples(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(st.tuples(st.integers(0, 3000), st.sets(st.integers(0, n - 1))), min_size=1, max_size=12),
        )
    ),
    st.sampled_from([256, 512, 1024, 4096]),
)


def setup_of(case):
    (num_receivers, rows), cap = case
    entries = [ParamMeta(f"t{i}", torch.uint8, (size,)) for i, (size, _) in enumerate(rows)]
    owners = [frozenset(o) for _, o in rows]
    wanted = [i for i, o in enumerate(owners) if o]
    return num_receivers, entries, owners, wanted, cap


@given(CASES)
def test_each_receiver_gets_every_owned_byte_once_and_no_other(case):
    num_receivers, entries, owners, wanted, cap = setup_of(case)
    steps = schedule(entries, streams_of(owners, wanted, num_receivers), cap, num_receivers)
    for receiver in range(num_receivers):
        got = {}
        for step in steps:
            if step.stream in (EVERYONE, receiver):
                for chunk in step.bucket.chunks:
                    got.setdefault(chunk.name, []).append((chunk.start, chunk.num_bytes))
        assert set(got) == {entries[i].name for i in wanted if receiver in owners[i]}
        for index in wanted:
            if receiver in owners[index]:
                parts = got[entries[index].name]
                assert [start for start, _ in parts] == [sum(n for _, n in parts[:k]) for k in range(len(parts))], (
                    "parts of a tensor must come in order, without gap or overlap"
                )
                assert sum(n for _, n in parts) == entries[index].num_bytes


@given(CASES)
def test_a_receiver_that_knows_two_streams_expects_what_the_sender_of_all_sends(case):
    num_receivers, entries, owners, wanted, cap = setup_of(case)
    streams = streams_of(owners, wanted, num_receivers)
    all_steps = schedule(entries, streams, cap, num_receivers)
    for receiver in range(num_receivers):
        mine = {key: value for key, value in streams.items() if key in (EVERYONE, receiver)}
        expected = [step for step in all_steps if step.stream in (EVERYONE, receiver)]
        assert list(schedule(entries, mine, cap, num_receivers)) == expected


@given(CASES)
def test_buckets_stay_under_their_cap_and_complete_in_wire_order(case):
    num_receivers, entries, owners, wanted, cap = setup_of(case)
    steps = schedule(entries, streams_of(owners, wanted, num_receivers), cap, num_receivers)
    position = {entry.name: i for i, entry in enumerate(entries)}
    due = [position[step.bucket.chunks[-1].name] for step in steps]
    assert due == sorted(due)
    for step in steps:
        assert step.bucket.num_bytes <= stream_cap(step.stream, cap, num_receivers)


def test_a_tensor_that_all_own_is_broadcast_once():
    entries = [ParamMeta("a", torch.uint8, (512,)), ParamMeta("b", torch.uint8, (512,))]
    streams = streams_of([frozenset({0, 1}), frozenset({1})], [0, 1], 2)
    assert streams == {EVERYONE: [0], 1: [1]}
    assert sum(s.bucket.num_bytes for s in schedule(entries, streams, 4096, 2)) == 1024
