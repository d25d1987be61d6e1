"""Collectives over real gloo groups: exact bytes, who gets what, and peers that send garbage, leave, or never come."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from weightsync.control import to_ranges
from weightsync.errors import PeerFailed, ProtocolError, TransportError, TransportTimeout
from weightsync.manifest import Manifest
from weightsync.transport.base import Feed, Mine, byte_view
from weightsync.transport.buckets import Bucket
from weightsync.transport.collective import CollectiveLink, CollectiveSender, check_seal, seal
from weightsync.transport.groups import GlooGroup, NcclGroup, local_address
from weightsync.transport.streams import EVERYONE, Step

CPU = torch.device("cpu")
DEADLINE = 30.0


def together(*functions):
    """Runs functions at the same time; gives results, or errors as values."""
    outcomes = [None] * len(functions)

    def run(index):
        try:
            outcomes[index] = functions[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a wait without a deadline"
    return outcomes


class Calls:
    """What the client does with a post: runs every link's receive on a thread of its own."""

    def __init__(self, links, names=None):
        self.links, self.names, self.got, self.errors = links, names, [{} for _ in links], []
        self.threads = []
        self.spoil = lambda data, own: (data, own)

    def __call__(self, data, per_rank, num_waits=1):
        def receive(index):
            try:
                told, own = self.spoil(dict(data), dict(per_rank[index]))
                for bucket, buffer in self.links[index].receive("model", self.names, told, own):
                    for chunk in bucket.chunks:
                        part = bytes(buffer[chunk.offset : chunk.offset + chunk.num_bytes].tolist())
                        self.got[index].setdefault(chunk.name, bytearray()).extend(part)
            except Exception as error:
                self.errors.append(error)
                self.links[index].close()

        self.threads = [threading.Thread(target=receive, args=(i,)) for i in range(len(self.links))]
        for thread in self.threads:
            thread.start()
        return self

    def check(self):
        if self.errors:
            raise self.errors[0]

    def wait(self):
        for thread in self.threads:
            thread.join(120)
            assert not thread.is_alive()
        self.check()


def connected(tensors, owners, cap=1024, resident=True):
    """A sender and one link per receiver, joined."""
    manifest = Manifest.from_tensors(tensors.items())
    num_receivers = max(map(max, owners)) + 1
    feed = Feed(
        manifest,
        tuple(map(frozenset, owners)),
        num_receivers,
        lambda: iter(tensors.items()),
        lambda: tensors if resident else None,
    )
    sender = CollectiveSender("gloo", GlooGroup, "127.0.0.1", {"model": feed}, cap, CPU, DEADLINE)
    _, offer, own = sender.refresh()
    links = [CollectiveLink(GlooGroup, CPU) for _ in range(num_receivers)]
    mine = [Mine(manifest, tuple(i for i, o in enumerate(owners) if r in o)) for r in range(num_receivers)]
    outcomes = together(
        lambda: sender.connect(DEADLINE),
        *(lambda i=i: links[i].connect(offer, own[i], {"model": mine[i]}, DEADLINE) for i in range(num_receivers)),
    )
    assert not any(outcomes), outcomes
    return sender, links, mine


def mixed_tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "three": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "f": torch.tensor([1.5]),
        "eight": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.zeros(0, 7),
        "long": torch.randn(2000, generator=generator),
        "sixteen": torch.randn(7, 11, generator=generator).bfloat16(),
    }


def bytes_of(tensors):
    return {name: bytes(byte_view(t.contiguous()).tolist()) for name, t in tensors.items()}


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "one at a time"])
@pytest.mark.parametrize("num_receivers", [1, 3])
def test_any_mix_of_dtypes_arrives_byte_for_byte(resident, num_receivers):
    tensors = mixed_tensors()
    sender, links, _ = connected(tensors, [set(range(num_receivers))] * len(tensors), resident=resident)
    for _ in range(2):
        calls = Calls(links)
        sent = sender.send("model", None, calls, lambda n: None)
        assert sent == sum(t.nbytes for t in tensors.values())
        assert calls.got == [bytes_of(tensors)] * num_receivers
        tensors["long"] = tensors["long"] + 1  # other memory: cached views must not be sent again
    sender.close()


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "one at a time"])
def test_each_receiver_gets_its_own_and_the_wire_carries_no_more(resident):
    tensors = mixed_tensors()
    owners = [{0, 1, 2}, {0}, {1, 2}, {2}, {1}, {0, 1}, {0, 1, 2}]
    sender, links, mine = connected(tensors, owners, resident=resident)
    calls = Calls(links)
    sent = sender.send("model", None, calls, lambda n: None)
    everything = bytes_of(tensors)
    names = list(tensors)
    for index, got in enumerate(calls.got):
        assert got == {names[i]: everything[names[i]] for i in mine[index].owned}
    sizes = [t.nbytes for t in tensors.values()]
    assert sent == sum(n if len(o) == 3 else n * len(o) for n, o in zip(sizes, owners, strict=True))
    sender.close()


