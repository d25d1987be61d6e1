"""What a later push of unchanged memory may cost: counted, not timed. And what makes it look at everything again."""

import gc
import http.client
import json
import sys
import threading

import pytest
import torch
from torch import nn

from weightsync import control
from weightsync.errors import ProtocolError
from weightsync.plan import replay
from weightsync.trainer.client import TrainerClient
from weightsync.trainer.http import HttpEndpoint
from weightsync.trainer.sources import ModuleSource, TensorSource
from weightsync.transport.shared_memory import Arena, share_parameters
from weightsync.worker import group
from weightsync.worker.receiver import Receiver
from weightsync.worker.server import BackgroundServer

ROWS = 4


class Stacked(nn.Module):
    """An engine of many names and one parameter, as experts are; which name goes where follows `first`."""

    supports_direct_reload = True

    def __init__(self, num_names):
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(num_names, ROWS), requires_grad=False)
        self.first = 0

    def place(self, name):
        return (int(name.removeprefix("expert.")) + self.first) % len(self.stack)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.stack.data[self.place(name)].copy_(tensor)


def in_arena(num_names, value):
    arena = Arena(num_names * ROWS * 4)
    flat = arena.buffer.view(torch.float32).view(num_names, ROWS)
    flat.copy_(torch.arange(num_names * ROWS).view(num_names, ROWS) + value)
    return arena, {f"expert.{index}": flat[index] for index in range(num_names)}


class Counted(Receiver):
    """Counts what crosses the wire, and the Python functions that are called to answer."""

    def __init__(self, model):
        super().__init__(model)
        self.wire_bytes = self.num_calls = self.num_python_calls = 0

    def call(self, route, body, deadline_seconds):
        with PythonCalls() as calls:
            answer = super().call(route, body, deadline_seconds)
        self.num_calls += 1
        self.num_python_calls += calls.count
        # Numbers of varying length, such as seconds, are not what grows with the number of names.
        self.wire_bytes += sum(len(json.dumps(rounded(value))) for value in (body, answer))
        return answer

    def reset(self):
        self.wire_bytes = self.num_calls = self.num_python_calls = 0


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return 0 if isinstance(value, float | int) else value


class PythonCalls:
    """Counts calls of Python functions, and steps of generators, in this thread."""

    def __init__(self):
        self.count = 0

    def __enter__(self):
        gc.disable()  # a finaliser would be counted too
        self._before = sys.getprofile()
        sys.setprofile(self._note)
        return self

    def _note(self, frame, event, argument):
        self.count += event == "call"

    def __exit__(self, *_):
        sys.setprofile(self._before)
        gc.enable()


def steady(num_names):
    """(wire bytes, Python calls of the trainer, Python calls of the engine) of a third push."""
    arena, tensors = in_arena(num_names, 1)
    receiver = Counted(Stacked(num_names))
    client = TrainerClient(TensorSource(tensors), receiver, transport="shared_memory")
    client.push(1), client.push(2)
    receiver.reset()
    with PythonCalls() as calls:
        client.push(3)
    assert receiver.num_calls == 1
    client.close()
    del arena
    return receiver.wire_bytes, calls.count, receiver.num_python_calls


def test_wire_bytes_and_python_calls_of_a_steady_push_do_not_grow_with_the_number_of_names():
    steady(20)  # what is worked out once per process
    few, many = steady(20), steady(2000)
    assert few == many


def test_a_steady_push_of_a_module_makes_no_python_call_per_tensor():
    def counted(num_tensors):
        module = nn.ParameterList([nn.Parameter(torch.zeros(3)) for _ in range(num_tensors)])
        source = ModuleSource(module)
        first = source.metadata
        with PythonCalls() as calls:
            assert source.metadata is first
            source.resident()
        return calls.count

    assert counted(10) == counted(1000)


@pytest.mark.parametrize("reach", ["in process", "http"])
def test_a_steady_push_starts_no_thread_and_opens_no_connection(reach, monkeypatch):
    arena, tensors = in_arena(6, 1)
    receiver = Receiver(Stacked(6))
    with BackgroundServer(receiver) as server:
        client = TrainerClient(
            TensorSource(tensors), receiver if reach == "in process" else server.url, transport="shared_memory"
        )
        for version in (1, 2, 3):
            client.push(version)
        begun = []
        start, connect = threading.Thread.start, http.client.HTTPConnection.connect
        monkeypatch.setattr(threading.Thread, "start", lambda self: begun.append(self.name) or start(self))
        monkeypatch.setattr(http.client.HTTPConnection, "connect", lambda self: begun.append("open") or connect(self))
        for version in (4, 5, 6):
            client.push(version)
        assert begun == []
        client.close()
    del arena


def test_no_collection_starts_within_a_push(monkeypatch):
    arena, tensors = in_arena(6, 1)
    model = Stacked(6)
    model.process_weights_after_loading = lambda: seen.append(gc.isenabled())
    seen = []
    client = TrainerClient(TensorSource(tensors), Receiver(model), transport="shared_memory")
    client.push(1)
    seen.clear()
    assert gc.isenabled()
    client.push(2)
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        client.push(3)
        assert not gc.isenabled()  # whoever turned it off finds it off
    finally:
        gc.enable()
    del arena


# ---- what a push must notice -------------------------------------------------------------------------------------


class World:
    """A trainer and an engine that have pushed twice, so that everything that can be remembered is."""

    def __init__(self):
        self.arena, self.tensors = in_arena(4, 1)
        self.engine = Stacked(4)
        self.receiver = Counted(self.engine)
        self.client = TrainerClient(TensorSource(self.tensors), self.receiver, transport="shared_memory")
        self.client.push(1), self.client.push(2)

    def expect(self, tensors=None):
        tensors = self.tensors if tensors is None else tensors
        for name, tensor in tensors.items():
            assert torch.equal(self.engine.stack[self.engine.place(name)], tensor), name


