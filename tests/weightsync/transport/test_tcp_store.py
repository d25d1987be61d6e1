"""torch's store as NCCL gets it: one slow attempt is not waited for, and no port is waited on for ever."""

import socket
import threading

import pytest

from weightsync.errors import PeerFailed, TransportTimeout
from weightsync.transport import tcp_store
from weightsync.transport.tcp_store import host_tcp_store, join_tcp_store

HOST, LONG = "127.0.0.1", 60.0


def test_two_sides_share_keys():
    hosted = host_tcp_store(HOST, LONG)
    joined = join_tcp_store(HOST, hosted.port, LONG)
    joined.set("key", "value")
    assert hosted.get("key") == b"value"
    assert joined.compare_set("key", "value", "other") == b"other"
    assert hosted.add("n", 2) == 2


def test_a_host_that_is_no_ipv4_address_has_torchs_own_listener(monkeypatch):
    made = []
    monkeypatch.setattr(tcp_store.dist, "TCPStore", lambda *a, **k: made.append((a[:4], k)) or "store")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(socket.AF_INET6, 0, 0, "", ("::1", 0))])
    assert host_tcp_store("::1", LONG) == "store"
    assert made == [(("::1", 0, None, True), {})]


def test_nobody_listening_is_found_out_without_torchs_own_retries(monkeypatch):
    monkeypatch.setattr(tcp_store.dist, "TCPStore", lambda *a: pytest.fail("its retries go on past the deadline"))
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        with pytest.raises(PeerFailed, match="cannot be reached"):
            join_tcp_store(HOST, unused.getsockname()[1], 3600.0)


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def attempts(monkeypatch, *outcomes, release):
    """TCPStore's attempts end with these: a value, an error, or "hang" until the test ends."""
    left = list(outcomes)

    def make(*arguments, **options):
        outcome = left.pop(0)
        if outcome == "hang":
            release.wait(LONG)
            return "late"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(tcp_store.dist, "TCPStore", make)
    monkeypatch.setattr(tcp_store, "_PATIENCE_SECONDS", 0.05)
    return left


def test_an_attempt_that_hangs_is_not_waited_for(monkeypatch, release):
    left = attempts(monkeypatch, "hang", "hang", "third", release=release)
    assert host_tcp_store("::1", LONG) == "third"
    assert left == []


def test_attempts_that_all_hang_are_a_timeout(monkeypatch, release):
    attempts(monkeypatch, "hang", "hang", "hang", release=release)
    with socket.create_server((HOST, 0)) as silent, pytest.raises(TransportTimeout, match=r"did not answer in 0\.3 s"):
        join_tcp_store(HOST, silent.getsockname()[1], 0.3)


def test_a_first_attempt_that_ends_late_still_counts(monkeypatch, release):
    attempts(monkeypatch, "hang", "hang", "hang", release=release)
    monkeypatch.setattr(tcp_store, "_PATIENCE_SECONDS", LONG)
    threading.Timer(0.1, release.set).start()
    assert host_tcp_store("::1", LONG) == "late"


@pytest.mark.parametrize(
    ("words", "kind"), [("client socket has timed out after 1ms", TransportTimeout), ("refused", PeerFailed)]
)
def test_torchs_errors_are_ours(monkeypatch, release, words, kind):
    attempts(monkeypatch, RuntimeError(words), release=release)
    with pytest.raises(kind, match=words):
        host_tcp_store("::1", LONG)
