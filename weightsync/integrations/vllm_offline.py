"""A vLLM engine in the trainer's own process, as an `Endpoint`: no server, no HTTP.

    llm = LLM(MODEL, weight_transfer_config={"backend": "weightsync"})
    with TrainerClient(trainer_model, LlmEndpoint(llm)) as client:
        client.push()
        llm.generate(prompts)

Calls are synchronous, as `LLM` is, so nothing is generated while one is under way.
"""

from __future__ import annotations

import contextlib
from typing import Any

from weightsync import control
from weightsync.control import Abort, Json, error_from_json
from weightsync.errors import ReloadError, WeightSyncError
from weightsync.integrations.calls import finish_calls, push_calls
from weightsync.integrations.vllm import WORKER_METHOD


class LlmEndpoint:
    """Carries control calls to the workers of a `vllm.LLM`.

    Args:
        llm: The engine, started with the backend `weightsync`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, route: str, body: Json, deadline_seconds: float) -> Json:
        """See `control.Endpoint.call`; a commit prepares on every rank before it publishes on any, then drops caches.

        Raises:
            WeightSyncError: A rank's own error; every rank has given that trainer's push up then.
        """
        if route == control.PUSH:
            start, update, finish = push_calls(body)
            self.call(control.START, start, deadline_seconds)
            moved = self.call(control.UPDATE, update, deadline_seconds)["ranks"]
            finished = self.call(control.FINISH, finish, deadline_seconds)["ranks"]
            return {"ranks": [{**m, **f} for m, f in zip(moved, finished, strict=True)]}
        if route != control.FINISH:
            return {"ranks": self._guarded(route, body, deadline_seconds)}
        for call in finish_calls(body):
            ranks = self._guarded(route, call, deadline_seconds)
        if body.get("phase") != "prepare":
            if not self._llm.reset_prefix_cache():
                raise ReloadError(
                    "the new weights are live, but vLLM could not reset its prefix cache: requests still use it"
                )
            self._llm.llm_engine.reset_mm_cache()
            self._llm.llm_engine.reset_encoder_cache()
            self._llm.update_weight_version(str(ranks[0]["version"]))
        return {"ranks": ranks}

    def _guarded(self, route: str, body: Json, deadline_seconds: float) -> list[Json]:
        try:
            return self._ranks(route, body, deadline_seconds)
        except WeightSyncError as error:
            inner = body.get(control.ENVELOPES.get(route, ""), body)
            session_id = inner.get("session_id") if isinstance(inner, dict) else None
            if route in (control.START, control.UPDATE, control.FINISH) and isinstance(session_id, str):
                abort = control.encode(Abort(session_id, f"{route} failed on a rank: {error}"))
                with contextlib.suppress(ReloadError):  # the session is another trainer's, and goes on
                    self._ranks(control.ABORT, abort, deadline_seconds)
            raise

    def _ranks(self, route: str, body: Json, deadline_seconds: float) -> list[Json]:
        results = self._llm.collective_rpc(WORKER_METHOD, timeout=deadline_seconds, args=(route, body))
        failures = [error_from_json(result["error"]) for result in results if "error" in result]
        if failures:
            raise control.primary_error(failures)
        return [result["rank"] for result in results]

    def close(self) -> None:
        """Nothing to free: the engine is the caller's."""