def test_tables_are_compiled_once_per_offer(monkeypatch):
    world, compiled = World(), []
    compile_segments = replay.compile_segments
    monkeypatch.setattr(replay, "compile_segments", lambda *given: compiled.append(1) or compile_segments(*given))
    world.client.push(), world.client.push()
    assert compiled == []
    old, (world.arena, fresh) = world.arena, in_arena(4, 50)
    world.tensors.update(fresh)
    world.client.push()  # the very same chunks of another mapping: the table holds, and reads from the new one
    world.expect()
    world.tensors["expert.0"], world.tensors["expert.1"] = world.tensors["expert.1"], world.tensors["expert.0"]
    world.client.push()
    assert compiled == [1]
    world.client.push()
    assert compiled == [1]
    world.expect()
    del old


def test_another_allocation_is_offered_anew():
    world = World()
    old = world.arena
    world.arena, fresh = in_arena(4, 50)
    world.tensors.update(fresh)
    old.close()
    world.client.push()
    world.expect()


def test_another_address_within_the_allocation_is_noticed():
    world = World()
    first, second = world.tensors["expert.0"], world.tensors["expert.1"]
    world.tensors["expert.0"], world.tensors["expert.1"] = second, first
    world.client.push()
    world.expect()
    assert torch.equal(world.engine.stack[0], second)


def test_another_address_in_the_same_tensor_object_is_noticed():
    world = World()
    arena, fresh = in_arena(4, 90)
    world.tensors["expert.2"].data = fresh["expert.2"]
    world.client.push()
    world.expect()
    del arena


def test_other_strides_at_the_same_address_are_noticed():
    world = World()
    flat = world.arena.buffer.view(torch.float32)
    world.tensors["expert.0"].data = flat.as_strided((ROWS,), (2,))  # same address, same shape
    world.client.push()
    world.expect()
    assert torch.equal(world.engine.stack[0], flat[: 2 * ROWS : 2])


def test_another_manifest_makes_a_new_handshake():
    world = World()
    world.tensors["expert.4"] = world.tensors["expert.0"]
    world.engine.stack = nn.Parameter(torch.zeros(5, ROWS), requires_grad=False)
    world.client.push()
    world.expect()


def test_another_place_for_the_same_names_is_refused_once_and_then_planned_anew():
    world = World()
    world.engine.first = 2
    before = world.engine.stack.clone()
    with pytest.raises(ProtocolError, match="plan .* was agreed, the model's layout now gives plan"):
        world.client.push()
    assert torch.equal(world.engine.stack, before)
    world.client.push()
    world.expect()


def test_after_an_aborted_push_everything_is_agreed_on_again():
    world = World()
    world.client.start()
    world.client.abort("a test")
    world.receiver.reset()
    world.tensors["expert.1"].fill_(-7)
    world.client.push()
    assert world.receiver.num_calls > 1
    world.expect()


def test_a_new_trainer_is_not_served_from_what_the_last_one_offered():
    world = World()
    world.client.close()
    arena, fresh = in_arena(4, 70)
    with TrainerClient(TensorSource(fresh), world.receiver, transport="shared_memory") as other:
        other.push(), other.push()
        world.expect(fresh)
    world.client.push()
    world.expect()
    del arena


# ---- threads and connections that are kept -----------------------------------------------------------------------


def test_a_kept_thread_takes_the_next_call_and_a_busy_one_does_not(monkeypatch):
    group._idle.clear()
    names = [group.in_thread(threading.get_ident).result(60) for _ in range(3)]
    assert len(set(names)) == 1
    held = threading.Event()
    busy = group.in_thread(lambda: held.wait(60) and threading.get_ident())
    other = group.in_thread(threading.get_ident).result(60)
    held.set()
    assert busy.result(60) != other


def test_a_kept_thread_that_nobody_needs_ends(monkeypatch):
    group._idle.clear()
    monkeypatch.setattr(group, "_IDLE_SECONDS", 0.01)
    thread = group.in_thread(threading.current_thread).result(60)
    thread.join(60)
    assert not thread.is_alive()
    assert group.in_thread(lambda: 5).result(60) == 5


def test_a_connection_that_the_server_left_is_not_used_again():
    """A push must never be sent twice, so a kept connection is looked at before a call rather than tried."""
    with BackgroundServer(Receiver(Stacked(2))) as server:
        endpoint = HttpEndpoint(server.url)
        endpoint.call(control.HEALTH, {}, 60)
        assert len(endpoint._idle) == 1
        kept = endpoint._idle[0]
    port = int(server.url.rpartition(":")[2])
    with BackgroundServer(Receiver(Stacked(2)), port=port):
        assert endpoint.call(control.HEALTH, {}, 60)["ranks"] == [{"status": "ok"}]
        assert endpoint._idle != [kept]
        endpoint.close()
    assert endpoint._idle == []


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", "http://localhost:port"])
def test_what_is_no_url_is_refused_with_what_one_looks_like(url):
    with pytest.raises(ProtocolError, match="is no URL of a server"):
        TrainerClient(nn.Linear(1, 1), url)


def test_parameters_in_an_arena_are_read_where_they_lie():
    trainer, engine = Stacked(3), Stacked(3)
    share_parameters(trainer)
    source = TensorSource({f"expert.{i}": trainer.stack[i] for i in range(3)})
    with TrainerClient(source, Receiver(engine), transport="shared_memory") as client:
        trainer.stack.data.fill_(2)
        assert client.push().copied_bytes == 0
        trainer.stack.data.fill_(3)
        assert client.push().copied_bytes == 0
    assert torch.equal(engine.stack, trainer.stack)
