"""How KV blocks travel from the outbox of one engine to another engine: shared memory, or TCP.

An outbox is a segment of host blocks and a thread that lets other engines in:

    shm    unix:PATH              the reader gets the segment's descriptor, maps it and copies straight out of it
    tcp    tcp://HOST:PORT/TOKEN  the reader asks for blocks by place and name, and they are sent in clear: so HOST
                                  is this machine's loopback interface
    (cuda-ipc.  cuda:PATH         the blocks lie on a GPU: disagg/cuda_ipc.py)
    (between machines: curve://…  encrypted: engine/curve_outbox.py)

A block is announced before it is there. Its reader waits until its label says so, as long as the other engine
lives. Knows bytes, names and sockets; does not know requests or torch.
"""

import contextlib
import hmac
import json
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.disagg.segment import LABEL_BYTES, Segment
from shoal.errors import TransferFailed

log = logging.getLogger(__name__)

SOCKET = "outbox.sock"  # in the engine's private folder
WAIT_S = 30.0  # longest wait for a block that was announced: a pass of the other engine may come first
LOOK_S = 0.0005  # between two looks at a label
CONNECT_S = 5.0
AGAIN_S = 10.0  # after which an outbox that did not answer is tried again
LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 32
_COUNT = struct.Struct("<I")
_ASKED = struct.Struct(f"<I{LABEL_BYTES}s")  # place, name
HERE, GONE = b"\x01", b"\x00"

Take = Callable[[int, Any], None]  # (number of the first, bytes of one or more blocks: [blocks, …])


def wait_for(segment: Segment, block: int, name: bytes, ended: Callable[[], bool]) -> bool:
    """Until the block holds this; False if that takes too long, or has no hope."""
    until_s = time.monotonic() + WAIT_S
    while not segment.holds(block, name):
        if ended() or time.monotonic() > until_s:
            return False
        time.sleep(LOOK_S)
    return True


# ---- the engine that the blocks come from


class SharedOutbox:
    """An outbox in shared memory, for engines of the same user on this machine."""

    def __init__(self, folder: Path, blocks: int, block_bytes: int) -> None:
        """`folder`: the engine's own, which only this user can enter."""
        listener = listen_in(folder)
        self.segment = Segment.fresh(blocks, block_bytes)
        self.memory: Any = self.segment.data
        self.address = f"unix:{folder / SOCKET}"
        self._doors = Doors(listener, self._welcome)

    def clear(self, block: int) -> None:
        self.segment.clear(block)

    def label(self, block: int, name: bytes) -> None:
        self.segment.label(block, name)

    def about(self) -> dict[str, Any]:
        """What a reader must know, beside the descriptor."""
        return {"blocks": self.segment.blocks, "block_bytes": self.segment.block_bytes}

    def _welcome(self, visitor: socket.socket) -> None:
        socket.send_fds(visitor, [json.dumps(self.about()).encode()], [self.segment.fd])
        visitor.recv(1)  # the connection shows the reader that this engine lives; it ends with the reader

    def close(self) -> None:
        self._doors.close()
        self.segment.close()


