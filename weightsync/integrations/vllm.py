"""The vLLM plugin: what `pip install weightsync` adds to a vLLM that is started with

    vllm serve MODEL --weight-transfer-config '{"backend": "weightsync"}'

vLLM calls `register` in each of its processes (entry-point group `vllm.general_plugins`). It adds

    every process     the backend name "weightsync" in vLLM's engine factory        integrations/vllm_engine.py
    worker            a record of each model's layouts when it has been constructed, before its post-load hooks run
    worker            the method that control calls reach through `collective_rpc`   integrations/vllm_engine.py
    API server        our answers on vLLM's weight-update routes, `abort_weight_update`  integrations/vllm_routes.py

All of it is inert unless the configuration names the backend. Nothing here imports torch or vLLM before vLLM asks.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

BACKEND = "weightsync"
SUPPORTED = ("0.32", "0.33")
WORKER_METHOD = "weightsync_call"
ASLEEP = "_weightsync_asleep"
_log = logging.getLogger(__name__)


def check_version(version: str) -> None:
    """Refuses a vLLM that this plugin was not tried with.

    Args:
        version: vLLM's version, e.g. "0.32.0" or "0.33.0+cpu".

    Raises:
        RuntimeError: It is neither 0.32 nor 0.33.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise RuntimeError(
            f"the weight transfer backend {BACKEND!r} works with vLLM {' and '.join(SUPPORTED)}, this is vLLM "
            f"{version}; install one of them, or another version of weightsync"
        )


class RefusedEngine:
    """What another vLLM gets for the backend's name: the message that says which versions work."""

    def __init__(self, *_: Any, **__: Any) -> None:
        from vllm import __version__

        check_version(__version__)


def register() -> None:
    """Registers the backend with vLLM; calling it again changes nothing.

    A vLLM that is not supported is left as it is, since it calls this whatever backend it was started with: only who
    selects this one is refused.
    """
    from vllm import __version__

    try:
        check_version(__version__)
    except RuntimeError as error:
        _register_refusal(str(error))
        return
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "weightsync.integrations.vllm_engine", "WeightSyncEngine")
    _add_worker_method()
    _record_layouts_after_construction()
    _add_routes()


def _register_refusal(reason: str) -> None:
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(BACKEND, __name__, RefusedEngine.__name__)
    except (ImportError, AttributeError):  # it has no such registry, and so no way to select this backend
        _log.warning("not registered: %s", reason)


def is_selected(vllm_config: Any) -> bool:
    """Whether a vLLM configuration names this backend."""
    return getattr(getattr(vllm_config, "weight_transfer_config", None), "backend", None) == BACKEND


def _add_worker_method() -> None:
    """Gives vLLM's workers the method that the routes call through `collective_rpc`."""
    from vllm.v1.worker.worker_base import WorkerBase

    def weightsync_call(self: Any, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answers one control call on this worker; see `WeightSyncEngine.answer`."""
        from weightsync.integrations.vllm_engine import answer

        return answer(self, route, body)

    setattr(WorkerBase, WORKER_METHOD, weightsync_call)


def _record_layouts_after_construction() -> None:
    """Wraps vLLM's own record of a model's layouts: it is made after construction, before any post-load hook."""
    from vllm.model_executor.model_loader import utils as loading

    original = loading.record_metadata_for_reloading

    @functools.wraps(original)
    def record_metadata_for_reloading(model: Any) -> Any:
        from vllm.config import get_current_vllm_config

        result = original(model)
        if is_selected(get_current_vllm_config()):
            from vllm.v1.worker.gpu_worker import Worker

            from weightsync.reload.layouts import record_layouts

            _leave_out_what_is_no_part_of_a_model()
            _keep_scales_of_native_handles()
            _declare_optional_scales(model)
            watch_worker(Worker)
            record_layouts(model)
        return result

    loading.record_metadata_for_reloading = record_metadata_for_reloading


def _keep_scales_of_native_handles() -> None:
    """Lets oneDNN handles of quantised layers keep the scales that they were made with; they know their address alone.

    In a reload those are a staged copy, which nobody else keeps: the layer's own scales stay where they are.
    """
    from vllm import _custom_ops

    create = getattr(_custom_ops, "create_onednn_scaled_mm", None)
    if create is None or hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_onednn_scaled_mm(weight: Any, weight_scales: Any, *args: Any, **kwargs: Any) -> Any:
        handler = create(weight, weight_scales, *args, **kwargs)
        handler.weightsync_scales = weight_scales.detach()
        return handler

    _custom_ops.create_onednn_scaled_mm = create_onednn_scaled_mm


def _declare_optional_scales(model: Any) -> None:
    """Marks attention scales, which quantised checkpoints may lack: vLLM then takes what construction put there."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            for parameter in module.parameters(recurse=False):
                parameter.weight_loader_optional = True


def watch_worker(worker_class: Any) -> None:
    """Makes workers of a class remember what vLLM's own calls do to the weights.

    While they sleep, their weights are not mapped; vLLM's own flag for it also means "paused". After a reload of vLLM's
    own they are no version that was ever pushed.

    Args:
        worker_class: vLLM's worker class, with `sleep(level)`, `wake_up(tags)` and `reload_weights(...)`. Watching it
            again changes nothing.
    """
    if hasattr(worker_class.sleep, "__wrapped__"):
        return
    sleep, wake_up, reload_weights = worker_class.sleep, worker_class.wake_up, worker_class.reload_weights

    @functools.wraps(sleep)
    def watched_sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, ASLEEP, True)
        return sleep(self, *args, **kwargs)

    @functools.wraps(wake_up)
    def watched_wake_up(self: Any, tags: list[str] | None = None) -> Any:
        result = wake_up(self, tags)
        if tags is None or "weights" in tags:
            setattr(self, ASLEEP, False)
        return result

    @functools.wraps(reload_weights)
    def watched_reload(self: Any, *args: Any, **kwargs: Any) -> Any:
        from weightsync.integrations.vllm_engine import forget_version

        forget_version(self)
        return reload_weights(self, *args, **kwargs)

    worker_class.sleep, worker_class.wake_up = watched_sleep, watched_wake_up
    worker_class.reload_weights = watched_reload


def _leave_out_what_is_no_part_of_a_model() -> None:
    """Keeps reloads out of vLLM's configuration and of oneDNN handles, both of which its layers hold.

    The configuration lists the attention layers of every model in the process, a draft model's too.

    A handle, which linear layers hold on a CPU, has a tensor with one pointer, and frees what that points to when it
    dies. A reload that kept the old tensor and copied the new pointer into it would have the new matrix freed with the
    old object. So the whole handle is replaced, as vLLM itself does it. No captured graph can hold one: there are none
    on a CPU.
    """
    from vllm import _custom_ops
    from vllm.config import CompilationConfig, VllmConfig

    from weightsync.reachable import leave_out

    for kind in (VllmConfig, CompilationConfig, getattr(_custom_ops, "CPUDNNLGEMMHandler", None)):
        if kind is not None:
            leave_out(kind)


def _add_routes() -> None:
    """Puts our answers before vLLM's on the routes that vLLM registers for reinforcement learning."""
    from vllm.entrypoints.rl import factories

    original = factories.register_rl_api_routers

    @functools.wraps(original)
    def register_rl_api_routers(app: Any) -> None:
        if getattr(getattr(app.state.args, "weight_transfer_config", None), "backend", None) == BACKEND:
            from weightsync.integrations.vllm_routes import attach

            attach(app)
        original(app)

    factories.register_rl_api_routers = register_rl_api_routers
