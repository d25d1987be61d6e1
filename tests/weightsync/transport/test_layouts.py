"""Whether many tensors are laid out as they were: torch's guards may say yes, and nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from weightsync.transport import layouts
from weightsync.transport.layouts import Layouts


def make():
    return [
        torch.zeros(4, 6),
        torch.zeros(6, 4).t(),
        torch.zeros(()),
        torch.zeros(0, 3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.zeros(5)),
        torch.zeros(2, 3, 4, dtype=torch.float8_e4m3fn),
    ]


@pytest.fixture(params=["with torch's guards", "without"], autouse=True)
def with_and_without(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(layouts, "_TensorGuards", None)


def test_torch_has_the_guards():
    if layouts._TensorGuards is None:
        pytest.skip("this torch has none, or they are switched off here")
    assert Layouts(make())._guards is not None, "torch changed them: pushes are right, and slower than they could be"


CHANGES = {
    "shape": lambda t: torch.zeros(5, 6),
    "same numel": lambda t: t.view(6, 4),
    "same shape, transposed": lambda t: torch.zeros(6, 4).t(),
    "dtype of the same size": lambda t: t.view(torch.int32),
    "dtype": lambda t: t.double(),
    "one more dim": lambda t: t.unsqueeze(0),
    "strides": lambda t: torch.zeros(4, 7)[:, :6],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_seen_also_behind_the_same_object(change):
    tensors = make()
    kept = Layouts(tensors)
    assert kept.hold(tensors)
    tensors[0].data = change(tensors[0].data)
    assert not kept.hold(tensors)
    tensors[0].data = torch.ones(4, 6)
    assert kept.hold(tensors), "another address is no other layout"


def test_other_objects_of_the_same_layout_hold_and_fewer_or_reordered_ones_do_not():
    tensors = make()
    kept = Layouts(tensors)
    assert kept.hold(make())
    assert not kept.hold(tensors[:-1])
    assert not kept.hold([*tensors, tensors[0]])
    assert not kept.hold([tensors[1], tensors[0], *tensors[2:]])
    assert Layouts([]).hold([])
    assert not Layouts([]).hold(tensors)


def test_what_is_no_layout_does_not_matter():
    tensors = make()
    kept = Layouts(tensors)
    tensors[0].requires_grad_(True)
    tensors[4].requires_grad_(False)
    assert kept.hold(tensors)
    with torch.inference_mode():
        assert kept.hold(make())


def test_no_tensor_is_kept_alive():
    tensors = make()
    kept = Layouts(tensors)
    alive = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    assert kept.shapes[0] == (4, 6)


def test_a_sparse_tensor_has_a_layout_too():
    tensors = [torch.eye(3).to_sparse()]
    kept = Layouts(tensors)
    assert kept.hold(tensors)
    assert not kept.hold([torch.eye(4).to_sparse()])


def test_guards_that_fail_are_done_without(monkeypatch):
    def raises(*args, **kwargs):
        raise TypeError("another release takes other arguments")

    monkeypatch.setattr(layouts, "_TensorGuards", raises)
    tensors = make()
    kept = Layouts(tensors)
    assert kept.hold(tensors)
    assert not kept.hold(tensors[:-1])
