"""The toy models of the comparison with vLLM: one per reported failure, with the value that is right.

Each `Row` is the smallest model that shows one failure of reloading weights into a live model, the pushes that show
it, and the outcome that is right. It is run by vLLM's reload code and by ours (`reload_vs_vllm.py`), in two
interpreters with two versions of torch, so this file imports torch alone. What a host has to give a toy - the base
class that marks a quantisation method or an attention layer - comes in as a `Host`.

    row = ROWS["D1"]
    outcome = run_row(row, engine)      # an Engine: cold_load, start, load, finish, abort
    row.is_right(outcome), row.wanted()

Uninitialised memory is filled with NaN while a row runs: a tensor that nobody wrote cannot pass by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Host:
    """What a reload engine recognises post-load hooks by.

    Attributes:
        quant_base: Base class of a module's `quant_method`.
        attention_base: Base class that marks a module as attention-like: its own hook runs after all the others.
    """

    quant_base: type
    attention_base: type


class Engine(Protocol):
    """One side of the comparison.

    Attributes:
        host: The base classes that it knows.
        refusals: Errors that count as a refusal; any other one ends the comparison.
    """

    host: Host
    refusals: tuple[type[Exception], ...]

    def cold_load(self, model: nn.Module, weights: Weights) -> None:
        """The first load: load_weights, then the post-load hooks in the loader's order."""

    def start(self, model: nn.Module, declared: Weights, partial: bool, max_held_bytes: int | None) -> None:
        """Begins a reload.

        Args:
            model: The model.
            declared: The names, shapes and dtypes that the trainer means to send.
            partial: Whether that is meant to be a part of the model.
            max_held_bytes: Budget for tensors kept for later, if the row has one.
        """

    def load(self, model: nn.Module, weights: Weights) -> None:
        """Hands over some of the new weights."""

    def finish(self, model: nn.Module) -> None:
        """Ends the reload: from here on the model serves."""

    def abort(self, model: nn.Module) -> None:
        """Gives the reload up after a failure, as far as this side can."""

    def held_bytes(self, model: nn.Module) -> int:
        """Bytes of received weights that this side keeps for later: now, or the most so far."""


@dataclass(frozen=True)
class Push:
    """One reload: its chunks, and whether the trainer dies before it ends it."""

    chunks: tuple[Weights, ...]
    dies: bool = False
    reuse_buffer: bool = False  # every tensor travels through one buffer, overwritten by the next one


@dataclass
class Outcome:
    """What one side made of a row: plain values, so that it crosses a process boundary as JSON."""

    error: str | None = None  # the first error that this side raised
    live: dict[str, Any] = field(default_factory=dict)  # what the model holds at the end
    captured: dict[str, Any] = field(default_factory=dict)  # what memory noted before the pushes holds at the end
    old: dict[str, Any] = field(default_factory=dict)  # what the model held before the pushes
    held_bytes: int = 0  # most bytes kept for later
    total_bytes: int = 0  # bytes sent

    def untouched(self) -> bool:
        """Whether the model and the noted memory hold the old values."""
        return _same(self.live, self.old) and _same(self.captured, {k: self.old[k] for k in self.captured})


