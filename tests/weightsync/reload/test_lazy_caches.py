"""What forward builds on first use and keeps is new after a reload and stays where a captured graph holds it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import MODES, Captured, Net, cold, full, param, push, zeros

from weightsync.errors import LayoutError


class Sink(nn.Module):
    """A padded copy of `w`, built on first use."""

    def __init__(self) -> None:
        super().__init__()
        self.w = param(zeros(3))
        self.prepare()

    def prepare(self) -> None:
        """Where the cache starts."""

    def build(self) -> torch.Tensor:
        return torch.nn.functional.pad(self.w.data, (0, 1))


class InNone(Sink):
    def prepare(self) -> None:
        self.cache = None

    def forward(self) -> torch.Tensor:
        if self.cache is None:
            self.cache = self.build()
        return self.cache


class InDict(Sink):
    def prepare(self) -> None:
        self.caches: dict[str, torch.Tensor] = {}

    def forward(self) -> torch.Tensor:
        if "sink" not in self.caches:
            self.caches["sink"] = self.build()
        return self.caches["sink"]


class InList(Sink):
    def prepare(self) -> None:
        self.caches: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        if not self.caches:
            self.caches.append(self.build())
        return self.caches[0]


class Holder:
    padded: torch.Tensor | None = None


class InHelper(Sink):
    def prepare(self) -> None:
        self.holder = Holder()

    def forward(self) -> torch.Tensor:
        if self.holder.padded is None:
            self.holder.padded = self.build()
        return self.holder.padded


class InProperty(Sink):
    @functools.cached_property
    def padded(self) -> torch.Tensor:
        return self.build()

    def forward(self) -> torch.Tensor:
        return self.padded


class InMethod(Sink):
    def prepare(self) -> None:
        self.caches: dict[str, Any] = {"of": {}}

    def cached(self) -> torch.Tensor:
        return self.caches["of"].setdefault("sink", self.build())

    def forward(self) -> torch.Tensor:
        return self.cached()


class InTuple(Sink):
    def prepare(self) -> None:
        self.pair: tuple[torch.Tensor, int] | None = None

    def forward(self) -> torch.Tensor:
        if self.pair is None:
            self.pair = (self.build(), 1)
        return self.pair[0]


class AfterReturn(InNone):
    def forward(self) -> torch.Tensor:
        if self.cache is not None:
            return self.cache
        self.cache = self.build()
        return self.cache


class ByFlag(InNone):
    def prepare(self) -> None:
        self.cache, self.is_ready = None, False

    def forward(self) -> torch.Tensor:
        if not self.is_ready:
            self.cache = self.build()
            self.is_ready = True
        return self.cache


class BySetattr(InNone):
    def forward(self) -> torch.Tensor:
        if not hasattr(self, "padded"):
            setattr(self, "padded", self.build())  # noqa: B010
        return self.padded


class ByMatch(InNone):
    def forward(self) -> torch.Tensor:
        match self.cache:
            case None:
                self.cache = self.build()
        return self.cache


class ByLocalName(InNone):
    def forward(self) -> torch.Tensor:
        cache = self.cache
        if cache is None:
            cache = self.build()
            self.cache = cache
        return cache


class ByLocalDict(InDict):
    def forward(self) -> torch.Tensor:
        caches = self.caches
        if "sink" not in caches:
            caches["sink"] = self.build()
        return caches["sink"]


class ByWalrus(InNone):
    def forward(self) -> torch.Tensor:
        if (cache := self.cache) is None:
            cache = self.cache = self.build()
        return cache


class ByRegistering(Sink):
    def forward(self) -> torch.Tensor:
        if not hasattr(self, "padded"):
            self.register_buffer("padded", self.build(), persistent=False)
        return self.padded


class InBuffer(Sink):
    def prepare(self) -> None:
        self.register_buffer("padded", None)

    def forward(self) -> torch.Tensor:
        if self.padded is None:
            self.padded = self.build()
        return self.padded


class Padder:
    def __init__(self) -> None:
        self.padded: torch.Tensor | None = None
        self.inner = self

    def get(self, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.padded is None:
            self.padded = build()
        return self.padded

    __call__ = get


class ByHelper(Sink):
    def prepare(self) -> None:
        self.padder = Padder()

    def forward(self) -> torch.Tensor:
        return self.padder.get(self.build)


class ByCalledHelper(ByHelper):
    def forward(self) -> torch.Tensor:
        return self.padder(self.build)


class ByHelperOfHelper(ByHelper):
    def forward(self) -> torch.Tensor:
        return self.padder.inner.get(self.build)


class Kernel:
    def __init__(self, padded: torch.Tensor) -> None:
        self.padded = padded


class InKernel(Sink):
    def prepare(self) -> None:
        self.kernel: Kernel | None = None

    def forward(self) -> torch.Tensor:
        if self.kernel is None:
            self.kernel = Kernel(self.build())
        return self.kernel.padded


KINDS = [
    *(
        ByLocalName,
        ByLocalDict,
        ByWalrus,
        ByRegistering,
        InBuffer,
        ByHelper,
        ByCalledHelper,
        ByHelperOfHelper,
        InKernel,
    ),
    *(AfterReturn, BySetattr, ByMatch, InNone, InDict, InList, InHelper, InProperty, InMethod, InTuple),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_cache_that_forward_builds_is_new_after_a_push(kind: Callable[[], Sink], mode: str, recorded: bool) -> None:
    model = Net(l=kind())
    if recorded:
        cold(model, {"l.w": full(1, 3)})
    else:
        model.load_weights([("l.w", full(1, 3))])
    first = model.l()
    address = first.data_ptr()
    for value in (5, 7, 7):
        report = push(model, {"l.w": full(value, 3)}, mode)
        assert report.rebuilt_on_forward
        assert model.l().tolist() == [value] * 3 + [0]
        again = model.l()
        assert again.tolist() == [value] * 3 + [0]
        assert again.data_ptr() == address
        assert first.tolist() == again.tolist()  # what a captured graph reads


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_pushes_without_a_forward_between_them(kind: Callable[[], Sink], mode: str) -> None:
    model = cold(Net(l=kind()), {"l.w": full(1, 3)})
    address = model.l().data_ptr()
    for value in (5, 7):
        push(model, {"l.w": full(value, 3)}, mode)
    assert model.l().tolist() == [7, 7, 7, 0]
    assert model.l().data_ptr() == address


@pytest.mark.parametrize("mode", MODES)
def test_what_an_engine_binds_after_the_first_load_is_no_cache(mode: str) -> None:
    model = Net(l=InDict())
    cold(model, {"l.w": full(1, 3)})
    model.l.kv_cache = full(9, 4)
    model.l.tables = {"rope": full(8, 2)}
    graph = Captured(model)
    push(model, {"l.w": full(5, 3)}, mode)
    graph.check(model)
    assert model.l.kv_cache.tolist() == [9] * 4
    assert model.l.tables["rope"].tolist() == [8, 8]


class Keeping(Sink):
    """Keeps its last input, of any size, and an engine's cache that forward writes into."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * self.w.data.sum()
        self.kv["k"][:1] = x[:1]
        return self.last


