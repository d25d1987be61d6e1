"""What surrounds a push in a real server: caches, requests in flight, pauses, dead trainers, torn weights, a loop."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from checkpoints_vllm import make_checkpoint, read_checkpoint
from cold_vllm import PROMPTS, cold_tokens
from server_vllm import VllmServer

from weightsync import control
from weightsync.errors import ReloadError, WeightSyncError
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.http import HttpEndpoint
from weightsync.trainer.sources import TensorSource

pytestmark = pytest.mark.vllm
LONG = 2  # the prompt whose prefix is cached
DEADLINE_SECONDS = 3.0


@pytest.fixture(scope="module")
def paths(checkpoints):
    return {which: make_checkpoint("llama", which, checkpoints) for which in "abcdef"}


@pytest.fixture(scope="module")
def server(paths, tmp_path_factory):
    """Without rollback: a push that fails after live bytes were written leaves torn weights."""
    with VllmServer(paths["a"], tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def careful_server(paths, tmp_path_factory):
    """With rollback on the host."""
    arguments = ("--additional-config", '{"weightsync": {"rollback": "host"}}')
    with VllmServer(paths["a"], tmp_path_factory.mktemp("log") / "careful.log", arguments=arguments) as running:
        yield running


def source(checkpoint: Path) -> TensorSource:
    return TensorSource(dict(read_checkpoint(checkpoint)))


def push(server: VllmServer, checkpoint: Path, endpoint: HttpEndpoint | None = None, **options):
    with TrainerClient(source(checkpoint), endpoint or server.url, **options) as client:
        return client.push()


def tokens(server: VllmServer) -> list[list[int]]:
    return [server.generate(prompt) for prompt in PROMPTS]


class KeepsCaches(HttpEndpoint):
    """Asks for the caches to stay."""

    def call(self, route, body, deadline_seconds):
        return super().call(
            route, {**body, "reset_caches": False} if route == control.FINISH else body, deadline_seconds
        )


def test_without_the_cache_reset_the_output_is_stale_and_with_it_it_is_not(server, paths):
    push(server, paths["a"])
    assert server.generate(PROMPTS[LONG]) == cold_tokens(paths["a"])[LONG]
    push(server, paths["b"], KeepsCaches(server.url))
    assert server.generate(PROMPTS[LONG]) != cold_tokens(paths["b"])[LONG]
    report = push(server, paths["b"])
    assert server.generate(PROMPTS[LONG]) == cold_tokens(paths["b"])[LONG]
    assert report.version == server.get("weight_info")["weight_version"]


def test_the_answer_to_finish_names_the_caches_that_were_reset(server, paths):
    answers = []

    class Listens(HttpEndpoint):
        def call(self, route, body, deadline_seconds):
            answer = super().call(route, body, deadline_seconds)
            if route == control.FINISH:
                answers.append(answer)
            return answer

    push(server, paths["a"], Listens(server.url))
    assert answers[-1]["caches_reset"] == {"prefix": True, "multimodal": True, "encoder": True}


def test_vllms_own_weight_version_follows(server, paths):
    report = push(server, paths["a"])
    info = server.get("weight_info")
    assert (info["weight_version"], info["state"], info["is_paused"]) == (report.version, "live", False)


def test_requests_in_flight_are_kept_and_end_after_the_push(server, paths):
    push(server, paths["a"])
    answers = []
    request = threading.Thread(target=lambda: answers.append(server.completion([1, 2, 3], max_tokens=240)))
    request.start()
    time.sleep(0.3)
    push(server, paths["b"])
    request.join(120)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["choices"][0]["token_ids"]) == 240
    assert tokens(server) == cold_tokens(paths["b"])


def test_a_pause_of_the_users_own_lasts_until_the_user_resumes(server, paths):
    assert server.post("pause", mode="abort").json()["status"] == "paused"
    push(server, paths["a"])
    assert server.get("is_paused")["is_paused"]
    assert server.post("resume").json()["status"] == "resumed"
    assert tokens(server) == cold_tokens(paths["a"])


def test_generation_cannot_be_resumed_while_an_update_is_under_way(server, paths):
    with TrainerClient(source(paths["b"]), server.url) as client:
        client.start()
        assert server.get("is_paused")["is_paused"]
        response = server.post("resume")
        assert response.status_code == 409
        assert "under way" in response.json()["error"]["message"]
        client.abort("enough")
        assert not server.get("is_paused")["is_paused"]
    assert tokens(server) == cold_tokens(paths["a"])


def test_a_second_trainer_is_refused_while_the_first_pushes_and_the_first_is_unharmed(server, paths):
    with (
        TrainerClient(source(paths["b"]), server.url) as first,
        TrainerClient(source(paths["a"]), server.url) as second,
    ):
        first.start()
        with pytest.raises(ReloadError, match="belongs to trainer"):
            second.push()
        first.update()
        report = first.finish()
    assert server.get("weight_info")["weight_version"] == report.version
    assert tokens(server) == cold_tokens(paths["b"])


def test_a_version_must_grow(server, paths):
    report = push(server, paths["a"])
    with TrainerClient(source(paths["b"]), server.url) as client, pytest.raises(ReloadError, match="not newer"):
        client.push(version=report.version)
    assert tokens(server) == cold_tokens(paths["a"])


@pytest.mark.parametrize("mode", ["layerwise", "direct"])
def test_a_trainer_killed_in_mid_push_leaves_torn_weights_that_serve_nobody_and_the_next_one_repairs_them(
    server, paths, mode
):
    push(server, paths["a"])
    before = server.get("weight_info")["weight_version"]
    command = [sys.executable, str(Path(__file__).with_name("trainer_vllm.py"))]
    arguments = [str(paths["b"]), server.url, mode, str(DEADLINE_SECONDS)]
    trainer = subprocess.Popen(command + arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline().strip() == "half sent"
        assert server.get("weight_info")["state"] == "loading"
        assert server.get("weight_info")["weight_version"] in (None, before)
    finally:
        trainer.kill()
        trainer.wait(30)
    info = wait_for_end(server)
    if mode == "layerwise" and info["state"] == "live":  # no module was complete yet, so nothing live was written
        assert info == {**info, "weight_version": before, "is_paused": False}
        assert tokens(server) == cold_tokens(paths["a"])
    else:
        assert info == {**info, "state": "torn", "weight_version": None, "is_paused": True}
        response = server.completion(PROMPTS[0])
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "TornModelError"
        assert server.post("resume").status_code == 409
    push(server, paths["b"], mode=mode)
    assert server.get("weight_info")["state"] == "live"
    assert tokens(server) == cold_tokens(paths["b"])


def wait_for_end(server: VllmServer) -> dict:
    """Waits until the engine has given the push up."""
    end = time.monotonic() + 10 * DEADLINE_SECONDS
    while time.monotonic() < end:
        info = server.get("weight_info")
        if info["state"] != "loading" and (info["state"] == "torn") == info["is_paused"]:
            return info
        time.sleep(0.2)
    raise AssertionError(f"still {info} after the trainer's deadline")


@pytest.mark.parametrize("mode", ["layerwise", "direct"])
def test_with_rollback_a_trainer_killed_in_mid_push_leaves_the_old_weights_serving(careful_server, paths, mode):
    push(careful_server, paths["a"])
    before = careful_server.get("weight_info")["weight_version"]
    command = [sys.executable, str(Path(__file__).with_name("trainer_vllm.py"))]
    arguments = [str(paths["b"]), careful_server.url, mode, str(DEADLINE_SECONDS)]
    trainer = subprocess.Popen(command + arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout.readline().strip() == "half sent"
    finally:
        trainer.kill()
        trainer.wait(30)
    info = wait_for_end(careful_server)
    assert info == {**info, "state": "live", "weight_version": before, "is_paused": False}
    assert tokens(careful_server) == cold_tokens(paths["a"])


def test_with_rollback_a_failed_push_gives_the_old_tokens_back(careful_server, paths):
    push(careful_server, paths["a"], mode="direct")
    before = careful_server.get("weight_info")["weight_version"]
    with TrainerClient(source(paths["b"]), careful_server.url, mode="direct") as client:
        client.start()
        client.update(list(dict(read_checkpoint(paths["b"])))[::2])
        with pytest.raises(WeightSyncError):
            client.finish()
    info = careful_server.get("weight_info")
    assert (info["state"], info["weight_version"]) == ("live", before)
    assert tokens(careful_server) == cold_tokens(paths["a"])


def test_two_engines_get_the_same_version_or_neither_does(server, careful_server, paths):
    for running in (server, careful_server):
        push(running, paths["a"])
    urls = [server.url, careful_server.url]
    with TrainerClient(source(paths["b"]), urls) as client:
        report = client.push(version=1000)
    assert {running.get("weight_info")["weight_version"] for running in (server, careful_server)} == {report.version}
    assert tokens(server) == tokens(careful_server) == cold_tokens(paths["b"])
    push(careful_server, paths["b"], mode="layerwise")  # now one engine is ahead: its version is 1001
    with TrainerClient(source(paths["a"]), urls) as client, pytest.raises(ReloadError, match="not newer"):
        client.push(version=1001)
    assert server.get("weight_info")["weight_version"] == 1000
    assert tokens(server) == tokens(careful_server) == cold_tokens(paths["b"])


def test_five_pushes_of_one_client_each_equal_a_cold_start(server, paths):
    weights = {name: tensor.clone() for name, tensor in read_checkpoint(paths["a"])}
    with TrainerClient(TensorSource(weights), server.url, mode="direct") as client:
        for which in "bcdef":
            with torch.no_grad():
                for name, tensor in read_checkpoint(paths[which]):
                    weights[name].copy_(tensor)
            report = client.push()
            assert tokens(server) == cold_tokens(paths[which])
            assert server.get("weight_info")["weight_version"] == report.version
        assert report.seconds["handshake"] < report.total_seconds


def test_a_wrong_body_is_refused_with_the_fields_name(server):
    response = server.post("start_weight_update", {"start_info": {"session_id": "x"}})
    assert response.status_code == 400
    assert "Start lacks" in response.json()["error"]["message"]
