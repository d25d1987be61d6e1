"""What every test gets: one torch thread, the same random numbers in every run, and uninitialised memory that shows."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

try:
    import hypothesis
except ImportError:  # the environment that serves vLLM has none, and runs no property test
    hypothesis = None

# Processes that tests start inherit it: tensors here are tiny, and two test workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


if hypothesis is not None:
    # The same examples in every run; `scripts/test --hypothesis-profile=search` looks for new ones.
    hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
    hypothesis.settings.register_profile("search", deadline=None, max_examples=1000)
    hypothesis.settings.load_profile("same")


def seed_all():
    """A test that fails for one seed in a hundred must fail here, not in somebody else's run."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Before every test, whatever ran before it in this process."""
    seed_all()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """What several tests share is made for the first of them that runs, before its own numbers are seeded."""
    if fixturedef.scope != "function":
        seed_all()


@pytest.fixture(autouse=True)
def visible_uninitialised_memory():
    """`torch.empty` gives NaN or the largest integer, so that a byte nobody wrote cannot pass for a zero page."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def pytest_collection_modifyitems(items):
    """Tests marked `gpu` are skipped where there is no GPU, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
