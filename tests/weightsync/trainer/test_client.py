"""A push over any transport gives the engine the trainer's bytes; one that fails never leaves half of them unsaid."""

import threading

import pytest
import torch
from push_toys import ExpertToy, Toy, addresses, expert_tensors, refill, state_bytes

from weightsync.errors import (
    CoverageError,
    LayoutError,
    ManifestError,
    ProtocolError,
    ReloadError,
    TornModelError,
    TransportError,
)
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.sources import ModuleSource, TensorSource, WeightSource
from weightsync.transport.shared_memory import share_parameters
from weightsync.worker.group import EndpointGroup
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

TRANSPORTS = ["memory", "shared_memory", "gloo"]
DEADLINE = 60.0


class LazySource(WeightSource):
    """One tensor at a time, each gone when the next is asked for: what a gathering trainer is."""

    def __init__(self, module):
        self._inner = ModuleSource(module)
        self.passes = 0
        self.fail_at = None

    @property
    def metadata(self):
        return self._inner.metadata

    def iter_full(self):
        self.passes += 1
        scratch = None
        for number, (name, tensor) in enumerate(self._inner.iter_full()):
            if number == self.fail_at:
                raise RuntimeError("the gather failed")
            if scratch is not None:
                scratch.view(torch.uint8).fill_(0xEE) if scratch.numel() and scratch.ndim else None
            scratch = tensor.clone()
            yield name, scratch


def connect(source, endpoint, transport, **options):
    return TrainerClient(source, endpoint, transport=transport, deadline_seconds=DEADLINE, bucket_bytes=512, **options)


@pytest.fixture(params=["in_process", "http"])
def reach(request):
    """How the client reaches a receiver."""
    servers = []

    def give(endpoint):
        if request.param == "in_process":
            return endpoint
        servers.append(BackgroundServer(endpoint))
        return servers[-1].url

    yield give
    for server in servers:
        server.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["direct", "layerwise"])
def test_pushes_give_the_trainers_bytes_at_the_same_addresses(transport, mode, reach):
    trainer, engine = Toy(1), Toy(2)
    before = addresses(engine)
    with connect(trainer, reach(Receiver(engine)), transport, mode=mode) as client:
        for version in (3, 4, 9):
            refill(trainer, version)
            report = client.push(version)
            assert report.version == version
            assert state_bytes(engine) == state_bytes(trainer)
        assert report.seconds["handshake"] < report.total_seconds
        assert report.bytes == sum(p.nbytes for p in trainer.parameters())
        assert report.tensors == len(list(trainer.parameters()))
    assert addresses(engine) == before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_that_gathers_one_tensor_at_a_time_is_read_before_the_next(transport):
    trainer, engine = Toy(1), Toy(2)
    source = LazySource(trainer)
    with connect(source, Receiver(engine), transport) as client:
        client.push()
        client.push()
    assert source.passes == 2
    assert state_bytes(engine) == state_bytes(trainer)


def test_an_arena_is_read_in_place_and_other_tensors_are_copied_once():
    trainer, engine = Toy(1), Toy(2)
    with connect(trainer, Receiver(engine), "shared_memory") as client:
        assert client.push().copied_bytes == sum(p.nbytes for p in trainer.parameters())
    arena = share_parameters(trainer)
    refill(trainer, 5)
    with connect(trainer, Receiver(engine), "shared_memory") as client:
        assert client.push().copied_bytes == 0
        refill(trainer, 6)
        assert client.push().copied_bytes == 0
        assert state_bytes(engine) == state_bytes(trainer)
        trainer.big.data = trainer.big.data.clone()  # leaves the arena: must be noticed, not read at its old place
        trainer.big.data.add_(1)
        assert client.push().copied_bytes == trainer.big.nbytes
        assert state_bytes(engine) == state_bytes(trainer)
    assert arena.is_open


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_transposed_tensor_arrives_in_its_own_order(transport):
    weight = torch.arange(40 * 33, dtype=torch.float32).view(33, 40).t()
    engine, trainer = Toy(2), Toy(1)
    tensors = {**dict(trainer.named_parameters()), "big": weight}
    with connect(TensorSource(tensors), Receiver(engine), transport) as client:
        client.push()
    assert torch.equal(engine.big, weight)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("order", ["weights first", "scales first"])
