"""The store of a group: torch's semantics, and peers that are silent, garbled, gone, or of another push."""

import gc
import json
import math
import socket
import struct
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from weightsync.errors import PeerFailed, ProtocolError, TransportError, TransportTimeout
from weightsync.transport import rendezvous
from weightsync.transport.rendezvous import HostedStore, RemoteStore

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
HOST, TOKEN, LONG, SHORT = "127.0.0.1", "secret", 30.0, 0.2


@pytest.fixture
def hosted():
    store = HostedStore(HOST, TOKEN, LONG)
    yield store
    store.close()


@pytest.fixture
def remote(hosted):
    return RemoteStore(HOST, hosted.port, TOKEN, LONG)


def in_thread(function):
    """Starts a function; the call that it gives waits for its result, or the error as a value."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(60)
        assert not thread.is_alive(), "a wait without a deadline"
        return outcome[0]

    return result


@pytest.fixture
def fake():
    """Makes a server of one connection, which is handed to a function after its request was read."""
    listeners, results = [], []

    def start(answer):
        listener = socket.create_server((HOST, 0))
        listeners.append(listener)

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                answer(connection)

        results.append(in_thread(serve))
        return listener.getsockname()[1]

    yield start
    for result in results:
        assert result() is None
    for listener in listeners:
        listener.close()


def frame(payload, magic=b"WSKV", num_bytes=None):
    return struct.pack(">4sI", magic, len(payload) if num_bytes is None else num_bytes) + payload


def raw_answer(port, data):
    """What the store says to bytes as they are: the reply's JSON object, or None if it hangs up."""
    with socket.create_connection((HOST, port), timeout=LONG) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return json.loads(received[8:]) if received else None


# torch's semantics


def semantics(mine, theirs):
    values = [mine.check(["a"]), mine.num_keys()]
    theirs.set("a", b"\x00\xff\n")
    values += [mine.get("a"), mine.check(["a"]), mine.check(["a", "b"]), mine.add("n", 2), theirs.add("n", 40)]
    values += [mine.get("n"), mine.compare_set("c", "", "new"), theirs.compare_set("c", "other", "x")]
    values += [theirs.compare_set("c", "new", "newer"), mine.get("c"), mine.compare_set("d", "held?", "x")]
    mine.wait(["a", "n"])
    theirs.wait(["a"], timedelta(seconds=1))
    mine.set("empty", "")
    values += [theirs.get("empty"), mine.delete_key("a"), theirs.delete_key("a"), mine.check(["a"]), mine.check(["d"])]
    return [*values, theirs.num_keys()]


def test_it_answers_as_torchs_own_store_from_either_side(hosted, remote):
    reference = dist.HashStore()
    expected = semantics(reference, reference)
    assert semantics(hosted, remote) == expected
    for key in ("n", "c", "d", "empty"):
        hosted.delete_key(key)
    assert semantics(remote, hosted) == expected


def test_cpp_reaches_it_through_a_prefix(hosted, remote):
    dist.PrefixStore("group", remote).set("key", "value")
    assert hosted.get("group/key") == b"value"
    assert dist.PrefixStore("group", hosted).get("key") == b"value"
    assert dist.PrefixStore("group", remote).add("n", 3) == 3


@pytest.mark.parametrize("waits", ["hosted", "remote"])
def test_a_wait_ends_when_the_last_key_comes(hosted, remote, waits):
    waiting, setting = (hosted, remote) if waits == "hosted" else (remote, hosted)
    done = in_thread(lambda: waiting.wait(["a", "b"]) or waiting.get("b"))
    setting.set("a", "1")
    setting.set("b", "2")
    assert done() == b"2"


def test_many_ranks_add_at_once_and_none_is_lost(hosted):
    stores = [RemoteStore(HOST, hosted.port, TOKEN, LONG) for _ in range(8)]
    results = [in_thread(lambda store=store: [store.add("n", 1) for _ in range(20)]) for store in stores]
    assert sorted(number for result in results for number in result()) == list(range(1, 161))


def test_a_value_of_any_bytes_and_of_some_size_arrives(hosted, remote):
    value = bytes(range(256)) * 1000
    remote.set("key", value)
    assert hosted.get("key") == remote.get("key") == value
    with pytest.raises(ProtocolError, match="longer than"):
        remote.set("key", bytes(rendezvous.MAX_FRAME_BYTES))
    assert remote.get("key") == value


# Deadlines, and peers that go


@pytest.mark.parametrize("side", ["hosted", "remote"])
def test_a_key_that_nobody_sets_is_a_timeout(hosted, remote, side):
    store = hosted if side == "hosted" else remote
    with pytest.raises(TransportTimeout, match="never"):
        store.wait(["never"], timedelta(seconds=SHORT))
    store.set_timeout(timedelta(seconds=SHORT))
    with pytest.raises(TransportTimeout, match="never"):
        store.get("never")


def test_a_trainer_that_closes_is_heard_of_by_all_who_wait_long_before_their_deadline(hosted, remote):
    for store in (hosted, remote):
        store.set_timeout(timedelta(hours=1))
    waiting = [in_thread(lambda store=store: store.get("never")) for store in (hosted, remote)]
    hosted.close()
    for result in waiting:
        assert isinstance(error := result(), PeerFailed), error
    with pytest.raises(PeerFailed):
        RemoteStore(HOST, hosted.port, TOKEN, LONG)
    hosted.close()


def test_nobody_listening_is_found_out_without_waiting_for_the_deadline():
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        with pytest.raises(PeerFailed, match="cannot be reached"):
            RemoteStore(HOST, unused.getsockname()[1], TOKEN, 3600.0)


