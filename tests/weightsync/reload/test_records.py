"""Recorded layouts make the same tensors again: sharing, strides, classes, attributes; no byte is uninitialised."""

import gc
import weakref

import pytest
import torch
from torch import nn
from toys import full, param, zeros

from weightsync.reload.records import COPY_BYTES, allocate, equal_bytes, layouts_of, same_layout


def remake(tensors, device=None, **options):
    layouts = layouts_of(tensors, **options)
    made = allocate(layouts.values(), device)
    return [made[id(layouts[id(tensor)])] for tensor in tensors]


class Fancy(nn.Parameter):
    pass


@pytest.mark.parametrize("device", [None, "meta"])
def test_layout_class_and_attributes_come_back(device):
    tensor = torch.arange(24.0).view(4, 6)[1:, ::2].t()
    fancy = Fancy(torch.arange(6.0).view(2, 3), requires_grad=False)
    fancy.weight_loader = len
    made = remake([tensor, fancy], device)
    assert all(same_layout(a, b) for a, b in zip(made, [tensor, fancy], strict=True))
    assert type(made[1]) is Fancy
    assert made[1].weight_loader is len
    if device is None:
        assert torch.equal(made[0], tensor)
        assert torch.equal(made[1], fancy)
    else:
        assert made[0].is_meta


def test_shared_bytes_are_shared_again_and_others_are_not():
    base = torch.arange(12.0)
    views = [base, base[2:6], base[6:].view(2, 3), torch.arange(3.0), base[2:6].view(torch.int32)]
    made = remake(views)
    made[0].fill_(7)
    assert [tensor.flatten().tolist() for tensor in made[1:3]] == [[7] * 4, [7] * 6]
    assert made[3].tolist() == [0, 1, 2]
    assert made[4].tolist() == torch.tensor([7.0] * 4).view(torch.int32).tolist()
    assert made[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


def test_neighbours_in_one_storage_that_do_not_overlap_are_made_apart():
    base = torch.zeros(1 << 16)
    made = remake([base[:4], base[-4:]])
    assert [tensor.untyped_storage().nbytes() < 64 for tensor in made] == [True, True]


@pytest.mark.parametrize("value", [0.0, 3.5, float("nan"), -0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_large_filled_tensor_comes_back_filled(value, dtype):
    tensor = torch.full((COPY_BYTES + 3,), value).to(dtype)
    assert equal_bytes(remake([tensor])[0], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("place", ["rows", "columns", "both ends", "one element"])
def test_a_large_tensor_with_padding_of_another_value_comes_back(place, dtype):
    tensor = torch.zeros(300, 512)
    if place == "rows":
        tensor[290:] = -7
    elif place == "columns":
        tensor[:, 500:] = -7
    elif place == "both ends":
        tensor[:3], tensor[-1, -5:] = 2, float("nan") if dtype.is_floating_point else 5
    else:
        tensor[150, 7] = 3
    tensor = tensor.to(dtype)
    layouts = layouts_of([tensor])
    assert equal_bytes(allocate(layouts.values())[id(layouts[id(tensor)])], tensor)
    assert layouts[id(tensor)].keeps_start


def test_a_large_tensor_of_different_values_comes_back_as_zeros():
    assert torch.equal(remake([torch.randn(COPY_BYTES)])[0], torch.zeros(COPY_BYTES))


def test_recording_keeps_no_tensor_alive():
    tensor = torch.randn(COPY_BYTES)
    reference = weakref.ref(tensor.untyped_storage())
    layouts = layouts_of([tensor])
    del tensor
    gc.collect()
    assert reference() is None
    assert layouts


def test_an_alias_starts_from_the_bytes_of_now():
    tensor = param(full(1, 4))
    layouts = layouts_of([tensor], alias=True)
    tensor.data.fill_(5)
    made = allocate(layouts.values())[id(layouts[id(tensor)])]
    assert made.tolist() == [5] * 4
    made.data.fill_(6)
    assert tensor.tolist() == [5] * 4


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_scalars_and_empty_tensors(shape):
    tensor = torch.zeros(shape)
    assert same_layout(remake([tensor])[0], tensor)


def test_same_layout_ignores_the_stride_of_single_steps_and_nothing_else():
    assert same_layout(zeros(4, 1), zeros(4, 1).as_strided((4, 1), (1, 99)))
    assert not same_layout(zeros(4, 2), zeros(2, 4).t())
    assert not same_layout(zeros(4), zeros(4).int())
    assert not same_layout(zeros(4), zeros(2, 2))
