"""Whatever a loader does, the plan's replay gives the loader's own bytes, and planning leaves no trace."""

import functools

import pytest
import torch
from planning_toys import assert_replays, plan_for, treatments, wire_tensor
from torch import nn

from weightsync.errors import LayoutError
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload
from weightsync.reload.layouts import record_layouts

FP8 = torch.float8_e4m3fn


class Toy(nn.Module):
    """Parameters by name; `rule(param, tensor)` per wire name, or a plain copy."""

    def __init__(self, params, rules=None, buffers=None):
        super().__init__()
        for name, tensor in params.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)
        self.rules = rules or {}

    def load_weights(self, weights):
        for name, tensor in weights:
            rule = self.rules.get(name)
            if rule is not None:
                rule(self, tensor)
            else:
                getattr(self, name).data.copy_(tensor)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def into(path, view=lambda p: p, source=lambda t: t):
    """A rule that copies `source(tensor)` into `view(parameter)`."""
    return lambda model, tensor: view(getattr(model, path).data).copy_(source(tensor))


COPIES = {
    "narrow": (zeros(4, 6), (2, 6), into("w", lambda p: p.narrow(0, 1, 2)), [(0, 1), (3, 4)]),
    "slice with a step": (zeros(6, 4), (3, 4), into("w", lambda p: p[::2]), None),
    "transposed": (zeros(4, 6), (6, 4), into("w", lambda p: p.t()), []),
    "transposed source": (zeros(4, 6), (6, 4), into("w", source=lambda t: t.t()), []),
    "permuted 3-d": (zeros(2, 3, 4), (4, 2, 3), into("w", lambda p: p.permute(2, 0, 1)), []),
    "chunk of the source": (zeros(3, 4), (6, 4), into("w", source=lambda t: t.chunk(2, 0)[1]), []),
    "split, unbind, select": (zeros(4), (6, 4), into("w", source=lambda t: t.split(2)[1].unbind(0)[0]), []),
    "fp8": (zeros(4, 6, dtype=FP8), (4, 6), into("w"), []),
    "bytes of both sides": (
        zeros(4, 6, dtype=FP8), (4, 6), into("w", lambda p: p.view(torch.uint8), lambda t: t.view(torch.uint8)), [],
    ),
    "wider ints of both sides": (
        zeros(4, 8, dtype=FP8), (4, 8), into("w", lambda p: p.view(torch.int32), lambda t: t.view(torch.int32)), [],
    ),
    "interleave of 8 rows": (
        zeros(32, 4), (16, 4), into("w", lambda p: p.view(2, 2, 8, 4)[:, 1], lambda t: t.view(2, 8, 4)), None,
    ),
    "a column": (zeros(4, 6), (4,), into("w", lambda p: p[:, 2]), None),
    "item assignment": (zeros(4, 6), (6,), lambda m, t: m.w.data.__setitem__(2, t), None),
    "ellipsis assignment": (zeros(4, 6), (4, 6), lambda m, t: m.w.data.__setitem__(..., t), []),
    "a scalar into one element": (zeros(4), (), lambda m, t: m.w.data.__setitem__(1, t), None),
    "one element into a scalar": (zeros(), (1,), lambda m, t: m.w.data.copy_(t[0]), []),
    "unit dims": (zeros(4, 1, 3), (4, 3), into("w", lambda p: p.squeeze(1)), []),
    "rows by index": (zeros(5, 3), (3, 3), lambda m, t: m.w.data.__setitem__(torch.tensor([3, 0, 1]), t), None),
    "rows by mask": (
        zeros(4, 3), (2, 3), lambda m, t: m.w.data.__setitem__(torch.tensor([True, False, False, True]), t), None,
    ),
    "columns by index": (zeros(3, 5), (3, 2), lambda m, t: m.w.data.index_copy_(1, torch.tensor([4, 1]), t), None),
    "negative index": (zeros(4, 3), (1, 3), lambda m, t: m.w.data.__setitem__(torch.tensor([-1]), t), None),
    "foreach": (zeros(4, 3), (4, 3), lambda m, t: torch._foreach_copy_([m.w.data], [t]), []),
    "moved to the parameter's device": (zeros(4, 3), (4, 3), into("w", source=lambda t: t.to(m_device())), []),
    "moved by device and dtype": (zeros(4, 3), (4, 3), into("w", source=lambda t: t.to("cpu", torch.float32)), []),
    "cpu()": (zeros(4, 3), (4, 3), into("w", source=lambda t: t.cpu()), []),
    "to(tensor)": (zeros(4, 3), (4, 3), lambda m, t: m.w.data.copy_(t.to(m.w)), []),
    "contiguous and cloned": (zeros(4, 3), (4, 3), into("w", source=lambda t: t.contiguous().clone().detach()), []),
    "explicit expand": (zeros(4, 3), (3,), into("w", source=lambda t: t.expand(4, 3)), []),
    "as_strided": (zeros(4, 3), (12,), into("w", source=lambda t: t.as_strided((4, 3), (3, 1))), []),
    "empty": (zeros(0, 3), (0, 3), into("w"), []),
    "reshape and flatten": (zeros(12), (4, 3), into("w", source=lambda t: t.flatten()), []),
    "the parameter itself": (zeros(4, 3), (4, 3), lambda m, t: m.w.copy_(t), []),
}  # fmt: skip


