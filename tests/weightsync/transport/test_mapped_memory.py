"""Mapped memory: what is offered is checked before it is read, and nothing is left behind."""

import copy
import gc
import os

import pytest
import torch
from torch import nn

from weightsync.errors import LayoutError, ManifestError, ProtocolError, TransportError
from weightsync.manifest import Manifest
from weightsync.transport import memory
from weightsync.transport.base import Feed, Mine, byte_view
from weightsync.transport.memory import memory_link, memory_sender
from weightsync.transport.shared_memory import (
    Arena,
    SharedMemoryMapper,
    share_parameters,
    shared_memory_link,
    shared_memory_sender,
)

KINDS = {
    "memory": (lambda feeds, cap: memory_sender(feeds, cap, "cpu"), memory_link),
    "shared_memory": (shared_memory_sender, shared_memory_link),
}


class Done:
    def check(self):
        pass

    def wait(self):
        pass


def pair_of(kind, tensors, cap=512, owned=None):
    """A connected sender and link for one target, and a push that gives the bytes the link saw."""
    manifest = Manifest.from_tensors(tensors.items())
    owned = tuple(range(len(manifest))) if owned is None else tuple(owned)
    owners = tuple(frozenset({0, 1}) if i in owned else frozenset({1}) for i in range(len(manifest)))
    feed = Feed(manifest, owners, 2, lambda: iter(tensors.items()), lambda: tensors)
    make_sender, make_link = KINDS[kind]
    sender, link = make_sender({"model": feed}, cap), make_link()
    mine = {"model": Mine(manifest, owned)}
    state = {"generation": None}

    def push(names=None):
        generation, offer, own = sender.refresh()
        if generation != state["generation"]:
            link.connect(offer, own.get(0, {}), mine, 5)
            state["generation"] = generation
        got, seen = {}, []

        def post(data, per_rank, num_waits=1):
            for bucket, buffer in link.receive("model", names, data, {}):
                seen.append(bucket)
                for chunk in bucket.chunks:
                    got.setdefault(chunk.name, bytearray()).extend(
                        bytes(buffer[chunk.offset : chunk.offset + chunk.num_bytes].tolist())
                    )
            return Done()

        sender.send("model", names, post, lambda n: None)
        return {name: bytes(value) for name, value in got.items()}, seen

    return sender, link, push, mine


def bytes_of(tensors):
    return {name: bytes(byte_view(t.contiguous()).tolist()) for name, t in tensors.items()}


def mixed_tensors():
    base = torch.arange(40, dtype=torch.uint8)
    return {
        "three": base[1:4],
        "f": torch.tensor([1.5]),
        "eight": torch.randn(5).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.zeros(0, 7),
        "transposed": torch.randn(6, 50).t(),
        "long": torch.randn(300),
        "flag": torch.tensor([True, False, True]),
        "rest": base[4:],
    }


@pytest.mark.parametrize("kind", KINDS)
def test_any_mix_of_dtypes_arrives_byte_for_byte(kind):
    tensors = mixed_tensors()
    sender, link, push, _ = pair_of(kind, tensors)
    assert push()[0] == bytes_of(tensors)
    some = ["rest", "three", "long"]
    assert push(some)[0] == {name: bytes_of(tensors)[name] for name in some}
    link.close()
    sender.close()


def test_an_unchanged_offer_gives_the_same_bucket_objects():
    tensors = {"a": torch.randn(9), "b": torch.randn(4)}
    _, _, push, _ = pair_of("memory", tensors)
    first, second = push()[1], push()[1]
    assert [id(b) for b in first] == [id(b) for b in second]
    tensors["b"] = torch.randn(4)
    assert push()[0] == bytes_of(tensors), "a tensor in other memory has to be offered anew"


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_what_it_owns_alone(kind):
    tensors = mixed_tensors()
    _, _, push, _ = pair_of(kind, tensors, owned=[1, 4, 6])
    assert set(push()[0]) == {"f", "none", "long"}


def test_tensors_of_one_storage_are_one_allocation():
    base = torch.randn(100)
    sender, *_ = pair_of("memory", {"a": base[:10], "b": base[20:50], "c": base[50:]})
    assert len(sender.refresh()[1]["allocations"]) == 1


def test_closing_gives_memory_back():
    before = len(memory._OFFERED)
    sender, link, push, _ = pair_of("memory", {"a": torch.randn(9), "b": torch.randn(4).expand(3, 4)})
    push()
    assert len(memory._OFFERED) > before
    link.close()
    sender.close()
    assert len(memory._OFFERED) == before


