"""The reported failures, as rows that `toys_peer.run_row` runs on either side.

The letter of a row is its kind: A addresses, B derived values, C layout and repetition, D completeness, E preservation,
G names, H dtypes, I transport buffers, K memory, L recovery, N targets, P expert layouts. Values are chosen so that the
wrong one says what went wrong: 1 or 2 is old, 10 and up is new, NaN was never written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from toys_peer import (
    Host,
    Layer,
    Push,
    Row,
    Toy,
    all_of,
    full,
    model_toy,
    one,
    param,
    quant_toy,
    see,
    toy,
    with_quant,
)

NAN = float("nan")


def w(value: float, *shape: int, name: str = "l.w") -> tuple[str, torch.Tensor]:
    """One named tensor of one value."""
    return name, full(value, *shape)


# ---- A: addresses ----------------------------------------------------------------------------------------------


def rebind(layer: nn.Module) -> None:
    layer.absorbed = layer.w.data * 2


class Kernel:
    """A kernel object that holds the tensors it was built with."""

    def __init__(self, scale: torch.Tensor, strides: torch.Tensor) -> None:
        self.scale, self.strides = scale, strides


def rebuild_kernel(layer: nn.Module) -> None:
    layer.kernel = Kernel(layer.s.data * 2, torch.arange(4.0))


def rebind_workspace(layer: nn.Module) -> None:
    layer.workspace, layer.sort_idx = torch.zeros(4), torch.arange(4.0)


def pad_through_data(layer: nn.Module) -> None:
    layer.w.data = F.pad(layer.w.data, (0, 2))


def derive_in_containers(layer: nn.Module) -> None:
    derived = layer.w.data * 2
    layer.in_dict = {"k": derived}
    layer.call = functools.partial(torch.add, layer.w.data * 3)


def see_containers(model: nn.Module) -> dict[str, Any]:
    return {"l.in_dict[k]": model.l.in_dict["k"], "partial argument": model.l.call.args[0]}


# ---- B: derived values -----------------------------------------------------------------------------------------


def negate(layer: nn.Module) -> None:
    layer.neg.copy_(-layer.w.data)


def negated_toy(host: Host) -> nn.Module:
    """A model whose own post-load hook keeps `neg = -w`."""
    model = model_toy(negate, w=1.0)(host)
    model.l.register_buffer("neg", full(0.0), persistent=False)
    return model


class HookInLoad(Toy):
    """Runs its post-load hook at the end of each load_weights, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        self.l = Layer(a=1.0, b=1.0)
        self.seen: list[float] = []
        self.register_buffer("total", full(2.0), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        self.process_weights_after_loading()
        return loaded

    def process_weights_after_loading(self) -> None:
        self.total.copy_(self.l.a.data + self.l.b.data)


class LazyCopy(Toy):
    """Builds a padded copy of a parameter on the first forward and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.l = Layer(sink=1.0)
        self.padded: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        if self.padded is None:
            self.padded = F.pad(self.l.sink.data, (0, 2))
        return self.padded


class BareCopy(Toy):
    """Writes one tensor with a bare copy_, behind the back of its weight loader."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        kept = []
        for name, tensor in weights:
            if name.endswith("sink"):
                self.get_parameter(name).data.copy_(tensor)
            else:
                kept.append((name, tensor))
        return super().load_weights(kept)


def derive_and_free(layer: nn.Module) -> None:
    """Derives a matrix once and frees its source."""
    layer.w_uk = layer.kv_b.data * 2
    layer.kv_b = None


class Wrapper(Toy):
    """A multimodal wrapper: the language model inside owns the post-load hook, and nobody forwards it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.lm = inner


def attention(host: Host, process: Callable[[nn.Module], None], **params: float) -> nn.Module:
    """An attention-like layer with its own post-load hook."""

    class Attention(Layer, host.attention_base):  # type: ignore[name-defined, misc]
        def get_attn_backend(self) -> Any:
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return None

        def process_weights_after_loading(self, act_dtype: Any = None) -> None:
            process(self)

    return Attention(**params)


def host_copy(layer: nn.Module) -> None:
    layer.k_scale_float = float(layer.k_scale.data.max())


# ---- C: layout and repetition ----------------------------------------------------------------------------------


def swap_halves(layer: nn.Module) -> None:
    rows = layer.w.data.shape[0] // 2
    layer.w.data.copy_(torch.cat([layer.w.data[rows:], layer.w.data[:rows]]))


def latched_double(layer: nn.Module) -> None:
    if not getattr(layer, "done", False):
        layer.w.data.mul_(2)
        layer.done = True


def halves(first: float, second: float) -> torch.Tensor:
    return torch.cat([full(first, 2), full(second, 2)])


class SetDirectly(Toy):
    """A model whose caller fills parameters itself: load_weights writes nothing through a loader."""

    def __init__(self) -> None:
        super().__init__()
        self.l = Layer(w=1.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            with torch.no_grad():
                self.get_parameter(name).copy_(tensor)
        return set()


def negative_exp(layer: nn.Module) -> None:
    layer.w.data.copy_(-torch.exp(layer.w.data))


# ---- D, E: completeness and preservation -----------------------------------------------------------------------


def padded_loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """Fills the first rows; the rest is padding."""
    param.data[: loaded_weight.shape[0]].copy_(loaded_weight)


def buffers_toy(host: Host) -> nn.Module:
    layer = Layer(w=1.0)
    layer.register_buffer("rope", full(0.5), persistent=False)
    layer.register_buffer("limit", full(0.25), persistent=True)
    return toy(l=layer)


def padding_toy(host: Host) -> nn.Module:
    return toy(l=Layer(w=param(0.0, 8, 2, loader=padded_loader)))


def tied_toy(host: Host) -> nn.Module:
    model = toy(embed=Layer(w=1.0), head=Layer(w=1.0))
    model.head.w = model.embed.w
    return model


# ---- G to P ----------------------------------------------------------------------------------------------------


class LoraWrapped(Toy):
    """A linear layer wrapped for LoRA: the parameter's path has `base_layer`, the checkpoint's name has not."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Module()
        self.l.base_layer = Layer(w=1.0)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            tensors[name].weight_loader(tensors[name], tensor)  # type: ignore[operator]
            loaded.add(name)
        return loaded


def many_layers(host: Host) -> nn.Module:
    return toy(**{f"l{i}": Layer(a=1.0, b=1.0) for i in range(50)})


class ForeignExperts(Toy):
    """An expert-parallel rank that owns two of four experts; its loader leaves the others alone."""

    def __init__(self) -> None:
        super().__init__()
        self.l = Layer(w=param(1.0, 2, 4, loader=self.expert_loader), s=1.0)

    @staticmethod
    def expert_loader(param: torch.Tensor, loaded_weight: torch.Tensor, expert_id: int = 0) -> bool:
        if expert_id >= param.shape[0]:
            return False
        param.data[expert_id].copy_(loaded_weight)
        return True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            layer, _, rest = name.partition(".")
            parts = rest.split(".")
            if parts[0] == "w":
                target = self.get_parameter(f"{layer}.w")
                target.weight_loader(target, tensor, expert_id=int(parts[1]))  # type: ignore[operator]
            else:
                target = self.get_parameter(name)
                target.weight_loader(target, tensor)  # type: ignore[operator]
        return set()


def swap_first(layer: nn.Module) -> None:
    kept = layer.q.data.clone()
    layer.q.data.copy_(layer.r.data)
    layer.r.data.copy_(kept)


def latched_experts(layer: nn.Module) -> None:
    """The shape of a one-shot expert transform: the first matrix is a copy, the second an alias, the sources go."""
    if getattr(layer, "transformed", None) is not None:
        return
    layer.transformed = {"l1": layer.w13.data * 10, "l2": layer.w2.data}
    layer.w13 = None


def interleave(layer: nn.Module) -> None:
    """Gate and up rows interleaved in place: not its own inverse."""
    layer.w.data.copy_(layer.w.data[torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])][torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])])