@pytest.mark.parametrize("mode", MODES)
def test_what_forward_binds_each_time_is_no_cache(mode: str) -> None:
    model = cold(Net(l=Keeping()), {"l.w": full(1, 3)})
    model.l.kv = {"k": full(9, 2)}
    model.l(full(1, 2))
    report = push(model, {"l.w": full(5, 3)}, mode)
    assert not report.rebuilt_on_forward
    assert model.l(full(1, 4)).tolist() == [15] * 4
    assert model.l.kv["k"].tolist() == [1, 9]


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_made_before_the_next_forward_shares_nothing(mode: str) -> None:
    model = cold(Net(l=InNone()), {"l.w": full(1, 3)})
    old = model.l()
    push(model, {"l.w": full(5, 3)}, mode)
    copied = copy.deepcopy(model)
    copied.l.w.data.fill_(6)
    for _ in range(2):
        assert copied.l().tolist() == [6, 6, 6, 0]
    assert old.tolist() == [1, 1, 1, 0]
    assert model.l().tolist() == [5, 5, 5, 0]
    assert model.l().data_ptr() == old.data_ptr() != copied.l().data_ptr()


def test_a_rebuilt_cache_of_another_shape_is_an_error_that_names_it() -> None:
    class Growing(InNone):
        size = 1

        def build(self) -> torch.Tensor:
            return torch.nn.functional.pad(self.w.data, (0, self.size))

    model = cold(Net(l=Growing()), {"l.w": full(1, 3)})
    model.l()
    push(model, {"l.w": full(5, 3)}, "direct")
    model.l.size = 2
    with pytest.raises(LayoutError, match=r"l\.cache: .*\(5,\), it was .*\(4,\)"):
        model.l()


@pytest.mark.parametrize("mode", MODES)
def test_a_flag_that_says_that_a_cache_was_built_goes_with_it(mode: str) -> None:
    model = cold(Net(l=ByFlag()), {"l.w": full(1, 3)})
    address = model.l().data_ptr()
    for value in (5, 7):
        push(model, {"l.w": full(value, 3)}, mode)
        assert [model.l().tolist() for _ in range(2)] == [[value] * 3 + [0]] * 2
        assert model.l().data_ptr() == address
        assert model.l.is_ready


class Numbers(Sink):
    """Keeps numbers that follow from the weights."""

    def prepare(self) -> None:
        self.largest: float | None = None
        self.by_name: dict[str, float] = {}
        self.calls = 0

    def forward(self) -> list[float]:
        self.calls += 1
        if self.largest is None:
            self.largest = float(self.w.data.max())
        if "sum" not in self.by_name:
            self.by_name["sum"] = float(self.w.data.sum())
        return [self.largest, self.by_name["sum"]]


@pytest.mark.parametrize("mode", MODES)
def test_numbers_that_forward_takes_from_weights_are_taken_again(mode: str) -> None:
    model = cold(Net(l=Numbers()), {"l.w": full(1, 3)})
    model.l()
    for num_calls, value in enumerate((5, 7, 7), 2):
        report = push(model, {"l.w": full(value, 3)}, mode)
        assert sorted(report.rebuilt_on_forward) == ["l.by_name['sum']", "l.largest"]
        assert model.l() == [value, 3 * value]
        assert model.l.calls == num_calls
