"""What runs inside a vLLM engine's own process; see engines_vllm.py. Every function gives JSON values."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoints_vllm import read_checkpoint

# The last one fills more than one block of the KV cache, so that its prefix can be cached.
PROMPTS = ([1, 2, 3, 4], [7, 5, 3], [(7 * i) % 120 + 3 for i in range(200)])
NUM_TOKENS = 12


def engine(checkpoint: str, **options: Any) -> Any:
    """A vLLM engine in this process."""
    from vllm import LLM

    return LLM(
        checkpoint,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )


def tokens_of(llm: Any) -> list[list[int]]:
    """Its greedy tokens, one prompt at a time, as a server gets them."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    found = []
    for prompt in PROMPTS:
        (result,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found.append(list(result.outputs[0].token_ids))
    return found


def cold(checkpoint: str, **options: Any) -> list[list[int]]:
    """The tokens of a cold start."""
    return tokens_of(engine(checkpoint, **options))


# ---- pushes into an engine of this process ---------------------------------------------------------------------------

MTP = {"method": "mtp", "num_speculative_tokens": 1}
BACKEND = {"weight_transfer_config": {"backend": "weightsync"}}


def _push(llm: Any, source: Any, trace: HookTrace | None = None, **options: Any) -> Any:
    from weightsync.integrations.vllm_offline import LlmEndpoint
    from weightsync.trainer.client import TrainerClient

    class Traced(LlmEndpoint):
        """Calls come from several threads of the client's, one at a time."""

        def call(self, *arguments: Any) -> Any:
            with trace or contextlib.nullcontext():
                return super().call(*arguments)

    with TrainerClient(source, Traced(llm), **options) as client:
        return client.push()


def _source(checkpoint: str) -> Any:
    from weightsync.trainer.sources import TensorSource

    return TensorSource(dict(read_checkpoint(Path(checkpoint))))


def _model(llm: Any) -> torch.nn.Module:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    model: torch.nn.Module = worker.get_model()
    return model


def _places(model: torch.nn.Module) -> dict[str, list[Any]]:
    """Address and layout of every tensor that modules and what hangs on them hold, found without weightsync.

    Left out are the handles of oneDNN, which own their matrix and are made anew, and the engine's caches.
    """
    found: dict[str, list[Any]] = {}
    seen: set[int] = set()

    def look(path: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = [value.data_ptr(), list(value.shape), list(value.stride()), str(value.dtype)]
        elif isinstance(value, torch.nn.Module) or depth > 3 or id(value) in seen:
            return
        elif isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                look(f"{path}[{key}]", item, depth + 1)
        elif callable(getattr(value, "__func__", None)) or isinstance(value, type):
            return
        elif type(value).__module__.startswith("vllm.") and "Config" not in type(value).__name__:
            if "GEMMHandler" in type(value).__name__ or not hasattr(value, "__dict__"):
                return
            seen.add(id(value))
            for key, item in vars(value).items():
                look(f"{path}.{key}", item, depth + 1)

    for path, module in model.named_modules():
        for key, value in {**vars(module), **module._parameters, **module._buffers}.items():
            if key not in ("_parameters", "_buffers", "_modules", "kv_cache"):
                look(f"{path}.{key}", value, 0)
    return found


class HookTrace:
    """Notes every post-load hook that this thread calls, outermost calls alone, with the module that it is for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._depth = 0

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name != "process_weights_after_loading" or code.co_filename.endswith("model_loader/utils.py"):
            return
        if event == "call":
            if not self._depth:
                names = code.co_varnames[: code.co_argcount]
                owner, *rest = (frame.f_locals[name] for name in names)
                subject = rest[0] if rest and isinstance(rest[0], torch.nn.Module) else owner
                self.calls.append((type(owner).__name__, subject))
            self._depth += 1
        elif event == "return":
            self._depth -= 1

    def __enter__(self) -> HookTrace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def by_path(self, model: torch.nn.Module) -> list[list[str]]:
        """`[owner's class, module path]` of each call."""
        paths = {id(module): path for path, module in model.named_modules()}
        return [[owner, paths.get(id(subject), "?")] for owner, subject in self.calls]


def _with_model_hook() -> None:
    """Gives vLLM a Llama with a hook of the whole model, which derives a tensor from what the modules' hooks left."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class HookedLlama(LlamaForCausalLM):
        def process_weights_after_loading(self) -> None:
            total = self.model.norm.weight.float().sum().reshape(1)
            if hasattr(self, "norm_sum"):
                self.norm_sum.copy_(total)
            else:
                self.norm_sum = total

    ModelRegistry.register_model("LlamaForCausalLM", HookedLlama)


def push_inside(a: str, b: str, mode: str) -> dict[str, Any]:
    """An engine that was started with checkpoint a gets a, b and a: hooks, addresses and tokens after each."""
    is_llama = Path(a).name == "llama-a"
    if is_llama:
        _with_model_hook()
    with HookTrace() as trace:
        llm = engine(a, **BACKEND)
    model = _model(llm)
    found: dict[str, Any] = {"cold_hooks": trace.by_path(model), "pushes": []}
    places = _places(model)
    for checkpoint in (a, b, a):
        trace = HookTrace()
        report = _push(llm, _source(checkpoint), trace, mode=mode)
        now = _places(model)
        row = {
            "checkpoint": checkpoint,
            "hooks": trace.by_path(model),
            "reported_hooks": report.ranks[0]["targets"]["model"]["hooks"],
            "moved": sorted(path for path in places if now.get(path) != places[path]),
            "gone_or_new": sorted(places.keys() ^ now.keys()),
            "tokens": tokens_of(llm),
        }
        if is_llama:
            expected = dict(read_checkpoint(Path(checkpoint)))["model.norm.weight"].float().sum()
            row["model_hook_saw_the_new_weights"] = bool(model.norm_sum == expected)
        found["pushes"].append(row)
    found["num_places"] = len(places)
    return found


def repeated_pushes_of_one_client(a: str, checkpoints: list[str]) -> dict[str, Any]:
    """One client pushes its tensors again and again: from the second time on, in one control call."""
    from weightsync import control
    from weightsync.integrations.vllm_offline import LlmEndpoint
    from weightsync.trainer.client import TrainerClient
    from weightsync.trainer.sources import TensorSource

    llm = engine(a, **BACKEND)
    routes: list[str] = []

    class Listens(LlmEndpoint):
        def call(self, route: str, body: Any, deadline_seconds: float) -> Any:
            routes.append(route)
            return super().call(route, body, deadline_seconds)

    weights = {name: tensor.clone() for name, tensor in read_checkpoint(Path(a))}
    found: list[Any] = []
    with TrainerClient(TensorSource(weights), Listens(llm)) as client:
        for checkpoint in checkpoints:
            for name, tensor in read_checkpoint(Path(checkpoint)):
                weights[name].copy_(tensor)
            version = client.push().version
            found.append([tokens_of(llm), version, llm.get_weight_version()])
    return {"pushes": found, "single_calls": routes.count(control.PUSH), "transport": "memory"}


def short_push(a: str, b: str) -> dict[str, Any]:
    """A push that lacks a tensor, into an engine of this process."""
    from weightsync.errors import CoverageError
    from weightsync.trainer.sources import TensorSource

    llm = engine(a, **BACKEND)
    words = ""
    try:
        _push(llm, TensorSource(dict(read_checkpoint(Path(b))[1:])))
    except CoverageError as error:
        words = str(error)
    return {"error": words, "tokens": tokens_of(llm)}


def vllms_own_calls(a: str, b: str) -> dict[str, Any]:
    """vLLM's documented entry points: its four calls, its own reload from disk, its shutdown of the connection."""
    from weightsync import control
    from weightsync.integrations.vllm_offline import LlmEndpoint
    from weightsync.trainer.client import TrainerClient

    llm = engine(a, **BACKEND)

    class FourCalls(LlmEndpoint):
        """Goes through vLLM's methods alone; only the handshake's answer is asked for beside them."""

        def call(self, route: str, body: Any, deadline_seconds: float) -> Any:
            if route == control.INIT:
                llm.init_weight_transfer_engine({"init_info": body["init_info"]})
                return super().call(route, body, deadline_seconds)
            if route == control.START:
                llm.start_weight_update()
                llm.update_weights({"update_info": {"start": body["start_info"]}})
                return {"ranks": [{}]}
            if route == control.UPDATE:
                llm.update_weights({"update_info": {"update": body["update_info"]}})
                return {"ranks": [{}]}
            if route == control.FINISH:
                llm.finish_weight_update(weight_version=str(body["weight_version"]))
                llm.reset_prefix_cache()
                return {"ranks": [{"version": body["weight_version"]}]}
            return super().call(route, body, deadline_seconds)

    def info() -> Any:
        (answer,) = llm.collective_rpc("weightsync_call", args=("weight_info", {}))
        return answer["rank"]

    found: dict[str, Any] = {}
    client = TrainerClient(_source(b), FourCalls(llm))
    report = client.push(version=5)
    found["four_calls"] = {"tokens": tokens_of(llm), "label": llm.get_weight_version(), "info": info()}
    found["report_version"] = report.version
    llm.shutdown_weight_transfer_engine()
    found["after_shutdown"] = {"info": info(), "version": _push(llm, _source(a)).version, "tokens": tokens_of(llm)}
    llm.collective_rpc("reload_weights", kwargs={"weights_path": b})
    llm.reset_prefix_cache()
    found["vllms_reload"] = {"tokens": tokens_of(llm), "info": info()}
    found["push_after_it"] = {"version": _push(llm, _source(a)).version, "tokens": tokens_of(llm)}
    return found


def mtp_digests(checkpoint: str, pushed: str | None = None) -> dict[str, Any]:
    """An engine with a multi-token-prediction draft; after a push of both targets, or as it was started.

    The draft shares embedding and head with the target model.
    """
    from weightsync.errors import LayoutError
    from weightsync.integrations.vllm_offline import LlmEndpoint
    from weightsync.trainer.client import TrainerClient
    from weightsync.trainer.sources import TensorSource

    llm = engine(checkpoint, speculative_config=MTP, **BACKEND)
    found: dict[str, Any] = {}
    if pushed is not None:
        weights = read_checkpoint(Path(pushed))
        layer = "model.layers.3."
        model = {name: tensor for name, tensor in weights if not name.startswith(layer)}
        draft = {name: tensor for name, tensor in weights if name.startswith(layer)}
        shared = ("embed_tokens.weight", "shared_head.head.weight")
        try:
            _push(llm, {"model": TensorSource(model), "draft": TensorSource(draft)})
        except LayoutError as error:
            found["refused"] = str(error)
        found["tokens_after_refusal"] = tokens_of(llm)
        own = {name: tensor for name, tensor in draft.items() if not name.endswith(shared)}
        with TrainerClient({"model": TensorSource(model), "draft": TensorSource(own)}, LlmEndpoint(llm)) as client:
            report = client.push()
        found["targets"] = {name: target["version"] for name, target in report.ranks[0]["targets"].items()}
    (answer,) = llm.collective_rpc("weightsync_call", args=("weight_checker", {"action": "checksum"}))
    return found | {"digests": answer["rank"]["checksums"], "tokens": tokens_of(llm)}
