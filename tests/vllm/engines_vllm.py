"""Engines that live in forks of one process, which has imported vLLM: a job costs what the engine costs, no import.

cold_tokens(checkpoint)                         # what a cold start of a checkpoint says, remembered beside it
run_job("push_inside", a=str(a), b=str(b))      # a function of jobs_vllm.py, in a process of its own

python engines_vllm.py                          # jobs on stdin, one JSON object per line, "done" lines on stdout
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from checkpoints_vllm import locked

JOB_SECONDS = 480
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine takes the same core
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# What an engine imports only when it starts.
_MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "weightsync.integrations.vllm_engine",
    "weightsync.integrations.vllm_offline",
    "weightsync.trainer.client",
)


def cold_tokens(checkpoint: Path, **options: Any) -> list[list[int]]:
    """The greedy tokens of an engine that was started with a checkpoint, one list per prompt."""
    out = checkpoint / f"cold-tokens{'-'.join(['', *options])}.json"
    with locked(out):
        if not out.exists():
            out.write_text(json.dumps(run_job("cold", checkpoint=str(checkpoint), **options)))
    tokens: list[list[int]] = json.loads(out.read_text())
    return tokens


class _Engines:
    """The process that forks."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-jobs-"))
        self._count = 0
        with (self._folder / "process.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
                text=True,
            )
        atexit.register(self.close)

    def run(self, name: str, arguments: dict[str, Any]) -> Any:
        """Runs a job; raises RuntimeError with its log if it fails or lasts too long."""
        self._count += 1
        out, log = (self._folder / f"{self._count}.{kind}" for kind in ("json", "log"))
        job = {"job": name, "arguments": arguments, "out": str(out), "log": str(log)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(JOB_SECONDS) else "too late"
        if line.strip() != "done" or not out.exists():
            if line.strip() != "done":
                self.close()
            logs = [path.read_text(errors="replace")[-6000:] for path in (self._folder / "process.log", log)]
            raise RuntimeError(
                f"job {name} {arguments} failed ({line.strip() or 'the process ended'}):\n" + "".join(logs)
            )
        return json.loads(out.read_text())

    def close(self) -> None:
        """Ends the process and a job under way."""
        global _engines
        _engines = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait(30)


_engines: _Engines | None = None


def run_job(name: str, **arguments: Any) -> Any:
    """Runs a function of jobs_vllm.py in a process of its own.

    Args:
        name: The function.
        **arguments: Its arguments, JSON values.

    Returns:
        Its result, a JSON value.

    Raises:
        RuntimeError: It raised, died or took too long; with its output.
    """
    global _engines
    _engines = _engines or _Engines()
    return _engines.run(name, arguments)


def _child(job: dict[str, Any]) -> None:
    """Does one job and ends the process."""
    status = 1
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import jobs_vllm

        result = getattr(jobs_vllm, job["job"])(**job["arguments"])
        partial = Path(job["out"] + ".part")
        partial.write_text(json.dumps(result))
        partial.rename(job["out"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Imports vLLM, then forks once per job."""
    import importlib

    for module in _MODULES:
        importlib.import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(job)
        os.waitpid(pid, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
