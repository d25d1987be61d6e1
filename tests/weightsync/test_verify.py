"""Fingerprints see every reachable tensor, every bit and every move, and nothing else."""

import json

import pytest
import torch
from toys import Kernel, Layer, Net, codes, full, zeros

from weightsync import Fingerprint, LayoutError, VerifyError, fingerprint
from weightsync.kernels.digest import digest


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


def test_tensors_without_bytes_have_no_digest_and_never_count_as_equal():
    model = Net()
    model.m = torch.empty(2, device="meta")
    model.freed = torch.ones(2)
    model.freed.untyped_storage().resize_(0)
    print_ = fingerprint(model)
    assert [(row.digest, row.address) for row in print_.rows.values()] == [("", 0), ("", 0)]
    assert print_.diff(print_).differing == ("m", "freed")


def per_channel(scale, zero, *values):
    data = torch.tensor(values).float().view(1, -1)
    return torch.quantize_per_channel(data, torch.tensor([scale]), torch.tensor([zero]), 0, torch.qint8)


def nested(layout, *values):
    return torch.nested.nested_tensor([torch.ones(2), torch.tensor(values)], layout=layout)


UNUSUAL = {
    "expanded": [lambda: full(1, 1).expand(3), lambda: full(2, 1).expand(3), lambda: torch.tensor([1.0, 1.0, 2.0])],
    "sparse": [
        lambda: torch.eye(3).to_sparse(), lambda: (torch.eye(3) * 2).to_sparse(),
        lambda: torch.eye(3).flip(0).to_sparse(),
    ],
    "csr": [lambda: torch.eye(3).to_sparse_csr(), lambda: (torch.eye(3) * 2).to_sparse_csr()],
    "csc": [lambda: torch.eye(3).to_sparse_csc(), lambda: torch.eye(3).flip(0).to_sparse_csc()],
    "bsr": [lambda: torch.eye(4).to_sparse_bsr((2, 2)), lambda: torch.eye(4).flip(0).to_sparse_bsr((2, 2))],
    "quantized": [
        lambda: torch.quantize_per_tensor(full(1, 3), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(full(2, 3), 0.2, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(full(2, 3), 0.1, 0, torch.qint8),
        lambda: torch.quantize_per_tensor(full(1, 3), 0.1, 1, torch.qint8),
    ],
    "quantized per channel": [
        lambda: per_channel(0.1, 0, 1, 2), lambda: per_channel(0.2, 0, 2, 4), lambda: per_channel(0.1, 0, 1, 3)
    ],
    "nested": [lambda: nested(torch.strided, 1.0, 1.0, 1.0), lambda: nested(torch.strided, 0.0, 1.0, 1.0),
               lambda: nested(torch.strided, 1.0, 1.0)],
    "jagged": [lambda: nested(torch.jagged, 1.0, 1.0, 1.0), lambda: nested(torch.jagged, 0.0, 1.0, 1.0)],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_values_of_unusual_tensors_are_compared(kind):
    def printed(make):
        model = torch.nn.Module()
        model.t = make()
        return fingerprint(model)

    prints = [printed(make) for make in UNUSUAL[kind]]
    for number, (one, make) in enumerate(zip(prints, UNUSUAL[kind], strict=True)):
        assert len(one.rows["t"].digest) == 32
        assert printed(make).diff(one).differing == ()
        assert all("t" in one.diff(other).differing for other in prints[:number])
        assert Fingerprint.from_json(one.to_json()) == one


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "quantized", "nested"])
def test_a_digest_of_what_is_more_than_its_bytes_is_refused(kind):
    with pytest.raises(LayoutError, match="no strided bytes"):
        digest(UNUSUAL[kind][0]())


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
