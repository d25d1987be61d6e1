"""Checkpoints and servers, each made once for all tests of this folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints; WEIGHTSYNC_VLLM_CHECKPOINTS keeps them between runs."""
    kept = os.environ.get("WEIGHTSYNC_VLLM_CHECKPOINTS")
    return Path(kept) if kept else tmp_path_factory.mktemp("checkpoints")
