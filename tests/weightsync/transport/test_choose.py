"""The transport is the fastest that every side has, and a refusal says what stands in its way."""

import dataclasses

import pytest
import torch

from weightsync.control import Facts
from weightsync.errors import ProtocolError, TransportError
from weightsync.transport.choose import TRANSPORTS, choose, local_facts, make_link

CPU = Facts(host="h", process="p", device="cpu", device_uuid=None, shared_memory=True, nccl=False)
OTHER = dataclasses.replace(CPU, process="q")
FAR = dataclasses.replace(OTHER, host="far")
GPU = Facts(host="h", process="p", device="cuda", device_uuid="GPU-0", shared_memory=True, nccl=True)


def gpu(uuid, process="q", **changes):
    return dataclasses.replace(GPU, device_uuid=uuid, process=process, **changes)


@pytest.mark.parametrize(
    ("trainer", "receivers", "expected"),
    [
        (CPU, [CPU], "memory"),
        (CPU, [CPU, CPU], "memory"),
        (CPU, [OTHER], "shared_memory"),
        (CPU, [CPU, OTHER], "shared_memory"),
        (CPU, [OTHER, FAR], "gloo"),
        (CPU, [dataclasses.replace(OTHER, shared_memory=False)], "gloo"),
        (GPU, [gpu("GPU-0", "p")], "memory"),
        (GPU, [gpu("GPU-0")], "ipc"),
        (GPU, [gpu("GPU-0"), gpu("GPU-0", "r")], "ipc"),
        (GPU, [gpu("GPU-1")], "nccl"),
        (GPU, [gpu("GPU-1"), gpu("GPU-2", host="far")], "nccl"),
        (GPU, [gpu("GPU-1"), gpu("GPU-1", "r")], "gloo"),
        (GPU, [gpu("GPU-0", host="far")], "gloo"),
        (GPU, [gpu("GPU-1", nccl=False)], "gloo"),
        (GPU, [OTHER], "shared_memory"),
        (GPU, [FAR], "gloo"),
        (CPU, [gpu("GPU-0")], "gloo"),
    ],
)
def test_auto_takes_the_fastest_that_all_have(trainer, receivers, expected):
    name, reason = choose("auto", trainer, receivers)
    assert name == expected
    for faster in TRANSPORTS[: TRANSPORTS.index(expected)]:
        assert f"not {faster}:" in reason


@pytest.mark.parametrize(
    ("asked", "trainer", "receivers", "words"),
    [
        ("memory", CPU, [OTHER], "different processes"),
        ("shm", CPU, [FAR], "h and far"),
        ("shared_memory", CPU, [gpu("GPU-0")], "an engine is on a GPU"),
        ("ipc", GPU, [gpu("GPU-1"), gpu("GPU-2")], "GPU-0, the receivers on GPU-1, GPU-2"),
        ("cuda_ipc", CPU, [OTHER], "needs every side on a GPU"),
        ("nccl", GPU, [gpu("GPU-0")], "share one GPU"),
        ("nccl", CPU, [OTHER], "GPU and NCCL"),
    ],
)
def test_what_is_asked_for_and_does_not_fit_is_refused_with_the_facts(asked, trainer, receivers, words):
    with pytest.raises(TransportError, match=words):
        choose(asked, trainer, receivers)


def test_an_unknown_transport_lists_the_known():
    with pytest.raises(ProtocolError, match="known: auto, memory, ipc"):
        choose("rdma", CPU, [CPU])
    with pytest.raises(ProtocolError, match="the offer names transport 'pickle'"):
        make_link("pickle", torch.device("cpu"))


def test_a_process_knows_itself():
    facts = local_facts(torch.device("cpu"))
    assert facts == local_facts(torch.device("cpu"))
    assert facts.device == "cpu"
    assert facts.device_uuid is None
