"""A process that closes its side of a push and ends at once ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from push_toys import Toy

from weightsync.trainer.client import TrainerClient
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

SCRIPT = Path(__file__).with_name("ending_process.py")
SECONDS = 120


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])},
    )


def ended(process):
    try:
        _, errors = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, errors


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_trainer_that_closes_and_ends_at_once_exits_with_0(transport):
    receiver = Receiver(Toy(2))
    with BackgroundServer(receiver) as server:
        code, errors = ended(started("trainer", server.url, transport))
    assert (code, receiver.version) == (0, 1), errors
    assert "terminate" not in errors
    receiver.close()


@pytest.mark.parametrize("leaves_first", ["trainer", "engine"])
def test_an_engine_that_closes_and_ends_at_once_exits_with_0(leaves_first):
    engine = started("engine")
    client = TrainerClient(Toy(5), engine.stdout.readline().strip(), transport="gloo", deadline_seconds=60.0)
    try:
        client.push(1)
        if leaves_first == "trainer":
            client.close()
    finally:
        code, errors = ended(engine)
    client.close()
    assert code == 0, errors
    assert "terminate" not in errors