def m_device():
    return torch.device("cpu")


@pytest.mark.parametrize("case", COPIES)
def test_a_pure_copy_is_recorded_as_a_copy(case):
    start, shape, rule, _ = COPIES[case]
    plan = assert_replays(
        lambda: Toy({"w": start.clone()}, {"x": rule}), [("x", wire_tensor(shape, start.dtype))], scope="partial"
    )
    assert treatments(plan) == {"x": "copy"}, plan.names["x"].reason


OPAQUE = {
    "cast": (zeros(4, 3, dtype=torch.bfloat16), (4, 3), into("w", source=lambda t: t.bfloat16()), torch.float32),
    "scaled": (zeros(4, 3), (4, 3), into("w", source=lambda t: t * 2), torch.float32),
    "repeated": (zeros(4, 3), (2, 3), into("w", source=lambda t: t.repeat_interleave(2, 0)), torch.float32),
    "reordered": (zeros(3, 4), (4, 3), into("w", source=lambda t: t.t().contiguous()), torch.float32),
    "gathered": (zeros(2, 3), (4, 3), into("w", source=lambda t: t[torch.tensor([3, 1])]), torch.float32),
    "written twice": (
        zeros(4, 3), (4, 3), lambda m, t: (m.w.data.copy_(t), m.w.data.copy_(m.w.data.abs() + 1)), torch.float32,
    ),
    "changed after the copy": (zeros(4, 3), (4, 3), lambda m, t: m.w.data.copy_(t).mul_(3), torch.float32),
    "source changed before": (zeros(4, 3), (4, 3), lambda m, t: m.w.data.copy_(t.add_(1)), torch.float32),
    "source overwritten in part": (
        zeros(4, 3), (4, 3), lambda m, t: (t[0].copy_(torch.ones(3)), m.w.data.copy_(t)), torch.float32,
    ),
    "source rows moved": (zeros(4, 3), (4, 3), lambda m, t: (t[0].copy_(t[1]), m.w.data.copy_(t)), torch.float32),
    "source zeroed in part": (zeros(4, 3), (4, 3), lambda m, t: (t[0].zero_(), m.w.data.copy_(t)), torch.float32),
    "padding filled": (
        zeros(4, 3), (2, 3), lambda m, t: (m.w.data[:2].copy_(t), m.w.data[2:].fill_(7)), torch.float32,
    ),
    "through a scratch tensor": (
        zeros(4, 3), (4, 3), lambda m, t: m.w.data.copy_(torch.empty_like(m.w).copy_(t)), torch.float32,
    ),
    "through zeros": (
        zeros(4, 3), (2, 3), lambda m, t: m.w.data.copy_(torch.cat([t, torch.zeros(2, 3)])), torch.float32,
    ),
    "out=": (zeros(4, 3), (4, 3), lambda m, t: torch.mul(t, 2, out=m.w.data), torch.float32),
    "one part twice": (
        zeros(4, 3), (4, 3), lambda m, t: (m.w.data.copy_(t), m.w.data[1].copy_(t[0])), torch.float32,
    ),
    "quantised": (zeros(4, 3, dtype=FP8), (4, 3), into("w", source=lambda t: t.clamp(-1, 1).to(FP8)), torch.float32),
    "float()": (zeros(4, 3), (4, 3), into("w", source=lambda t: t.float()), torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("case", OPAQUE)
def test_a_computed_value_is_opaque_and_its_destination_known(case):
    start, shape, rule, dtype = OPAQUE[case]
    plan = assert_replays(lambda: Toy({"w": start.clone()}, {"x": rule}), [("x", wire_tensor(shape, dtype))])
    how = plan.names["x"]
    assert how.treatment == "opaque"
    assert how.reason
    assert [plan.destinations[index].path for index in how.destinations] == ["w"]
    assert how.reason in plan.explain()


VALUES = {
    "item": lambda m, t: m.w.data.copy_(t) if t.flatten()[0].item() > -100 else None,
    "bool": lambda m, t: m.w.data.copy_(t) if bool((t == t).all()) else m.w.data.zero_(),
    "float": lambda m, t: m.w.data.copy_(t if float(t.max()) < 1e9 else t * 0),
    "tolist": lambda m, t: m.w.data.copy_(torch.tensor(t.tolist())),
    "numpy": lambda m, t: m.w.data.copy_(torch.from_numpy(t.numpy())),
    "equal": lambda m, t: m.w.data.copy_(t) if not torch.equal(t, t + 1) else None,
    "allclose": lambda m, t: None if torch.allclose(t, t + 9) else m.w.data.copy_(t),
    "nonzero": lambda m, t: m.w.data.copy_(t) if len(t.nonzero()) >= 0 else None,
    "loop over values": lambda m, t: [m.w.data[i].copy_(row) for i, row in enumerate(t) if row.sum() != 1e9],
    "other branch": lambda m, t: m.w.data.copy_(t) if t.flatten()[0].item() != 0 else None,
    "raises on the placeholder": lambda m, t: m.w.data.copy_(t / (1 / t.abs().max().item())),
    "live value": lambda m, t: m.w.data.copy_(t) if m.w.data[0, 0] == m.w.data[0, 0] else None,
}


@pytest.mark.parametrize("case", VALUES)
def test_a_loader_that_looks_at_values_is_run_with_the_real_tensor(case):
    plan = assert_replays(lambda: Toy({"w": zeros(4, 3)}, {"w": VALUES[case]}), [("w", wire_tensor((4, 3)))])
    assert treatments(plan) == {"w": "value_dependent"}
    assert plan.names["w"].reason in plan.explain()


def test_both_branches_of_a_value_are_seen():
    def rule(model, tensor):
        (model.a if tensor.sum().item() == 0 else model.b).data.copy_(tensor)

    model = Toy({"a": zeros(3), "b": zeros(3)}, {"x": rule})
    plan = plan_for(model, [("x", wire_tensor((3,)))], scope="partial")
    assert {plan.destinations[index].path for index in plan.names["x"].destinations} == {"a", "b"}


def test_fused_qkv_and_w13_take_their_parts():
    rules = {
        "q": into("qkv", lambda p: p[:4]),
        "k": into("qkv", lambda p: p[4:6]),
        "v": into("qkv", lambda p: p.narrow(0, 6, 2)),
        "gate": into("w13", lambda p: p.chunk(2)[0]),
        "up": into("w13", lambda p: p.chunk(2)[1]),
    }

    def make():
        return Toy({"qkv": zeros(8, 3), "w13": zeros(8, 3)}, rules)

    sizes = {"q": 4, "k": 2, "v": 2, "gate": 4, "up": 4}
    plan = assert_replays(make, [(n, wire_tensor((s, 3), seed=i)) for i, (n, s) in enumerate(sizes.items())])
    assert set(treatments(plan).values()) == {"copy"}
    assert plan.coverage.written_bytes == 2 * 8 * 3 * 4


class Experts(nn.Module):
    """Stacked experts of one rank, with vLLM's `weight_loader` signature."""

    def __init__(self, num_local, first, num_experts, *, by_map=False):
        super().__init__()
        self.first, self.num_local = first, num_local
        self.w13 = nn.Parameter(zeros(num_local, 16, 4))
        self.w2 = nn.Parameter(zeros(num_local, 4, 8))
        for param in (self.w13, self.w2):
            param.weight_loader = self.weight_loader
        expert_map = torch.full((num_experts,), -1)
        expert_map[first : first + num_local] = torch.arange(num_local)
        self.register_buffer("expert_map", expert_map)
        self.by_map = by_map

    def weight_loader(self, param, loaded, name, shard_id, expert_id, return_success=False):
        local = int(self.expert_map[expert_id]) if self.by_map else expert_id - self.first
        if not 0 <= local < self.num_local:
            return False if return_success else None
        row = param.data[local]
        if shard_id != "w2":
            row = row.narrow(0, 0 if shard_id == "w1" else 8, 8)
        row.copy_(loaded)
        return True if return_success else None


class MoE(nn.Module):
    def __init__(self, num_local=2, first=0, num_experts=4, **options):
        super().__init__()
        self.experts = Experts(num_local, first, num_experts, **options)

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, tensor in weights:
            _, expert, shard, _ = name.split(".")
            param = params["experts.w2" if shard == "w2" else "experts.w13"]
            param.weight_loader(param, tensor, name, shard_id=shard, expert_id=int(expert), return_success=True)


def expert_weights(num_experts=4):
    shapes = {"w1": (8, 4), "w2": (4, 8), "w3": (8, 4)}
    return [
        (f"experts.{e}.{shard}.weight", wire_tensor(shape, seed=10 * e + i))
        for e in range(num_experts)
        for i, (shard, shape) in enumerate(shapes.items())
    ]


@pytest.mark.parametrize("by_map", [False, True])
def test_a_rank_skips_foreign_experts_and_says_so(by_map):
    plans = [assert_replays(functools.partial(MoE, first=first, by_map=by_map), expert_weights()) for first in (0, 2)]
    for plan, foreign in zip(plans, ("23", "01"), strict=True):
        assert {name.split(".")[1] for name in plan.skipped} == set(foreign)
        assert set(treatments(plan).values()) == {"copy", "skipped"}
        assert f"expert {foreign[0]} is not on this rank" in plan.names[f"experts.{foreign[0]}.w1.weight"].reason
    assert not set(plans[0].skipped) & set(plans[1].skipped)
    assert plans[0].live_reads == (("experts.expert_map",) if by_map else ())


def test_a_rank_without_any_of_the_experts_skips_all_of_them():
    model = Toy({"w": zeros(2)})
    model.experts = Experts(2, 8, 16)

    def load(weights):
        for name, tensor in weights:
            if name == "w":
                model.w.data.copy_(tensor)
            else:
                _, expert, shard, _ = name.split(".")
                model.experts.w13.weight_loader(model.experts.w13, tensor, name, shard, int(expert))

    model.load_weights = load
    plan = plan_for(model, [("w", wire_tensor((2,))), *expert_weights(2)], scope="partial")
    assert set(treatments(plan).values()) == {"copy", "skipped"}
    assert len(plan.skipped) == 6


@pytest.mark.parametrize("how", ["function", "bound method", "partial", "property"])
def test_any_callable_can_be_a_weight_loader(how):
    def load(param, tensor, scale_dim=None):
        param.data.copy_(tensor)

    class Layer(nn.Linear):
        def load(self, param, tensor):
            param.data.copy_(tensor)

    class Special(nn.Parameter):
        def __new__(cls, data, loader):
            return super().__new__(cls, data, requires_grad=False)

        def __init__(self, data, loader):
            self._weight_loader = loader

        @property
        def weight_loader(self):
            return self._weight_loader

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer(3, 2, bias=False)
            loaders = {
                "function": load,
                "bound method": self.layer.load,
                "partial": functools.partial(load, scale_dim=1),
            }
            if how == "property":
                self.layer.weight = Special(torch.zeros(2, 3), load)
            else:
                self.layer.weight.weight_loader = loaders[how]

        def load_weights(self, weights):
            params = dict(self.named_parameters())
            for name, tensor in weights:
                params[name].weight_loader(params[name], tensor)

    plan = assert_replays(Model, [("layer.weight", wire_tensor((2, 3)))])
    assert treatments(plan) == {"layer.weight": "copy"}


def test_a_model_without_load_weights_is_loaded_by_name():
    def make():
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    names = {name: t.shape for name, t in make().state_dict().items() if "num_batches" not in name}
    plan = assert_replays(make, [(name, wire_tensor(shape, seed=i)) for i, (name, shape) in enumerate(names.items())])
    assert set(treatments(plan).values()) == {"copy"}
    assert "1.running_mean" in names


def test_buffers_and_plain_tensors_can_be_destinations_and_need_no_source():
    rules = {"x": lambda m, t: m.cache["k"].copy_(t)}

    def make():
        model = Toy({"w": zeros(2)}, rules, {"b": zeros(2), "unsent": zeros(3)})
        model.cache = {"k": zeros(2)}
        return model

    plan = assert_replays(make, [(n, wire_tensor((2,), seed=i)) for i, n in enumerate("wbx")])
    assert treatments(plan) == dict.fromkeys("wbx", "copy")
    assert {d.path: d.kind for d in plan.destinations} == {
        "w": "parameter", "b": "buffer", "unsent": "buffer", "cache['k']": "attribute",
    }  # fmt: skip
    assert plan.coverage.untouched == ("unsent",)


def test_tied_parameters_are_one_destination():
    def make():
        model = Toy({"embed": zeros(6, 2)})
        model.head = model.embed
        return model

    plan = assert_replays(make, [("embed", wire_tensor((6, 2)))])
    assert [(d.path, d.aliases) for d in plan.destinations] == [("embed", ("head",))]


def test_a_parameter_that_exists_only_after_planning_is_a_destination_of_the_next_plan():
    model = Toy({"w": zeros(2)})
    weights = [("w", wire_tensor((2,)))]
    first = plan_for(model, weights)
    model.late = nn.Parameter(zeros(3))
    second = plan_for(model, [*weights, ("late", wire_tensor((3,)))])
    assert treatments(second) == {"w": "copy", "late": "copy"}
    assert first.hash != second.hash


def test_a_parameter_registered_by_the_loader_is_opaque_and_leaves_no_trace():
    def rule(model, tensor):
        if not hasattr(model, "late"):
            model.late = nn.Parameter(torch.empty(tensor.shape), requires_grad=False)
        model.late.data.copy_(tensor)

    made = []

    def make():
        made.append(Toy({"w": zeros(2)}, {"x": rule}))
        return made[-1]

    weights = [("w", wire_tensor((2,))), ("x", wire_tensor((3,), seed=2))]
    plan = assert_replays(make, weights)
    assert treatments(plan) == {"w": "copy", "x": "opaque"}
    assert plan.names["x"].rebinds
    late = plan.destinations[plan.names["x"].destinations[0]]
    assert (late.path, late.late) == ("late", True)
    again = plan_for(made[0], weights)  # the replay has run the loader: now it is an ordinary parameter
    assert treatments(again) == {"w": "copy", "x": "copy"}


@pytest.mark.parametrize("how", ["data", "parameter", "set_", "data of a computed value"])
def test_rebinding_a_live_tensor_is_opaque_and_says_so(how):
    def rule(model, tensor):
        if how == "data":
            model.w.data = tensor.to(model.w.device)
        elif how == "parameter":
            model.w = nn.Parameter(tensor, requires_grad=False)
        elif how == "set_":
            model.w.set_(tensor)
        else:
            model.w.data = tensor * 2

    plan = plan_for(Toy({"w": zeros(2, 3)}, {"w": rule}), [("w", wire_tensor((2, 3)))])
    assert plan.names["w"].treatment == "opaque"
    assert plan.names["w"].rebinds
    assert "another tensor" in plan.names["w"].reason


def test_names_that_one_value_needs_go_together():
    class Collects(Toy):
        def load_weights(self, weights):
            parts = {}
            for name, tensor in weights:
                parts[name] = tensor
                if {"k", "v"} <= parts.keys():
                    self.kv.data.copy_(torch.cat([parts["k"], parts["v"]]))
                    parts = {}

    weights = [("v", wire_tensor((2, 3))), ("k", wire_tensor((2, 3), seed=2))]
    plan = assert_replays(lambda: Collects({"kv": zeros(4, 3)}), weights)
    assert treatments(plan) == {"v": "opaque", "k": "opaque"}
    assert plan.names["k"].together == plan.names["v"].together == ("v", "k")  # in wire order


def test_copies_that_wait_for_each_other_are_still_copies():
    class Waits(Toy):
        def load_weights(self, weights):
            parts = dict(weights)
            self.kv.data[:2].copy_(parts["k"])
            self.kv.data[2:].copy_(parts["v"])

    weights = [("v", wire_tensor((2, 3))), ("k", wire_tensor((2, 3), seed=2))]
    plan = assert_replays(lambda: Waits({"kv": zeros(4, 3)}), weights)
    assert treatments(plan) == {"v": "copy", "k": "copy"}


def test_a_tensor_that_the_model_keeps_is_opaque():
    def rule(model, tensor):
        model.w.data.copy_(tensor)
        model.kept = tensor[:1]

    plan = plan_for(Toy({"w": zeros(2, 3)}, {"w": rule}), [("w", wire_tensor((2, 3)))])
    assert treatments(plan) == {"w": "opaque"}
    assert "keeps" in plan.names["w"].reason


def test_a_tied_head_that_the_loader_copies_after_the_loop_follows_its_source():
    class CopiesHead(Toy):
        def load_weights(self, weights):
            super().load_weights(weights)
            self.head.data.copy_(self.embed.data)

    plan = assert_replays(
        lambda: CopiesHead({"embed": zeros(4, 2), "head": zeros(4, 2)}), [("embed", wire_tensor((4, 2)))]
    )
    assert treatments(plan) == {"embed": "opaque"}


def test_post_load_hooks_called_by_the_loader_do_not_run():
    calls = []

    class Quant:
        def process_weights_after_loading(self, layer):
            calls.append(layer)

    class Hooked(Toy):
        supports_direct_reload = True

        def load_weights(self, weights):
            super().load_weights(weights)
            self.process_weights_after_loading()
            self.quant.process_weights_after_loading(self)

        def process_weights_after_loading(self):
            calls.append(self)

    model = Hooked({"w": zeros(2)})
    model.quant = Quant()
    plan = plan_for(model, [("w", wire_tensor((2,)))])
    assert treatments(plan) == {"w": "copy"}
    assert calls == []
    model.process_weights_after_loading()
    assert calls == [model]


def test_inference_tensors_can_be_planned():
    with torch.inference_mode():
        model = Toy({"w": zeros(2, 3)})
    plan = plan_for(model, [("w", wire_tensor((2, 3)))])
    assert treatments(plan) == {"w": "copy"}


def test_a_parameter_subclass_with_torch_function_is_planned():
    class Weight(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

        def load_column(self, tensor):
            self.data.narrow(0, 0, 2).copy_(tensor)

    model = Toy({"w": zeros(1)}, {"w": lambda m, t: m.w.load_column(t)})
    model.w = Weight(zeros(2, 3), requires_grad=False)
    assert treatments(plan_for(model, [("w", wire_tensor((2, 3)))])) == {"w": "copy"}


def test_views_of_one_flat_buffer_are_separate_destinations():
    flat = torch.zeros(12)
    model = Toy({"a": zeros(1), "b": zeros(1)})
    model.a = nn.Parameter(flat[:4].view(2, 2))
    model.b = nn.Parameter(flat[4:].view(4, 2))
    plan = plan_for(model, [("a", wire_tensor((2, 2))), ("b", wire_tensor((4, 2)))])
    storages = {d.path: d.storage for d in plan.destinations}
    assert storages["a"] == storages["b"]
    assert [plan.destinations[plan.names[n].destinations[0]].path for n in "ab"] == ["a", "b"]


class Repacked(Toy):
    """Its hook transposes `w`, so its loaders' layout is gone from the live tensors."""

    def process_weights_after_loading(self):
        self.w.data = self.w.data.t().contiguous()


def test_a_staged_module_is_planned_in_the_layout_that_its_loaders_know():
    model = Repacked({"w": zeros(4, 6)}, {"x": into("w", lambda p: p[:2]), "y": into("w", lambda p: p[2:])})
    record_layouts(model)
    model.process_weights_after_loading()
    weights = [("x", wire_tensor((2, 6))), ("y", wire_tensor((2, 6)))]
    plan = plan_for(model, weights)
    assert treatments(plan) == {"x": "copy", "y": "copy"}
    assert plan.modules == {"": "layerwise"}
    assert plan.destinations[0].shape == (4, 6)
    assert model.w.shape == (6, 4)
    assert "layerwise: 1 modules, since" in plan.explain()


STAGED = {
    "scratch": (lambda m, t: m.w.data.copy_(torch.empty_like(m.w).copy_(t)), "opaque"),
    "blend with a scratch": (lambda m, t: m.w.data.copy_(torch.zeros_like(m.w) + t), "opaque"),
    "twice": (lambda m, t: (m.w.data.copy_(t), m.w.data.mul_(2)), "opaque"),
    "live value": (lambda m, t: m.w.data.copy_(t) if m.w.data[0, 0] != 5 else None, "value_dependent"),
}


@pytest.mark.parametrize("case", STAGED)
def test_a_staged_module_has_no_values(case):
    rule, treatment = STAGED[case]
    model = Repacked({"w": zeros(4, 6)}, {"w": rule})
    record_layouts(model)
    model.process_weights_after_loading()
    assert treatments(plan_for(model, [("w", wire_tensor((4, 6)))])) == {"w": treatment}


def test_a_staged_value_cannot_be_looked_at_before_the_first_weight():
    class Looks(Repacked):
        def load_weights(self, weights):
            if self.w.data[0, 0] == 0:
                super().load_weights(weights)

    model = Looks({"w": zeros(4, 6)})
    record_layouts(model)
    model.process_weights_after_loading()
    with pytest.raises(LayoutError, match="staged tensor's value outside of any weight"):
        plan_reload(model, Manifest.from_tensors([("w", wire_tensor((4, 6)))]))


def test_a_weight_that_is_looked_at_before_the_first_one_is_part_of_what_the_plan_depends_on():
    class Looks(Toy):
        def load_weights(self, weights):
            half = slice(0, 2) if self.w.data[0, 0] == 0 else slice(2, 4)
            for _, tensor in weights:
                self.w.data[half].copy_(tensor)

    model = Looks({"w": zeros(4, 2)})
    weights = [("x", wire_tensor((2, 2)))]
    first = plan_for(model, weights, scope="partial")
    assert first.live_reads == ("w",)
    with torch.no_grad():
        model.w.fill_(1.0)
    second = plan_for(model, weights, scope="partial")
    assert (first.writes[0].dest.offset, second.writes[0].dest.offset) == (0, 16)


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_planned_without_moving_a_byte():
    rules = {
        "moved": lambda m, t: m.a.data.copy_(t.to(m.a.device)),
        "cuda": lambda m, t: m.b.data.copy_(t.cuda(non_blocking=True)),
        "value": lambda m, t: m.c.data.copy_(t) if not torch.equal(m.c.data, t) else None,
        "scaled": lambda m, t: m.d.data.copy_(t * m.table[0]),
        "rows": lambda m, t: m.e.data.__setitem__(torch.tensor([2, 0, 1], device="cuda"), t),
    }
    model = Toy({name: zeros(3, 2) for name in "abcde"}, rules, {"table": torch.full((2,), 2.0)}).cuda()
    plan = plan_for(model, [(name, wire_tensor((3, 2))) for name in rules])
    assert treatments(plan) == {
        "moved": "copy", "cuda": "copy", "value": "value_dependent", "scaled": "opaque", "rows": "copy",
    }  # fmt: skip
