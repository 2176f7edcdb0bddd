"""Outboxes and their readers: blocks come unchanged, a reader waits for those that were only announced, and whatever
goes wrong is a TransferFailed, never wrong bytes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.plan import BlockCopy
from shoal.disagg import transport
from shoal.disagg.transport import PeerOutboxes, SharedOutbox, TcpOutbox
from shoal.engine.curve_outbox import CurveOutbox, CurvePeer, open_nearest
from shoal.errors import TransferFailed
from shoal.models.spec import spec_from_config
from shoal.runner.copier import Copier
from shoal.runner.kvstore import KVStore, bytes_per_block
from tests.models.test_spec import config

BLOCKS, BYTES = 8, 5000
KINDS = ("shm", "tcp", "curve")
NETWORK = {"curve": open_nearest}


def name(number: int) -> bytes:
    return bytes([number]) * 32


def make(kind: str, folder: Path, blocks: int = BLOCKS, size: int = BYTES) -> Any:
    made = {
        "shm": lambda: SharedOutbox(folder, blocks, size),
        "tcp": lambda: TcpOutbox(blocks, size),
        "curve": lambda: CurveOutbox("127.0.0.1", blocks, size),
    }
    return made[kind]()


def fill(outbox: Any, block: int, number: int) -> None:
    outbox.clear(block)
    outbox.memory[block] = number
    outbox.label(block, name(number))


@pytest.fixture(params=KINDS)
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = make(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def peers() -> Iterator[PeerOutboxes]:
    made = PeerOutboxes(NETWORK)
    yield made
    made.close()


def read(peers: PeerOutboxes, address: str, blocks: list[int], names: list[bytes]) -> dict[int, np.ndarray[Any, Any]]:
    found = {}

    def take(first: int, data: Any) -> None:
        found.update({first + number: np.array(block) for number, block in enumerate(data)})

    peers.read(address, blocks, names, take)
    return found


def test_blocks_come_as_they_are(outbox: Any, peers: PeerOutboxes) -> None:
    for block in range(BLOCKS):
        fill(outbox, block, block + 1)
    for _ in range(2):
        found = read(peers, outbox.address, [5, 0, 7], [name(6), name(1), name(8)])
        assert [found[number].tolist() for number in range(3)] == [[6] * BYTES, [1] * BYTES, [8] * BYTES]


def test_a_block_that_was_only_announced_is_waited_for(outbox: Any, peers: PeerOutboxes) -> None:
    fill(outbox, 0, 1)
    fill(outbox, 1, 9)  # an older content of the place
    found: dict[int, Any] = {}
    reading = threading.Thread(target=lambda: found.update(read(peers, outbox.address, [0, 1], [name(1), name(2)])))
    reading.start()
    reading.join(0.2)
    assert reading.is_alive()
    fill(outbox, 1, 2)
    reading.join(30)
    assert found[1].tolist() == [2] * BYTES


def test_a_block_that_never_comes_is_given_up(
    outbox: Any, monkeypatch: pytest.MonkeyPatch, peers: PeerOutboxes
) -> None:
    monkeypatch.setattr(transport, "WAIT_S", 0.05)
    fill(outbox, 0, 1)
    with pytest.raises(TransferFailed, match="did not come"):
        read(peers, outbox.address, [0], [name(2)])
    assert read(peers, outbox.address, [0], [name(1)])[0][0] == 1, "the next one is read all the same"


def test_a_block_that_changes_while_it_is_read_is_not_trusted(outbox: Any, peers: PeerOutboxes) -> None:
    fill(outbox, 0, 1)
    fill(outbox, 1, 2)
    if not isinstance(outbox, SharedOutbox):
        holds, looks = outbox.segment.holds, [0]

        def changed(block: int, wanted: bytes) -> bool:
            looks[0] += 1
            return holds(block, wanted) and looks[0] < 2

        outbox.segment.holds = changed  # type: ignore[method-assign]
        with pytest.raises(TransferFailed, match="overwritten"):
            read(peers, outbox.address, [0], [name(1)])
        return
    with pytest.raises(TransferFailed, match="overwritten"):
        peers.read(outbox.address, [0], [name(1)], lambda number, data: outbox.clear(0))


def test_an_engine_that_is_gone_is_noticed_at_once(outbox: Any, peers: PeerOutboxes) -> None:
    """Far sooner than the wait for a block that never comes: else this test would take half a minute."""
    failures: list[Exception] = []

    def reads() -> None:
        try:
            read(peers, outbox.address, [0], [name(1)])
        except TransferFailed as error:
            failures.append(error)

    reading = threading.Thread(target=reads)
    reading.start()
    reading.join(0.2)
    assert reading.is_alive()
    outbox.close()
    reading.join(20)
    assert failures
    with pytest.raises(TransferFailed):
        read(peers, outbox.address, [0], [name(1)])


@pytest.mark.parametrize("kind", KINDS)
def test_outboxes_of_engines_that_are_gone_are_let_go(kind: str, tmp_path: Path, peers: PeerOutboxes) -> None:
    (tmp_path / "next").mkdir()
    for folder in (tmp_path, tmp_path / "next"):
        outbox = make(kind, folder)
        fill(outbox, 0, 1)
        assert read(peers, outbox.address, [0], [name(1)])
        assert list(peers._peers) == [outbox.address]
        outbox.close()
        wait_until(lambda: has_ended(peers))


def has_ended(peers: PeerOutboxes) -> bool:
    """Looks at a copy of what the connection of the one peer says, so that it is still there for the next look."""
    (peer,) = peers._peers.values()
    if isinstance(peer, CurvePeer):
        return all(one.monitor.poll(0) for one in peer._connections)
    return peer.has_ended()


def wait_until(came: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not came():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_reader_that_closes_waits_no_more(outbox: Any, peers: PeerOutboxes) -> None:
    failures: list[Exception] = []

    def reads() -> None:
        try:
            read(peers, outbox.address, [0], [name(1)])
        except TransferFailed as error:
            failures.append(error)

    reading = threading.Thread(target=reads)
    reading.start()
    wait_until(lambda: bool(peers._peers))
    peers.close()
    reading.join(20)
    assert failures


def test_a_reader_that_closes_while_it_connects_waits_for_no_block(outbox: Any, peers: PeerOutboxes) -> None:
    def slowly(rest: str) -> Any:
        peers.close()
        return opened(rest)

    kind = outbox.address.partition(":")[0]
    opened, peers._openers[kind] = peers._openers[kind], slowly
    with pytest.raises(TransferFailed, match="clos"):
        read(peers, outbox.address, [0], [name(1)])
    assert not peers._peers


def test_without_the_token_nothing_is_sent(tmp_path: Path, peers: PeerOutboxes) -> None:
    outbox = make("tcp", tmp_path)
    fill(outbox, 0, 1)
    wrong = outbox.address[:-64] + "0" * 64
    with pytest.raises(TransferFailed):
        read(peers, wrong, [0], [name(1)])
    assert read(peers, outbox.address, [0], [name(1)])
    outbox.close()


def test_an_outbox_that_does_not_answer_is_tried_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a machine that is gone: here, a port where none is accepted."""
    monkeypatch.setattr(transport, "CONNECT_S", 0.2)
    tries: list[str] = []

    def open_silent(rest: str) -> Any:
        tries.append(rest)
        return open_nearest(rest)

    peers = PeerOutboxes({"curve": open_silent})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"curve://127.0.0.1:{silent.getsockname()[1]}/{'1' * 64}/{'2' * 64}"
        for reason in ("does not answer", "a moment ago", "a moment ago"):
            with pytest.raises(TransferFailed, match=reason) as caught:
                read(peers, address, [0], [name(1)])
            assert "2" * 64 not in str(caught.value), "the reader's key is a secret"
    assert len(tries) == 1
    peers.close()


