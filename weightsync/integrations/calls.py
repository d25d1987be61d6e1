"""One control call of a trainer's as the calls that every rank of an engine gets, one after the other.

A rank alone may do a whole push in one call. Several must not: all of them prepare before any of them publishes.

    finish_calls({"session_id": s})                    # [{... "phase": "prepare"}, {... "phase": "publish"}]
    start, update, finish = push_calls(body)           # `push_weights` as the three calls that it stands for
"""

from __future__ import annotations

from weightsync import control
from weightsync.control import Json
from weightsync.errors import ProtocolError


def finish_calls(body: Json) -> list[Json]:
    """The phases of a finish.

    Args:
        body: A `control.Finish`, with whatever else belongs to the call. Publishing is a call of its own, made now, so
            it does not carry the time at which the trainer made its call.
    """
    phase = body.get("phase", "commit")
    calls = [{**body, "phase": step} for step in ("prepare", "publish") if phase in (step, "commit")]
    for call in calls:
        if call["phase"] == "publish":
            call.pop(control.SENT, None)
    if not calls:
        raise ProtocolError(f"unknown phase {phase!r:.80}; known: commit, prepare, publish")
    return calls


def push_calls(body: Json) -> tuple[Json, Json, Json]:
    """The start, update and finish that a `push_weights` call stands for.

    Args:
        body: `start_info`, `update_info`, `weight_version`, and what the single calls may carry beside them.

    Raises:
        ProtocolError: There is no `start_info`.
    """
    start_info = body.get("start_info")
    if not isinstance(start_info, dict):
        raise ProtocolError(f"{control.PUSH} needs start_info, a JSON object, got {type(start_info).__name__}")
    sent = {control.SENT: body[control.SENT]} if control.SENT in body else {}
    start: Json = {name: body[name] for name in ("start_info", "pause") if name in body}
    update: Json = {"update_info": body.get("update_info"), **sent}
    finish: Json = {"session_id": start_info.get("session_id"), **sent}
    return start, update, finish | {name: body[name] for name in ("weight_version", "reset_caches") if name in body}