@dataclass(frozen=True)
class Row:
    """One reported failure.

    Attributes:
        id: Its number in the list of failures.
        title: What users see.
        build: Makes the model; gets the host's base classes.
        cold: The checkpoint it starts from.
        pushes: The reloads that show the failure, in order.
        observe: The values that tell, by name; tensors are also noted by address before the first push.
        want: The values that are right, by the same names; None if refusing is the one right outcome.
        may_refuse: Whether an error that leaves every old value is right too.
        max_held: If given, the largest share of the sent bytes that may be kept for later.
        partial: Whether the trainer means to send a part of the model, for a side that can be told so.
    """

    id: str
    title: str
    build: Callable[[Host], nn.Module]
    cold: Weights
    pushes: tuple[Push, ...]
    observe: Callable[[nn.Module], dict[str, Any]]
    want: dict[str, Any] | None
    may_refuse: bool = False
    max_held: float | None = None
    partial: bool = False

    def is_right(self, outcome: Outcome) -> bool:
        """Whether an outcome is a right one."""
        if self.max_held is not None and outcome.held_bytes > self.max_held * outcome.total_bytes:
            return False
        if outcome.error is not None:
            return (self.want is None or self.may_refuse) and outcome.untouched()
        return self.want is not None and _same(outcome.live, self.want) and _same(outcome.captured, self.want)

    def wanted(self) -> str:
        """The right outcome in words."""
        parts = [] if self.want is None else [", ".join(f"{k} = {_short(v)}" for k, v in self.want.items())]
        if self.want is None or self.may_refuse:
            parts.append("refused, old values kept")
        held = "" if self.max_held is None else f"; at most {self.max_held:.0%} of the bytes held"
        return " or ".join(parts) + held

    def told(self, outcome: Outcome) -> str:
        """What a side did, in words."""
        words = []
        if outcome.error is not None:
            words.append(outcome.error if len(outcome.error) < 160 else outcome.error[:157] + "...")
        elif self.want is None:
            words.append("no error")
        words.append(", ".join(f"{k} = {_short(v)}" for k, v in outcome.live.items()))
        stale = [k for k, v in outcome.captured.items() if k in outcome.live and not _same_value(v, outcome.live[k])]
        if stale:
            words.append("a captured graph reads " + ", ".join(f"{k} = {_short(outcome.captured[k])}" for k in stale))
        if self.max_held is not None:
            words.append(f"held {outcome.held_bytes / max(1, outcome.total_bytes):.0%} of the bytes")
        return "; ".join(words)


def _short(value: Any) -> str:
    if isinstance(value, list):
        flat = _flat(value)
        distinct = list(dict.fromkeys("nan" if math.isnan(v) else f"{v:g}" for v in flat))
        if len(distinct) == 1 and len(flat) > 1:
            return f"{distinct[0]} (all)"
        return "[" + " ".join("nan" if math.isnan(v) else f"{v:g}" for v in flat) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flat(value: Any) -> list[float]:
    return [v for item in value for v in _flat(item)] if isinstance(value, list) else [float(value)]


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, list) or isinstance(b, list):
        return isinstance(a, list) and isinstance(b, list) and _flat(a) == _flat(b)
    return bool(a == b)


def _same(values: dict[str, Any], want: dict[str, Any]) -> bool:
    return all(key in want and _same_value(value, want[key]) for key, value in values.items())


def run_row(row: Row, engine: Engine) -> Outcome:
    """Runs one row on one side.

    Args:
        row: The row.
        engine: The side.

    Returns:
        What came of it; an error of the side is part of the outcome, an error of the toy itself is not caught.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    model = row.build(engine.host)
    engine.cold_load(model, row.cold)
    outcome = Outcome(old=_values(row.observe(model)))
    noted = {
        key: (tensor.untyped_storage(), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        for key, tensor in row.observe(model).items()
        if isinstance(tensor, torch.Tensor)
    }
    for push in row.pushes:
        try:
            _push(row, push, model, engine, outcome)
        except TrainerDied:
            engine.abort(model)
        except engine.refusals as error:
            outcome.error = outcome.error or f"{type(error).__name__}: {' '.join(str(error).split())}"
            engine.abort(model)
    try:
        outcome.live = _values(row.observe(model))
    except engine.refusals as error:
        outcome.error = outcome.error or f"{type(error).__name__}: {error}"
    for key, (storage, dtype, offset, shape, stride) in noted.items():
        view = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        outcome.captured[key] = _values({key: view})[key]
    return outcome


class TrainerDied(Exception):
    """Raised between two calls of a push, where the trainer of that row dies."""


def _push(row: Row, push: Push, model: nn.Module, engine: Engine, outcome: Outcome) -> None:
    declared = row.cold if push.dies else [weight for chunk in push.chunks for weight in chunk]
    sent = sum(tensor.nbytes for _, tensor in declared)
    engine.start(model, declared, row.partial, None if row.max_held is None else int(row.max_held * sent))
    buffer = torch.empty(0)
    for chunk in push.chunks:
        weights = [(name, tensor.clone()) for name, tensor in chunk]
        outcome.total_bytes += sum(tensor.nbytes for _, tensor in weights)
        if push.reuse_buffer:
            for name, tensor in weights:
                buffer = torch.empty_like(tensor) if buffer.numel() == 0 else buffer
                engine.load(model, [(name, buffer.copy_(tensor))])
        else:
            engine.load(model, weights)
        outcome.held_bytes = max(outcome.held_bytes, engine.held_bytes(model))
    if push.dies:
        raise TrainerDied
    engine.finish(model)
    outcome.held_bytes = max(outcome.held_bytes, engine.held_bytes(model))


def _values(observed: dict[str, Any]) -> dict[str, Any]:
    return {
        key: ("meta tensor" if value.is_meta else value.detach().double().tolist())
        if isinstance(value, torch.Tensor)
        else value
        for key, value in observed.items()
    }


# ---- toys ------------------------------------------------------------------------------------------------------


def copy_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """The loader of an unsharded parameter: shapes are equal, and the bytes are copied."""
    if param.shape != loaded_weight.shape:
        raise ValueError(f"shape {tuple(loaded_weight.shape)} given for {tuple(param.shape)}")
    param.data.copy_(loaded_weight)


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of one value."""
    return torch.full(shape or (4,), float(value), dtype=dtype)


