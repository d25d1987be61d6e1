"""vLLM's `WeightTransferEngine`, on our receiver: one object per vLLM worker.

    trainer                vLLM's API server              vLLM's worker
    TrainerClient  -----> integrations/vllm_routes ----> weightsync_call -> answer -> WeightSyncEngine -> Receiver

vLLM's own entry points (`LLM.init_weight_transfer_engine`, `LLM.update_weights`, ...) reach the same receiver, with the
same messages as plain JSON. They return nothing, so a trainer that needs the answers goes through `collective_rpc`:

    llm.collective_rpc("weightsync_call", args=("weight_info", {}))       # [{"rank": {...}}], or [{"error": {...}}]

Settings come from `--additional-config '{"weightsync": {"rollback": "host"}}'`; see `Settings`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync import control
from weightsync.control import Json, error_to_json
from weightsync.errors import ProtocolError, ReloadError
from weightsync.integrations.vllm import ASLEEP, BACKEND, check_version
from weightsync.reachable import leave_modules_out
from weightsync.reload.gate import close_gate
from weightsync.reload.state import state_of
from weightsync.worker.receiver import Receiver

MODEL, DRAFT = "model", "draft"
# What the engine fills while it generates; no part of the weights.
_RUNTIME_STATE = (".kv_cache",)


@dataclass(frozen=True)
class Settings:
    """What `--additional-config '{"weightsync": {...}}'` may say.

    Attributes:
        rollback: `"none"`, `"host"` or `"device"`: where a push keeps old bytes, so that a failure restores them.
        ignore: fnmatch patterns of wire names that this engine leaves aside on purpose.
        pause: What a push does to requests in flight: `"keep"`, `"wait"` or `"abort"`; read by the API server.
        gate_seconds: How long a control call waits for another one.
    """

    rollback: str = "none"
    ignore: tuple[str, ...] = ()
    pause: str = "keep"
    gate_seconds: float = 30.0

    @classmethod
    def read(cls, vllm_config: Any) -> Settings:
        """The settings of a vLLM configuration.

        Raises:
            ValueError: A setting is unknown.
        """
        given: dict[str, Any] = (getattr(vllm_config, "additional_config", None) or {}).get(BACKEND, {})
        known = [spec.name for spec in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"additional-config {BACKEND!r} has unknown settings {unknown}; known: {', '.join(known)}")
        values: dict[str, Any] = {name: tuple(v) if name == "ignore" else v for name, v in given.items()}
        return cls(**values)


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The fields of `control.Hello`; vLLM builds it from the request's JSON."""

    protocol: int
    session_id: str
    trainer: str
    targets: dict[str, Any]
    mode: str
    scope: str
    bucket_bytes: int
    deadline_seconds: float
    formats: dict[str, Any]
    facts: dict[str, Any]
    casts: str = "refuse"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """One step of a push through vLLM's own `update_weights`, which is the one entry point with a body.

    Attributes:
        start: A `control.Start`; first, after vLLM's `start_weight_update`.
        update: A `control.Update`.
    """

    start: dict[str, Any] | None = None
    update: dict[str, Any] | None = None


class WeightSyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # as above
    """The backend `weightsync`.

    Args:
        config: vLLM's weight transfer configuration.
        vllm_config: vLLM's whole configuration.
        device: Where the worker's model lies.
        model: The worker's model.

    Raises:
        RuntimeError: This vLLM, or the way it is parallelised, is not supported; the message says what is.
        ValueError: A setting is unknown.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        check_version(vllm_version)
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        if parallel.data_parallel_size != 1:
            raise RuntimeError(
                f"the weight transfer backend {BACKEND!r} takes one engine per server: data_parallel_size is "
                f"{parallel.data_parallel_size}; start one server per replica and give the trainer all their URLs"
            )
        self._settings = Settings.read(vllm_config)
        self._session_id = ""
        self._worker: Any = None
        self.receiver = Receiver(
            {MODEL: model},
            engine=f"vllm-{vllm_config.instance_id}",
            rank=int(parallel.rank),
            world=int(parallel.world_size),
            rollback=self._settings.rollback,
            ignore=self._settings.ignore,
            ready=self._why_not_ready,
            on_publish=(self._before_publish,),
            gate_seconds=self._settings.gate_seconds,
        )

    # ---- control calls -------------------------------------------------------------------------------------------

    def call(self, route: str, body: Json, worker: Any = None) -> Json:
        """Answers one control call on this rank.

        Args:
            route: One of `control.ROUTES`.
            body: Its JSON body.
            worker: vLLM's worker, for what lies outside the model: the draft model, the LoRA state.

        Raises:
            WeightSyncError: See `Receiver.call`.
        """
        if worker is not None:
            self._worker = worker
            draft = getattr(worker.model_runner, "get_draft_model", lambda: None)()
            if draft is not None:
                self._add_draft(draft)
        if route == control.CHECKER and body.get("action") == "reset":
            return self._zero_weights()
        with self._as_while_loading():
            (rank,) = self.receiver.call(route, body, self._settings.gate_seconds)["ranks"]
        if "checksums" in rank:
            rank["checksums"] = {k: v for k, v in rank["checksums"].items() if not k.endswith(_RUNTIME_STATE)}
        if "mismatches" in rank:
            rank["mismatches"] = [key for key in rank["mismatches"] if not key.endswith(_RUNTIME_STATE)]
            rank["match"] = not rank["mismatches"]
        result: Json = rank
        return result

    def _add_draft(self, draft: torch.nn.Module) -> None:
        """Makes a draft model a target of its own, without the modules that it shares with the target model."""
        if DRAFT not in self.receiver.targets:
            shared = set(self.receiver.targets[MODEL].modules()).intersection(draft.modules())
            leave_modules_out(draft, shared)
            self.receiver.targets[DRAFT] = draft

    @contextlib.contextmanager
    def _as_while_loading(self) -> Iterator[None]:
        """What vLLM's own loader sets around loaders and post-load hooks; that all came is proved before, by name."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(disable_mtp_completeness_check())
            stack.enter_context(set_current_vllm_config(self.vllm_config))
            stack.enter_context(set_default_torch_dtype(self.vllm_config.model_config.dtype))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            yield

    def _zero_weights(self) -> Json:
        """vLLM's `reset` of /weight_checker: zeros in all parameters, and no version until a full push."""
        model = self.receiver.targets[MODEL]
        state = state_of(model)
        with state.lock:
            if state.session is not None:
                raise ReloadError("a weight update is under way; finish or abort it before the weights are reset")
            state.status, state.torn_by = "torn", "the weights were reset through /weight_checker"
            close_gate(model)
        self._worker.reset_weights()
        return {"status": "reset"}

    def _why_not_ready(self) -> str | None:
        if getattr(self._worker, ASLEEP, False):
            return "the engine sleeps and its weights are not mapped; wake it up first"
        return None

    def _before_publish(self, version: int) -> None:
        """What vLLM's worker drops after a reload of its own."""
        reset = getattr(getattr(self._worker, "model_runner", None), "reset_lora_state", None)
        if reset is not None:
            reset()

    # ---- vLLM's own entry points ---------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """The handshake; the answer is to be had from `weight_info`."""
        self._session_id = init_info.session_id
        self.call(control.INIT, {"init_info": dataclasses.asdict(init_info)})

    def start_weight_update(self) -> None:
        """Nothing yet: the first `update_weights` brings the start message, since vLLM gives this call no body."""
        if not self._session_id:
            raise ReloadError("no trainer has joined; call init_weight_transfer_engine first")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One step of the push. The device is synchronised by the receiver, where there is one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Opens the push, or moves bytes, or both in that order."""
        if update_info.start is None and update_info.update is None:
            raise ProtocolError("update_info must hold `start`, `update`, or both")
        if update_info.start is not None:
            self.call(control.START, {"start_info": update_info.start})
        if update_info.update is not None:
            self.call(control.UPDATE, {"update_info": update_info.update})

    def finish_weight_update(self) -> None:
        """Hooks, audit, and the version that `start` named goes live."""
        self.call(control.FINISH, {"session_id": self._session_id})

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        """Adds the draft model as a target; a push names its targets itself."""
        super().set_weight_update_target(model, model_config)
        self._add_draft(model)

    def shutdown(self) -> None:
        """Ends any session and frees the transport; the model stays as it is."""
        self.receiver.close()


def answer(worker: Any, route: str, body: Json) -> Json:
    """The method that vLLM's workers get: answers one control call, and never raises.

    Args:
        worker: vLLM's worker.
        route: One of `control.ROUTES`.
        body: Its JSON body.

    Returns:
        `{"rank": answer}`, or `{"error": error}` as `control.error_to_json` writes it: an exception here would cross
        vLLM's process boundary as text alone.
    """
    try:
        engine = getattr(worker, "weight_transfer_engine", None)
        if not isinstance(engine, WeightSyncEngine):
            raise ReloadError(
                f'this server was started without --weight-transfer-config \'{{"backend": "{BACKEND}"}}\''
            )
        return {"rank": engine.call(route, body, worker)}
    except Exception as error:
        return {"error": error_to_json(error)}


def forget_version(worker: Any) -> None:
    """What vLLM's own reload from disk means for us: the weights are no version that was ever pushed.

    Raises:
        ReloadError: A push is under way.
    """
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, WeightSyncEngine):
        return
    if engine.receiver.state == "loading":
        raise ReloadError("a weight update is under way; finish or abort it before vLLM reloads weights itself")
    state_of(engine.receiver.targets[MODEL]).version = None


def ranks_of(results: list[Json]) -> list[Json]:
    """Every rank's answer of one `collective_rpc`.

    Raises:
        WeightSyncError: Of the rank whose error says most.
    """
    failures = [control.error_from_json(result["error"]) for result in results if "error" in result]
    if failures:
        raise control.primary_error(failures)
    return [result["rank"] for result in results]