def test_separate_updates_make_one_push(transport, order, reach):
    trainer, engine = Toy(1), Toy(2)
    names = [name for name, _ in trainer.named_parameters()]
    parts = [[n for n in names if n.endswith("sixteen")], [n for n in names if not n.endswith("sixteen")]]
    if order == "scales first":
        parts.reverse()
    with connect(trainer, reach(Receiver(engine)), transport) as client:
        for version in (1, 2):
            refill(trainer, version)
            client.start(version)
            for part in parts:
                client.update(part)
            report = client.finish()
            assert report.tensors == len(names)
            assert state_bytes(engine) == state_bytes(trainer)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_partial_push_changes_what_it_names_alone(transport):
    trainer, engine = Toy(1), Toy(2)
    before = state_bytes(engine)
    tensors = {n: p for n, p in trainer.named_parameters() if n.startswith("layer1.")}
    with connect(TensorSource(tensors), Receiver(engine), transport, scope="partial") as client:
        report = client.push()
    after = state_bytes(engine)
    assert report.bytes == sum(t.nbytes for t in tensors.values())
    for name, value in state_bytes(trainer).items():
        assert after[name] == (value if name in tensors else before[name])


def test_targets_are_fed_by_name():
    model, draft, trainer, draft_trainer = Toy(1), Toy(2), Toy(3), Toy(4)
    receiver = Receiver({"model": model, "draft": draft})
    untouched = state_bytes(model)
    with connect(draft_trainer, receiver, "memory", target="draft") as client:
        client.push(5)
    assert state_bytes(draft) == state_bytes(draft_trainer)
    assert state_bytes(model) == untouched
    assert receiver.version is None, "the model was never pushed"
    with connect({"model": trainer, "draft": trainer}, receiver, "memory") as client:
        client.push(6)
    assert state_bytes(model) == state_bytes(draft) == state_bytes(trainer)
    with pytest.raises(ProtocolError, match="unknown targets: adapter"):
        connect(trainer, receiver, "memory", target="adapter").push()


# ---- refusals: before any live byte changes ----------------------------------------------------------------------


def broken_source(kind):
    tensors = dict(Toy(1).named_parameters())
    if kind == "missing":
        del tensors["layer1.sixteen"]
    elif kind == "unexpected":
        tensors["layer9.sixteen"] = torch.zeros(3)
    elif kind == "shape":
        tensors["big"] = torch.zeros(3, 3)
    else:
        tensors["big"] = tensors["big"].double()
    return TensorSource(tensors)


@pytest.mark.parametrize(
    ("kind", "error", "field", "names"),
    [
        ("missing", CoverageError, "missing", "layer1.sixteen"),
        ("unexpected", CoverageError, "unexpected", "layer9.sixteen"),
        ("shape", LayoutError, "names", "big"),
        ("dtype", LayoutError, "names", "big"),
    ],
)
def test_a_wrong_manifest_is_refused_by_name_and_the_engine_is_as_before(kind, error, field, names, reach):
    engine, trainer = Toy(2), Toy(1)
    receiver = Receiver(engine)
    before = state_bytes(engine)
    endpoint = reach(receiver)
    with pytest.raises(error) as caught:
        connect(broken_source(kind), endpoint, "auto").push()
    assert any(names in name for name in getattr(caught.value, field))
    assert state_bytes(engine) == before
    assert receiver.state == "live"
    with receiver.serving():
        pass
    with connect(trainer, endpoint, "auto") as client:
        client.push()
    assert state_bytes(engine) == state_bytes(trainer)