class TcpOutbox:
    """An outbox whose blocks are sent over TCP to readers on this machine that have its token."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.segment = Segment.fresh(blocks, block_bytes)
        self.memory: Any = self.segment.data
        self._token = secrets.token_bytes(TOKEN_BYTES)
        listener = socket.create_server((LOOPBACK, 0))
        self.address = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}/{self._token.hex()}"
        self._closing = Event()
        self._doors = Doors(listener, self._welcome)

    def clear(self, block: int) -> None:
        self.segment.clear(block)

    def label(self, block: int, name: bytes) -> None:
        self.segment.label(block, name)

    def _welcome(self, visitor: socket.socket) -> None:
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor.settimeout(CONNECT_S)
        if not hmac.compare_digest(receive(visitor, TOKEN_BYTES), self._token):
            log.warning("a connection to the KV outbox without its token was refused")
            return
        visitor.settimeout(None)
        visitor.sendall(_COUNT.pack(self.segment.block_bytes))
        while True:
            (count,) = _COUNT.unpack(receive(visitor, _COUNT.size))
            asked = [_ASKED.unpack(receive(visitor, _ASKED.size)) for _ in range(count)]
            if not all(self._send(visitor, block, name) for block, name in asked):
                return

    def _send(self, visitor: socket.socket, block: int, name: bytes) -> bool:
        known = block < self.segment.blocks and wait_for(self.segment, block, name, self._closing.is_set)
        if not known:
            visitor.sendall(GONE)
            return False
        visitor.sendall(HERE)
        visitor.sendall(self.segment.data[block].data)
        still = self.segment.holds(block, name)
        visitor.sendall(HERE if still else GONE)
        return still

    def close(self) -> None:
        self._closing.set()
        self._doors.close()
        self.segment.close()


class Doors:
    """A listening socket; each visitor is welcomed on a thread of its own."""

    def __init__(self, listener: socket.socket, welcome: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._welcome = welcome
        self._visitors: set[socket.socket] = set()
        Thread(target=self._accept, name="shoal-outbox", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                return  # closed
            Thread(target=self._serve, args=(visitor,), name="shoal-outbox-reader", daemon=True).start()

    def _serve(self, visitor: socket.socket) -> None:
        self._visitors.add(visitor)
        with visitor, contextlib.suppress(OSError, TransferFailed):
            self._welcome(visitor)
        self._visitors.discard(visitor)

    def close(self) -> None:
        for one in (self._listener, *self._visitors):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for it
        self._listener.close()


def listen_in(folder: Path) -> socket.socket:
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


# ---- the engine that they go to


class Peer(Protocol):
    """Another engine's outbox, opened."""

    def read(self, blocks: Sequence[int], names: Sequence[bytes], take: Take, closing: Event) -> None: ...

    def has_ended(self) -> bool:
        """Whether the other engine is gone, or the way to it."""

    def close(self) -> None: ...


class SharedPeer:
    """Maps the other engine's segment."""

    def __init__(self, path: str) -> None:
        self._socket, about, fd = enter(path)
        self.segment = Segment(fd, int(about["blocks"]), int(about["block_bytes"]))
        self.about = about

    def read(self, blocks: Sequence[int], names: Sequence[bytes], take: Take, closing: Event) -> None:
        for number, (block, name) in enumerate(zip(blocks, names, strict=True)):
            self.wait(block, name, closing)
            take(number, self.segment.data[block : block + 1])
            self.confirm(block, name)

    def wait(self, block: int, name: bytes, closing: Event) -> None:
        if not wait_for(self.segment, block, name, lambda: closing.is_set() or self.has_ended()):
            raise TransferFailed("a block was announced and did not come")

    def confirm(self, block: int, name: bytes) -> None:
        if not self.segment.holds(block, name):
            raise TransferFailed("a block was overwritten while it was read")

    def has_ended(self) -> bool:
        return has_ended(self._socket)

    def close(self) -> None:
        self._socket.close()
        self.segment.close()


class TcpPeer:
    """Asks the other engine for blocks. Several are asked for at once, and come one after the other."""

    def __init__(self, rest: str) -> None:
        """`rest`: of the address, after tcp://"""
        place, _, token = rest.rpartition("/")
        host, _, port = place.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=CONNECT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(bytes.fromhex(token))
            (size,) = _COUNT.unpack(receive(self._socket, _COUNT.size))
        except BaseException:
            self._socket.close()
            raise
        self._buffer: npt.NDArray[np.uint8] = np.empty(size, dtype=np.uint8)
        self._socket.settimeout(WAIT_S + CONNECT_S)

    def read(self, blocks: Sequence[int], names: Sequence[bytes], take: Take, closing: Event) -> None:
        asked = b"".join(_ASKED.pack(block, name) for block, name in zip(blocks, names, strict=True))
        self._socket.sendall(_COUNT.pack(len(blocks)) + asked)
        view = self._buffer.data
        for number in range(len(blocks)):
            if receive(self._socket, 1) != HERE:
                raise TransferFailed("a block was announced and did not come")
            receive_into(self._socket, view)
            if receive(self._socket, 1) != HERE:
                raise TransferFailed("a block was overwritten while it was sent")
            take(number, self._buffer[None])

    def has_ended(self) -> bool:
        return has_ended(self._socket)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self._socket.close()


