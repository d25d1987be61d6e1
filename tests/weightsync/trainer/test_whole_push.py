"""Where nothing new has to be connected, one control call does a whole push; else start, update and finish do."""

import dataclasses

import pytest
import torch
from push_toys import Toy, addresses, refill, state_bytes

from weightsync import control
from weightsync.errors import LayoutError, ReloadError, TransportTimeout
from weightsync.trainer.client import TrainerClient
from weightsync.transport.shared_memory import share_parameters
from weightsync.worker.receiver import Receiver

DEADLINE = 60.0


class Watched(Receiver):
    """Counts the calls that reach it."""

    def __init__(self, model):
        super().__init__(model)
        self.routes = []

    def call(self, route, body, deadline_seconds):
        self.routes.append(route)
        return super().call(route, body, deadline_seconds)


def connected(transport="memory", **options):
    trainer, engine = Toy(1), Toy(2)
    receiver = Watched(engine)
    client = TrainerClient(trainer, receiver, transport=transport, deadline_seconds=DEADLINE, **options)
    client.push(1)
    receiver.routes.clear()
    return trainer, engine, receiver, client


def test_a_later_push_of_mapped_memory_is_one_call():
    trainer, engine, receiver, client = connected()
    where = addresses(engine)
    refill(trainer, 3)
    report = client.push(2)
    assert receiver.routes == [control.PUSH]
    assert report.version == receiver.version == 2
    assert report.ranks[0]["bytes"] == report.bytes > 0
    assert state_bytes(engine) == state_bytes(trainer)
    assert addresses(engine) == where


def test_a_transport_that_streams_keeps_its_calls():
    trainer, engine, receiver, client = connected("gloo")
    refill(trainer, 3)
    client.push(2)
    assert receiver.routes == [control.START, control.UPDATE, control.FINISH]
    assert state_bytes(engine) == state_bytes(trainer)


def test_two_engines_publish_in_two_phases():
    trainer = Toy(1)
    receivers = [Watched(Toy(2)), Watched(Toy(3))]
    client = TrainerClient(trainer, receivers, transport="memory", deadline_seconds=DEADLINE)
    client.push(1)
    client.push(2)
    for receiver in receivers:
        assert control.PUSH not in receiver.routes
        assert receiver.version == 2


def test_a_whole_push_that_fails_publishes_nothing_and_the_next_one_repairs_it(monkeypatch):
    trainer, engine, receiver, client = connected()
    from weightsync.worker import push

    real = push.Push.prepare

    def failing(self):
        raise ReloadError("a hook failed")

    refill(trainer, 3)
    monkeypatch.setattr(push.Push, "prepare", failing)
    with pytest.raises(ReloadError, match="a hook failed"):
        client.push(2)
    assert receiver.state == "torn"
    assert receiver.version is None
    monkeypatch.setattr(push.Push, "prepare", real)
    client.push(3)
    assert (receiver.state, receiver.version) == ("live", 3)
    assert state_bytes(engine) == state_bytes(trainer)


def test_an_old_version_is_refused_before_a_byte_moves():
    trainer, engine, receiver, client = connected()
    before = state_bytes(engine)
    refill(trainer, 3)
    with pytest.raises(ReloadError, match="version"):
        client.push(1)
    assert state_bytes(engine) == before
    assert (receiver.state, receiver.version) == ("live", 1)


@pytest.mark.parametrize("cause", ["deadline", "abort"])
def test_a_push_that_the_trainer_gave_up_is_never_published(cause, monkeypatch):
    trainer, _engine, receiver, client = connected()
    from weightsync.worker import push

    real = push.Push.prepare
    session = receiver._session

    def slow(self):
        real(self)
        if cause == "deadline":
            monkeypatch.setattr(session, "hello", dataclasses.replace(session.hello, deadline_seconds=1e-9))
        else:
            receiver._cancel(session, "the trainer gave up")  # what an abort does before it waits for its turn

    refill(trainer, 3)
    monkeypatch.setattr(push.Push, "prepare", slow)
    with pytest.raises(TransportTimeout if cause == "deadline" else ReloadError, match="given|gave"):
        client.push(2)
    assert (receiver.state, receiver.version) == ("torn", None)


def test_a_call_that_waited_past_its_deadline_before_it_was_read_is_refused(monkeypatch):
    _trainer, _engine, receiver, client = connected()
    real = receiver.call

    def stopped(route, body, deadline_seconds):
        if control.SENT in body:
            body = {**body, control.SENT: body[control.SENT] - DEADLINE - 1}
        return real(route, body, deadline_seconds)

    monkeypatch.setattr(receiver, "call", stopped)
    with pytest.raises(TransportTimeout, match="given the push up"):
        client.push(2)
    assert receiver.version is None


def test_a_callback_that_fails_on_one_engine_keeps_the_other_from_publishing():
    def fail(version):
        raise RuntimeError("a cache could not be dropped")

    receivers = [Receiver(Toy(2)), Receiver(Toy(3), on_publish=[fail])]
    client = TrainerClient(Toy(1), receivers, transport="memory", deadline_seconds=DEADLINE)
    with pytest.raises(RuntimeError, match="cache"):
        client.push(1)
    assert [receiver.version for receiver in receivers] == [None, None]


@pytest.mark.parametrize("transport", ["memory", "shared_memory", "gloo"])
def test_the_same_memory_in_another_order_arrives_in_its_own_order(transport):
    class Square(torch.nn.Module):
        supports_direct_reload = True

        def __init__(self, value):
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3) + value, requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.w.data.copy_(tensor)

    trainer, engine = Square(1), Square(50)
    if transport == "shared_memory":
        share_parameters(trainer)
    client = TrainerClient(trainer, Receiver(engine), transport=transport, deadline_seconds=DEADLINE)
    client.push(1)
    trainer.w.data = trainer.w.data.t()
    client.push(2)
    assert engine.w.tolist() == [[1, 4, 7], [2, 5, 8], [3, 6, 9]]
    client.close()


@pytest.mark.parametrize("transport", ["memory", "shared_memory", "gloo"])
@pytest.mark.parametrize("change", [lambda t: t.reshape(33, 40), lambda t: t.view(torch.int32)], ids=["shape", "dtype"])
def test_another_shape_or_dtype_in_the_same_parameter_is_refused_before_a_byte_moves(transport, change):
    trainer, engine, receiver, client = connected(transport)
    before = state_bytes(engine)
    trainer.big.data = change(trainer.big.data)
    with pytest.raises(LayoutError, match="big"):
        client.push(2)
    assert state_bytes(engine) == before
    assert (receiver.state, receiver.version) == ("live", 1)
    client.close()
