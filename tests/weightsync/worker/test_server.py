"""The HTTP face of an engine: vLLM's routes and bodies, errors as JSON, garbage answered, numbers counted."""

import json
import socket
import threading

import httpx
import pytest
import torch
from torch import nn

from weightsync import control
from weightsync.errors import CoverageError, ManifestError, PeerFailed, ProtocolError, ReloadError, TransportTimeout
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.http import HttpEndpoint
from weightsync.transport.memory import memory_link
from weightsync.worker.group import EndpointGroup
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer, status_of
from weightsync.worker.session import read_manifests


class Small(nn.Module):
    supports_direct_reload = True

    def __init__(self, value=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), value), requires_grad=False)
        self.b = nn.Parameter(torch.full((3,), value), requires_grad=False)

    def load_weights(self, weights):
        mine = dict(self.named_parameters())
        for name, tensor in weights:
            mine[name].data.copy_(tensor)


@pytest.fixture
def served():
    model = Small()
    receiver = Receiver(model, engine="e")
    with BackgroundServer(receiver) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        yield model, receiver, server, http


def push(server, value, version=None):
    with TrainerClient(Small(value), server.url, deadline_seconds=60) as client:
        return client.push(version)


def test_info_and_health(served):
    _, _, server, http = served
    assert http.get("/health").json()["ranks"] == [{"status": "ok"}]
    info = http.get("/weight_info").json()
    assert info["weight_version"] is None
    assert info["state"] == "live"
    push(server, 2.0, 7)
    info = http.get("/weight_info").json()
    assert info["weight_version"] == 7
    assert info["ranks"][0]["targets"] == {"model": {"version": 7, "state": "live"}}


def test_the_checker_gives_digests_and_compares_them(served):
    model, _, server, http = served
    push(server, 2.0)
    before = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
    assert set(before) == {"model.w", "model.b"}
    same = http.post("/weight_checker", json={"action": "compare", "baseline": before}).json()
    assert (same["match"], same["mismatches"]) == (True, [])
    model.w.data[1, 1] += 1
    other = http.post("/weight_checker", json={"action": "compare", "baseline": before}).json()
    assert (other["match"], other["mismatches"]) == (False, ["model.w"])
    assert http.post("/weight_checker", json={"action": "compare"}).status_code == 400
    assert http.post("/weight_checker", json={"action": "reset"}).status_code == 400


def test_pause_keeps_passes_out_until_resume(served):
    _, receiver, server, http = served
    assert http.get("/is_paused").json()["is_paused"] is False
    assert http.post("/pause?mode=keep").status_code == 200
    assert http.get("/is_paused").json()["is_paused"] is True
    receiver._gate_seconds = 0.05
    with pytest.raises(ReloadError, match="paused"), receiver.serving():
        pass
    receiver._gate_seconds = 5.0
    push(server, 3.0)
    assert http.get("/is_paused").json()["is_paused"] is True, "a push does not end a pause"
    assert http.post("/resume").status_code == 200
    with receiver.serving():
        pass
    assert http.post("/pause?mode=abort").json()["error"]["type"] == "ProtocolError"


def test_an_update_waits_for_the_pass_inside(served):
    model, receiver, server, _ = served
    done = threading.Event()
    with receiver.serving():
        thread = threading.Thread(target=lambda: (push(server, 5.0), done.set()))
        thread.start()
        assert not done.wait(0.3)
        assert float(model.w[0, 0]) == 0.0
    assert done.wait(10)
    thread.join(5)
    assert float(model.w[0, 0]) == 5.0


GARBAGE = [
    b"\x80\x04\x95",
    b"[]",
    b"7",
    b'{"init_info": 3}',
    b'{"init_info": {}}',
    b'{"init_info": {"protocol": 99}}',
    b"{" * 5000,
    b'"\xff\xfe"',
]


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_answered_with_a_protocol_error(served, body):
    _, receiver, _, http = served
    for route in (control.INIT, control.START, control.UPDATE, control.FINISH, control.ABORT):
        answer = http.post(f"/{route}", content=body)
        assert answer.status_code in (400, 409)
        assert answer.json()["error"]["type"] in ("ProtocolError", "ReloadError")
    assert receiver.state == "live"
    assert receiver.info()["session"] is None


def test_unknown_routes_and_methods_are_http_errors(served):
    _, _, server, http = served
    assert http.get("/nothing").status_code == 404
    assert http.get("/update_weights").status_code == 405
    with pytest.raises(ProtocolError, match="404"):
        HttpEndpoint(server.url).call("nothing", {}, 5)


def test_an_operator_can_end_a_session_by_force(served):
    model, receiver, server, http = served
    client = TrainerClient(Small(4.0), server.url, deadline_seconds=60)
    client.start(1)
    assert http.post("/abort_weight_update", json={"reason": "operator"}).status_code == 409
    answer = http.post("/abort_weight_update", json={"reason": "operator", "force": True})
    assert answer.json()["ranks"][0]["state"] == "live"
    with pytest.raises(ReloadError):
        client.update()
    assert push(server, 6.0).version == 1
    assert float(model.b[0]) == 6.0
    assert receiver.info()["session"] is None


