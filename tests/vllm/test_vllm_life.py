"""What surrounds a push in a real server: caches, requests in flight, pauses, dead trainers, torn weights, a loop."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from checkpoints_vllm import MAX_TOKENS, make_checkpoint, read_checkpoint
from engines_vllm import cold_tokens
from jobs_vllm import PROMPTS
from server_vllm import ANSWER_SECONDS, VllmServer
from trainer_vllm import half_pushed, killed_in_mid_push

from weightsync import control
from weightsync.errors import PeerFailed, ProtocolError, ReloadError, TransportTimeout, WeightSyncError
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.http import HttpEndpoint
from weightsync.trainer.sources import TensorSource
from weightsync.transport.shared_memory import share_parameters

pytestmark = pytest.mark.vllm
LONG = 2  # the prompt whose prefix is cached
# A request of that many is in flight until its client leaves or a push ends it, however late the push comes.
ENDLESS = MAX_TOKENS - 1000


@pytest.fixture(scope="module")
def paths(checkpoints):
    return {which: make_checkpoint("llama", which, checkpoints) for which in "abcdef"}


@pytest.fixture(scope="module")
def servers(paths, tmp_path_factory):
    """Two: without rollback, where a push that fails after live bytes were written leaves torn weights, and with."""
    logs = tmp_path_factory.mktemp("log")
    careful = ("--additional-config", '{"weightsync": {"rollback": "host"}}')
    plain = VllmServer(paths["a"], logs / "server.log", max_model_len=MAX_TOKENS, cache_bytes=320 << 20).begin()
    with VllmServer(paths["a"], logs / "careful.log", arguments=careful) as other, plain as running:
        yield running, other


@pytest.fixture(scope="module")
def server(servers):
    return servers[0]


@pytest.fixture(scope="module")
def careful_server(servers):
    return servers[1]


def source(checkpoint: Path) -> TensorSource:
    return TensorSource(dict(read_checkpoint(checkpoint)))


def push(server: VllmServer, checkpoint: Path, endpoint: HttpEndpoint | None = None, **options):
    with TrainerClient(source(checkpoint), endpoint or server.url, **options) as client:
        return client.push()


def tokens(server: VllmServer) -> list[list[int]]:
    return [server.generate(prompt) for prompt in PROMPTS]


class Adds(HttpEndpoint):
    """Adds fields to the body of one route, and keeps its answers."""

    def __init__(self, url, route, **fields):
        super().__init__(url)
        self.route, self.fields, self.answers = route, fields, []

    def call(self, route, body, deadline_seconds):
        if route != self.route:
            return super().call(route, body, deadline_seconds)
        self.answers.append(super().call(route, {**body, **self.fields}, deadline_seconds))
        return self.answers[-1]


def test_without_the_cache_reset_the_output_is_stale_and_with_it_it_is_not(server, paths):
    push(server, paths["a"])
    assert server.generate(PROMPTS[LONG]) == cold_tokens(paths["a"])[LONG]
    push(server, paths["b"], Adds(server.url, control.FINISH, reset_caches=False))
    assert server.generate(PROMPTS[LONG]) != cold_tokens(paths["b"])[LONG]
    report = push(server, paths["b"])
    assert server.generate(PROMPTS[LONG]) == cold_tokens(paths["b"])[LONG]
    assert report.version == server.get("weight_info")["weight_version"]


def test_the_answer_to_finish_names_the_caches_that_were_reset(server, paths):
    endpoint = Adds(server.url, control.FINISH)
    push(server, paths["a"], endpoint)
    assert endpoint.answers[-1]["caches_reset"] == {"prefix": True, "multimodal": True, "encoder": True}


def test_vllms_own_weight_version_follows(server, paths):
    report = push(server, paths["a"])
    info = server.get("weight_info")
    assert (info["weight_version"], info["state"], info["is_paused"]) == (report.version, "live", False)


def test_requests_in_flight_are_kept_and_go_on_after_the_push_as_the_new_weights_continue_them(server, paths):
    push(server, paths["a"])
    prompt, generated = [1, 2, 3], server.counter("vllm:generation_tokens_total")
    preempted = server.counter("vllm:num_preemptions_total")
    with server.stream(prompt, ENDLESS) as pieces:
        said, reason = next(pieces)
        report = push(server, paths["b"])
        num_before = server.counter("vllm:generation_tokens_total") - generated  # those of after the push come later
        while reason is None and len(said) <= num_before + 20:
            piece, reason = next(pieces)
            said += piece
    assert reason is None
    assert report.version == server.get("weight_info")["weight_version"]
    assert server.counter("vllm:num_preemptions_total") == preempted + 1  # what it had was computed anew
    assert tokens(server) == cold_tokens(paths["b"])


def test_with_pause_wait_requests_in_flight_end_first_under_the_old_weights(server, paths):
    push(server, paths["a"])
    alone = server.generate([1, 2, 3], max_tokens=200)
    endpoint = Adds(server.url, control.START, pause="wait")
    with server.stream([1, 2, 3], 200) as pieces:
        first = next(pieces)
        push(server, paths["b"], endpoint)
        rest = list(pieces)
    assert endpoint.answers[-1]["paused"] == "wait"
    assert [token for piece, _ in (first, *rest) for token in piece] == alone
    assert rest[-1][1] == "length"
    assert tokens(server) == cold_tokens(paths["b"])


def test_with_pause_abort_requests_in_flight_end_now_with_what_they_have(server, paths):
    push(server, paths["a"])
    with server.stream([1, 2, 3], ENDLESS) as pieces:
        first = next(pieces)
        push(server, paths["b"], Adds(server.url, control.START, pause="abort"))
        pieces = [first, *pieces]
    reasons = [reason for _, reason in pieces]
    assert (reasons[-1], set(reasons[:-1])) == ("abort", {None})
    assert sum(len(piece) for piece, _ in pieces) > 0
    assert tokens(server) == cold_tokens(paths["b"])


def test_an_unknown_way_to_pause_is_refused_and_nothing_is_paused(server, paths):
    with pytest.raises(ProtocolError, match="keep, wait, abort, got 'stop'"):
        push(server, paths["a"], Adds(server.url, control.START, pause="stop"))
    assert not server.get("is_paused")["is_paused"]


def test_a_request_that_comes_during_a_push_is_answered_by_the_new_weights(server, paths):
    push(server, paths["a"])
    answers = []
    request = threading.Thread(target=lambda: answers.append(server.completion(PROMPTS[0])))
    with TrainerClient(source(paths["b"]), server.url) as client:
        client.start()
        request.start()
        client.update()
        assert not answers
        client.finish()
    request.join(ANSWER_SECONDS)
    assert answers[0].json()["choices"][0]["token_ids"] == cold_tokens(paths["b"])[0]


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


def test_the_weight_checker_finds_a_push_after_a_reset_equal_and_another_checkpoint_different(server, paths):
    """vLLM's documented check of a weight update: checksum, reset, push, compare."""
    push(server, paths["a"])
    baseline = server.post("weight_checker", {"action": "checksum"}).json()["checksums"]
    assert server.post("weight_checker", {"action": "reset"}).json()["status"] == "reset"
    info = server.get("weight_info")
    assert (info["state"], info["weight_version"], info["is_paused"]) == ("torn", None, True)
    assert server.completion(PROMPTS[0]).status_code == 503
    compare = {"action": "compare", "baseline": baseline}
    assert "model.model.norm.weight" in server.post("weight_checker", compare).json()["mismatches"]
    report = push(server, paths["a"])
    answer = server.post("weight_checker", compare).json()
    assert (answer["match"], answer["mismatches"]) == (True, [])
    assert server.get("weight_info")["weight_version"] == report.version
    assert tokens(server) == cold_tokens(paths["a"])
    push(server, paths["b"])
    answer = server.post("weight_checker", compare).json()
    assert not answer["match"]
    assert "model.model.norm.weight" in answer["mismatches"]


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
def test_a_trainer_killed_in_mid_push_leaves_torn_weights_that_serve_nobody_or_with_rollback_the_old_ones(
    server, careful_server, paths, mode
):
    for running in (server, careful_server):
        push(running, paths["a"])
    before = {running.url: running.get("weight_info")["weight_version"] for running in (server, careful_server)}
    with (
        killed_in_mid_push(paths["b"], server.url, mode),
        killed_in_mid_push(paths["b"], careful_server.url, mode),
    ):
        for running in (server, careful_server):
            info = running.get("weight_info")
            assert info["weight_version"] in (None, before[running.url])
    info = wait_for_end(careful_server)
    assert info == {**info, "state": "live", "weight_version": before[careful_server.url], "is_paused": False}
    assert tokens(careful_server) == cold_tokens(paths["a"])
    info = wait_for_end(server)
    if mode == "layerwise" and info["state"] == "live":  # no module was complete yet, so nothing live was written
        assert info == {**info, "weight_version": before[server.url], "is_paused": False}
        assert tokens(server) == cold_tokens(paths["a"])
    else:
        assert info == {**info, "state": "torn", "weight_version": None, "is_paused": True}
        response = server.completion(PROMPTS[0])
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "TornModelError"
        assert server.post("resume").status_code == 409
    report = push(server, paths["b"], mode=mode)
    assert server.get("weight_info")["state"] == "live"
    assert server.get("weight_info")["weight_version"] == report.version > before[server.url]
    assert tokens(server) == cold_tokens(paths["b"])


