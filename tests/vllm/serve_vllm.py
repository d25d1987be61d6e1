"""vLLM's server as `python -m vllm.entrypoints.openai.api_server` starts it, but its processes wait without spinning.

vLLM's engine and worker wait for each other in a loop around `sched_yield`. On few cores, some kernels then run nothing
else for as long as tokens are generated: neither the API server nor a trainer, for many seconds. Here they sleep a
little instead. The processes that vLLM spawns execute this file too, as every spawned process does with its main file.

python serve_vllm.py --model ...                # vLLM's arguments
"""

from __future__ import annotations

import os
import runpy
import time

WAIT_SECONDS = 1e-4

os.sched_yield = lambda: time.sleep(WAIT_SECONDS)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
