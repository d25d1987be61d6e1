"""A server with a draft model, which is a target of its own: pushed with the target model, or not at all."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from checkpoints_vllm import make_checkpoint, read_checkpoint
from engines_vllm import cold_tokens
from jobs_vllm import PROMPTS
from server_vllm import VllmServer

from weightsync.errors import CoverageError
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import TensorSource

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def paths(checkpoints):
    return {which: make_checkpoint("llama", which, checkpoints) for which in "ab"}


def speculation(draft):
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def server(paths, tmp_path_factory):
    """The draft model is the target model itself, so nearly every token that it proposes is accepted."""
    arguments = ("--speculative-config", json.dumps(speculation(paths["a"])))
    with VllmServer(paths["a"], tmp_path_factory.mktemp("log") / "draft.log", arguments=arguments) as running:
        yield running


def source(checkpoint, **changes):
    weights = dict(read_checkpoint(checkpoint))
    return TensorSource({changes.get(name, name): tensor for name, tensor in weights.items()})


def tokens(server):
    return [server.generate(prompt) for prompt in PROMPTS]


def accepted(server):
    """The share of the draft's tokens that the target model accepts now."""
    names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    before = [server.counter(name) for name in names]
    for prompt in PROMPTS:
        server.generate(prompt, max_tokens=40)
    gained = [server.counter(name) - earlier for name, earlier in zip(names, before, strict=True)]
    assert gained[1] > 0
    return gained[0] / gained[1]


def versions(server):
    (rank,) = server.get("weight_info")["ranks"]
    return {name: target["version"] for name, target in rank["targets"].items()}


def push(server, sources, **options):
    with TrainerClient(sources, server.url, **options) as client:
        return client.push()


def test_one_push_updates_both_models_and_a_draft_that_is_left_behind_is_of_no_use(server, paths):
    assert versions(server) == {"model": None, "draft": None}
    assert accepted(server) > 0.8
    push(server, source(paths["b"]))
    assert versions(server) == {"model": 1, "draft": None}
    assert accepted(server) < 0.2
    for mode in ("direct", "layerwise"):
        for which in "ab":
            report = push(server, {"model": source(paths[which]), "draft": source(paths[which])}, mode=mode)
            assert versions(server) == {"model": report.version, "draft": report.version}
            cold = cold_tokens(paths[which], speculative_config=speculation(paths[which]))
            assert tokens(server) == cold
            assert accepted(server) > 0.8


def test_a_draft_that_does_not_fit_refuses_the_target_model_too(server, paths):
    push(server, {"model": source(paths["a"]), "draft": source(paths["a"])})
    before, said = versions(server), tokens(server)
    wrong = source(paths["b"], **{"model.norm.weight": "model.norm.wait"})
    with pytest.raises(CoverageError, match=r"model\.norm\.wait"):
        push(server, {"model": source(paths["b"]), "draft": wrong})
    assert versions(server) == before
    assert tokens(server) == said
    assert accepted(server) > 0.8


def test_vllms_route_for_a_draft_update_says_how_it_is_done_here(server):
    response = server.post("start_draft_weight_update")
    assert response.status_code == 400
    assert "target 'draft'" in response.json()["error"]["message"]