def test_metrics_count_calls_bytes_and_failures(served):
    _, _, server, http = served
    push(server, 2.0, 3)
    http.post("/update_weights", content=b"junk")
    text = http.get("/metrics").text
    assert 'weightsync_calls_total{route="finish_weight_update",status="200"} 1.0' in text
    assert "weightsync_loaded_bytes_total 60.0" in text
    assert "weightsync_version 3.0" in text
    assert 'weightsync_failures_total{type="ProtocolError"} 1.0' in text


def test_errors_have_a_fitting_status():
    assert [
        status_of(e) for e in (ProtocolError(), CoverageError(), ReloadError(), TransportTimeout(), KeyError())
    ] == [
        400,
        422,
        409,
        504,
        500,
    ]


def test_an_engine_asleep_refuses_to_start_and_is_fine():
    model = Small()
    reason = ["the weights are asleep"]
    receiver = Receiver(model, ready=lambda: reason[0])
    client = TrainerClient(Small(1.0), receiver)
    with pytest.raises(ReloadError, match="no weight update can start now: the weights are asleep"):
        client.push(1)
    reason[0] = None
    assert client.push(1).version == 1


def test_caches_are_dropped_before_the_version_is_live_and_a_failing_drop_stops_it():
    versions = []
    receiver = Receiver(Small(), on_publish=[lambda v: versions.append((v, receiver.version))])
    client = TrainerClient(Small(1.0), receiver)
    client.push(4)
    assert versions == [(4, None)]

    def fail(version):
        raise RuntimeError("the prefix cache could not be dropped")

    other = Receiver(Small(), on_publish=[fail])
    with pytest.raises(RuntimeError, match="prefix cache"):
        TrainerClient(Small(1.0), other).push(1)
    assert other.version is None
    assert other.state == "torn"


def test_a_failed_call_ends_the_session_without_the_trainers_help():
    receiver = Receiver(Small())
    client = TrainerClient(Small(1.0), receiver)
    client.push(1)
    client.start(2)
    session_id = client._agreement.session_id
    update = {"session_id": session_id, "target": "draft", "names": None, "data": {}, "per_rank": {}}
    with pytest.raises(ProtocolError, match="unknown targets: draft"):
        receiver.call(control.UPDATE, {"update_info": update}, 5)
    assert receiver.info()["session"] is None
    with receiver.serving():
        pass
    assert TrainerClient(Small(3.0), receiver).push(3).version == 3, "another may join at once"


class Impostor:
    """A TCP server that answers every request with the same bytes, or with silence."""

    def __init__(self, answer):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answer = answer
        self.held = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.held.append(connection)
            connection.recv(65536)
            if self.answer is not None:
                connection.sendall(self.answer)
                connection.close()


def http_answer(body):
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\x00\x01garbage\r\n\r\n", PeerFailed),
        (b"", PeerFailed),
        (http_answer(b"<html>"), ProtocolError),
        (http_answer(b"[]"), ProtocolError),
        (http_answer(b'{"ranks": 3}'), ProtocolError),
        (http_answer(b'{"ranks": [{"rank": 0}]}'), ProtocolError),
        (http_answer(b'{"error": "boom"}'), ProtocolError),
        (http_answer(json.dumps({"error": {"type": "CoverageError", "message": "m"}}).encode()), CoverageError),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort", PeerFailed),
    ],
)
def test_a_server_that_answers_garbage_is_an_error(answer, error):
    impostor = Impostor(answer)
    with pytest.raises(error):
        TrainerClient(Small(), impostor.url, deadline_seconds=60).push()
    impostor.listener.close()


def test_a_server_that_never_answers_is_a_timeout():
    impostor = Impostor(None)
    with pytest.raises(TransportTimeout, match="did not answer in 0.3 s"):
        TrainerClient(Small(), impostor.url, deadline_seconds=0.3).push()
    impostor.listener.close()


def test_one_server_can_front_several_ranks():
    models = [Small(), Small()]
    ranks = [Receiver(m, engine="e", rank=i, world=2) for i, m in enumerate(models)]
    with BackgroundServer(EndpointGroup(ranks)) as server:
        assert len(push(server, 3.0, 5).ranks) == 2
        info = httpx.get(f"{server.url}/weight_info").json()
    assert info["weight_version"] == 5
    assert [float(m.w[0, 0]) for m in models] == [3.0, 3.0]


@pytest.mark.parametrize("shape", [[2**62, 8], [0, 2**70], [2**40, 2**40]])
def test_a_tensor_larger_than_any_memory_is_a_manifest_error(shape):
    with pytest.raises(ManifestError, match="w: shape"):
        read_manifests(hello_with(shape))


def hello_with(shape):
    rows = {"model": [["w", "float32", shape]]}
    return control.Hello(control.PROTOCOL_VERSION, "s", "t", rows, "direct", "full", 1 << 20, 5.0, {}, {})


def test_an_allocation_that_is_no_object_is_a_protocol_error():
    offer = {"allocations": [5], "targets": {}, "bucket_bytes": 1, "slots": []}
    with pytest.raises(ProtocolError, match="an allocation must be an object"):
        memory_link().connect(offer, {}, {}, 1.0)