def param(value: float, *shape: int, dtype: torch.dtype = torch.float32, loader: Any = copy_loader) -> nn.Parameter:
    """A parameter with a weight loader."""
    made = nn.Parameter(full(value, *shape, dtype=dtype), requires_grad=False)
    made.weight_loader = loader  # type: ignore[attr-defined]
    return made


class Toy(nn.Module):
    """A model whose loaders are looked up by name, as vLLM's models do; a name it does not know is passed over."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        loaded = set()
        for name, tensor in weights:
            if name in tensors:
                getattr(tensors[name], "weight_loader", copy_loader)(tensors[name], tensor)
                loaded.add(name)
        return loaded


class Layer(nn.Module):
    """A module of some parameters: `Layer(w=1.0, s=2.0)`."""

    def __init__(self, **params: float | nn.Parameter) -> None:
        super().__init__()
        for name, value in params.items():
            setattr(self, name, value if isinstance(value, nn.Parameter) else param(value))


def toy(**layers: nn.Module) -> Toy:
    """A model of these layers."""
    model = Toy()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


def with_quant(host: Host, layer: nn.Module, process: Callable[[nn.Module], None]) -> nn.Module:
    """Gives a layer a quantisation method whose post-load hook is `process`."""

    class Quant(host.quant_base):  # type: ignore[name-defined, misc]
        def create_weights(self, *args: Any, **kwargs: Any) -> None:
            pass

        def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            process(layer)

    layer.quant_method = Quant()
    return layer


def quant_toy(process: Callable[[nn.Module], None], **params: float | nn.Parameter) -> Callable[[Host], nn.Module]:
    """A builder: one layer `l` of these parameters with a post-load hook of its quantisation method."""
    return lambda host: toy(l=with_quant(host, Layer(**params), process))


def model_toy(process: Callable[[nn.Module], None], **params: float | nn.Parameter) -> Callable[[Host], nn.Module]:
    """A builder: one layer `l` of these parameters with the post-load hook of the model itself."""

    class Hooked(Toy):
        def process_weights_after_loading(self) -> None:
            process(self.l)

    def build(host: Host) -> nn.Module:
        model = Hooked()
        model.l = Layer(**params)
        return model

    return build


def see(*paths: str) -> Callable[[nn.Module], dict[str, Any]]:
    """Observes attributes by dotted path; a part `[k]` indexes."""

    def observe(model: nn.Module) -> dict[str, Any]:
        seen = {}
        for path in paths:
            value: Any = model
            for part in path.replace("[", ".[").split("."):
                value = value[part[1:-1]] if part.startswith("[") else getattr(value, part)
            seen[path] = value
        return seen

    return observe


def one(*weights: tuple[str, torch.Tensor]) -> tuple[Push, ...]:
    """One push in one chunk."""
    return (Push((list(weights),)),)


def all_of(value: float, *shape: int) -> list[Any]:
    """The value of a tensor of one value, as an outcome holds it."""
    return full(value, *shape).double().tolist()
