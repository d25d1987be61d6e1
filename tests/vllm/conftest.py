"""Checkpoints that all tests of this folder share, servers' logs beside failures, and no process left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the checkpoints, one for all workers; WEIGHTSYNC_VLLM_CHECKPOINTS keeps them between runs."""
    kept = os.environ.get("WEIGHTSYNC_VLLM_CHECKPOINTS")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(kept) if kept else shared / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Adds the end of every running server's log to the report of a test that failed."""
    outcome = yield
    report = outcome.get_result()
    if report.failed and item.get_closest_marker("vllm"):
        from server_vllm import RUNNING

        report.sections += [(f"log of the server {server.log.stem}", server.tail()) for server in RUNNING]


def pytest_configure() -> None:
    """Makes a SIGTERM end the tests as Ctrl-C does, so that fixtures end their servers."""

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Gives each architecture's tests to one worker, so that its server is started once; others go file by file."""
    from checkpoints_vllm import ARCHITECTURES
    from xdist.scheduler import LoadScopeScheduling

    class ByEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            parameters = nodeid.partition("[")[2].rstrip("]").split("-")
            return next((name for name in parameters if name in ARCHITECTURES), nodeid.partition("::")[0])

    return ByEngine(config, log)