def wait_for_end(server: VllmServer) -> dict:
    """Waits until the engine has given the push up."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        info = server.get("weight_info")
        if info["state"] != "loading" and (info["state"] == "torn") == info["is_paused"]:
            return info
        time.sleep(0.2)
    raise AssertionError(f"still {info} after the trainer's deadline")


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


def test_an_engine_that_stops_answering_fails_the_push_within_the_deadline_and_goes_on_with_the_old_weights(
    careful_server, paths
):
    push(careful_server, paths["a"], mode="direct")
    before = careful_server.get("weight_info")["weight_version"]
    client = half_pushed(source(paths["b"]), careful_server.url, mode="direct")
    with careful_server.frozen(), pytest.raises((TransportTimeout, PeerFailed), match="did not answer"):
        client.finish()
    info = wait_for_end(careful_server)
    assert info == {**info, "state": "live", "weight_version": before, "is_paused": False}
    assert tokens(careful_server) == cold_tokens(paths["a"])
    push(careful_server, paths["b"])
    assert tokens(careful_server) == cold_tokens(paths["b"])


def test_no_engine_publishes_when_one_stops_answering_at_the_end(server, careful_server, paths):
    for running in (server, careful_server):
        push(running, paths["a"])
    before = [running.get("weight_info")["weight_version"] for running in (server, careful_server)]
    urls, version = [server.url, careful_server.url], max(before) + 1
    client = half_pushed(source(paths["b"]), urls, version=version)
    with careful_server.frozen(), pytest.raises(WeightSyncError):
        client.finish()
    assert wait_for_end(careful_server)["weight_version"] == before[1]
    assert tokens(careful_server) == cold_tokens(paths["a"])
    torn = wait_for_end(server)  # it has no rollback: it had prepared, and was told to give up
    assert (torn["state"], torn["weight_version"]) == ("torn", None)
    assert server.completion(PROMPTS[0]).status_code == 503
    with TrainerClient(source(paths["b"]), urls) as client:
        report = client.push(version=version)
    assert tokens(server) == tokens(careful_server) == cold_tokens(paths["b"])
    assert {running.get("weight_info")["weight_version"] for running in (server, careful_server)} == {report.version}


@pytest.mark.parametrize("shared", [False, True], ids=["copied", "shared"])
def test_five_pushes_of_one_client_each_equal_a_cold_start(server, paths, shared):
    """With weights in shared memory, which engines read where they lie, each push but the first is one call."""
    module = torch.nn.ParameterDict() if shared else None
    weights = {name: tensor.clone() for name, tensor in read_checkpoint(paths["a"])}
    if module is not None:
        for number, tensor in enumerate(weights.values()):
            module[str(number)] = torch.nn.Parameter(tensor, requires_grad=False)
        share_parameters(module)
        weights = dict(zip(weights, module.values(), strict=True))
    single = Adds(server.url, control.PUSH)
    with TrainerClient(TensorSource(weights), single, mode="direct") as client:
        for which in "bcdef":
            with torch.no_grad():
                for name, tensor in read_checkpoint(paths[which]):
                    weights[name].copy_(tensor)
            report = client.push()
            assert tokens(server) == cold_tokens(paths[which])
            info = server.get("weight_info")
            assert (info["weight_version"], info["is_paused"]) == (report.version, False)
    assert len(single.answers) == (4 if shared else 0)
    for answer in single.answers:
        assert answer["caches_reset"]["prefix"]
        assert answer["paused"] == "keep"


def test_a_wrong_body_is_refused_with_the_fields_name(server):
    response = server.post("start_weight_update", {"start_info": {"session_id": "x"}})
    assert response.status_code == 400
    assert "Start lacks" in response.json()["error"]["message"]
