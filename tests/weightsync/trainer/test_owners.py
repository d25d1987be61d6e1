"""Who loads which tensor, merged from every rank's answer to the hello."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from weightsync import control
from weightsync.errors import CoverageError
from weightsync.manifest import Manifest
from weightsync.trainer.handshake import owners_of


def manifest_of(num_tensors):
    return Manifest.from_tensors((f"w{number}", torch.empty(1, device="meta")) for number in range(num_tensors))


def answers(owned, world=1, ignored=()):
    """One per rank; `world` ranks make an engine."""
    ranks = [
        control.Accept(
            control.PROTOCOL_VERSION, "s", f"engine{index // world}", index % world, world, None, "live", 256, {}, {}
        )
        for index in range(len(owned))
    ]
    targets = [
        control.TargetAccept("m", "p", control.to_ranges(entries), control.to_ranges(ignored), 0) for entries in owned
    ]
    return ranks, targets


def test_owners_are_the_receivers_that_said_so():
    owned = [[0, 1, 2], [0, 3, 4], [0, 1, 2, 3], [0, 4]]  # two engines of two ranks
    owners = owners_of(manifest_of(5), *answers(owned, world=2))
    assert owners == tuple(frozenset(i for i, mine in enumerate(owned) if entry in mine) for entry in range(5))


def test_what_no_rank_of_an_engine_loads_or_ignores_is_told_by_name():
    with pytest.raises(CoverageError) as error:
        owners_of(manifest_of(5), *answers([[0, 1], [2, 3, 4], [0, 1], [2, 3]], world=2))
    assert error.value.unexpected == ("w4",)
    owners = owners_of(manifest_of(5), *answers([[0, 1], [2, 3]], world=2, ignored=[4]))
    assert owners[4] == frozenset()


def test_memory_does_not_grow_with_tensors_times_receivers():
    manifest = manifest_of(2000)
    ranks, targets = answers([list(range(2000))] * 200)
    tracemalloc.start()
    try:
        owners = owners_of(manifest, ranks, targets)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert owners == (frozenset(range(200)),) * 2000
    assert peak < 2 << 20  # a set of receivers for each name, and of names for each engine, would be 70 MiB
