"""A push into a vLLM engine of the trainer's own process equals a cold start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from checkpoints_vllm import make_checkpoint, read_checkpoint
from cold_vllm import NUM_TOKENS, PROMPTS, cold_tokens

pytestmark = pytest.mark.vllm


def main(a: Path, b: Path) -> None:
    """Runs in a process of its own: an engine that was started with checkpoint a gets b, a bad push, and a again."""
    from vllm import LLM, SamplingParams

    from weightsync.errors import CoverageError
    from weightsync.integrations.vllm_offline import LlmEndpoint
    from weightsync.trainer.client import TrainerClient
    from weightsync.trainer.sources import TensorSource

    config = {"backend": "weightsync"}
    llm = LLM(str(a), skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, weight_transfer_config=config)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, detokenize=False, ignore_eos=True)

    def expect(checkpoint: Path) -> None:
        got = []
        for prompt in PROMPTS:
            (result,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            got.append(list(result.outputs[0].token_ids))
        if got != cold_tokens(checkpoint):
            raise SystemExit(f"{checkpoint.name}: {got} is not what a cold start says")

    expect(a)
    for checkpoint in (b, a):
        with TrainerClient(TensorSource(dict(read_checkpoint(checkpoint))), LlmEndpoint(llm)) as client:
            client.push()
        expect(checkpoint)
    short = dict(read_checkpoint(b)[1:])
    try:
        with TrainerClient(TensorSource(short), LlmEndpoint(llm)) as client:
            client.push()
    except CoverageError as error:
        print("refused:", error)
    else:
        raise SystemExit("a push that lacks a tensor was accepted")
    expect(a)


def test_an_engine_in_the_trainers_process_takes_pushes_and_refuses_a_short_one(checkpoints, monkeypatch):
    a, b = (make_checkpoint("llama", which, checkpoints) for which in "ab")
    for checkpoint in (a, b):
        cold_tokens(checkpoint)  # made before, since the other process may not start a third engine beside its own
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    run = subprocess.run(
        [sys.executable, __file__, str(a), str(b)], capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "refused:" in run.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
