"""What every test gets: one torch thread, and uninitialised memory that shows."""

from __future__ import annotations

import os

import pytest
import torch

# Processes that tests start inherit it: tensors here are tiny, and two test workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
