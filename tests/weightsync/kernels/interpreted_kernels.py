"""The Triton kernels in Triton's interpreter; run by test_triton_interpreted.py in a process of its own."""

from __future__ import annotations

import kernel_checks
import pytest


@pytest.mark.parametrize("seed", range(12))
def test_random_plans(seed):
    kernel_checks.check_random_plan(seed, "cpu", "triton")


@pytest.mark.parametrize(
    "check",
    [
        kernel_checks.check_every_alignment_and_run_length,
        kernel_checks.check_tiles_of_long_and_of_transposed_copies,
        kernel_checks.check_sources_can_be_exchanged,
    ],
)
def test_copies(check):
    check("cpu", "triton")


def test_digests():
    kernel_checks.check_digests_agree_with_numpy("cpu")
