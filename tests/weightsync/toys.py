"""Small models for the failures that users of in-place reload report, each with engine-style loaders and hooks.

`Net` loads by parameter name through `weight_loader`, `Layer` has what it is given and runs the hook it is given. Most
toys are these two with a few lines of hook:

    net = Net(l=Layer(hook=lambda l: setattr(l, "t", l.w.data.t().contiguous()), w=zeros(2, 3)))
    cold(net, {"l.w": full(1, 2, 3)})

The hooks are kept as wrong as they are in the reports: they rebind, free, latch, pad and process in place.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weightsync.manifest import Manifest
from weightsync.reachable import walk
from weightsync.reload.cold import cold_load
from weightsync.reload.report import ReloadReport
from weightsync.reload.session import reload

Weights = Iterable[tuple[str, torch.Tensor]]
MODES = ("direct", "layerwise")


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of one value."""
    return torch.full(shape, value, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of zeros."""
    return torch.zeros(shape, dtype=dtype)


def codes(start: int, *shape: int) -> torch.Tensor:
    """Distinct values, so that a misplaced row is named by its value."""
    numel = functools.reduce(lambda a, b: a * b, shape, 1)
    return torch.arange(start, start + numel, dtype=torch.float32).view(shape)


def param(data: torch.Tensor, **attributes: Any) -> nn.Parameter:
    """A parameter without gradient, with loader attributes."""
    parameter = nn.Parameter(data, requires_grad=False)
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


class Layer(nn.Module):
    """Parameters, and a hook in the module stage.

    Args:
        hook: `hook(layer)`, run as its `process_weights_after_loading`; None for a layer without one.
        **params: Initial values.
    """

    def __init__(self, hook: Callable[[Layer], None] | None = None, **params: torch.Tensor) -> None:
        super().__init__()
        for name, data in params.items():
            setattr(self, name, data if isinstance(data, nn.Parameter) else param(data))
        if hook is not None:
            self.quant_method = QuantMethod(hook)


class QuantMethod:
    """Owns a layer's hook, as quantisation methods do."""

    def __init__(self, hook: Callable[[Any], None]) -> None:
        self.hook = hook

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.hook(layer)


class Net(nn.Module):
    """A model that loads by parameter (or buffer) name, through `weight_loader` where there is one."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def load_weights(self, weights: Weights) -> set[str]:
        tensors = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        loaded = set()
        for name, tensor in weights:
            target = tensors[name]
            loader = getattr(target, "weight_loader", None)
            if loader is not None:
                loader(target, tensor)
            else:
                if target.shape != tensor.shape:
                    raise ValueError(f"{tuple(target.shape)} != {tuple(tensor.shape)}")
                target.data.copy_(tensor)
            loaded.add(name)
        return loaded


class HookedNet(Net):
    """A model with a hook of its own, which is how model-level work is done.

    Args:
        hook: `hook(model)`.
        **children: Its modules.
    """

    def __init__(self, hook: Callable[[Any], None], **children: nn.Module) -> None:
        super().__init__(**children)
        self.hook = hook

    def process_weights_after_loading(self) -> None:
        self.hook(self)


class Experts(nn.Module):
    """w13 and w2 of a few experts, fused as engines do: gate rows, then up rows.

    Args:
        num_experts: Experts in the checkpoint.
        hidden: Hidden size.
        intermediate: Rows of w1.
        local: Logical experts of this rank, in slot order; may repeat one (replicas) or be changed later.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, local: list[int] | None = None) -> None:
        super().__init__()
        self.local = list(range(num_experts)) if local is None else local
        self.intermediate = intermediate
        slots = len(self.local)
        self.w13 = param(zeros(slots, 2 * intermediate, hidden), weight_loader=self.weight_loader)
        self.w2 = param(zeros(slots, hidden, intermediate), weight_loader=self.weight_loader)

    def weight_loader(self, parameter: torch.Tensor, tensor: torch.Tensor, shard_id: str, expert_id: int) -> bool:
        slots = [slot for slot, expert in enumerate(self.local) if expert == expert_id]
        for slot in slots:
            target = parameter.data[slot]
            if shard_id != "w2":
                target = target.narrow(0, 0 if shard_id == "w1" else self.intermediate, self.intermediate)
            target.copy_(tensor)
        return bool(slots)


