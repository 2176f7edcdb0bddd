"""Outboxes on the network: only holders of the whole address get blocks, nothing travels in clear, and engines of one
machine share memory instead. What all transports do is tested in tests/disagg/test_transport.py."""

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from zmq.utils import z85

from shoal.disagg.transport import PeerOutboxes, SharedPeer
from shoal.engine import curve_outbox
from shoal.engine.curve import KeyPair
from shoal.engine.curve_outbox import CurveAddress, CurveOutbox, CurvePeer, network_links, open_nearest
from shoal.errors import BadConfig, TransferFailed
from tests.disagg.test_transport import CHILD
from tests.processes.stopping import stop

BLOCKS, BYTES = 40, 70_000


def name(number: int) -> bytes:
    return bytes([number + 1]) * 32


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[CurveOutbox]:
    made = CurveOutbox("127.0.0.1", BLOCKS, BYTES, tmp_path)
    for block in range(BLOCKS):
        made.memory[block] = block
        made.label(block, name(block))
    yield made
    made.close()


@pytest.fixture
def peers() -> Iterator[PeerOutboxes]:
    made = PeerOutboxes({"curve": lambda rest: CurvePeer(CurveAddress.read(rest))})
    yield made
    made.close()


def parts(outbox: CurveOutbox) -> CurveAddress:
    return CurveAddress.read(outbox.address.removeprefix("curve://"))


def read(peers: PeerOutboxes, address: str, blocks: list[int]) -> list[int]:
    """A value of each block that came."""
    found: list[int] = []

    def take(number: int, data: Any) -> None:
        assert np.all(data == data[0, 0])
        assert (number, data.shape) == (len(found), (1, BYTES))
        found.append(int(data[0, 0]))

    peers.read(address, blocks, [name(block) for block in blocks], take)
    return found


@pytest.mark.parametrize("window", [1, BYTES, 3 * BYTES, 100 * BYTES])
def test_more_blocks_than_the_window_come_in_order(
    outbox: CurveOutbox, peers: PeerOutboxes, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_outbox, "WINDOW_BYTES", window)
    blocks = [(7 * number) % BLOCKS for number in range(BLOCKS)]
    assert read(peers, outbox.address, blocks) == blocks
    assert read(peers, outbox.address, [3]) == [3], "nothing was left over"


def test_several_readers_are_served_while_one_waits(outbox: CurveOutbox, peers: PeerOutboxes) -> None:
    outbox.clear(0)
    other = PeerOutboxes({"curve": lambda rest: CurvePeer(CurveAddress.read(rest))})
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.extend(read(other, outbox.address, [1, 0, 2])))
    waiting.start()
    assert read(peers, outbox.address, [5, 6]) == [5, 6]
    assert waiting.is_alive()
    outbox.label(0, name(0))
    waiting.join(30)
    assert found == [1, 0, 2]
    other.close()


def test_without_the_right_keys_nothing_comes(outbox: CurveOutbox, peers: PeerOutboxes) -> None:
    address, stranger = parts(outbox), KeyPair.fresh()
    wrong_reader = CurveAddress(address.place, address.server, stranger.secret)
    wrong_server = CurveAddress(address.place, stranger.public, address.reader)
    for wrong in (wrong_reader, wrong_server):
        with pytest.raises(TransferFailed):
            read(peers, str(wrong), [1])
    assert read(peers, outbox.address, [1]) == [1]


@pytest.mark.parametrize("place", ["nowhere", "127.0.0.1:99999", ""])
def test_a_place_that_cannot_be_is_a_failed_transfer(peers: PeerOutboxes, place: str) -> None:
    with pytest.raises(TransferFailed):
        read(peers, f"curve://{place}/{'1' * 64}/{'2' * 64}", [1])


def test_a_connection_in_clear_gets_nothing(outbox: CurveOutbox) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(f"tcp://{parts(outbox).place}")
        plain.send(curve_outbox._ASKED.pack(1, name(1)))
        assert not plain.poll(500)


class Relay:
    """Passes connections on until they are cut, and keeps all bytes of them; accepts others afterwards."""

    def __init__(self, place: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = place.rpartition(":")
        self._open: list[socket.socket] = []
        self.heard = bytearray()
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target[0], int(self._target[2])))
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.heard += data
                target.sendall(data)

    def cut(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join(30)
        self._listener.close()
        self.cut()


def test_nothing_travels_in_clear(outbox: CurveOutbox, peers: PeerOutboxes) -> None:
    address = parts(outbox)
    relay = Relay(address.place)
    assert read(peers, str(CurveAddress(relay.place, address.server, address.reader)), [7, 9]) == [7, 9]
    relay.close()
    assert len(relay.heard) > 2 * BYTES, "the relay heard nothing"
    for clear in (bytes([7]) * 32, bytes([9]) * 32, address.reader.encode(), z85.decode(address.reader)):
        assert clear not in relay.heard


def test_a_connection_that_was_lost_meanwhile_is_made_again(outbox: CurveOutbox, peers: PeerOutboxes) -> None:
    """A network's pause costs no block."""
    address = parts(outbox)
    relay = Relay(address.place)
    relayed = str(CurveAddress(relay.place, address.server, address.reader))
    assert read(peers, relayed, [1]) == [1]
    relay.cut()
    (peer,) = peers._peers.values()
    assert isinstance(peer, CurvePeer)
    assert all(one.monitor.poll(20_000) for one in peer._connections), "the end was not noticed"
    assert read(peers, relayed, [2]) == [2]
    assert list(peers._peers.values()) == [peer]
    relay.close()


@pytest.mark.slow
def test_a_machine_that_falls_silent_is_noticed(tmp_path: Path, peers: PeerOutboxes) -> None:
    """Not by the wait for the block, which would end with another reason."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, "curve", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    peers.read(address, [2], [b"n" * 32], lambda number, data: None)
    stop(child.pid)
    try:
        with pytest.raises(TransferFailed, match="went away"):
            peers.read(address, [3], [b"m" * 32], lambda number, data: None)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_engines_of_one_machine_share_the_memory(outbox: CurveOutbox, tmp_path: Path) -> None:
    near = open_nearest(outbox.address.removeprefix("curve://"))
    assert isinstance(near, SharedPeer)
    assert (near.segment.data[5] == 5).all()
    near.close()
    address = parts(outbox)
    (tmp_path / "file").touch()
    for path in ("", "/nowhere/outbox.sock", str(tmp_path / "file"), deserted(tmp_path)):
        far = open_nearest(str(CurveAddress(address.place, address.server, address.reader, path))[len("curve://") :])
        assert isinstance(far, CurvePeer)
        far.close()


def deserted(folder: Path) -> str:
    """The socket of a process that is gone."""
    path = str(folder / "deserted.sock")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
    return path


def test_where_no_memory_can_be_shared_the_network_is_enough(tmp_path: Path, peers: PeerOutboxes) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    outbox = CurveOutbox("127.0.0.1", 2, BYTES, long)
    outbox.memory[1] = 1
    outbox.label(1, name(1))
    assert not parts(outbox).path
    assert read(peers, outbox.address, [1]) == [1]
    outbox.close()


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"203\.0\.113\.1"):
        CurveOutbox("203.0.113.1", 2, 10)


def test_links_of_each_role(tmp_path: Path) -> None:
    prefill, decode, none = (network_links(role, "127.0.0.1", tmp_path) for role in ("prefill", "decode", ""))
    assert (prefill.has_outbox, decode.has_outbox, none.has_outbox) == (True, False, False)
    outbox = prefill.outbox(2, 10)
    assert outbox is not None
    assert outbox.address == prefill.address
    assert decode.peers is not None
    outbox.label(1, name(1))
    decode.peers.read(prefill.address, [1], [name(1)], lambda number, data: None)
    decode.peers.close()
    outbox.close()
    assert (none.role, none.peers) == ("", None)
