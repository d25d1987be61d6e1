"""A peer that dies or stops is an error on all sides within the deadline, and a new trainer joins without restart."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from push_toys import Toy, state_bytes

from weightsync.errors import PeerFailed, ProtocolError, ReloadError, TransportError, TransportTimeout
from weightsync.trainer.client import TrainerClient
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

SCRIPT = Path(__file__).with_name("peer_process.py")
DEADLINE = 4.0  # of the side that is lost, waited for in most tests; a busy machine must come that far within it
LONG = 60.0  # of all others; what is tested is that waits end, not when


class Peer:
    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path])},
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture
def start():
    peers = []

    def give(*arguments):
        peers.append(Peer(*arguments))
        return peers[-1]

    yield give
    for peer in peers:
        peer.end()


def wait_until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "a wait without a deadline"
        time.sleep(0.02)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_trainer_lost_in_mid_push_frees_the_engine_for_the_next(transport, death, start):
    engine = Toy(2)
    receiver = Receiver(engine)
    with BackgroundServer(receiver) as server:
        lost = start("trainer", server.url, transport, DEADLINE, 8)
        assert lost.line() == "mid"
        assert receiver.info()["session"] is not None
        lost.signal(death)
        wait_until(lambda: receiver.info()["session"] is None)
        assert receiver.state in ("live", "torn")
        assert receiver.version is None
        trainer = Toy(7)
        with TrainerClient(trainer, server.url, transport=transport, deadline_seconds=LONG, bucket_bytes=512) as client:
            assert client.push(1).version == 1
            assert state_bytes(engine) == state_bytes(trainer)
            if death == signal.SIGSTOP:
                lost.signal(signal.SIGCONT)
                lost.signal(signal.SIGTERM)
                client.push(2)
                assert state_bytes(engine) == state_bytes(trainer), "the old trainer must not write any more"


def test_a_trainer_killed_between_start_and_update_keeps_others_out_until_its_deadline(start):
    receiver = Receiver(Toy(2))
    with BackgroundServer(receiver) as server:
        lost = start("trainer", server.url, "shared_memory", LONG, -1)
        assert lost.line() == "mid"
        lost.signal(signal.SIGKILL)
        with pytest.raises(ReloadError, match="belongs to trainer"):
            TrainerClient(Toy(7), server.url, deadline_seconds=LONG).push(1)
    receiver.close()


def test_a_trainer_killed_between_start_and_update_is_given_up_at_its_deadline(start):
    receiver = Receiver(Toy(2))
    with BackgroundServer(receiver) as server:
        lost = start("trainer", server.url, "shared_memory", DEADLINE, -1)
        assert lost.line() == "mid"
        lost.signal(signal.SIGKILL)
        wait_until(lambda: receiver.info()["session"] is None)
        assert receiver.state == "live", "no byte was written"
        with receiver.serving():
            pass
        with TrainerClient(Toy(7), server.url, deadline_seconds=LONG) as client:
            assert client.push(1).version == 1


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_lost_in_mid_push_is_an_error_for_the_trainer_and_the_other_engine(transport, death, start):
    peer = start("engine", 2)
    url = peer.line()
    other = Receiver(Toy(3))
    trainer = Toy(7)
    client = TrainerClient(trainer, [url, other], transport=transport, deadline_seconds=DEADLINE, bucket_bytes=512)
    from weightsync.worker.group import in_thread

    pushing = in_thread(client.push, 1)
    assert peer.line() == "mid"
    peer.signal(death)
    with pytest.raises(TransportError) as caught:
        pushing.result(timeout=LONG)
    assert isinstance(caught.value, PeerFailed | TransportTimeout)
    wait_until(lambda: other.info()["session"] is None)
    assert other.version is None, "no engine publishes what another did not get"
    with TrainerClient(trainer, other, transport=transport, deadline_seconds=LONG, bucket_bytes=512) as again:
        again.push(1)
    assert other.state == "live"


def test_a_server_that_speaks_something_else_is_a_protocol_error():
    class Garbage:
        def call(self, route, body, deadline_seconds):
            return {"ranks": [{"weights": "∞"}]}

        def close(self):
            pass

    with pytest.raises(ProtocolError, match="Accept"):
        TrainerClient(Toy(1), Garbage()).push()


def test_an_engine_that_is_not_there_is_an_error_at_once():
    with pytest.raises(PeerFailed, match="ConnectionRefusedError"):
        TrainerClient(Toy(1), "http://127.0.0.1:9", deadline_seconds=LONG).push()