class MoENet(nn.Module):
    """Layers of experts with checkpoint names `layers.0.experts.3.w1`."""

    def __init__(self, num_layers: int, num_experts: int, local: list[int] | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.layers = nn.ModuleList(Net(experts=Experts(num_experts, 2, 3, local)) for _ in range(num_layers))

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            _, layer, _, expert, shard = name.split(".")
            experts = self.layers[int(layer)].experts
            parameter = experts.w2 if shard == "w2" else experts.w13
            parameter.weight_loader(parameter, tensor, shard, int(expert))

    def checkpoint(self, seed: int) -> dict[str, torch.Tensor]:
        """Every expert's tensors, with distinct values."""
        shapes = {"w1": (3, 2), "w2": (2, 3), "w3": (3, 2)}
        names = itertools.product(range(len(self.layers)), range(self.num_experts), shapes)
        return {
            f"layers.{layer}.experts.{expert}.{shard}": codes(1000 * seed + 10 * index, *shapes[shard])
            for index, (layer, expert, shard) in enumerate(names)
        }


class Kernel:
    """A kernel object that holds the tensors it was built with."""

    def __init__(self, scale: torch.Tensor, strides: torch.Tensor) -> None:
        self.scale = scale
        self.strides = strides


class LatchedExperts(nn.Module):
    """Finalises once: L1 is a copy, L2 aliases the source, the sources are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = param(zeros(2))
        self.w2 = param(zeros(2))
        self._t: tuple[torch.Tensor, torch.Tensor] | None = None

    def process_weights_after_loading(self) -> None:
        if self._t is not None:
            return
        self._t = (self.w13.data * 10, self.w2.data)
        self.w13 = None
        self.w2 = None


class LazySink(nn.Module):
    """Builds a padded copy of its sink at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = param(zeros(2))
        self._c: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        if self._c is None:
            self._c = F.pad(self.sink.data, (0, 1))
        return self._c


class LatentAttention(nn.Module):
    """Attention-like: its hook takes the activation dtype, runs after module hooks, and reads a sibling's result."""

    def __init__(self, kv_b: Layer) -> None:
        super().__init__()
        self.kv_b = kv_b
        self.seen_dtype: torch.dtype | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self.seen_dtype = act_dtype
        self.w_uk = self.kv_b.processed * 2


class Wrapper(nn.Module):
    """A multimodal wrapper: loads through its inner language model, has no hook of its own."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.vision = Layer(w=zeros(2))
        self.lm = lm

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name.startswith("language_model."):
                self.lm.load_weights([(name.removeprefix("language_model."), tensor)])
            else:
                self.get_parameter(name).data.copy_(tensor)


class LoraLinear(nn.Module):
    """An adapter around a layer, which puts `base_layer` into its parameter names."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def cold(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """The first load of a freshly built model; returns it."""
    cold_load(model, weights.items())
    return model


def push(model: nn.Module, weights: Mapping[str, torch.Tensor], mode: str, **options: Any) -> ReloadReport:
    """One reload in one call, with a manifest; aborted if it fails."""
    return push_in_chunks(
        model, weights, mode, len(weights), manifest=Manifest.from_tensors(weights.items()), **options
    )


def push_in_chunks(
    model: nn.Module, weights: Mapping[str, torch.Tensor], mode: str, size: int = 1, **options: Any
) -> ReloadReport:
    """One reload, `size` tensors per call, without a manifest if none is given; aborted if it fails."""
    items = list(weights.items())
    with reload(model, mode=mode, **options) as session:
        for start in range(0, len(items), size):
            session.load_weights(items[start : start + size])
    return session.report


def state_bytes(model: nn.Module) -> dict[str, bytes]:
    """The bytes of every reachable tensor."""
    return {slot.path: _bytes(slot.tensor) for slot in walk(model)}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Captured:
    """A fake captured graph: views of a model's tensors, taken now and read later.

    Holds storages and layouts, never the tensor objects, as a CUDA graph holds addresses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._views = {}
        self._where = {}
        for slot in walk(model):
            tensor = slot.tensor
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            self._views[slot.path] = view
            self._where[slot.path] = self._identity(tensor)

    def __getitem__(self, path: str) -> torch.Tensor:
        return self._views[path]

    def replay(self) -> dict[str, bytes]:
        """What the graph reads now."""
        return {path: _bytes(view) for path, view in self._views.items()}

    def check(self, model: nn.Module) -> None:
        """Every captured tensor is where it was, and memory that was let go does not change what is read."""
        before = self.replay()
        garbage = [torch.full((size,), 77.0) for size in (1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 64) for _ in range(20)]
        assert self.replay() == before
        del garbage
        now = {slot.path: self._identity(slot.tensor) for slot in walk(model)}
        assert {path: now.get(path) for path in self._where} == self._where
        assert self.replay() == {path: value for path, value in state_bytes(model).items() if path in self._where}

    @staticmethod
    def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
