"""Greedy tokens of cold starts, made in a process of their own: what an engine says that was started with a checkpoint.

python cold_vllm.py CHECKPOINT OUT.json      # {"tokens": [[...], ...]}, one list per prompt of PROMPTS
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# The last one fills more than one block of the KV cache, so that its prefix can be cached.
PROMPTS = ([1, 2, 3, 4], [7, 5, 3], [(7 * i) % 120 + 3 for i in range(200)])
NUM_TOKENS = 12
COLD_SECONDS = 240


def cold_tokens(checkpoint: Path) -> list[list[int]]:
    """The tokens of a cold start, remembered beside the checkpoint."""
    out = checkpoint / "cold-tokens.json"
    if not out.exists():
        run = subprocess.run(
            [sys.executable, __file__, str(checkpoint), str(out)],
            capture_output=True,
            text=True,
            timeout=COLD_SECONDS,
            check=False,
        )
        if run.returncode != 0:
            raise RuntimeError(f"the cold start of {checkpoint.name} failed:\n{run.stderr[-4000:]}")
    tokens: list[list[int]] = json.loads(out.read_text())["tokens"]
    return tokens


def main() -> None:
    """Starts an engine in this process and generates once per prompt."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    from vllm import LLM, SamplingParams

    engine = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=256)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    tokens = []
    for prompt in PROMPTS:  # one at a time, as the server gets them
        (result,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens.append(list(result.outputs[0].token_ids))
    Path(sys.argv[2]).write_text(json.dumps({"tokens": tokens}))


if __name__ == "__main__":
    main()