def test_an_unknown_kind_of_address_is_a_failed_transfer(peers: PeerOutboxes) -> None:
    with pytest.raises(TransferFailed):
        peers.read("carrier-pigeon:home", [0], [name(1)], lambda number, data: None)


CHILD = """
import sys, time
from pathlib import Path
from shoal.disagg.transport import SharedOutbox, TcpOutbox
from shoal.engine.curve_outbox import CurveOutbox
kind, folder = sys.argv[1:]
if kind == "shm":
    outbox = SharedOutbox(Path(folder), 4, 100)
else:
    outbox = TcpOutbox(4, 100) if kind == "tcp" else CurveOutbox("127.0.0.1", 4, 100)
outbox.memory[2] = 7
outbox.label(2, b"n" * 32)
print(outbox.address, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_between_processes_and_after_a_kill(kind: str, tmp_path: Path, peers: PeerOutboxes) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, kind, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    assert read(peers, address, [2], [b"n" * 32])[0].tolist() == [7] * 100
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with pytest.raises(TransferFailed):
        read(peers, address, [3], [b"m" * 32])
    with pytest.raises(TransferFailed):
        read(peers, address, [3], [b"m" * 32]) if kind == "shm" else read(peers, address, [2], [b"n" * 32])
    child.stdout.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_blocks_go_from_one_engine_to_another(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    spec = spec_from_config(config())
    outbox = make(kind, tmp_path, 5, bytes_per_block(spec, 4, dtype))
    source = KVStore(spec, 6, 4, dtype, "cpu", outbox=outbox)
    target = KVStore(spec, 9, 4, dtype, "cpu", peers=PeerOutboxes(NETWORK))
    source.data.copy_(torch.randn(source.data.shape, generator=torch.Generator().manual_seed(1)))
    sends, gets = Copier(source), Copier(target)
    names = (name(1), name(2), name(3))
    gets.submit(BlockCopy(0, (3, 0, 4), (8, 1, 2), "in", names, outbox.address))  # announced before it is there
    sends.submit(BlockCopy(0, (1, 4, 2), (3, 0, 4), "out", names))
    assert gets.take(all_of_them=True)[0][0][0] == 0
    for was, now in ((1, 8), (4, 1), (2, 2)):
        assert torch.equal(target.data[:, :, now], source.data[:, :, was])
    assert not target.data[:, :, 0].any()
    gets.submit(BlockCopy(1, (3,), (0,), "in", (name(9),), "unix:/nowhere"))
    assert gets.take(all_of_them=True)[1] == (1,)
    sends.submit(BlockCopy(1, (3,), (2,), "in"))  # the outbox is also the engine's own host memory
    assert sends.take(all_of_them=True)[0]
    sends.close()
    gets.close()