def test_versions_only_grow():
    engine, trainer = Toy(2), Toy(1)
    receiver = Receiver(engine)
    with connect(trainer, receiver, "memory") as client:
        client.push(5)
        for version in (5, 4):
            with pytest.raises(ReloadError, match=f"version {version} is not newer than 5"):
                client.push(version)
        assert client.push().version == 6
    assert receiver.version == 6


def test_an_unfinished_push_publishes_nothing_and_names_what_is_missing():
    engine, trainer = Toy(2), Toy(1)
    receiver = Receiver(engine)
    client = connect(trainer, receiver, "memory")
    client.push(1)
    client.start(2)
    client.update(["big"])
    with pytest.raises(CoverageError) as caught:
        client.finish()
    assert "scalar" in caught.value.missing
    assert receiver.version in (None, 1)
    assert receiver.state == "torn"
    with pytest.raises(TornModelError), receiver.serving():
        pass
    client.push(3)
    assert receiver.state == "live"
    assert receiver.version == 3
    with receiver.serving():
        pass
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_source_that_fails_in_mid_push_aborts_everywhere_and_the_next_push_repairs(transport, reach):
    trainer, engine = Toy(1), Toy(2)
    source = LazySource(trainer)
    receiver = Receiver(engine)
    client = connect(source, reach(receiver), transport)
    source.fail_at = 6
    with pytest.raises(RuntimeError, match="the gather failed"):
        client.push(1)
    assert receiver.version is None
    assert receiver.info()["session"] is None
    assert receiver.state in ("live", "torn")
    source.fail_at = None
    assert client.push(1).version == 1
    assert receiver.state == "live"
    assert state_bytes(engine) == state_bytes(trainer)
    client.close()


def test_rollback_restores_the_old_bytes():
    trainer, engine = Toy(1), Toy(2)
    receiver = Receiver(engine, rollback="host")
    before = state_bytes(engine)
    client = connect(trainer, receiver, "memory")
    client.start(1)
    client.update(["big"])
    client.abort("changed my mind")
    assert receiver.state == "live"
    assert state_bytes(engine) == before
    assert client.push(1).version == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_fails_in_mid_push_gives_its_own_words(transport, reach, monkeypatch):
    trainer, engine = Toy(1), Toy(2)
    receiver = Receiver(engine)
    client = connect(trainer, reach(receiver), transport)
    from weightsync.worker import push

    real = push.Push.load

    def failing(self, target, filled):
        raise LayoutError("the kernel said no", names=["big"])

    monkeypatch.setattr(push.Push, "load", failing)
    with pytest.raises(LayoutError, match="the kernel said no") as caught:
        client.push(1)
    assert caught.value.names == ("big",)
    monkeypatch.setattr(push.Push, "load", real)
    client.push(1)
    assert state_bytes(engine) == state_bytes(trainer)
    client.close()


def test_a_changed_model_is_a_new_handshake():
    trainer, engine = Toy(1), Toy(2)
    receiver = Receiver(engine)
    with connect(trainer, receiver, "memory") as client:
        client.push()
        trainer.big = torch.nn.Parameter(torch.full((40, 33), 7.0), requires_grad=False)
        assert client.push().seconds["handshake"] > 0
        assert state_bytes(engine) == state_bytes(trainer)
        del trainer.scalar
        with pytest.raises(CoverageError) as caught:
            client.push()
        assert any("scalar" in name for name in caught.value.missing)


def test_formats_that_differ_are_refused_with_both():
    receiver = Receiver(Toy(2), formats={"experts": "block_fp8"})
    with pytest.raises(ManifestError, match="sends 'mxfp8', this engine takes 'block_fp8'"):
        connect(Toy(1), receiver, "memory", formats={"experts": "mxfp8"}).push()
    connect(Toy(1), receiver, "memory", formats={"experts": "block_fp8", "other": "x"}).push()


def test_a_source_that_yields_another_order_than_it_declared_is_refused():
    class Swapped(LazySource):
        def iter_full(self):
            yield from reversed(list(self._inner.iter_full()))

    with pytest.raises(ManifestError, match="iter_full must yield what metadata declares"):
        connect(Swapped(Toy(1)), Receiver(Toy(2)), "shared_memory").push()


