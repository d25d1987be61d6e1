"""Over random loaders made of view chains: the plan's copies give the loaders' bytes, its proof counts as they do."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_toys import as_bytes, plan_for, randomised, replay
from torch import nn

from weightsync.errors import CoverageError
from weightsync.manifest import Manifest
from weightsync.plan.plan import plan_reload

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.int32]


def narrowed(view, choose):
    dim = choose(view.dim())
    start = choose(view.shape[dim])
    return view.narrow(dim, start, 1 + choose(view.shape[dim] - start))


def chunked(view, choose):
    return view.chunk(2, choose(view.dim()))[0]


def strided(view, choose):
    return view[:: 1 + choose(2)]


def selected(view, choose):
    dim = choose(view.dim())
    return view.select(dim, choose(view.shape[dim]))


def transposed(view, choose):
    return view.transpose(choose(view.dim()), choose(view.dim()))


def split_dim(view, choose):
    dim = choose(view.dim())
    return view.unflatten(dim, (2, view.shape[dim] // 2)) if view.shape[dim] % 2 == 0 else view


def with_unit_dim(view, choose):
    return view.unsqueeze(choose(view.dim() + 1))


VIEWS = [narrowed, chunked, strided, selected, transposed, split_dim, with_unit_dim]
MOVES = [lambda t: t, lambda t: t.to(t.device), lambda t: t.detach(), lambda t: t.contiguous(), lambda t: t.clone()]


def inverted(tensor):
    return tensor.reshape(-1).view(torch.uint8).bitwise_not().view(tensor.dtype).reshape(tensor.shape)


def reversed_items(tensor):
    items = tensor.reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
    return items.flip(0).reshape(-1).view(tensor.dtype).reshape(tensor.shape)


COMPUTES = [inverted, reversed_items]


def copied(target, source):
    target.copy_(source)


def assigned(target, source):
    target[...] = source


def in_a_list(target, source):
    torch._foreach_copy_([target], [source])


WRITES = [copied, assigned, in_a_list]


@dataclass
class Rule:
    """How one name is loaded: a chain of views of a parameter, a larger wire tensor cut down to fit, and a write."""

    param: str
    views: list
    choices: list
    extra: list  # per dim of the target: rows before it and after it in the wire tensor
    permute: bool
    move: object
    compute: object
    write: object
    as_bytes: bool

    def target(self, model):
        choices = iter(self.choices)
        view = getattr(model, self.param).data
        for function in self.views:
            if view.dim():
                view = function(view, lambda n: next(choices) % max(n, 1))
        return view

    def wire_shape(self, shape):
        padded = [size + before + after for size, (before, after) in zip(shape, self.extra, strict=False)]
        return tuple(reversed(padded)) if self.permute else tuple(padded)

    def load(self, model, tensor):
        target = self.target(model)
        source = tensor.permute(tuple(reversed(range(tensor.dim())))) if self.permute else tensor
        for dim, (size, (before, _)) in enumerate(zip(target.shape, self.extra, strict=False)):
            source = source.narrow(dim, before, size)
        source = self.move(source)
        if self.compute is not None:
            source = self.compute(source.clone(memory_format=torch.contiguous_format))
        if self.as_bytes and target.dim() and target.stride(-1) == 1 == source.stride(-1) and target.shape[-1] > 1:
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        self.write(target, source)


RULES = st.builds(
    Rule,
    param=st.sampled_from(["a", "b"]),
    views=st.lists(st.sampled_from(VIEWS), max_size=4),
    choices=st.just([]),
    extra=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=8, max_size=8),
    permute=st.booleans(),
    move=st.sampled_from(MOVES),
    compute=st.sampled_from([None, None, None, *COMPUTES]),
    write=st.sampled_from(WRITES),
    as_bytes=st.booleans(),
)


class Model(nn.Module):
    def __init__(self, shapes, dtype, rules):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        self.rules = rules

    def load_weights(self, weights):
        for name, tensor in weights:
            self.rules[int(name.removeprefix("rule"))].load(self, tensor)


@st.composite
def cases(draw):
    shapes = {name: tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))) for name in "ab"}
    dtype = draw(st.sampled_from(DTYPES))
    rules = draw(st.lists(RULES, min_size=1, max_size=4))
    for rule in rules:
        rule.choices = draw(st.lists(st.integers(0, 11), min_size=16, max_size=16))
    model = Model(shapes, dtype, rules)
    wire = []
    for number, rule in enumerate(rules):
        shape = rule.wire_shape(rule.target(model).shape)
        size = torch.Size(shape).numel() * dtype.itemsize
        noise = torch.randint(0, 120, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        wire.append((f"rule{number}", noise.view(dtype).reshape(shape)))
    return shapes, dtype, rules, wire


def written_elements(shapes, dtype, rule, tensor):
    """The bytes that one name writes, found by loading it over two different backgrounds."""
    results = []
    for background in (0, 255):
        model = Model(shapes, dtype, [])
        for param in model.parameters():
            param.data.view(torch.uint8).fill_(background)
        rule.load(model, tensor.clone())
        results.append([as_bytes(param) for param in model.parameters()])
    return [first == second for first, second in zip(*results, strict=True)]


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_the_plan_does_what_the_loaders_do_and_counts_what_they_write(case):
    shapes, dtype, rules, wire = case
    cold, model = randomised(Model(shapes, dtype, rules)), randomised(Model(shapes, dtype, rules))
    counts = [torch.zeros(p.numel() * dtype.itemsize, dtype=torch.int64) for p in model.parameters()]
    for rule, (_, tensor) in zip(rules, wire, strict=True):
        for total, hit in zip(counts, written_elements(shapes, dtype, rule, tensor), strict=True):
            total += hit.to(torch.int64)
    if any(bool((count > 1).any()) for count in counts):
        with pytest.raises(CoverageError) as caught:
            plan_reload(model, Manifest.from_tensors(wire), scope="partial")
        assert caught.value.duplicated
        return
    plan = plan_for(model, wire, scope="partial")
    assert plan.coverage.written_bytes == sum(int(count.sum()) for count in counts)
    for number, rule in enumerate(rules):
        if rule.compute is None and rule.move in MOVES[:3]:
            assert plan.names[f"rule{number}"].treatment == "copy"
    with torch.no_grad():
        cold.load_weights((name, tensor.clone()) for name, tensor in wire)
    replay(plan, model, wire)
    for left, right in zip(cold.parameters(), model.parameters(), strict=True):
        assert torch.equal(as_bytes(left), as_bytes(right))
    whole = all(bool((count == 1).all()) for count in counts)
    if whole:
        assert plan_for(model, wire).coverage.missing == ()
    else:
        with pytest.raises(CoverageError) as caught:
            plan_reload(model, Manifest.from_tensors(wire))
        incomplete = {name for name, count in zip("ab", counts, strict=True) if bool((count == 0).any())}
        assert {name.split("[")[0] for name in caught.value.missing} == incomplete
