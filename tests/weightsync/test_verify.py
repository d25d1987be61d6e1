"""Fingerprints see every reachable tensor, every bit and every move, and nothing else."""

import json

import pytest
import torch
from toys import Kernel, Layer, Net, codes, full, zeros

from weightsync import Fingerprint, VerifyError, fingerprint


def small():
    model = Net(l=Layer(w=codes(0, 2, 3)), m=Layer(w=zeros(2)))
    model.m.w = model.m.w
    model.l.kernel = Kernel(full(1, 2), torch.arange(3))
    model.l.register_buffer("b", full(2, 1), persistent=False)
    return model


def test_every_reachable_tensor_has_a_row_and_a_repeat_is_equal():
    model = small()
    print_ = fingerprint(model)
    assert set(print_.rows) == {"l.w", "l.b", "l.kernel.scale", "l.kernel.strides", "m.w"}
    assert print_ == fingerprint(model)
    assert not print_.diff(print_)


@pytest.mark.parametrize("path", ["l.w", "l.b", "l.kernel.scale", "m.w"])
def test_one_changed_bit_is_seen_at_its_path(path):
    model = small()
    before = fingerprint(model)
    places = {"l.w": model.l.w, "l.b": model.l.b, "l.kernel.scale": model.l.kernel.scale, "m.w": model.m.w}
    places[path].data.view(torch.int32).view(-1)[-1] ^= 1
    diff = fingerprint(model).diff(before)
    assert (diff.differing, diff.moved, diff.added, diff.removed) == ((path,), (), (), ())


def test_a_moved_tensor_with_the_same_bytes_is_moved_and_not_differing():
    model = small()
    before = fingerprint(model)
    model.l.b = model.l.b.clone()
    diff = fingerprint(model).diff(before)
    assert (diff.differing, diff.moved) == ((), ("l.b",))


def test_swapped_rows_differ():
    model = small()
    before = fingerprint(model)
    model.l.w.data.copy_(model.l.w.data.flip(0))
    assert fingerprint(model).diff(before).differing == ("l.w",)


def test_equal_bytes_under_another_dtype_or_shape_differ():
    model = small()
    before = fingerprint(model)
    model.l.kernel.scale = model.l.kernel.scale.view(torch.int32)
    model.l.b = model.l.b.view(1, 1)
    assert fingerprint(model).diff(before).differing == ("l.b", "l.kernel.scale")


def test_added_and_removed_paths_are_named():
    model = small()
    before = fingerprint(model)
    model.l.late = zeros(1)
    del model.l.b
    diff = fingerprint(model).diff(before)
    assert (diff.added, diff.removed) == (("l.late",), ("l.b",))


def test_bytes_are_compared_across_models_without_their_addresses():
    fingerprint(small()).expect_equal_bytes(fingerprint(small()))
    other = small()
    other.m.w.data.fill_(1)
    del other.l.b
    with pytest.raises(VerifyError, match=r"differing \(1\): m\.w; missing \(1\): l\.b"):
        fingerprint(other).expect_equal_bytes(fingerprint(small()))


def test_json_gives_back_an_equal_fingerprint():
    before = fingerprint(small())
    assert Fingerprint.from_json(before.to_json()) == before


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2)])
def test_empty_and_scalar_tensors_have_rows(shape):
    model = Net()
    model.register_buffer("b", torch.zeros(shape))
    row = fingerprint(model).rows["b"]
    assert (row.shape, len(row.digest)) == (shape, 32)


def test_tensors_without_bytes_have_a_row_and_no_digest():
    model = Net()
    model.m = torch.empty(2, device="meta")
    model.s = torch.eye(2).to_sparse()
    assert [(row.digest, row.address) for row in fingerprint(model).rows.values()] == [("", 0), ("", 0)]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        json.dumps({"format": "other", "tensors": {}}),
        json.dumps({"format": "weightsync-fingerprint-1", "tensors": {"a": [1, 2]}}),
        json.dumps({"format": "weightsync-fingerprint-1", "tensors": {"a": [1, 0, [1], [True], "float32", ""]}}),
        json.dumps({"format": "weightsync-fingerprint-1", "tensors": {"a": [1, 0, [1], [1], "floatxx", ""]}}),
    ],
)
def test_malformed_json_is_refused(text):
    with pytest.raises(VerifyError):
        Fingerprint.from_json(text)