def test_a_part_of_the_names_travels_alone():
    tensors = mixed_tensors()
    sender, links, _ = connected(tensors, [{0, 1}, {0}, {1}, {0, 1}, {0}, {0, 1}, {1}])
    names = ["long", "f", "sixteen"]
    calls = Calls(links, names)
    sender.send("model", names, calls, lambda n: None)
    assert [set(got) for got in calls.got] == [{"long", "f"}, {"long", "sixteen"}]
    sender.close()


def test_a_receiver_that_packs_differently_refuses_before_it_enters_a_collective():
    tensors = mixed_tensors()
    sender, links, _ = connected(tensors, [{0}] * len(tensors))
    links[0]._bucket_bytes *= 2
    calls = Calls(links)
    with pytest.raises(TransportError) as caught:
        sender.send("model", None, calls, lambda n: None)
    assert isinstance(caught.value, ProtocolError | PeerFailed)
    assert isinstance(calls.errors[0], ProtocolError)
    assert "the two sides pack differently" in str(calls.errors[0])
    sender.close()


def test_bytes_of_another_update_are_refused_before_they_are_used():
    tensors = mixed_tensors()
    sender, links, _ = connected(tensors, [{0}] * len(tensors))
    calls = Calls(links)
    calls.spoil = lambda data, own: ({"nonce": "00" * 8}, own)
    with pytest.raises(TransportError):
        sender.send("model", None, calls, lambda n: None)
    assert isinstance(calls.errors[0], ProtocolError)
    assert "expected message 0" in str(calls.errors[0])
    assert calls.got == [{}]
    sender.close()


def test_garbage_is_refused_before_it_is_used():
    tensors = mixed_tensors()
    manifest = Manifest.from_tensors(tensors.items())
    store = GlooGroup.host_store("127.0.0.1", "secret", DEADLINE)
    link = CollectiveLink(GlooGroup, CPU)
    offer = {"host": "127.0.0.1", "port": store.port, "token": "secret", "receivers": 1, "bucket_bytes": 4096}
    own = {"index": 0, "everyone": {"model": to_ranges(range(len(manifest)))}}
    mine = {"model": Mine(manifest, tuple(range(len(manifest))))}
    group, joined = together(
        lambda: GlooGroup(store, 0, 2, "127.0.0.1", DEADLINE, CPU), lambda: link.connect(offer, own, mine, DEADLINE)
    )
    assert joined is None
    steps = link._steps("model", None)
    told = {"messages": len(steps), "bytes": sum(s.bucket.num_bytes for s in steps)}
    garbage = torch.randint(0, 255, (steps[0].bucket.num_bytes + 32,), dtype=torch.uint8)
    work = group.broadcast(garbage)
    with pytest.raises(ProtocolError, match="end with no seal"):
        next(link.receive("model", None, {"nonce": "11" * 8}, told))
    group.wait(work)
    link.close()
    group.close()


@pytest.mark.parametrize("nonce", [None, 7, "xyz"])
def test_a_nonce_that_is_no_nonce_is_refused(nonce):
    tensors = {"a": torch.randn(4)}
    sender, links, _ = connected(tensors, [{0}])
    with pytest.raises(ProtocolError, match="nonce"):
        next(links[0].receive("model", None, {"nonce": nonce}, {"messages": 1, "bytes": 256}))
    sender.close()


def test_a_seal_names_what_differs():
    step = Step(EVERYONE, 4, Bucket((), 512))
    check_seal(seal(b"12345678", step), b"12345678", step)
    with pytest.raises(ProtocolError, match=r"expected message 4 .* got message 5"):
        check_seal(seal(b"12345678", Step(EVERYONE, 5, Bucket((), 512))), b"12345678", step)


def test_a_trainer_that_leaves_is_seen_at_once():
    tensors = {"a": torch.randn(4000)}
    sender, links, _ = connected(tensors, [{0, 1}])
    told = {"messages": len(links[0]._steps("model", None)), "bytes": 0}
    told["bytes"] = sum(s.bucket.num_bytes for s in links[0]._steps("model", None))

    def wait(link):
        return next(link.receive("model", None, {"nonce": "11" * 8}, told))

    def leave():
        time.sleep(0.2)
        sender.close()

    first, second, _ = together(lambda: wait(links[0]), lambda: wait(links[1]), leave)
    assert isinstance(first, PeerFailed), first
    assert isinstance(second, PeerFailed), second  # by the deadline it would be a timeout


