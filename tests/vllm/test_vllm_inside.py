"""An engine in the trainer's own process: what only there can be seen of hooks and addresses, and vLLM's own calls.

Each job runs in a process of its own; see engines_vllm.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from checkpoints_vllm import ARCHITECTURES, make_checkpoint
from engines_vllm import cold_tokens, run_job
from jobs_vllm import MTP

pytestmark = pytest.mark.vllm


@pytest.fixture
def checkpoint(checkpoints):
    return lambda name, which: make_checkpoint(name, which, checkpoints)


@pytest.mark.parametrize("mode", ["layerwise", "direct"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hooks_run_as_in_a_first_load_and_no_tensor_moves(checkpoint, architecture, mode):
    a, b = checkpoint(architecture, "a"), checkpoint(architecture, "b")
    found = run_job("push_inside", a=str(a), b=str(b), mode=mode)
    cold_hooks = list(map(tuple, found["cold_hooks"]))
    assert cold_hooks
    assert found["num_places"] > 20
    for number, (push, path) in enumerate(zip(found["pushes"], (a, b, a), strict=True)):
        assert push["moved"] == []
        assert push["gone_or_new"] == []
        assert push["tokens"] == cold_tokens(path)
        hooks = list(map(tuple, push["hooks"]))
        assert set(hooks) == set(cold_hooks)
        assert len(push["reported_hooks"]) == len(set(push["reported_hooks"])) == len(cold_hooks)
        if (
            number
        ):  # the first push may run hooks again, when it shows what they look at; what the first run did is undone
            assert max(Counter(hooks).values()) == 1
            assert [stage_of(hook) for hook in hooks] == [stage_of(hook) for hook in cold_hooks]
        if architecture == "llama":
            assert hooks[-1] == ("HookedLlama", "")
            assert push["model_hook_saw_the_new_weights"]


def stage_of(hook: tuple[str, str]) -> str:
    """vLLM's loader runs quantisation methods first, then attention-like modules, then the model."""
    owner, path = hook
    return "model" if path == "" else "method" if "Method" in owner else "attention"


def test_one_client_pushes_again_and_again_each_time_as_a_cold_start(checkpoint):
    a, *others = (checkpoint("llama", which) for which in "abca")
    found = run_job("repeated_pushes_of_one_client", a=str(a), checkpoints=[str(path) for path in others])
    assert found["single_calls"] == len(others) - 1
    for number, (path, (tokens, version, label)) in enumerate(zip(others, found["pushes"], strict=True), 1):
        assert tokens == cold_tokens(path)
        assert (version, label) == (number, str(number))


def test_a_short_push_is_refused_by_name_and_the_engine_still_says_the_same(checkpoint):
    a, b = checkpoint("llama", "a"), checkpoint("llama", "b")
    found = run_job("short_push", a=str(a), b=str(b))
    assert "missing (1): lm_head.weight" in found["error"]
    assert found["tokens"] == cold_tokens(a)


def test_vllms_own_calls_reach_the_backend_and_its_own_reload_takes_the_version_away(checkpoint):
    a, b = checkpoint("llama", "a"), checkpoint("llama", "b")
    found = run_job("vllms_own_calls", a=str(a), b=str(b))
    first = found["four_calls"]
    assert first["tokens"] == cold_tokens(b)
    assert first["label"] == "5"
    assert (first["info"]["weight_version"], first["info"]["state"]) == (5, "live")
    after = found["after_shutdown"]
    assert after["info"]["session"] is None
    assert (after["version"], after["tokens"]) == (6, cold_tokens(a))
    reload = found["vllms_reload"]
    assert reload["tokens"] == cold_tokens(b)
    assert (reload["info"]["weight_version"], reload["info"]["state"]) == (None, "live")
    assert found["push_after_it"] == {"version": 7, "tokens": cold_tokens(a)}


def test_a_draft_for_multi_token_prediction_is_pushed_with_its_target_and_shares_what_vllm_lets_it_share(checkpoint):
    a, b = checkpoint("deepseek_mtp", "a"), checkpoint("deepseek_mtp", "b")
    started = run_job("mtp_digests", checkpoint=str(b))
    pushed = run_job("mtp_digests", checkpoint=str(a), pushed=str(b))
    assert "embed_tokens.weight: its loader writes a VocabParallelEmbedding that belongs" in pushed["refused"]
    assert "shared_head.head.weight: its loader writes a ParallelLMHead" in pushed["refused"]
    assert pushed["tokens_after_refusal"] == cold_tokens(a, speculative_config=MTP)
    assert pushed["targets"] == {"model": 1, "draft": 1}
    assert pushed["tokens"] == started["tokens"] == cold_tokens(b, speculative_config=MTP)
    draft = {path: digest for path, digest in started["digests"].items() if path.startswith("draft.")}
    assert len(draft) > 10
    differing = [path for path, digest in started["digests"].items() if pushed["digests"].get(path) != digest]
    assert differing == []
