"""What the API server makes of a control call, with an engine client that only notes what it is asked: no server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM's own virtual environment; run scripts/test_vllm")

from weightsync import control
from weightsync.control import error_to_json
from weightsync.errors import LayoutError, ProtocolError, ReloadError, TornModelError
from weightsync.integrations.calls import finish_calls, push_calls
from weightsync.integrations.vllm_routes import EngineControl

pytestmark = pytest.mark.vllm
START = {"session_id": "s", "version": 3, "generation": "g", "offer": None, "per_rank": {}}
UPDATE = {"session_id": "s", "target": "model", "names": None, "data": {}, "per_rank": {}}
PUSH = {"start_info": START, "update_info": UPDATE, "weight_version": 3, control.SENT: 1.5}


class Client:
    """Two ranks; `fails` maps (route, phase) to the error of the second."""

    def __init__(self, fails: dict[tuple[str, str], Exception] | None = None, state: str = "live") -> None:
        self.log: list[Any] = []
        self.fails, self.state, self.paused = fails or {}, state, False

    async def collective_rpc(self, method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        route, body = args
        phase = str(body.get("phase", ""))
        self.log.append((route, phase) if phase else route)
        info = {"state": self.state, "session": None, "weight_version": 2, "version": 3, "bytes": 7}
        error = self.fails.get((route, phase))
        return [{"rank": dict(info)}, {"error": error_to_json(error)} if error else {"rank": dict(info)}]

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.log.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.paused = False
        self.log.append("resume")

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.log.append("reset prefix")
        return True

    async def reset_mm_cache(self) -> None:
        self.log.append("reset mm")

    async def reset_encoder_cache(self) -> None:
        self.log.append("reset encoder")

    async def update_weight_version(self, version: str) -> None:
        self.log.append(f"label {version}")


def calls(client: Client, *bodies: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers of one engine control to control calls, or the errors."""

    async def run() -> list[Any]:
        engine, found = EngineControl(client), []
        for route, body in bodies:
            try:
                found.append(await engine.call(route, body))
            except Exception as error:
                found.append(error)
        return found

    return asyncio.run(run())


WHOLE = [
    "pause keep", control.START, control.UPDATE, (control.FINISH, "prepare"), (control.FINISH, "publish"),
    "reset prefix", "reset mm", "reset encoder", "label 3", "resume",
]  # fmt: skip


def test_a_push_in_one_call_prepares_on_every_rank_before_any_publishes_and_drops_caches_before_generation_goes_on():
    client = Client()
    (answer,) = calls(client, (control.PUSH, PUSH))
    assert client.log == WHOLE
    assert [rank["version"] for rank in answer["ranks"]] == [3, 3]
    assert answer["caches_reset"] == {"prefix": True, "multimodal": True, "encoder": True}


def test_three_calls_do_the_same():
    client = Client()
    finish = {"session_id": "s", "weight_version": 3, control.SENT: 2.0}
    calls(
        client,
        (control.START, {"start_info": START}),
        (control.UPDATE, {"update_info": UPDATE, control.SENT: 1.0}),
        (control.FINISH, finish),
    )
    assert client.log == WHOLE


@pytest.mark.parametrize("where", [(control.START, ""), (control.UPDATE, ""), (control.FINISH, "prepare")])
def test_a_failure_on_one_rank_aborts_all_publishes_nothing_and_lets_generation_go_on(where):
    client = Client({where: LayoutError("of no use", names=["w"])})
    (error,) = calls(client, (control.PUSH, PUSH))
    assert isinstance(error, LayoutError)
    assert client.log[-3:] == [control.ABORT, control.INFO, "resume"]
    assert (control.FINISH, "publish") not in client.log
    assert not any(str(entry).startswith(("label", "reset")) for entry in client.log)


def test_a_failure_that_tears_the_model_ends_requests_and_refuses_to_go_on():
    client = Client({(control.FINISH, "prepare"): ReloadError("broken")}, state="torn")
    error, refused = calls(client, (control.PUSH, PUSH), (control.RESUME, {}))
    assert isinstance(error, ReloadError)
    assert isinstance(refused, TornModelError)
    assert client.log[-1] == "pause abort"
    assert client.paused


def test_a_pause_of_the_callers_own_is_left_alone():
    client = Client()
    calls(client, (control.PAUSE, {"mode": "wait"}), (control.PUSH, PUSH))
    assert client.log.count("pause wait") == 1
    assert "resume" not in client.log
    assert client.paused


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_the_call_that_starts_a_push_chooses_what_becomes_of_requests_in_flight_before_any_rank_starts(pause):
    client = Client()
    (answer,) = calls(client, (control.START, {"start_info": START, "pause": pause}))
    assert client.log[:2] == [f"pause {pause}", control.START]
    assert answer["paused"] == pause


def test_publishing_does_not_carry_the_time_of_the_trainers_call():
    prepare, publish = finish_calls({"session_id": "s", control.SENT: 1.0, "weight_version": 3})
    assert prepare == {"session_id": "s", control.SENT: 1.0, "weight_version": 3, "phase": "prepare"}
    assert publish == {"session_id": "s", "weight_version": 3, "phase": "publish"}
    assert finish_calls({"session_id": "s", "phase": "prepare"}) == [{"session_id": "s", "phase": "prepare"}]
    with pytest.raises(ProtocolError, match="unknown phase 'half'"):
        finish_calls({"session_id": "s", "phase": "half"})


def test_a_push_without_its_start_is_refused_by_name():
    with pytest.raises(ProtocolError, match="push_weights needs start_info, a JSON object, got NoneType"):
        push_calls({"update_info": UPDATE})
    start, update, finish = push_calls({**PUSH, "pause": "wait", "reset_caches": False})
    assert start == {"start_info": START, "pause": "wait"}
    assert update == {"update_info": UPDATE, control.SENT: 1.5}
    assert finish == {"session_id": "s", control.SENT: 1.5, "weight_version": 3, "reset_caches": False}