def test_a_silent_trainer_is_a_timeout_on_every_receiver():
    tensors = {"a": torch.randn(40)}
    sender, links, _ = connected(tensors, [{0, 1}])
    for link in links:
        link._group._timeout = timedelta(seconds=0.2)
    told = {"messages": 1, "bytes": 256}
    first, second = together(
        *(lambda link=link: next(link.receive("model", None, {"nonce": "11" * 8}, told)) for link in links)
    )
    for error in (first, second):
        assert isinstance(error, TransportTimeout | PeerFailed), error
    sender.close()


def pair():
    """Two ranks of a gloo group, joined."""
    store = GlooGroup.host_store("127.0.0.1", "secret", DEADLINE)
    remote = GlooGroup.join_store("127.0.0.1", store.port, "secret", DEADLINE)
    ranks = together(
        lambda: GlooGroup(store, 0, 2, "127.0.0.1", DEADLINE, CPU),
        lambda: GlooGroup(remote, 1, 2, "127.0.0.1", DEADLINE, CPU),
    )
    GlooGroup.close_store(store)
    return ranks


def test_a_wait_in_a_broadcast_ends_when_another_channel_knows_that_it_is_in_vain():
    class ElsewhereError(Exception):
        pass

    asked = []

    def meanwhile():
        asked.append(len(asked))
        if len(asked) == 2:
            raise ElsewhereError

    trainer, engine = pair()
    buffer = torch.zeros(8)
    work = engine.broadcast(buffer)
    with pytest.raises(ElsewhereError):
        engine.wait(work, meanwhile)
    trainer.wait(trainer.broadcast(torch.ones(8)), meanwhile)
    engine.wait(work, meanwhile)
    assert buffer.tolist() == [1] * 8, "a wait that was given up leaves the work as it was"
    for rank in (trainer, engine):
        rank.close()


def test_a_broadcast_that_fails_while_it_is_watched_says_how():
    trainer, engine = pair()
    work = engine.broadcast(torch.zeros(8))
    trainer.close()
    with pytest.raises(PeerFailed, match="a peer left"):
        engine.wait(work, lambda: None)
    engine.close()


def test_nccl_is_watched_too():
    class ElsewhereError(Exception):
        pass

    class Work:
        def is_completed(self):
            return False

    def meanwhile():
        raise ElsewhereError

    group = NcclGroup.__new__(NcclGroup)
    group._deadline_seconds = DEADLINE
    with pytest.raises(ElsewhereError):
        group.wait(Work(), meanwhile)


def test_receivers_that_never_come_are_a_timeout():
    feed = Feed(Manifest(()), (), 2, lambda: iter(()), dict)
    sender = CollectiveSender("gloo", GlooGroup, "127.0.0.1", {"model": feed}, 1024, CPU, 0.2)
    with pytest.raises(TransportTimeout, match="not all of 3 ranks joined in 0.2 s"):
        sender.connect(0.2)
    sender.close()


def test_a_group_can_be_left_and_another_joined_in_the_same_process():
    tensors = {"a": torch.randn(40)}
    for _ in range(3):
        sender, links, _ = connected(tensors, [{0, 1}])
        calls = Calls(links)
        sender.send("model", None, calls, lambda n: None)
        assert calls.got == [bytes_of(tensors)] * 2
        links[0].close()
        sender.close()


@pytest.mark.parametrize(
    ("offer", "own"),
    [
        ({"port": "x"}, {}),
        ({"port": 70000}, {}),
        ({"token": 7}, {}),
        ({"receivers": 0}, {}),
        ({"bucket_bytes": 3}, {}),
        ({}, {"index": 1}),
        ({}, {"everyone": {}}),
        ({}, {"everyone": {"model": [[0, 2]]}}),
    ],
)
def test_a_malformed_offer_is_refused(offer, own):
    manifest = Manifest.from_tensors([("a", torch.zeros(2))])
    whole = {"host": "127.0.0.1", "port": 1, "token": "", "receivers": 1, "bucket_bytes": 1024, **offer}
    part = {"index": 0, "everyone": {"model": [[0, 1]]}, **own}
    with pytest.raises(ProtocolError):
        CollectiveLink(GlooGroup, CPU).connect(whole, part, {"model": Mine(manifest, (0,))}, 1.0)


def test_the_default_process_group_is_never_touched():
    tensors = {"a": torch.randn(40)}
    sender, links, _ = connected(tensors, [{0}])
    Calls(links)
    assert not torch.distributed.is_initialized()
    sender.close()


def test_the_address_towards_this_host_is_this_hosts():
    assert local_address("127.0.0.1") == "127.0.0.1"
