"""Processes of the demo: a parent that asks, a child that answers, one JSON object per line over stdin and stdout.

Weights never pass here; this is only how the demo tells its trainer to train and its engine to generate. Every answer
has a deadline, a child that dies is an error with the end of its log, and a child whose parent is gone ends by itself.

    child = Child("megamoe_adapter.demo.trainer", ["--checkpoint", "DIR"], log=Path("trainer.log"))
    losses = child.ask("train", num_steps=2, on_event=print)     # {"event": ...} lines arrive while the child works
    child.close()

    link = ParentLink()                                          # the child's side
    link.answer_requests({"train": lambda num_steps: ...})       # events go out by link.emit(loss=...)
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

_LOG_TAIL_CHARS = 3000


class ChildError(RuntimeError):
    """A child process refused a request, did not answer in time, or died.

    Attributes:
        kind: Class name of the error in the child; "timeout" or "died" if there is none.
    """

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Child:
    """A child process that answers requests.

    Args:
        module: What `python -m` runs.
        arguments: Its command line.
        log: File that takes its stderr.
        environment: Added to this process's environment.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = module.rpartition(".")[2]
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
                text=True,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"{self.name}-reader", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ask(
        self,
        request: str,
        *,
        deadline_seconds: float = 120,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **arguments: object,
    ) -> Any:
        """Sends a request and waits for its answer.

        Args:
            request: Name of the child's handler.
            deadline_seconds: Longest wait for the answer, events or not.
            on_event: Called here with each event that the child emits meanwhile.
            **arguments: The handler's keyword arguments; JSON values.

        Raises:
            ChildError: The handler raised, the deadline passed, or the child died. After a passed deadline the child
                can only be killed: its answer may still come, and would be taken for the next one.
        """
        self.send(request, **arguments)
        return self.answer(deadline_seconds=deadline_seconds, on_event=on_event)

    def send(self, request: str, **arguments: object) -> None:
        """Sends a request without waiting; `answer` waits for it. Lets several children work at once."""
        stdin = self._process.stdin
        if stdin is None:
            raise ChildError(f"{self.name} has no stdin", kind="died")
        try:
            stdin.write(json.dumps({"request": request, "arguments": arguments}) + "\n")
            stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._died() from error

    def answer(self, *, deadline_seconds: float = 120, on_event: Callable[[dict[str, Any]], None] | None = None) -> Any:
        """Waits for the answer to the oldest request that has none yet; arguments and errors as for `ask`."""
        deadline = time.monotonic() + deadline_seconds
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise ChildError(
                    f"{self.name} gave no answer within {deadline_seconds:.0f} s; its log ends:\n{self.log_tail()}",
                    kind="timeout",
                ) from None
            if line is None:
                raise self._died()
            message = json.loads(line)
            if "event" in message:
                if on_event is not None:
                    on_event(message["event"])
            elif "error" in message:
                raise ChildError(f"{self.name}: {message['error']}", kind=message["kind"])
            else:
                return message["result"]

    def kill(self) -> None:
        """Ends the process at once, as a crash would (SIGKILL), and waits until it is gone."""
        self._process.kill()
        self._process.wait(timeout=30)

    def close(self, *, deadline_seconds: float = 20) -> None:
        """Lets the child end by itself (its stdin ends), and kills it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self) -> str:
        """The end of what the child wrote to stderr."""
        return self._log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        if stdout is not None:
            for line in stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _died(self) -> ChildError:
        self._lines.put(None)  # whoever asks next learns it too
        code = self._process.wait(timeout=30)
        return ChildError(f"{self.name} ended with code {code}; its log ends:\n{self.log_tail()}", kind="died")


class ParentLink:
    """The child's end. From its construction on, whatever else the process prints goes to stderr.

    So no library can talk into the protocol.
    """

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def emit(self, **event: object) -> None:
        """Sends an event to whoever waits for the answer; any thread may call it."""
        self._write({"event": event})

    def answer_requests(self, handlers: Mapping[str, Callable[..., object]]) -> None:
        """Answers requests, one after another, until the parent closes stdin or is gone."""
        for line in sys.stdin:
            message = json.loads(line)
            try:
                result = handlers[message["request"]](**message["arguments"])
            except Exception as error:
                traceback.print_exc()
                self._write({"error": str(error), "kind": type(error).__name__})
            else:
                self._write({"result": result})

    def _write(self, message: dict[str, object]) -> None:
        with self._lock:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()
