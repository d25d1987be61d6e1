"""Our answers on vLLM's weight-update routes, in vLLM's API server.

vLLM's own routes of the same names answer `{"message": ...}`, take no body at start, and know no abort; a trainer then
learns neither what was planned nor why something was refused. These stand before them:

    /init_weight_transfer_engine /start_weight_update /update_weights /finish_weight_update /push_weights
    /abort_weight_update /shutdown_weight_transfer_engine /weight_info /weight_checker /pause /resume /is_paused

A call goes to every worker through `collective_rpc`, and what concerns the whole engine happens here:

    start     generation is paused, unless it was already; requests in flight are kept, drained or aborted (`pause`)
    finish    every rank prepares, then every rank publishes, or all abort; caches that hold results of the old weights
              are reset; vLLM's own weight version is set; generation goes on if start had paused it
    failure   every rank aborts; with old bytes back, generation goes on; if the model is torn it stays paused, and
              inference requests are answered 503 until a push repairs it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightsync import control
from weightsync.control import Abort, Finish, Json, Start, Update, error_from_json, error_to_json
from weightsync.errors import ProtocolError, ReloadError, TornModelError, WeightSyncError
from weightsync.integrations.calls import finish_calls, push_calls
from weightsync.integrations.vllm import BACKEND, WORKER_METHOD
from weightsync.worker.server import answer_of, parse_body, status_of

_PAUSE_MODES = ("keep", "wait", "abort")
_WATCH_SECONDS = 1.0
_INFERENCE_PREFIXES = ("/v1/", "/inference/", "/generate", "/pooling", "/classify", "/score", "/rerank", "/invocations")
_OPEN_ROUTES = ("/v1/models",)


class EngineControl:
    """Carries control calls to the workers of one vLLM engine, and keeps generation and weights apart.

    Args:
        client: vLLM's engine client.
        pause_mode: What happens to requests in flight when a push starts: `"keep"` freezes them and computes them
            anew under the new weights, `"wait"` lets them end, `"abort"` ends them.

    Attributes:
        torn: Why inference requests are refused now; None if they are not.
    """

    def __init__(self, client: Any, pause_mode: str = "keep") -> None:
        if pause_mode not in _PAUSE_MODES:
            raise ValueError(f"pause mode must be one of {', '.join(_PAUSE_MODES)}, got {pause_mode!r}")
        self._client, self._pause_mode = client, pause_mode
        self._paused_here = False
        self._watcher: asyncio.Task[None] | None = None
        self.torn: str | None = None

    async def call(self, route: str, body: Json) -> Json:
        """Answers one control call; see `control.Endpoint.call` for the form.

        Raises:
            WeightSyncError: A rank's own error; all ranks have aborted then.
        """
        handler = {
            control.START: self._start,
            control.UPDATE: self._update,
            control.FINISH: self._finish,
            control.PUSH: self._push,
            control.ABORT: self._abort,
            control.SHUTDOWN: self._abort,
            control.INFO: self._info,
            control.PAUSE: self._pause,
            control.RESUME: self._resume,
            control.IS_PAUSED: self._is_paused,
            control.CHECKER: self._check,
            _START_DRAFT: self._refuse_draft_start,
        }.get(route)
        return await handler(route, body) if handler is not None else {"ranks": await self._ranks(route, body)}

    async def _ranks(self, route: str, body: Json) -> list[Json]:
        results = await self._client.collective_rpc(WORKER_METHOD, args=(route, body))
        failures = [error_from_json(result["error"]) for result in results if "error" in result]
        if failures:
            raise control.primary_error(failures)
        return [result["rank"] for result in results]

    async def _guarded(self, route: str, body: Json, session_id: str) -> list[Json]:
        """A call of a push: if one rank fails, all of them give that trainer's push up."""
        try:
            return await self._ranks(route, body)
        except WeightSyncError as error:
            abort = Abort(session_id, f"{route} failed on a rank: {error}")
            with contextlib.suppress(ReloadError):  # the session is another trainer's, and goes on
                await self._ranks(control.ABORT, control.encode(abort))
            await self._settle()
            raise

    # ---- the push ------------------------------------------------------------------------------------------------

    async def _start(self, route: str, body: Json) -> Json:
        start = control.decode(Start, body.get("start_info"))
        pause_mode = body.get("pause", self._pause_mode)
        if pause_mode not in _PAUSE_MODES:
            raise ProtocolError(f"pause must be one of {', '.join(_PAUSE_MODES)}, got {pause_mode!r:.80}")
        paused_now = not await self._client.is_paused()
        if paused_now:
            await self._client.pause_generation(mode=pause_mode, clear_cache=False)
            self._paused_here = True
        ranks = await self._guarded(route, {"start_info": body["start_info"]}, start.session_id)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return {"ranks": ranks, "paused": pause_mode if paused_now else "before"}

    async def _update(self, route: str, body: Json) -> Json:
        update = control.decode(Update, body.get("update_info"))
        return {"ranks": await self._guarded(route, body, update.session_id)}

    async def _finish(self, route: str, body: Json) -> Json:
        body = dict(body)
        reset_caches = body.pop("reset_caches", True)
        told = {name: value for name, value in body.items() if name not in ("weight_version", control.SENT)}
        finish = control.decode(Finish, told)
        for call in finish_calls(body):
            ranks = await self._guarded(route, call, finish.session_id)
        if finish.phase == "prepare":
            return {"ranks": ranks}
        caches = await self._reset_caches() if reset_caches else {}
        await self._client.update_weight_version(str(ranks[0]["version"]))
        self.torn = None
        await self._go_on()
        return {"ranks": ranks, "caches_reset": caches}

    async def _push(self, route: str, body: Json) -> Json:
        """Start, one update and finish, in one call of the trainer's."""
        start, update, finish = push_calls(body)
        started = await self._start(control.START, start)
        moved = await self._update(control.UPDATE, update)
        finished = await self._finish(control.FINISH, finish)
        ranks = [{**m, **f} for m, f in zip(moved["ranks"], finished["ranks"], strict=True)]
        return {**started, **finished, "ranks": ranks}

    async def _refuse_draft_start(self, route: str, body: Json) -> Json:
        raise ProtocolError(
            "a push names its targets in the handshake: the draft model is target 'draft', as in "
            "TrainerClient({'model': trainer_model, 'draft': draft_model}, url)"
        )

    async def _reset_caches(self) -> Json:
        """Drops whatever was computed from the old weights, and says what.

        Requests that were frozen in flight are preempted: their prefix is computed anew under the new weights.
        """
        prefix = await self._client.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        await self._client.reset_mm_cache()
        await self._client.reset_encoder_cache()
        if not prefix:
            raise ReloadError(
                "the new weights are live, but vLLM could not reset its prefix cache; call /reset_prefix_cache before "
                "generation is resumed"
            )
        return {"prefix": True, "multimodal": True, "encoder": True}

    async def _abort(self, route: str, body: Json) -> Json:
        ranks = await self._ranks(route, body)
        await self._settle()
        return {"ranks": ranks}

    async def _settle(self) -> None:
        """After a push has ended without a version: generation goes on, unless the model is torn."""
        ranks = await self._ranks(control.INFO, {})
        if any(rank["state"] == "loading" for rank in ranks):
            return
        if any(rank["state"] == "torn" for rank in ranks):
            await self._refuse_requests()
        else:
            await self._go_on()

    async def _refuse_requests(self) -> None:
        """Ends the requests that wait for a torn model, and answers new ones 503."""
        if self.torn is not None:
            return
        self.torn = (
            "the model's weights are not whole, after a push that failed or a reset; push all of them to repair it"
        )
        self._paused_here = self._paused_here or not await self._client.is_paused()
        await self._client.pause_generation(mode="abort", clear_cache=True)

    async def _go_on(self) -> None:
        if self._paused_here:
            self._paused_here = False
            await self._client.resume_generation()

    async def _watch(self) -> None:
        """Ends the pause of a push whose trainer is gone: the worker aborts it when the trainer's deadline passes."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            ranks = await self._ranks(control.INFO, {})
            if all(rank["state"] != "loading" for rank in ranks):
                if any(rank["session"] is None for rank in ranks):
                    await self._settle()
                return

    # ---- state ---------------------------------------------------------------------------------------------------

    async def _info(self, route: str, body: Json) -> Json:
        answer = answer_of(route, await self._ranks(route, {}))
        if answer["state"] == "torn":
            await self._refuse_requests()
        return {**answer, "is_paused": await self._client.is_paused()}

    async def _check(self, route: str, body: Json) -> Json:
        ranks = await self._ranks(route, body)
        if body.get("action") == "reset":
            await self._settle()
        return {"ranks": ranks}

    async def _pause(self, route: str, body: Json) -> Json:
        mode = body.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise ProtocolError(f"pause knows modes {', '.join(_PAUSE_MODES)}, got {mode!r}")
        clear_cache = str(body.get("clear_cache", "true")).lower() in ("true", "1")
        await self._client.pause_generation(mode=mode, clear_cache=clear_cache)
        self._paused_here = False
        return {"ranks": [{"status": "paused"}], "status": "paused"}

    async def _resume(self, route: str, body: Json) -> Json:
        if self.torn is not None:
            raise TornModelError(self.torn)
        ranks = await self._ranks(control.INFO, {})
        if any(rank["state"] == "loading" for rank in ranks):
            raise ReloadError("a weight update is under way; finish or abort it before generation is resumed")
        self._paused_here = False
        await self._client.resume_generation()
        return {"ranks": [{"status": "resumed"}], "status": "resumed"}

    async def _is_paused(self, route: str, body: Json) -> Json:
        is_paused = await self._client.is_paused()
        return {"ranks": [{"is_paused": is_paused}], "is_paused": is_paused}


class TornGate:
    """ASGI middleware that answers inference requests 503 while the model is torn."""

    def __init__(self, app: ASGIApp, state: Any) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything else on."""
        engine = getattr(self._state, _STATE_NAME, None)
        path = scope.get("path", "")
        is_inference = path.startswith(_INFERENCE_PREFIXES) and path not in _OPEN_ROUTES
        if scope["type"] == "http" and is_inference and engine is not None and engine.torn is not None:
            error = error_to_json(TornModelError(engine.torn))
            await JSONResponse({"error": error}, 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)