OPENERS: dict[str, Callable[[str], Peer]] = {"unix": SharedPeer, "tcp": TcpPeer}


class PeerOutboxes:
    """All outboxes that this engine reads; each is opened when it is first needed, and again after a failure."""

    def __init__(self, openers: Mapping[str, Callable[[str], Peer]] | None = None) -> None:
        """`openers`: of further kinds of addresses, by what stands before the colon."""
        self._openers = {**OPENERS, **(openers or {})}
        self._peers: dict[str, Peer] = {}
        self._silent: dict[str, float] = {}  # that did not answer → until when they are not tried again
        self._closing = Event()

    def read(self, peer: str, blocks: Sequence[int], names: Sequence[bytes], take: Take) -> None:
        try:
            if peer not in self._peers:
                self._peers[peer] = self._open(peer)
            if self._closing.is_set():  # perhaps while it was opened, when close() did not know of it
                raise TransferFailed("this engine is closing")
            self._peers[peer].read(blocks, names, take, self._closing)
        except (OSError, ValueError, KeyError, TransferFailed) as error:
            opened = self._peers.pop(peer, None)
            if opened is not None:
                opened.close()
            raise TransferFailed(f"KV blocks did not come from {shown(peer)}: {error}") from error

    def _open(self, peer: str) -> Peer:
        """A machine that is gone refuses nothing, so each try takes its whole time, and other blocks wait behind it: it
        is tried once in a while."""
        self._drop_ended()
        begun_s = time.monotonic()
        self._silent = {one: until_s for one, until_s in self._silent.items() if until_s > begun_s}
        if peer in self._silent:
            raise TransferFailed("it did not answer a moment ago")
        kind, _, rest = peer.partition(":")
        try:
            return self._openers[kind](rest.removeprefix("//"))
        except (OSError, TransferFailed):
            now_s = time.monotonic()
            if now_s - begun_s > CONNECT_S / 2:
                self._silent[peer] = now_s + AGAIN_S
            raise

    def _drop_ended(self) -> None:
        """An engine that is started again has another outbox; nothing more is read from the one that it had."""
        for address, peer in list(self._peers.items()):
            if peer.has_ended():
                del self._peers[address]
                peer.close()

    def close(self) -> None:
        self._closing.set()
        for peer in list(self._peers.values()):  # a thread that reads one notices
            peer.close()


def shown(peer: str) -> str:
    """An outbox's address, less what is secret in it.

    >>> shown("tcp://127.0.0.1:4000/c0ffee"), shown("unix:/tmp/shoal-1/outbox.sock")
    ('tcp://127.0.0.1:4000', 'unix:/tmp/shoal-1/outbox.sock')
    """
    kind, slashes, rest = peer.partition("://")
    return f"{kind}{slashes}{rest.partition('/')[0]}"


def enter(path: str) -> tuple[socket.socket, dict[str, Any], int]:
    """Connect to an outbox on this machine: the connection, what it says of itself, and its descriptor."""
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        visitor.settimeout(CONNECT_S)
        visitor.connect(path)
        said, fds, _, _ = socket.recv_fds(visitor, 65536, 1)
        if not said or not fds:
            raise TransferFailed("the other engine went away")
        return visitor, json.loads(said), fds[0]
    except BaseException:
        visitor.close()
        raise


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side is gone; it sends nothing that it is not asked for."""
    return bool(select.select([connection], [], [], 0)[0])


def receive(source: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    receive_into(source, memoryview(data))
    return bytes(data)


def receive_into(source: socket.socket, view: memoryview) -> None:
    while len(view):
        count = source.recv_into(view)
        if not count:
            raise TransferFailed("the other engine went away")
        view = view[count:]
