"""The Triton kernels in Triton's interpreter; run by test_triton_interpreted.py in a process of its own."""

from __future__ import annotations

import kernel_checks
import pytest
import torch

NO_INTERPRETER = "the interpreter of this triton does not run a plain loop beside this numpy"


def interpreter_runs_a_loop() -> bool:
    """False for triton 3.6 beside numpy 2.5, which no longer takes a one-element array for an int."""
    import triton
    import triton.language as tl

    @triton.jit
    def count(counter, bound):
        for _ in range(tl.load(bound)):
            tl.store(counter, tl.load(counter) + 1)

    counter, bound = torch.zeros(1, dtype=torch.int32), torch.full((1,), 3, dtype=torch.int32)
    try:
        count[(1,)](counter, bound)
    except Exception as error:
        if "0-dimensional arrays" in repr(error):
            return False
        raise
    return counter.item() == 3


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    if not interpreter_runs_a_loop():
        pytest.skip(NO_INTERPRETER)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans(seed):
    kernel_checks.check_random_plan(seed, "cpu", "triton")


@pytest.mark.parametrize(
    "check",
    [
        kernel_checks.check_every_alignment_and_run_length,
        kernel_checks.check_tiles_of_long_and_of_transposed_copies,
        kernel_checks.check_sources_can_be_exchanged,
        kernel_checks.check_destinations_can_be_exchanged,
    ],
)
def test_copies(check):
    check("cpu", "triton")


def test_digests():
    kernel_checks.check_digests_agree_with_numpy("cpu")


def test_addresses_are_uploaded_only_when_they_change():
    kernel_checks.check_addresses_are_uploaded_only_when_they_change("cpu")