def open_memory_files():
    """Distinct memory files that this process holds open (an mmap holds one too)."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.islink(path) and "weightsync" in os.readlink(path):
            found.add(os.stat(path).st_ino)
    return found


def mappings():
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("memfd:weightsync" in line for line in file)


def test_twenty_connections_leave_no_memory_file_and_no_mapping():
    files, maps = open_memory_files(), mappings()
    for _ in range(20):
        sender, link, push, _ = pair_of("shared_memory", {"a": torch.randn(900)})
        push()
        link.close()
        sender.close()
        del sender, link, push, _
    assert (open_memory_files(), mappings()) == (files, maps)


# ---- hostile offers ------------------------------------------------------------------------------------------------


def first_placed(offer):
    return offer["targets"]["model"]["placed"][0]


def spoil(offer, kind):
    row = first_placed(offer)
    size = offer["allocations"][row[1]]["num_bytes"]
    if kind == "offset past the end":
        row[2] = size - 1
    elif kind == "negative offset":
        row[2] = -1
    elif kind == "unknown allocation":
        row[1] = 99
    elif kind == "unknown entry":
        row[0] = 99
    elif kind == "no integer":
        row[2] = 0.0
    elif kind == "twice":
        offer["targets"]["model"]["placed"].append(list(row))
    elif kind == "missing tensor":
        offer["targets"]["model"]["placed"].pop()
    elif kind == "missing target":
        del offer["targets"]["model"]
    elif kind == "larger than it is":
        offer["allocations"][row[1]]["num_bytes"] += 4096
    elif kind == "no handle":
        offer["allocations"][row[1]]["handle"] = "gASVAAAA"
    elif kind == "slots missing":
        offer["targets"]["model"]["staged"] = [[0, 1]]


HOSTILE = [
    "offset past the end",
    "negative offset",
    "unknown allocation",
    "unknown entry",
    "no integer",
    "twice",
    "missing tensor",
    "missing target",
    "larger than it is",
    "no handle",
    "slots missing",
]


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("transport", KINDS)
def test_an_offer_that_reaches_outside_is_refused_before_a_read(transport, kind):
    arena = Arena(4096)
    arena.buffer.zero_()
    tensors = {"a": arena.buffer[:300], "b": arena.buffer[512:600]}
    sender, link, _, mine = pair_of(transport, tensors)
    offer = copy.deepcopy(sender.refresh()[1])
    spoil(offer, kind)
    with pytest.raises((ProtocolError, TransportError)):
        link.connect(offer, {}, mine, 5)


def test_memory_of_another_process_is_not_taken_for_ours():
    sender, link, _, mine = pair_of("memory", {"a": torch.randn(4)})
    offer = copy.deepcopy(sender.refresh()[1])
    offer["allocations"][0]["handle"]["pid"] += 1
    with pytest.raises(TransportError, match="works within one process"):
        link.connect(offer, {}, mine, 5)


@pytest.mark.parametrize("change", [{"fd": 0}, {"inode": 1}, {"pid": 2**22 + 5}, {"pid": -1}, {"fd": "3"}])
def test_a_memory_file_that_is_not_the_offered_one_is_refused(change):
    arena = Arena(4096)
    with pytest.raises((TransportError, ProtocolError)):
        SharedMemoryMapper().open({**arena.handle(), **change}, 4096)


def test_a_file_that_could_shrink_is_refused():
    fd = os.memfd_create("plain")
    os.ftruncate(fd, 4096)
    status = os.fstat(fd)
    handle = {"pid": os.getpid(), "fd": fd, "inode": status.st_ino, "device": status.st_dev}
    with pytest.raises(TransportError, match="cannot shrink"):
        SharedMemoryMapper().open(handle, 4096)
    os.close(fd)


def test_an_arena_cannot_shrink_under_its_readers():
    arena = Arena(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(arena._fd, 4096)


@pytest.mark.parametrize(
    "data", [{}, {"placed": 1}, {"placed": False, "bucket": 99, "slot": 0}, {"placed": False, "bucket": 0, "slot": 2}]
)
def test_an_update_that_names_no_bucket_is_refused(data):
    _sender, link, push, _ = pair_of("shared_memory", {"a": torch.randn(4)})
    push()
    with pytest.raises(ProtocolError):
        list(link.receive("model", None, data, {}))


def test_a_tensor_that_changed_its_shape_is_refused_by_name():
    tensors = {"a": torch.randn(4)}
    _, _, push, _ = pair_of("memory", tensors)
    tensors["a"] = torch.randn(5)
    with pytest.raises(ManifestError, match=r"a: metadata declares .*\[4\].*\[5\]"):
        push()


# ---- moving a module into an arena ---------------------------------------------------------------------------------


def test_sharing_keeps_values_objects_ties_and_strides():
    module = nn.Sequential(nn.Linear(5, 3), nn.Linear(5, 3))
    module[1].weight = module[0].weight
    module.register_buffer("view", torch.arange(12.0).view(3, 4).t())
    module.register_buffer("empty", torch.zeros(0))
    module.register_buffer("odd", torch.arange(3, dtype=torch.uint8))
    before = {n: t.clone() for n, t in module.state_dict().items()}
    strides = {n: t.stride() for n, t in module.state_dict().items()}
    parameters = list(module.parameters())
    arena = share_parameters(module)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert module[1].weight is module[0].weight
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.stride() == strides[name]
        if tensor.numel():
            start = tensor.data_ptr() - arena.buffer.data_ptr()
            assert 0 <= start < arena.num_bytes
    module[0].weight.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert not torch.equal(module[0].weight, before["0.weight"])


def test_an_arena_lives_as_long_as_the_module():
    before = open_memory_files()
    module = nn.Linear(3, 3)
    share_parameters(module)
    assert len(open_memory_files() - before) == 1
    del module
    assert not open_memory_files() - before


def test_only_cpu_tensors_can_be_shared():
    with pytest.raises(LayoutError, match="needs tensors on a CPU") as caught:
        share_parameters(nn.Linear(2, 2, device="meta"))
    assert caught.value.names == ("weight", "bias")
