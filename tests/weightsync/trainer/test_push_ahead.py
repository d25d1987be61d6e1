"""A steady push over HTTP: the engine opens its session while the trainer looks at its tensors, then reads them."""

import asyncio
import socket
import threading

import pytest
import torch
from push_toys import Toy, refill, state_bytes

from weightsync import control
from weightsync.control import InParts
from weightsync.errors import LayoutError, PeerFailed, ProtocolError, ReloadError, TransportTimeout
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.http import HttpEndpoint
from weightsync.trainer.sources import ModuleSource
from weightsync.transport.shared_memory import SharedMemoryExporter, share_parameters
from weightsync.worker import group
from weightsync.worker.group import EndpointGroup
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

DEADLINE = 60.0


class Noting(Receiver):
    """Notes each call, whether its body came in parts, and how the engine was when it had been answered."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.model, self.calls, self.after = model, [], []

    def call(self, route, body, deadline_seconds):
        self.calls.append((route, isinstance(body, InParts)))
        try:
            return super().call(route, body, deadline_seconds)
        finally:
            self.after.append((self.state, self.version, state_bytes(self.model)))

    def reset(self):
        self.calls.clear()
        self.after.clear()


class World:
    """A trainer and an engine behind HTTP, after as many pushes as it takes to be steady."""

    def __init__(self, endpoint=None, source=ModuleSource, **options):
        self.trainer, self.engine = Toy(1), Toy(2)
        self.arena = share_parameters(self.trainer)
        self.receiver = Noting(self.engine, **options)
        self.server = BackgroundServer(endpoint(self.receiver) if endpoint else self.receiver)
        self.source = source(self.trainer)
        self.client = TrainerClient(self.source, self.server.url, transport="shared_memory", deadline_seconds=DEADLINE)
        self.client.push(1), self.client.push(2)
        refill(self.trainer, 3)
        self.before = state_bytes(self.engine)
        self.receiver.reset()

    @property
    def session(self):
        return self.receiver._session

    def close(self):
        self.client.close()
        self.server.close()

    def expect(self, version):
        assert state_bytes(self.engine) == state_bytes(self.trainer)
        assert (self.receiver.state, self.receiver.version) == ("live", version)

    def expect_old(self):
        assert state_bytes(self.engine) == self.before
        assert (self.receiver.state, self.receiver.version) == ("live", 2)


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


STEADY = [(control.PUSH, True)]


def test_a_steady_push_is_one_call_in_two_parts(world):
    for version in (3, 4):
        world.receiver.reset()
        refill(world.trainer, version)
        report = world.client.push()
        assert world.receiver.calls == STEADY
        assert report.version == version
        assert report.ranks[0]["bytes"] == report.bytes > 0
        world.expect(version)


def test_the_push_after_a_new_offer_is_not_begun_ahead(world):
    arena = share_parameters(world.trainer)
    world.client.push(3), world.receiver.reset()
    world.client.push(4)
    assert world.receiver.calls == [(control.PUSH, False)]
    world.receiver.reset()
    world.client.push(5)
    assert world.receiver.calls == STEADY
    del arena


def move(trainer):
    trainer.big.data = trainer.big.data.clone()  # out of the arena: staged from now on


def exchange(trainer):
    """Another object, in the arena, at the place of another."""
    block, other = trainer.layer0, trainer.layer1
    block.weight, other.weight = other.weight, block.weight


def turn(trainer):
    """Other strides behind the same object, address and shape."""
    flat = trainer.big.data.reshape(-1)
    trainer.big.data = flat.as_strided((40, 33), (1, 40))


def share_again(trainer):
    trainer.arena = share_parameters(trainer)


@pytest.mark.parametrize("change", [move, exchange, turn, share_again])
def test_tensors_that_moved_are_noticed_while_the_engine_is_open_already(world, change):
    session = world.session
    change(world.trainer)
    world.client.push(3)
    routes = [route for route, _ in world.receiver.calls]
    assert routes[0] == control.PUSH
    assert control.START in routes
    assert world.receiver.after[0] == ("live", 2, world.before), "the push that was begun is withdrawn"
    assert world.session is session, "the handshake still holds"
    world.expect(3)
    world.client.push(4)
    world.expect(4)


@pytest.mark.parametrize("change", [lambda t: t.reshape(33, 40), lambda t: t.view(torch.int32)], ids=["shape", "dtype"])
def test_another_shape_or_dtype_at_the_same_address_is_refused_before_a_byte_moves(world, change):
    world.trainer.big.data = change(world.trainer.big.data)
    with pytest.raises(LayoutError, match="big"):
        world.client.push(3)
    assert world.receiver.calls[0] == STEADY[0]
    world.expect_old()


def test_a_closed_arena_is_noticed(world):
    world.arena.close()
    world.client.push(3)
    assert world.receiver.after[0] == ("live", 2, world.before)
    world.expect(3)


def test_an_engine_that_refuses_to_start_says_why_and_goes_on():
    asleep = []
    world = World(ready=lambda: asleep[0] if asleep else None)
    asleep.append("the weights are asleep")
    with pytest.raises(ReloadError, match="asleep"):
        world.client.push(3)
    assert world.receiver.calls[0] == STEADY[0]
    world.expect_old()
    asleep.clear()
    world.client.push(3)
    world.expect(3)
    world.close()


def test_an_engine_that_refuses_to_start_says_why_although_the_trainers_tensors_moved():
    asleep = []
    world = World(ready=lambda: asleep[0] if asleep else None)
    asleep.append("the weights are asleep")
    move(world.trainer)
    with pytest.raises(ReloadError, match="asleep"):
        world.client.push(3)
    world.expect_old()
    asleep.clear()
    world.client.push(3)
    world.expect(3)
    world.close()


def test_an_old_version_is_refused_before_a_byte_moves(world):
    with pytest.raises(ReloadError, match="version"):
        world.client.push(2)
    assert world.receiver.calls[0] == STEADY[0]
    world.expect_old()


class Failing(ModuleSource):
    """A source whose declaration can be made to fail."""

    error = None

    @property
    def metadata(self):
        if self.error is not None:
            raise self.error
        return super().metadata


@pytest.mark.parametrize("error", [RuntimeError("no metadata"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_look_at_the_tensors_that_fails_leaves_the_engine_as_it_was(error):
    world = World(source=Failing)
    world.source.error = error
    with pytest.raises(type(error)):
        world.client.push(3)
    assert world.receiver.calls[0] == STEADY[0]
    world.expect_old()
    world.source.error = None
    world.client.push(3)
    world.expect(3)
    world.close()


def test_a_fence_that_fails_after_the_look_leaves_the_engine_as_it_was(world, monkeypatch):
    fences = []

    def fence(self):
        fences.append(1)
        if len(fences) == 2:
            raise RuntimeError("the device is lost")

    monkeypatch.setattr(SharedMemoryExporter, "fence", fence)
    with pytest.raises(RuntimeError, match="lost"):
        world.client.push(3)
    world.expect_old()
    world.client.push(3)
    world.expect(3)


def test_the_device_is_waited_for_before_the_engine_opens_and_before_it_reads(world, monkeypatch):
    order = []
    begin, end = HttpEndpoint.begin, HttpEndpoint.end
    monkeypatch.setattr(SharedMemoryExporter, "fence", lambda self: order.append("fence"))
    monkeypatch.setattr(HttpEndpoint, "begin", lambda *given: order.append("begin") or begin(*given))
    monkeypatch.setattr(HttpEndpoint, "end", lambda *given: order.append("end") or end(*given))
    world.client.push(3)
    assert order == ["fence", "begin", "fence", "end"]


def test_an_endpoint_that_takes_no_parts_gets_the_whole():
    world = World(endpoint=lambda receiver: EndpointGroup([receiver]))
    world.client.push(3)
    assert world.receiver.calls == [(control.PUSH, False)]
    world.expect(3)
    world.receiver.reset()
    move(world.trainer)
    world.client.push(4)
    assert control.PUSH not in [route for route, _ in world.receiver.calls]
    world.expect(4)
    world.close()


def test_a_server_that_takes_no_parts_reads_them_as_one_body():
    world = World(endpoint=lambda receiver: EndpointGroup([receiver]))
    head, tail = head_and_tail(world)
    endpoint = HttpEndpoint(world.server.url)
    endpoint.begin(control.PUSH, head, DEADLINE).end(tail, DEADLINE)
    assert world.receiver.calls == [(control.PUSH, False)]
    world.expect(3)
    endpoint.close()
    world.close()


# ---- the engine's side, by itself --------------------------------------------------------------------------------


def head_and_tail(world, version=3):
    agreement = world.client._agreement
    start = control.Start(agreement.session_id, version, agreement.generation, None, agreement.per_rank({}))
    update = control.Update(agreement.session_id, "model", None, {"placed": True}, {})
    return (
        {"start_info": control.encode(start), "weight_version": version},
        {"update_info": control.encode(update)},
    )


def test_nothing_is_read_before_the_second_part_has_come(world, monkeypatch):
    head, tail = head_and_tail(world)
    link = world.session.link
    read = []
    receive = link.receive
    monkeypatch.setattr(link, "receive", lambda *given: read.append(1) or receive(*given))

    def rest(seconds):
        assert seconds == DEADLINE
        assert read == []
        assert world.receiver.state == "loading"
        assert state_bytes(world.engine) == world.before
        return tail, 1e18

    world.receiver.call(control.PUSH, InParts(head, rest), DEADLINE)
    assert read == [1]
    world.expect(3)


def test_the_deadline_counts_from_the_arrival_of_the_second_part(world):
    head, tail = head_and_tail(world)
    with pytest.raises(TransportTimeout, match="given the push up"):
        world.receiver.call(control.PUSH, InParts(head, lambda seconds: (tail, -1e9)), DEADLINE)
    assert world.receiver.version is None


def test_a_trainer_that_never_says_the_second_part_is_given_up(world):
    head, _ = head_and_tail(world)

    def rest(seconds):
        raise TransportTimeout("nothing came")

    with pytest.raises(TransportTimeout, match="nothing came"):
        world.receiver.call(control.PUSH, InParts(head, rest), DEADLINE)
    assert world.session is None
    world.expect_old()
    with world.receiver.serving():
        pass


def test_a_push_that_was_aborted_while_it_was_open_is_not_read(world):
    head, tail = head_and_tail(world)

    def rest(seconds):
        world.receiver._cancel(world.session, "an operator gave it up")  # as an abort does before it waits for its turn
        return tail, 1e18

    with pytest.raises(ReloadError, match="operator"):
        world.receiver.call(control.PUSH, InParts(head, rest), DEADLINE)
    world.expect_old()


def test_an_update_of_another_session_is_refused(world):
    head, tail = head_and_tail(world)
    tail["update_info"]["session_id"] = "other"
    with pytest.raises(ProtocolError, match="session"):
        world.receiver.call(control.PUSH, InParts(head, lambda seconds: (tail, 1e18)), DEADLINE)
    world.expect_old()


def begun_by_hand(world):
    """A call of which only the first part was sent, once the engine has opened its session."""
    head, tail = head_and_tail(world)
    opened = threading.Event()
    real = world.receiver._open

    def open_(session, start):
        real(session, start)
        opened.set()

    world.receiver._open = open_
    endpoint = HttpEndpoint(world.server.url)
    begun = endpoint.begin(control.PUSH, head, DEADLINE)
    assert opened.wait(DEADLINE)
    world.receiver._open = real
    return endpoint, begun, tail


def test_a_trainer_that_hangs_up_leaves_the_engine_as_it_was(world):
    endpoint, begun, _ = begun_by_hand(world)
    session = world.session
    assert world.receiver.state == "loading"
    begun.cut()
    assert session.ended.wait(DEADLINE)
    world.expect_old()
    endpoint.close()
    with pytest.raises(ReloadError, match="knows no session"):
        world.client.push(3)
    world.client.push(3)
    world.expect(3)


def test_a_second_part_that_is_garbage_is_refused(world):
    endpoint, begun, _ = begun_by_hand(world)
    begun.connection.sock.sendall(b"3\r\n,}}\r\n0\r\n\r\n")
    answer = begun.connection.sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400")
    world.expect_old()
    begun.cut()
    endpoint.close()


@pytest.mark.parametrize("size", ["-1", "x", "\u0663", "9" * 30])
def test_a_length_of_the_first_part_that_is_none_is_refused(world, size):
    host, port = world.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as raw:
        lines = (
            f"POST /push_weights HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n{control.HEAD_BYTES}: {size}\r\n\r\n{{}}"
        )
        raw.sendall(lines.encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 400")
    world.expect_old()


def test_a_connection_of_an_answered_call_is_not_hung_up_on(world):
    endpoint, begun, tail = begun_by_hand(world)
    begun.end(tail, DEADLINE)
    begun.cut()
    assert len(endpoint._idle) == 1
    assert endpoint.call(control.HEALTH, {}, DEADLINE)["ranks"] == [{"status": "ok"}]
    endpoint.close()
    world.expect(3)


def test_a_server_that_is_gone_fails_the_push(world):
    world.server.close()
    with pytest.raises(PeerFailed):
        world.client.push(3)
    world.expect_old()


def test_a_call_that_is_no_longer_awaited_runs_to_its_end_and_its_thread_takes_the_next():
    async def stop_waiting():
        held = threading.Event()
        future = group.in_thread(held.wait, DEADLINE)
        waiting = asyncio.wrap_future(future)
        waiting.cancel()
        await asyncio.sleep(0)
        held.set()
        return future

    group._idle.clear()
    assert asyncio.run(stop_waiting()).result(DEADLINE) is True
    assert group.in_thread(lambda: 5).result(DEADLINE) == 5


def test_a_second_part_that_the_trainer_sent_long_ago_is_refused(world):
    head, tail = head_and_tail(world)
    late = {**tail, control.SENT: -1e9}  # by the clock that both processes of a host share
    with pytest.raises(TransportTimeout, match="given the push up"):
        world.receiver.call(control.PUSH, InParts(head, lambda seconds: (late, 1e18)), DEADLINE)
    assert world.receiver.version is None


def test_the_clock_of_another_host_says_nothing(world):
    head, tail = head_and_tail(world)
    assert world.session.shares_clock
    world.session.shares_clock = False
    foreign = {**tail, control.SENT: -1e9}
    world.receiver.call(control.PUSH, InParts(head, lambda seconds: (foreign, 1e18)), DEADLINE)
    world.expect(3)
