"""Several mapped buffers taken at once give the same bytes and the same refusals as one after the other."""

import pytest
import torch
from torch import nn

from weightsync.errors import CoverageError, LayoutError
from weightsync.manifest import Manifest
from weightsync.reload.session import finish_reload, reload_state, start_reload
from weightsync.transport.buckets import Bucket, Chunk


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        for name, size in (("a", 6), ("b", 10), ("c", 3)):
            self.register_parameter(name, nn.Parameter(torch.zeros(size), requires_grad=False))

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


TENSORS = {"a": torch.arange(6.0), "b": torch.arange(10.0) + 50, "c": torch.arange(3.0) - 7}
MANIFEST = Manifest.from_tensors(TENSORS.items())


def packed(*names, offset=0):
    """A buffer that holds these tensors whole, and the bucket that says where."""
    chunks, parts, at = [], [torch.zeros(offset, dtype=torch.uint8)], offset
    for name in names:
        data = TENSORS[name].view(torch.uint8)
        chunks.append(Chunk(name, 0, data.numel(), at))
        parts.append(data)
        at += data.numel()
    buffer = torch.cat(parts)
    return Bucket(tuple(chunks), buffer.numel()), buffer


def values(model):
    return {name: parameter.data.clone() for name, parameter in model.named_parameters()}


def check_new(model):
    for name, tensor in values(model).items():
        assert torch.equal(tensor, TENSORS[name]), name


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
@pytest.mark.parametrize("split", [[("a", "b", "c")], [("b",), ("c", "a")], [("c",), ("b",), ("a",)]])
def test_all_at_once_gives_the_bytes(mode, split):
    model = Plain()
    filled = [packed(*names, offset=4 * number) for number, names in enumerate(split)]
    for _ in range(3):  # the second time the same buckets are known
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        session = start_reload(model, mode=mode, manifest=MANIFEST)
        session.load_buckets(filled)
        report = finish_reload(model)
        assert report.num_names == 3
        check_new(model)


@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_a_name_in_two_buckets_is_refused(mode):
    model = Plain()
    session = start_reload(model, mode=mode, manifest=MANIFEST)
    with pytest.raises(CoverageError) as caught:
        session.load_buckets([packed("a", "b"), packed("b", "c")])
    assert caught.value.duplicated == ("b",)


def test_a_name_that_came_before_is_refused_before_it_is_written_again():
    model = Plain()
    session = start_reload(model, mode="direct", manifest=MANIFEST)
    known = [packed("a"), packed("b")]
    session.load_buckets(known)
    written = values(model)
    with pytest.raises(CoverageError) as caught:
        session.load_buckets(known)
    assert caught.value.duplicated == ("a",)
    assert all(torch.equal(tensor, written[name]) for name, tensor in values(model).items())
    session.abort()


def test_an_unknown_name_is_refused_and_nothing_is_written():
    model = Plain()
    session = start_reload(model, mode="direct", manifest=MANIFEST)
    _, buffer = packed("a")
    stranger = Bucket((Chunk("zzz", 0, 24, 0),), 24)
    with pytest.raises(CoverageError) as caught:
        session.load_buckets([(stranger, buffer)])
    assert caught.value.unexpected == ("zzz",)
    assert not any(tensor.any() for tensor in values(model).values())
    session.abort()
    assert reload_state(model) == "live"


def test_a_buffer_that_is_too_small_is_refused_though_its_bucket_is_known():
    model = Plain()
    filled = [packed("a", "b", "c")]
    start_reload(model, mode="direct", manifest=MANIFEST).load_buckets(filled)
    finish_reload(model)
    session = start_reload(model, mode="direct", manifest=MANIFEST)
    with pytest.raises(LayoutError):
        session.load_buckets([(filled[0][0], filled[0][1][:-4])])
    check_new(model)  # the bytes of the push before


def test_a_split_tensor_among_whole_ones_is_put_together():
    model = Plain()
    data = TENSORS["b"].view(torch.uint8)
    first = Bucket((Chunk("b", 0, 16, 0),), 16)
    second = Bucket((Chunk("b", 16, 24, 0),), 24)
    session = start_reload(model, mode="direct", manifest=MANIFEST)
    session.load_buckets([packed("a", "c"), (first, data[:16].clone()), (second, data[16:].clone())])
    finish_reload(model)
    check_new(model)


def test_tensors_that_lie_apart_are_staged_module_by_module_and_nothing_is_held():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "ab":
                part = nn.Module()
                part.w = nn.Parameter(torch.zeros(8), requires_grad=False)
                part.s = nn.Parameter(torch.zeros(2), requires_grad=False)
                self.add_module(name, part)

        def load_weights(self, weights):
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    tensors = {f"{m}.{p}": torch.rand(n) for p, n in (("w", 8), ("s", 2)) for m in "ab"}
    filled = []
    for part in "ws":  # all weights in one buffer, all scales in another
        names = [name for name in tensors if name.endswith(part)]
        data = [tensors[name].view(torch.uint8) for name in names]
        chunks = [
            Chunk(name, 0, d.numel(), i * data[0].numel()) for i, (name, d) in enumerate(zip(names, data, strict=True))
        ]
        filled.append((Bucket(tuple(chunks), sum(d.numel() for d in data)), torch.cat(data)))
    model = Pair()
    session = start_reload(model, mode="layerwise", manifest=Manifest.from_tensors(tensors.items()))
    session.load_buckets(filled)
    report = finish_reload(model)
    assert report.peak_held_bytes == 0
    assert report.peak_staged_bytes == 40
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor)
