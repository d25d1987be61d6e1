"""A real vLLM server in its own process, driven over HTTP.

with VllmServer(checkpoint) as server:
    server.generate([1, 2, 3, 4])        # token ids
    server.url                           # for TrainerClient
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

START_SECONDS = 240
STOP_SECONDS = 20


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """One server process, with the weight-update routes on.

    Args:
        checkpoint: Folder of the model that it starts with.
        log: File for its output.
        backend: The weight transfer backend.
        arguments: Further arguments of vLLM's command line.
    """

    def __init__(
        self, checkpoint: Path, log: Path, backend: str = "weightsync", arguments: tuple[str, ...] = ()
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(checkpoint), "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "256",
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "toy",
            "--weight-transfer-config", f'{{"backend": "{backend}"}}', *arguments,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended with status {self._process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    return self
            except httpx.HTTPError:
                time.sleep(0.2)
        self.__exit__(None, None, None)
        raise RuntimeError(f"vLLM did not answer within {START_SECONDS} s:\n{self.tail()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the server's own process group."""
        process = self._process
        if process is None:
            return
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sent)
                process.wait(STOP_SECONDS)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait(STOP_SECONDS)
        self._process = None

    def tail(self, num_characters: int = 6000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-num_characters:]

    def post(self, route: str, body: dict[str, Any] | None = None, timeout: float = 60, **query: Any) -> httpx.Response:
        """One POST; the caller checks the status."""
        return httpx.post(f"{self.url}/{route}", json=body or {}, params=query or None, timeout=timeout)

    def get(self, route: str) -> Any:
        """The JSON answer of a GET."""
        response = httpx.get(f"{self.url}/{route}", timeout=30)
        response.raise_for_status()
        return response.json()

    def completion(self, prompt: list[int], max_tokens: int = 12, timeout: float = 120) -> httpx.Response:
        """One greedy completion request."""
        body = {
            "model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
            "detokenize": False, "ignore_eos": True,
        }  # fmt: skip
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout)

    def generate(self, prompt: list[int], max_tokens: int = 12) -> list[int]:
        """The greedy continuation, as token ids."""
        response = self.completion(prompt, max_tokens)
        response.raise_for_status()
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens
