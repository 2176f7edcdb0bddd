"""Engines on TCP: only holders of the deployment's client key get an answer, nothing travels in clear, and garbage on
the port changes nothing."""

import contextlib
import socket as sockets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shoal.core.job import EngineInfo
from shoal.engine import wire
from shoal.engine.curve import KeyPair, SocketOptions, client_options, server_options
from shoal.engine.host import Host, InboxClock
from shoal.engine.listen import NetworkListening, PrivateListening, Reach, listening_of, router
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig
from tests.engine.hosts import expected, make_job
from tests.fakes import VOCAB, FakeExecutor, make_scheduler

ANSWER_MS = 20_000  # far more than an answer takes
NONE_MS = 600  # for answers that must not come


class NetworkEngine:
    """A host on a thread that listens on a TCP port of this machine."""

    def __init__(self, client_key: str) -> None:
        self.listening = listening = NetworkListening("tcp://127.0.0.1:*", client_key)
        scheduler = make_scheduler()
        executor = FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)
        loop = EngineLoop(scheduler, executor, InboxClock(listening.socket), check=True)
        self.host = Host(loop, listening.socket, EngineInfo(0, 200, VOCAB, 256, "float32", "fake"))
        self.reach = listening.bind()
        self.thread = threading.Thread(target=self.host.run, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        self.host.stop()
        self.thread.join(10)
        self.listening.close()


@pytest.fixture(scope="module")
def keys() -> KeyPair:
    return KeyPair.fresh()


@pytest.fixture(scope="module")
def engine(keys: KeyPair) -> Iterator[NetworkEngine]:
    made = NetworkEngine(keys.public)
    yield made
    made.kill()


def apply(options: SocketOptions, socket: "zmq.Socket[bytes]") -> None:
    for name, value in options:
        socket.setsockopt(name, value)


def dealer(reach: Reach, own: KeyPair | None, server_key: str | None = None) -> "zmq.Socket[bytes]":
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    if own is not None:
        apply(client_options(own, reach.server_key if server_key is None else server_key), made)
    made.connect(reach.address)
    return made


def answers(socket: "zmq.Socket[bytes]", message: wire.Message, wait_ms: int) -> Any:
    """The first answer, or None."""
    socket.setsockopt(zmq.SNDTIMEO, wait_ms)  # a refused peer may have no connection to send on
    with contextlib.suppress(zmq.Again):
        socket.send(wire.pack(message))
    return wire.read_engine(socket.recv()) if socket.poll(wait_ms) else None


def compute_a_job(reach: Reach, own: KeyPair) -> None:
    with dealer(reach, own) as front:
        assert isinstance(answers(front, wire.Hello(), ANSWER_MS), wire.Ready)
        job = make_job()
        front.send(wire.pack(wire.Submit.of(1, job)))
        tokens: list[int] = []
        while True:
            assert front.poll(ANSWER_MS), tokens
            news = wire.read_engine(front.recv())
            assert isinstance(news, wire.Pass)
            tokens += news.tokens
            if news.ended:
                break
        assert tokens == expected(job)


def test_the_holder_of_the_key_is_served(engine: NetworkEngine, keys: KeyPair) -> None:
    compute_a_job(engine.reach, keys)


def test_another_key_or_none_gets_nothing(engine: NetworkEngine, keys: KeyPair) -> None:
    others = [dealer(engine.reach, KeyPair.fresh()), dealer(engine.reach, None)]
    for other in others:
        with other:
            assert answers(other, wire.Hello(), NONE_MS) is None
    compute_a_job(engine.reach, keys)
    assert len(engine.host.fronts) <= 2, "no refused peer became a front"


def test_a_client_refuses_an_engine_that_is_not_the_one_it_was_told_of(engine: NetworkEngine, keys: KeyPair) -> None:
    with dealer(engine.reach, keys, server_key=KeyPair.fresh().public) as front:
        assert answers(front, wire.Hello(), NONE_MS) is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
        b"\x00" * 4096,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE".ljust(71, b"\0") + b"\x06" + b"\x7f" + b"\xff" * 7,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL".ljust(71, b"\0") + b"\x04\x05READY",
        bytes(range(256)) * 64,
    ],
    ids=["http", "zeros", "a frame of 2^63 bytes", "no security", "anything"],
)
def test_the_engine_survives_garbage_on_its_port(engine: NetworkEngine, keys: KeyPair, garbage: bytes) -> None:
    host, _, port = engine.reach.address.removeprefix("tcp://").rpartition(":")
    for _ in range(3):
        with sockets.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(garbage)
            peer.settimeout(0.1)
            try:
                while peer.recv(4096):
                    pass
            except (TimeoutError, ConnectionError):
                pass
    compute_a_job(engine.reach, keys)


def test_nothing_travels_in_clear(engine: NetworkEngine, keys: KeyPair) -> None:
    with Tap(engine.reach) as tap:
        compute_a_job(tap.reach, keys)
    assert b"CURVE" in tap.heard, "the tap heard nothing"
    for word in (b"Submit", b"Ready", b"max_tokens", b"float32", keys.secret.encode()):
        assert word not in tap.heard


class Tap:
    """Passes a connection on, and keeps every byte of it."""

    def __init__(self, reach: Reach) -> None:
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self._target = reach.address.removeprefix("tcp://").rpartition(":")
        self.reach = Reach(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}", reach.server_key)
        self.heard = b""

    def __enter__(self) -> "Tap":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = sockets.create_connection((self._target[0], int(self._target[2])))
        threading.Thread(target=self._pass_on, args=(near, far), daemon=True).start()
        self._pass_on(far, near)

    def _pass_on(self, source: sockets.socket, target: sockets.socket) -> None:
        try:
            while data := source.recv(65536):
                self.heard += data
                target.sendall(data)
        except OSError:
            pass
        target.close()


def test_without_an_authenticator_a_secured_socket_refuses_all(keys: KeyPair) -> None:
    with zmq.Context() as context, router(context) as socket:
        own = KeyPair.fresh()
        apply(server_options(own), socket)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with dealer(Reach(f"tcp://127.0.0.1:{port}", own.public), keys) as front:
            front.send(b"hello")
            assert not socket.poll(NONE_MS)


def test_tcp_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="client_key"):
        listening_of({"listen": "tcp://127.0.0.1:*"}, tmp_path)
    with pytest.raises(BadConfig, match="tcp://HOST:PORT"):
        listening_of({"listen": "udp://127.0.0.1:1", "client_key": KeyPair.fresh().public}, tmp_path)
    with pytest.raises(BadConfig, match="40 characters"):
        listening_of({"listen": "tcp://127.0.0.1:*", "client_key": "x"}, tmp_path)
    private = listening_of({}, tmp_path)
    assert isinstance(private, PrivateListening)
    private.close()


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    listening = NetworkListening("tcp://203.0.113.1:1", KeyPair.fresh().public)
    with pytest.raises(BadConfig, match=r"203\.0\.113\.1"):
        listening.bind()
    listening.close()


def test_secrets_are_not_shown(keys: KeyPair) -> None:
    assert keys.secret not in repr(keys)
    assert keys.public in repr(keys)
    assert KeyPair.from_json(keys.as_json()) == keys


def test_how_to_reach_an_engine_is_written_down(tmp_path: Path) -> None:
    reach = Reach("tcp://10.0.0.1:4000", KeyPair.fresh().public)
    reach.write(tmp_path)
    assert Reach.read(tmp_path) == reach
