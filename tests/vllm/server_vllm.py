"""A real vLLM server in its own process, driven over HTTP.

with VllmServer(checkpoint) as server:
    server.generate([1, 2, 3, 4])        # token ids
    server.url                           # for TrainerClient
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

START_SECONDS = 480  # it takes 25 to 35 alone on two cores
STOP_SECONDS = 30
ANSWER_SECONDS = 240
NUM_STARTS = 3  # vLLM picks ports for itself as well, and may lose one to another process before it takes it
CACHE_BYTES = 64 << 20
RUNNING: list[VllmServer] = []


def _reserved_port() -> socket.socket:
    """A socket on a port that the system picked; it does not listen. vLLM's may be bound beside it, and no other."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class VllmServer:
    """One server process, with the weight-update routes on.

    Args:
        checkpoint: Folder of the model that it starts with.
        log: File for its output.
        backend: The weight transfer backend.
        arguments: Further arguments of vLLM's command line.
        max_model_len: Longest request, in tokens.
        cache_bytes: Size of the KV cache, which vLLM fills with zeros at once.
    """

    def __init__(
        self,
        checkpoint: Path,
        log: Path,
        backend: str = "weightsync",
        arguments: tuple[str, ...] = (),
        max_model_len: int = 256,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._held = _reserved_port()
        self.port = int(self._held.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            sys.executable, str(Path(__file__).with_name("serve_vllm.py")),
            "--model", str(checkpoint), "--skip-tokenizer-init", "--enforce-eager",
            "--max-model-len", str(max_model_len), "--max-num-seqs", "8",
            "--kv-cache-memory-bytes", str(cache_bytes),
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "toy",
            "--weight-transfer-config", f'{{"backend": "{backend}"}}', *arguments,
        ]  # fmt: skip
        self._starts_left = NUM_STARTS
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> VllmServer:
        """Starts the process and does not wait for it."""
        environment = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server takes the same core
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._starts_left -= 1
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_end_with_the_parent,
            )
        if self not in RUNNING:
            RUNNING.append(self)
        return self

    def __enter__(self) -> VllmServer:
        """Starts the process, unless it was, and waits until it answers."""
        if self._process is None:
            self.begin()
        try:
            return self._wait_for_health()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _wait_for_health(self) -> VllmServer:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                if self._starts_left and "Address already in use" in self.tail(40_000):
                    self.begin()
                    continue
                raise RuntimeError(f"vLLM ended with status {self._process.returncode}:\n{self.tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=20).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"vLLM did not answer within {START_SECONDS} s:\n{self.tail()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the server's own process group."""
        process, self._process = self._process, None
        if process is None:
            return
        RUNNING.remove(self)
        self._held.close()
        for sent in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sent)
                if sent != signal.SIGCONT:
                    process.wait(STOP_SECONDS)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait(STOP_SECONDS)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, none of its processes runs: it takes connections and answers nothing."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def tail(self, num_characters: int = 6000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-num_characters:]

    def post(
        self, route: str, body: dict[str, Any] | None = None, timeout: float = ANSWER_SECONDS, **query: Any
    ) -> httpx.Response:
        """One POST; the caller checks the status."""
        return httpx.post(f"{self.url}/{route}", json=body or {}, params=query or None, timeout=timeout)

    def get(self, route: str) -> Any:
        """The JSON answer of a GET."""
        response = httpx.get(f"{self.url}/{route}", timeout=ANSWER_SECONDS)
        response.raise_for_status()
        return response.json()

    def counter(self, name: str) -> float:
        """The sum of a Prometheus counter of vLLM's own."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_SECONDS).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        if not lines:
            raise KeyError(f"no counter {name} in /metrics")
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def completion(self, prompt: list[int], max_tokens: int = 12) -> httpx.Response:
        """One greedy completion request."""
        return httpx.post(f"{self.url}/v1/completions", json=_request(prompt, max_tokens), timeout=ANSWER_SECONDS)

    @contextlib.contextmanager
    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Iterator[tuple[list[int], str | None]]]:
        """A request whose `(new tokens, reason of the end or None)` come one by one; it ends with the block."""
        body = _request(prompt, max_tokens) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=ANSWER_SECONDS) as response:
            response.raise_for_status()

            def pieces() -> Iterator[tuple[list[int], str | None]]:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        yield choice.get("token_ids") or [], choice.get("finish_reason")

            yield pieces()

    def generate(self, prompt: list[int], max_tokens: int = 12) -> list[int]:
        """The greedy continuation, as token ids."""
        response = self.completion(prompt, max_tokens)
        response.raise_for_status()
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens


def _request(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
        "detokenize": False, "ignore_eos": True,
    }  # fmt: skip


def _end_with_the_parent() -> None:
    """In the child, before vLLM starts: the kernel ends it should the tests be killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