def test_a_port_that_accepts_and_says_nothing_is_a_timeout():
    with socket.create_server((HOST, 0)) as silent, pytest.raises(TransportTimeout, match="did not answer"):
        RemoteStore(HOST, silent.getsockname()[1], TOKEN, SHORT)


def test_a_peer_that_sends_a_byte_now_and_then_does_not_outlast_the_deadline(fake):
    def drip(connection):
        try:
            while True:
                connection.sendall(frame(b"", num_bytes=1 << 20)[:8] if not drip.begun else b"x")
                drip.begun = True
                stop.wait(0.01)
        except OSError:
            return

    drip.begun, stop = False, threading.Event()
    with pytest.raises(TransportTimeout, match="did not answer"):
        RemoteStore(HOST, fake(drip), TOKEN, SHORT)


def test_a_peer_that_dies_in_its_answer_is_told_from_a_silent_one(fake):
    with pytest.raises(PeerFailed, match="after 10 of 100 bytes"):
        RemoteStore(HOST, fake(lambda connection: connection.sendall(frame(b"0123456789", num_bytes=100))), TOKEN, LONG)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(b"{}", magic=b"WSKW"),
        frame(b"", num_bytes=1 << 30),
        frame(b"\x80\x04."),
        frame(b"[]"),
        frame(b'{"values": 3}'),
        frame(b'{"numbers": 3}'),
        frame(b'{"error": {"type": "SystemExit", "message": "x"}}'),
        frame(b"[" * 100000),
    ],
    ids=["http", "magic", "endless", "pickle", "list", "type", "field", "class", "nested"],
)
def test_an_answer_that_is_none_is_a_protocol_error(fake, data):
    with pytest.raises(ProtocolError):
        RemoteStore(HOST, fake(lambda connection: connection.sendall(data)), TOKEN, LONG)


@pytest.mark.parametrize("values", ["[]", '["YQ==", "YQ=="]', '["not base64!"]', "[7]"])
def test_an_answer_without_the_one_value_is_a_protocol_error(remote, fake, values):
    port = fake(lambda connection: connection.sendall(frame(f'{{"values": {values}}}'.encode())))
    remote._address = (HOST, port)
    with pytest.raises(ProtocolError):
        remote.get("key")


# Who is served


def test_who_does_not_know_the_token_is_refused(hosted, remote):
    with pytest.raises(ProtocolError, match="belongs to another push"):
        RemoteStore(HOST, hosted.port, "another", LONG)
    with pytest.raises(ProtocolError, match="belongs to another push"):
        RemoteStore(HOST, hosted.port, "\ud800", LONG)
    assert remote.num_keys() == 0


def request(op, **fields):
    return frame(json.dumps({"token": TOKEN, "op": op, **fields}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HT",  # no more: what the store leaves unread when it hangs up would take its answer along
        frame(b"", num_bytes=(1 << 20) + 1),
        frame(b"", magic=b"WSKW"),
        frame(b"{"),
        frame(b"7"),
        frame(b"{}"),
        request("set", names=["k"], value="not base64!"),
        request("set", names=["k"], expected="="),
        request("set"),
        request("add", names=["a", "b"]),
        request("set", names=[["k"]]),
        request("set", names=[None]),
        request("set", names=["k"], value=7),
        request("wait", names=["k"], seconds=-1),
        request("wait", names=["k"], seconds=math.nan),
        request("wait", names=["k"], seconds=math.inf),
        request("wait", names=["k"], seconds=True),
        request("add", names=["text"], amount=1),
        request("add", names=["k"], amount=1.5),
        request("eval", names=["k"]),
        request("set", names=["k"], more=1),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(hosted, data):
    hosted.set("text", "no number")
    answer = raw_answer(hosted.port, data)
    assert answer["error"]["type"] == "ProtocolError", answer
    assert hosted.num_keys() == 1
    assert hosted.get("text") == b"no number"


def test_strangers_that_say_nothing_do_not_keep_others_from_being_served(hosted):
    strangers = [socket.create_connection((HOST, hosted.port)) for _ in range(20)]
    assert RemoteStore(HOST, hosted.port, TOKEN, LONG).add("n", 1) == 1
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_says_nothing_is_hung_up_on():
    store = HostedStore(HOST, TOKEN, SHORT)
    with socket.create_connection((HOST, store.port), timeout=LONG) as stranger:
        assert stranger.recv(1) == b""
    store.close()


def test_a_host_that_is_not_this_machine_is_refused_with_the_remedy():
    with pytest.raises(TransportError, match=r"cannot listen on '192\.0\.2\.1'; host= must be an address"):
        HostedStore("192.0.2.1", TOKEN, LONG)


# What it holds


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "weightsync-rendezvous"]


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_store_that_is_closed_or_forgotten_frees_its_port_and_thread(how):
    before = threads()
    store = HostedStore(HOST, TOKEN, LONG)
    port = store.port
    mine = [thread for thread in threads() if thread not in before]
    if how == "closed":
        store.close()
    else:
        del store
        gc.collect()
    for thread in mine:
        thread.join(60)
        assert not thread.is_alive()
    socket.create_server((HOST, port)).close()


def test_no_name_is_ever_looked_up(monkeypatch, hosted):
    """A reverse lookup is what stalls torch's store: the resolver waits five seconds for a lost answer."""

    def lookup(*arguments):
        raise AssertionError("a name was asked for")

    for name in ("gethostbyaddr", "getnameinfo", "getfqdn"):
        monkeypatch.setattr(socket, name, lookup)
    remote = RemoteStore(HOST, hosted.port, TOKEN, LONG)
    remote.set("key", "value")
    assert hosted.get("key") == b"value"