RAMP = torch.arange(8.0)
RAMP_DONE = RAMP[torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])][torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])]

ALL_ROWS = (
    # ---- A
    Row("A1", "a matrix derived from a weight is rebound by the post-load hook", quant_toy(rebind, w=1.0),
        [w(1)], one(w(10)), see("l.w", "l.absorbed"), {"l.w": all_of(10), "l.absorbed": all_of(20)}),
    Row("A2", "a kernel object is rebuilt by the post-load hook around new tensors", quant_toy(rebuild_kernel, s=1.0),
        [w(1, name="l.s")], one(w(10, name="l.s")), see("l.kernel.scale", "l.kernel.strides"),
        {"l.kernel.scale": all_of(20), "l.kernel.strides": [0.0, 1.0, 2.0, 3.0]}),
    Row("A3", "an index tensor derived from a weight is a plain attribute and is replaced",
        quant_toy(lambda layer: setattr(layer, "sort_idx", torch.argsort(layer.w.data).float()), w=param(0.0, 4)),
        [("l.w", torch.arange(4.0))], one(("l.w", 3 - torch.arange(4.0))), see("l.sort_idx"),
        {"l.sort_idx": [3.0, 2.0, 1.0, 0.0]}),
    Row("A5", "the post-load hook pads through .data", quant_toy(pad_through_data, w=1.0),
        [w(1)], one(w(10)), see("l.w"), {"l.w": [10.0] * 4 + [0.0] * 2}),
    Row("A7", "derived tensors live in a dict and in a partial", quant_toy(derive_in_containers, w=1.0),
        [w(1)], one(w(10)), see_containers, {"l.in_dict[k]": all_of(20), "partial argument": all_of(30)},
        may_refuse=True),
    # ---- B
    Row("B2", "a hook of the model itself is not run again", negated_toy,
        [w(1)], one(w(10)), see("l.w", "l.neg"), {"l.w": all_of(10), "l.neg": all_of(-10)}),
    Row("B3", "load_weights calls the hook itself, once per chunk", lambda host: HookInLoad(),
        [w(1, name="l.a"), w(1, name="l.b")], (Push(([w(10, name="l.a")], [w(20, name="l.b")])),),
        see("l.a", "l.b", "total"), {"l.a": all_of(10), "l.b": all_of(20), "total": all_of(30)}),
    Row("B4", "a padded copy is built on the first forward and never again", lambda host: LazyCopy(),
        [w(1, name="l.sink")], one(w(10, name="l.sink")), lambda model: {"forward": model()},
        {"forward": [10.0] * 4 + [0.0] * 2}, may_refuse=True),
    Row("B6a", "load_weights writes the only tensor of a module with a bare copy_",
        lambda host: BareCopy(l=Layer(sink=1.0), m=Layer(w=1.0)), [w(1, name="l.sink"), w(1, name="m.w")],
        one(w(10, name="l.sink"), w(10, name="m.w")), see("l.sink", "m.w"),
        {"l.sink": all_of(10), "m.w": all_of(10)}, may_refuse=True),
    Row("B6b", "load_weights writes one tensor of a module with a bare copy_, beside others",
        lambda host: BareCopy(l=Layer(sink=1.0, w=1.0)), [w(1, name="l.sink"), w(1)],
        one(w(10, name="l.sink"), w(10)), see("l.sink", "l.w"), {"l.sink": all_of(10), "l.w": all_of(10)},
        may_refuse=True),
    Row("B9", "the post-load hook derives a matrix and frees its source", quant_toy(derive_and_free, kv_b=1.0),
        [w(1, name="l.kv_b")], one(w(10, name="l.kv_b")), see("l.w_uk"), {"l.w_uk": all_of(20)}, may_refuse=True),
    Row("B10", "a multimodal wrapper does not forward the inner model's hook",
        lambda host: Wrapper(negated_toy(host)), [w(1, name="lm.l.w")], one(w(10, name="lm.l.w")),
        see("lm.l.w", "lm.l.neg"), {"lm.l.w": all_of(10), "lm.l.neg": all_of(-10)}),
    Row("B12", "a host copy of an attention scale is taken by the attention layer's hook",
        lambda host: toy(l=attention(host, host_copy, k_scale=1.0)), [w(1, name="l.k_scale")],
        one(w(10, name="l.k_scale")), see("l.k_scale", "l.k_scale_float"),
        {"l.k_scale": all_of(10), "l.k_scale_float": 10.0}),
    # ---- C
    Row("C1", "the model's hook swapped [w1; w3] once; the same weights arrive again",
        model_toy(swap_halves, w=param(0.0, 4)), [("l.w", halves(1, 3))], one(("l.w", halves(1, 3))), see("l.w"),
        {"l.w": [3.0, 3.0, 1.0, 1.0]}),
    Row("C2", "one layer in two sessions of one tensor each",
        lambda host: toy(l=Layer(a=1.0, b=2.0)), [w(1, name="l.a"), w(2, name="l.b")],
        (Push(([w(10, name="l.a")],)), Push(([w(20, name="l.b")],))), see("l.a", "l.b"),
        {"l.a": all_of(10), "l.b": all_of(20)}, may_refuse=True, partial=True),
    Row("C4", "a row shuffle that is not its own inverse, three pushes of the same weights",
        quant_toy(interleave, w=param(0.0, 8)), [("l.w", RAMP)], one(("l.w", RAMP)) * 3, see("l.w"),
        {"l.w": RAMP_DONE.tolist()}),
    Row("C5", "the hook is guarded by a latch that survives the update", quant_toy(latched_double, w=1.0),
        [w(1)], one(w(5)), see("l.w"), {"l.w": all_of(10)}, may_refuse=True),
    Row("C11", "the caller fills the session's parameters itself; no loader fires",
        lambda host: SetDirectly(), [w(1)], one(w(10)), see("l.w"),
        {"l.w": all_of(10)}, may_refuse=True),
    Row("C12", "ten tensors in ten buckets, with a hook that is not idempotent",
        quant_toy(lambda layer: [p.data.mul_(2) for p in layer.parameters()], **{f"p{i}": 1.0 for i in range(10)}),
        [w(1, name=f"l.p{i}") for i in range(10)], (Push(tuple([w(10 + i, name=f"l.p{i}")] for i in range(10))),),
        see("l.p0", "l.p9"), {"l.p0": all_of(20), "l.p9": all_of(38)}),
    # ---- D
    Row("D1", "one tensor twice, its sibling never: the element count says complete",
        lambda host: toy(l=Layer(left=2.0, right=2.0)), [w(2, name="l.left"), w(2, name="l.right")],
        one(w(10, name="l.left"), w(10, name="l.left")), see("l.left", "l.right"), None),
    Row("D3", "a weight without its scale", lambda host: toy(l=Layer(weight=1.0, scale=0.5)),
        [w(1, name="l.weight"), w(0.5, name="l.scale")], one(w(9, name="l.weight")), see("l.weight", "l.scale"), None),
    Row("D4", "one of two parameters of a layer", lambda host: toy(l=Layer(a=1.0, b=2.0)),
        [w(1, name="l.a"), w(2, name="l.b")], one(w(10, name="l.a")), see("l.a", "l.b"),
        {"l.a": all_of(10), "l.b": all_of(2)}, may_refuse=True),
    Row("D5", "one of three names is sent to a quantised model",
        lambda host: toy(**{k: with_quant(host, Layer(w=1.0), lambda layer: None) for k in ("a", "b", "c")}),
        [w(1, name=f"{k}.w") for k in "abc"], one(w(10, name="a.w")), see("a.w", "b.w", "c.w"), None),
    Row("D6a", "nothing is loaded", lambda host: toy(l=Layer(w=1.0)), [w(1)], (Push(([],)),), see("l.w"), None),
    Row("D6b", "the only tensor is misnamed", lambda host: toy(l=Layer(w=1.0)), [w(1)],
        one(w(10, name="l.weight")), see("l.w"), None),
    Row("D8", "the trainer leaves out the head", lambda host: toy(l=Layer(w=1.0), lm_head=Layer(w=1.0)),
        [w(1), w(1, name="lm_head.w")], one(w(10)), see("l.w", "lm_head.w"), None),
    # ---- E
    Row("E2", "buffers that no checkpoint holds", buffers_toy, [w(1)], one(w(10)), see("l.w", "l.rope", "l.limit"),
        {"l.w": all_of(10), "l.rope": all_of(0.5), "l.limit": all_of(0.25)}),
    Row("E3", "padding rows that no loader writes", padding_toy, [("l.w", full(1, 5, 2))],
        one(("l.w", full(7, 5, 2))), see("l.w"), {"l.w": [[7.0, 7.0]] * 5 + [[0.0, 0.0]] * 3}),
    Row("E4", "A = -exp(A): the same checkpoint again", quant_toy(negative_exp, w=1.0), [w(0)], one(w(0)), see("l.w"),
        {"l.w": all_of(-1)}),
    Row("E6a", "tied head: only the embedding is sent", tied_toy, [w(1, name="embed.w")],
        one(w(10, name="embed.w")), see("embed.w", "head.w"), {"embed.w": all_of(10), "head.w": all_of(10)}),
    Row("E6b", "tied head: the two names disagree", tied_toy, [w(1, name="embed.w")],
        one(w(10, name="embed.w"), w(9, name="head.w")), see("embed.w", "head.w"), None),
    Row("E7", "the trainer dies after a bias arrived", lambda host: toy(l=Layer(w=1.0, bias=1.0)),
        [w(1), w(1, name="l.bias")], (Push(([w(10, name="l.bias")],), dies=True),), see("l.w", "l.bias"),
        {"l.w": all_of(1), "l.bias": all_of(1)}),
    # ---- G, H, I
    Row("G1", "a layer wrapped for LoRA: checkpoint names lack `base_layer`", lambda host: LoraWrapped(),
        [w(1, name="l.base_layer.w")], one(w(10)), see("l.base_layer.w"), {"l.base_layer.w": all_of(10)}),
    Row("G5", "the trainer emits a name that no parameter backs", lambda host: toy(l=Layer(w=1.0)), [w(1)],
        one(w(10), w(3, name="l.extra")), see("l.w"), None),
    Row("H1", "an fp32 router weight is sent to a bf16 parameter and narrowed",
        lambda host: toy(l=Layer(w=param(2.0, 2, dtype=torch.bfloat16))), [("l.w", full(2, 2, dtype=torch.bfloat16))],
        one(("l.w", full(1.00390625, 2))), see("l.w"), None),
    Row("I5", "the trainer's buffer is used again while the loader still holds views of it",
        lambda host: toy(l=Layer(a=1.0, b=1.0)), [w(1, name="l.a"), w(1, name="l.b")],
        (Push(([w(10, name="l.a"), w(20, name="l.b")],), reuse_buffer=True),), see("l.a", "l.b"),
        {"l.a": all_of(10), "l.b": all_of(20)}),
    # ---- K
    Row("K1", "fifty layers, sent by kind instead of by layer", many_layers,
        [w(1, name=f"l{i}.{k}") for i in range(50) for k in "ab"],
        (Push(tuple([w(10, name=f"l{i}.{k}")] for k in "ab" for i in range(50))),), see("l0.a", "l49.b"),
        {"l0.a": all_of(10), "l49.b": all_of(10)}, max_held=0.1),
    Row("K2", "foreign experts of an expert-parallel rank are kept", lambda host: ForeignExperts(),
        [(f"l.w.{e}", full(1)) for e in range(2)] + [w(1, name="l.s")],
        (Push(([(f"l.w.{e}", full(10)) for e in (2, 3)],
               [(f"l.w.{e}", full(10)) for e in (0, 1)], [w(10, name="l.s")])),),
        see("l.w", "l.s"), {"l.w": all_of(10, 2, 4), "l.s": all_of(10)}, max_held=0.5),
    # ---- L
    Row("L1", "an update dies midway, then everything is sent again",
        lambda host: toy(l0=Layer(a=1.0, b=1.0), l1=Layer(a=1.0, b=1.0)),
        [w(1, name=f"l{i}.{k}") for i in range(2) for k in "ab"],
        (Push(([w(20, name="l0.a"), w(20, name="l0.b"), w(20, name="l1.a")],), dies=True),
         *one(*(w(30, name=f"l{i}.{k}") for i in range(2) for k in "ab"))),
        see("l0.a", "l0.b", "l1.a", "l1.b"), {f"l{i}.{k}": all_of(30) for i in range(2) for k in "ab"}),
    Row("L7", "the trainer dies between start and the first tensor; a request runs", lambda host: toy(l=Layer(w=1.0)),
        [w(1)], (Push(([],), dies=True),), lambda model: {"forward": model.l.w.data + 0}, {"forward": all_of(1)}),
    # ---- N, P
    Row("N3", "an attention layer gets no tensors, but its hook runs again",
        lambda host: toy(l=Layer(w=1.0), attn=attention(host, swap_first, q=1.0, r=2.0)),
        [w(1), w(1, name="attn.q"), w(2, name="attn.r")], one(w(10)), see("l.w", "attn.q", "attn.r"),
        {"l.w": all_of(10), "attn.q": all_of(2), "attn.r": all_of(1)}, partial=True),
    Row("P1", "a latched expert transform: L1 is a copy, L2 an alias, the source is freed",
        quant_toy(latched_experts, w13=1.0, w2=1.0), [w(1, name="l.w13"), w(1, name="l.w2")],
        one(w(5, name="l.w13"), w(6, name="l.w2")), see("l.transformed[l1]", "l.transformed[l2]"),
        {"l.transformed[l1]": all_of(50), "l.transformed[l2]": all_of(6)}, may_refuse=True),
)  # fmt: skip


ROWS = {row.id: row for row in ALL_ROWS}