# ---- several ranks, several engines --------------------------------------------------------------------------------


def expert_engine(value=0.0, engine="e", **options):
    models = [ExpertToy([0, 1], value), ExpertToy([1, 2, 3], value)]
    return models, [Receiver(m, engine=engine, rank=r, world=2, **options) for r, m in enumerate(models)]


def check_experts(models, tensors):
    for model in models:
        assert torch.equal(model.shared, tensors["shared"])
        for slot, expert in enumerate(model.owned):
            assert torch.equal(model.experts[slot], tensors[f"experts.{expert}.weight"])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("grouped", [False, True], ids=["a list of ranks", "one coordinator"])
def test_experts_go_to_the_ranks_that_own_them(transport, grouped, reach):
    models, ranks = expert_engine()
    tensors = expert_tensors(4, 5)
    endpoint = reach(EndpointGroup(ranks)) if grouped else [reach(rank) for rank in ranks]
    with connect(TensorSource(tensors), endpoint, transport) as client:
        for value in (5, 6):
            tensors.update(expert_tensors(4, value))
            report = client.push()
            check_experts(models, tensors)
    one = tensors["experts.0.weight"].nbytes
    shared = tensors["shared"].nbytes
    owned = 5 * one  # expert 1 on both ranks
    everyone = shared + one
    alone = owned - 2 * one
    # a broadcast counts once, a mapping is read by each rank
    assert report.wire_bytes == (everyone + alone if transport == "gloo" else 2 * shared + owned)
    assert [rank["rank"] for rank in report.ranks] == [0, 1]


def test_a_name_that_no_rank_owns_is_refused():
    _, ranks = expert_engine()
    with pytest.raises(CoverageError) as caught:
        connect(TensorSource(expert_tensors(5, 1)), ranks, "memory").push()
    assert caught.value.unexpected == ("experts.4.weight",)


def test_a_rank_left_out_is_refused():
    _, ranks = expert_engine()
    with pytest.raises(ProtocolError, match=r"engine e has 2 ranks, ranks \[1\] are not among the endpoints"):
        connect(TensorSource(expert_tensors(4, 1)), ranks[:1], "memory").push()


@pytest.mark.parametrize("grouped", [False, True], ids=["a list of ranks", "one coordinator"])
def test_no_rank_publishes_what_another_could_not_finish(grouped, monkeypatch):
    models, ranks = expert_engine()
    tensors = expert_tensors(4, 5)
    endpoint = EndpointGroup(ranks) if grouped else ranks
    client = connect(TensorSource(tensors), endpoint, "memory")
    client.push(1)
    from weightsync.worker import push

    real = push.Push.prepare

    def failing(self):
        if self is ranks[1]._push:
            raise ReloadError("hook failed on rank 1")
        real(self)

    monkeypatch.setattr(push.Push, "prepare", failing)
    with pytest.raises(ReloadError, match="hook failed on rank 1"):
        client.push(2)
    for rank in ranks:
        assert rank.version != 2
        assert rank.state == "torn"
        with pytest.raises(TornModelError), rank.serving():
            pass
    monkeypatch.setattr(push.Push, "prepare", real)
    client.push(3)
    assert [rank.version for rank in ranks] == [3, 3]
    check_experts(models, tensors)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_engines_get_one_push(transport, reach):
    trainer, engines = Toy(1), [Toy(2), Toy(3), Toy(4)]
    with connect(trainer, [reach(Receiver(e)) for e in engines], transport) as client:
        report = client.push(4)
        refill(trainer, 9)
        client.push(5)
    assert [rank["version"] for rank in report.ranks] == [4, 4, 4]
    for engine in engines:
        assert state_bytes(engine) == state_bytes(trainer)


# ---- who may push ----------------------------------------------------------------------------------------------------


