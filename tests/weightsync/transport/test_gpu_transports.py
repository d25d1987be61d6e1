"""CUDA IPC and NCCL between processes: the trainer's bytes, in order with its streams, and nothing left behind."""

import base64
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_trainer import GpuToy, values

from weightsync.errors import ProtocolError, TransportError
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("gpu_trainer.py")
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each side; fewer than 2 here"
)


class TrainerProcess:
    def __init__(self, url, transport, device, **environment):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), url, transport, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )
        assert self.process.stdout.readline() == "ready\n"

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def ask(self, *words):
        self.tell(*words)
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def start():
    trainers = []

    def give(*arguments, **environment):
        trainers.append(TrainerProcess(*arguments, **environment))
        return trainers[-1]

    yield give
    for trainer in trainers:
        trainer.end()


def assert_holds(engine, seed, plus=0):
    for name, expected in values(seed, next(engine.parameters()).device).items():
        if name == "c":
            expected = expected + plus
        found = getattr(engine, name).data
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ipc_reads_trainer_memory_in_place_and_notices_when_it_moves(start):
    engine = GpuToy(2, "cuda:0")
    addresses = [p.data_ptr() for p in engine.parameters()]
    receiver = Receiver(engine)
    with BackgroundServer(receiver) as server:
        trainer = start(server.url, "auto", "cuda:0")
        first = trainer.ask("push", 1)
        assert first == {"transport": "ipc", "reason": first["reason"], "copied": 0}
        assert_holds(engine, 1)
        trainer.ask("step", 5)
        assert trainer.ask("push", 2)["copied"] == 0
        assert_holds(engine, 5)
        trainer.ask("scatter")
        assert trainer.ask("push", 3)["copied"] == 0
        assert_holds(engine, 5, plus=1)
        assert [p.data_ptr() for p in engine.parameters()] == addresses
        trainer.ask("close")


@pytest.mark.parametrize("transport", ["ipc", pytest.param("nccl", marks=needs_two)])
def test_a_push_is_ordered_with_the_trainers_streams(transport, start):
    engine = GpuToy(2, "cuda:0")
    with BackgroundServer(Receiver(engine)) as server:
        trainer = start(server.url, transport, "cuda:0" if transport == "ipc" else "cuda:1")
        for version in range(1, 6):
            answer = trainer.ask("race", 10 + version, version)
            assert answer["transport"] == transport
            assert_holds(engine, 10 + version)


def test_twenty_ipc_pushes_and_a_close_leave_memory_as_it_was(start):
    engine = GpuToy(2, "cuda:0")
    receiver = Receiver(engine)
    with BackgroundServer(receiver) as server:
        trainer = start(server.url, "ipc", "cuda:0")
        trainer.ask("push", 1)
        gc.collect()
        before, mine = trainer.ask("memory"), torch.cuda.memory_allocated()
        for version in range(2, 22):
            trainer.ask("push", version)
        after = trainer.ask("memory")
        assert after["allocated"] == before["allocated"]
        assert after["free"] >= before["free"] - (2 << 20)
        gc.collect()
        assert torch.cuda.memory_allocated() == mine
        trainer.ask("close")
        assert receiver.info()["session"] is None
        assert trainer.ask("memory")["free"] >= before["free"] - (2 << 20)


def test_expandable_segments_are_refused_by_name(start):
    with BackgroundServer(Receiver(GpuToy(2, "cuda:0"))) as server:
        setting = "expandable_segments:True"
        trainer = start(server.url, "ipc", "cuda:0", PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
        answer = trainer.ask("push", 1)
    assert answer["error"] == "TransportError"
    assert "expandable_segments" in answer["message"]


@pytest.mark.parametrize("transport", ["ipc", pytest.param("nccl", marks=needs_two)])
def test_a_trainer_killed_in_mid_push_makes_room_for_the_next(transport, start):
    engine = GpuToy(2, "cuda:0")
    receiver = Receiver(engine)
    device = "cuda:0" if transport == "ipc" else "cuda:1"
    with BackgroundServer(receiver) as server:
        lost = start(server.url, transport, device)
        lost.tell("stall", 1)
        assert lost.process.stdout.readline() == "mid\n"
        lost.process.send_signal(signal.SIGKILL)
        wait_until(lambda: receiver.info()["session"] is None, 20)
        assert receiver.version is None
        trainer = start(server.url, transport, device)
        assert trainer.ask("push", 1)["transport"] == transport
        assert_holds(engine, 1)


@needs_two
def test_nccl_pushes_into_another_gpu(start):
    engine = GpuToy(2, "cuda:0")
    with BackgroundServer(Receiver(engine)) as server:
        trainer = start(server.url, "auto", "cuda:1")
        answer = trainer.ask("push", 1)
        assert answer["transport"] == "nccl"
        assert_holds(engine, 1)
        trainer.ask("step", 5)
        trainer.ask("push", 2)
        assert_holds(engine, 5)
        trainer.ask("scatter")
        trainer.ask("push", 3)
        assert_holds(engine, 5, plus=1)


@needs_two
def test_gloo_carries_gpu_tensors_through_host_memory(start):
    engine = GpuToy(2, "cuda:0")
    with BackgroundServer(Receiver(engine)) as server:
        trainer = start(server.url, "gloo", "cuda:1")
        assert trainer.ask("push", 1)["transport"] == "gloo"
        assert_holds(engine, 1)


@needs_two
def test_ipc_between_two_gpus_is_refused_with_both_uuids(start):
    with BackgroundServer(Receiver(GpuToy(2, "cuda:0"))) as server:
        answer = start(server.url, "ipc", "cuda:1").ask("push", 1)
    for index in (0, 1):
        assert str(torch.cuda.get_device_properties(index).uuid) in answer["message"]


def test_handles_that_are_none_are_refused_before_the_driver_sees_them():
    from weightsync.transport.ipc import IpcMapper, device_uuid

    device = torch.device("cuda:0")
    mapper = IpcMapper(device)
    good = {
        "handle": base64.b64encode(bytes(64)).decode(),
        "device_uuid": device_uuid(device),
        "buffer_id": 1,
    }
    for change, error in (
        ({"handle": "gASV!"}, ProtocolError),
        ({"handle": base64.b64encode(bytes(63)).decode()}, ProtocolError),
        ({"handle": 7}, ProtocolError),
        ({"buffer_id": "x"}, ProtocolError),
        ({"device_uuid": "another"}, TransportError),
        ({}, TransportError),
    ):
        with pytest.raises(error):
            mapper.open({**good, **change}, 4096)