_STATE_NAME = "weightsync"


def attach(app: Any) -> None:
    """Adds the routes and the gate to vLLM's application, before vLLM's own routes of the same names.

    Args:
        app: vLLM's FastAPI application.
    """
    from starlette.routing import Route

    def endpoint(name: str) -> Route:
        async def handle(request: Request) -> Response:
            try:
                body = {**request.query_params, **parse_body(await request.body())}
                value = await engine_control(request).call(name, body)
                status, content = 200, {**answer_of(name, value["ranks"]), **value} if name in _ANSWERED else value
            except Exception as error:
                status, content = status_of(error), {"error": error_to_json(error)}
            return Response(json.dumps(content, separators=(",", ":")), status, media_type="application/json")

        return Route(f"/{name}", handle, methods=["GET"] if name in control.READ_ONLY_ROUTES else ["POST"])

    ours = [*control.ROUTES, _START_DRAFT]
    app.router.routes[:0] = [endpoint(name) for name in ours if name != control.HEALTH]
    app.add_middleware(TornGate, state=app.state)


_ANSWERED = (control.CHECKER,)
_START_DRAFT = "start_draft_weight_update"  # vLLM's route for a push of the draft model alone


def engine_control(request: Request) -> EngineControl:
    """The one `EngineControl` of an application, made on first use."""
    state = request.app.state
    if not hasattr(state, _STATE_NAME):
        settings = (getattr(state.engine_client.vllm_config, "additional_config", None) or {}).get(BACKEND, {})
        setattr(state, _STATE_NAME, EngineControl(state.engine_client, settings.get("pause", "keep")))
    found: EngineControl = getattr(state, _STATE_NAME)
    return found