def test_a_second_trainer_is_refused_and_the_first_unharmed(reach):
    trainer, engine = Toy(1), Toy(2)
    endpoint = reach(Receiver(engine))
    with connect(trainer, endpoint, "memory" if isinstance(endpoint, Receiver) else "shared_memory") as first:
        first.push(1)
        first.start(2)
        second = connect(Toy(3), endpoint, "auto")
        with pytest.raises(ReloadError, match="belongs to trainer"):
            second.push(7)
        first.update()
        assert first.finish().version == 2
        assert state_bytes(engine) == state_bytes(trainer)
    assert second.push(7).version == 7, "once the first has left, another may join"


def test_two_trainers_that_race_leave_one_whole_push():
    engine, trainers = Toy(2), [Toy(3), Toy(4)]
    receiver = Receiver(engine)
    outcomes = [None, None]

    def race(index):
        client = connect(trainers[index], receiver, "memory")
        try:
            outcomes[index] = client.push(1).version
        except ReloadError as error:
            outcomes[index] = error

    threads = [threading.Thread(target=race, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(type(o).__name__ for o in outcomes) == ["ReloadError", "int"]
    assert state_bytes(engine) == state_bytes(trainers[outcomes.index(1)])


def test_start_twice_and_finish_without_start_are_refused():
    receiver = Receiver(Toy(2))
    client = connect(Toy(1), receiver, "memory")
    with pytest.raises(ReloadError, match="no push is open"):
        client.finish()
    client.start(1)
    with pytest.raises(ReloadError, match="a push is open already"):
        client.start(2)
    client.update()
    client.finish()


def test_progress_counts_every_byte():
    trainer, seen = Toy(1), []
    total = sum(p.nbytes for p in trainer.parameters())
    for transport in TRANSPORTS:
        seen.clear()
        with connect(LazySource(trainer), Receiver(Toy(2)), transport, progress=lambda *a: seen.append(a)) as client:
            client.push()
        assert seen[-1] == (total, total)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_transport_that_does_not_fit_is_refused_with_the_reason():
    with pytest.raises(TransportError, match="'ipc' cannot be used: it needs every side on a GPU"):
        connect(Toy(1), Receiver(Toy(2)), "ipc").push()


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"transport": "pigeon"}, ProtocolError, "unknown transport 'pigeon'; known: auto, memory, ipc, .*gloo, shm"),
    ({"mode": "fast"}, ValueError, "mode must be one of direct, layerwise, got 'fast'"),
    ({"scope": "some"}, ValueError, "scope must be one of full, partial, got 'some'"),
])  # fmt: skip
def test_an_option_that_does_not_exist_is_refused_before_anybody_is_asked(options, error, words):
    with pytest.raises(error, match=words):
        TrainerClient(Toy(1), "http://127.0.0.1:9", **options)


@pytest.mark.parametrize(("source", "error", "words"), [
    (Toy(1).state_dict(), TypeError, r"to a tensor; .*weightsync.TensorSource\(tensors\)"),
    ("checkpoint", TypeError, "source of target 'model' is a str; .*CheckpointSource"),
    ({"draft": [1]}, TypeError, "source of target 'draft' is a list"),
    ({}, ValueError, "empty mapping"),
], ids=["tensors", "path", "list", "nothing"])  # fmt: skip
def test_what_is_no_source_is_refused_with_what_to_pass_instead(source, error, words):
    with pytest.raises(error, match=words):
        TrainerClient(source, "http://127.0.0.1:9")


def test_a_partial_push_of_some_names_tells_the_engine_of_these_alone():
    trainer, engine = Toy(2), Toy(1)
    before = state_bytes(engine)
    client = TrainerClient(trainer, Receiver(engine), scope="partial")
    named = ["layer1.weight", "scalar"]
    assert client.push(names=named).tensors == 2
    after, sent = state_bytes(engine), state_bytes(trainer)
    assert after == {name: (sent if name in named else before)[name] for name in before}
    client.push(names=["big"])
    assert state_bytes(engine) == after | {"big": sent["big"]}
    with pytest.raises(CoverageError, match="nothing_like_it"):
        client.push(names=["nothing_like_it"])
