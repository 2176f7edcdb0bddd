"""KV blocks between machines: an outbox whose blocks are sent by CURVE (engine/curve.py), and its reader.

    curve://HOST:PORT/SERVER/READER?PATH    keys in hexadecimal; ?PATH is left out where no memory is shared

The outbox makes two key pairs when it is opened: its own, of which SERVER is the public half, and one for its readers,
of which READER is the secret half. So the address is all that a reader needs, and without it none gets in. It is a
secret: it travels only in the messages of engines and fronts, which are encrypted themselves. PATH is a socket on the
outbox's machine, where engines of the same user share its memory instead.

Owns the messages between the two and what is under way. Knows bytes and names; does not know requests.
"""

import logging
import os
import stat
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TypeAlias

import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shoal.disagg import transport
from shoal.disagg.handoff import DECODE, PREFILL
from shoal.disagg.links import KVLinks
from shoal.disagg.segment import LABEL_BYTES, Segment
from shoal.disagg.transport import Peer, PeerOutboxes, SharedOutbox, SharedPeer, Take
from shoal.engine.curve import Authenticator, KeyPair, client_options, server_options
from shoal.engine.listen import router
from shoal.errors import BadConfig, TransferFailed

log = logging.getLogger(__name__)

CONNECTIONS = 4  # of one reader to one outbox, and threads on each side that encrypt for all of them
LOOK_MS = 1  # between two looks at a label
TURN_MS = 100  # between two looks whether the reader's engine ends
FIRST_BLOCKS = 4  # that are asked for before the size of one is known
WINDOW_BYTES = 16 * 2**20  # that are on their way to one reader: enough for 10 Gbit/s over 10 ms
_ASKED = struct.Struct(f"<I{LABEL_BYTES}s")  # place, name
GONE, CHANGED = b"\x00", b"\x01"  # instead of a block, which is larger
FAILURES = {GONE: "a block was announced and did not come", CHANGED: "a block was overwritten while it was read"}
ENDED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
Socket: TypeAlias = "zmq.Socket[bytes]"


def network_links(role: str, host: str, folder: Path | None) -> KVLinks:
    """Of an engine of this role ("": none) that is reached at this host. `folder`: its own, where engines on the same
    machine find its memory; None: they use the network, too."""
    if role == PREFILL:
        return KVLinks(PREFILL, lambda blocks, size: CurveOutbox(host, blocks, size, folder))
    if role == DECODE:
        return KVLinks(DECODE, peers=PeerOutboxes({"curve": open_nearest}))
    return KVLinks()


@dataclass(frozen=True)
class CurveAddress:
    """Of an outbox that is reached by CURVE.

    >>> address = CurveAddress("[::1]:4000", "Q" * 40, "R" * 40, "/tmp/shoal-1/outbox.sock")
    >>> CurveAddress.read(str(address).removeprefix("curve://")) == address
    True
    """

    place: str  # HOST:PORT
    server: str  # its public key
    reader: str  # the secret key of its readers
    path: str = ""  # where it shares its memory

    def __str__(self) -> str:
        near = f"?{self.path}" if self.path else ""
        return f"curve://{self.place}/{z85.decode(self.server).hex()}/{z85.decode(self.reader).hex()}{near}"

    @classmethod
    def read(cls, rest: str) -> "CurveAddress":
        """`rest`: what follows curve://. Raises ValueError."""
        place, server, last = rest.split("/", 2)
        reader, _, path = last.partition("?")
        server, reader = (z85.encode(bytes.fromhex(key)).decode() for key in (server, reader))
        return cls(place, server, reader, path)


# ---- the engine that the blocks come from


@dataclass(frozen=True, slots=True)
class AskedBlock:
    """A block that a reader waits for."""

    block: int
    name: bytes
    until_s: float


class CurveOutbox:
    """An outbox whose blocks are sent to readers that hold its reader key; one thread answers all of them."""

    def __init__(self, host: str, blocks: int, block_bytes: int, folder: Path | None = None) -> None:
        """`host`: as in a URL. `folder`: the engine's own, to share the memory there as well."""
        own, readers = KeyPair.fresh(), KeyPair.fresh()
        self._context = zmq.Context(io_threads=CONNECTIONS)  # its own: a context has one authenticator
        Authenticator(self._context, readers.public)
        self._socket = router(self._context)
        self._socket.setsockopt(zmq.IPV6, int("[" in host))
        for name, value in server_options(own):
            self._socket.setsockopt(name, value)
        try:
            self._socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise BadConfig(f"the KV outbox cannot listen on {host}: {error.strerror}") from error
        self._shared = _shared_in(folder, blocks, block_bytes)
        self.segment = self._shared.segment if self._shared else Segment.fresh(blocks, block_bytes)
        self.memory: Any = self.segment.data
        place = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        path = self._shared.address.removeprefix("unix:") if self._shared else ""
        self.address = str(CurveAddress(place, own.public, readers.secret, path))
        self._asked: dict[bytes, deque[AskedBlock]] = {}  # by reader
        self._thread = Thread(target=self._run, name="shoal-outbox", daemon=True)
        self._thread.start()

    def clear(self, block: int) -> None:
        self.segment.clear(block)

    def label(self, block: int, name: bytes) -> None:
        self.segment.label(block, name)

    def close(self) -> None:
        self._context.term()  # ends both threads, which close their sockets
        self._thread.join()
        if self._shared is not None:
            self._shared.close()
        self.segment.close()

    def _run(self) -> None:
        with self._socket:
            try:
                wait_ms: int | None = None
                while True:
                    if self._socket.poll(wait_ms):
                        self._take(*self._socket.recv_multipart())
                    sent = [self._answer(reader) for reader in list(self._asked)]
                    wait_ms = 0 if any(sent) else LOOK_MS if self._asked else None
            except zmq.ContextTerminated:
                pass
            except Exception:  # its readers see the connections end, and compute the blocks themselves
                log.exception("the KV outbox failed; decode engines compute what was in it")

    def _take(self, reader: bytes, *parts: bytes) -> None:
        message, until_s = b"".join(parts), time.monotonic() + transport.WAIT_S
        whole = len(message) - len(message) % _ASKED.size
        found = [AskedBlock(block, name, until_s) for block, name in _ASKED.iter_unpack(message[:whole])]
        if found:
            self._asked.setdefault(reader, deque()).extend(found)

    def _answer(self, reader: bytes) -> bool:
        """Send this reader its next block, or that it will not come; False if it is not there yet."""
        queue = self._asked[reader]
        content = self._content(queue[0])
        if content is None:
            return False
        queue.popleft()
        if content in FAILURES:
            queue.clear()
        try:
            self._socket.send_multipart([reader, content], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            queue.clear()  # the reader is gone
        if not queue:
            del self._asked[reader]
        return True

    def _content(self, asked: AskedBlock) -> bytes | None:
        if asked.block >= self.segment.blocks:
            return GONE
        if not self.segment.holds(asked.block, asked.name):
            return GONE if time.monotonic() > asked.until_s else None
        data = self.segment.data[asked.block].tobytes()  # a copy: it is encrypted later, beside the next passes
        return data if self.segment.holds(asked.block, asked.name) else CHANGED


def _shared_in(folder: Path | None, blocks: int, block_bytes: int) -> SharedOutbox | None:
    if folder is None:
        return None
    try:
        return SharedOutbox(folder, blocks, block_bytes)
    except OSError as error:  # such as a path that is too long for a socket
        log.warning("KV blocks go over the network within this machine, too: %s", error)
        return None


# ---- the engine that they go to


def open_nearest(rest: str) -> Peer:
    """The outbox of this address: its memory, if it is on this machine and this user's, else by CURVE."""
    address = CurveAddress.read(rest)
    if address.path and _is_own_socket(address.path):
        try:
            return SharedPeer(address.path)
        except (OSError, TransferFailed) as error:
            log.debug("the outbox in %s does not answer: %s", address.path, error)
    return CurvePeer(address)


def _is_own_socket(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()


class CurvePeer:
    """Asks the other engine for blocks, some at a time: as one comes, another is asked for. Over several connections in
    turn, since one thread encrypts, and another decrypts, all that one connection carries."""

    def __init__(self, address: CurveAddress) -> None:
        self._address = address
        self._lock = Lock()  # a socket belongs to one thread at a time
        self._open()

    def _open(self) -> None:
        self._context = zmq.Context(io_threads=CONNECTIONS)
        try:
            self._connections = [Connection(self._context, self._address) for _ in range(CONNECTIONS)]
            until_s = time.monotonic() + transport.CONNECT_S
            for one in self._connections:
                one.wait(until_s)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise TransferFailed(f"no connection can be made: {error.strerror}") from error
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def has_ended(self) -> bool:
        return any(one.has_ended() for one in self._connections)

    def read(self, blocks: Sequence[int], names: Sequence[bytes], take: Take, closing: Event) -> None:
        asked = [_ASKED.pack(block, name) for block, name in zip(blocks, names, strict=True)]
        with self._lock:
            if self.has_ended():  # while nothing was read; the other engine may be there all the same
                self._context.destroy(linger=0)
                self._open()
            sent = self._ask(asked, 0, FIRST_BLOCKS)
            for number in range(len(asked)):
                data = self._receive(number, closing)
                window = max(FIRST_BLOCKS, WINDOW_BYTES // len(data))
                sent = self._ask(asked, sent, number + 1 + window)
                take(number, data[None])

    def _ask(self, asked: Sequence[bytes], sent: int, until: int) -> int:
        """Ask for those up to this one that were not asked for; returns how many were by now."""
        until = max(sent, min(until, len(asked)))
        for first in range(sent, min(until, sent + CONNECTIONS)):
            self._connections[first % CONNECTIONS].socket.send(b"".join(asked[first:until:CONNECTIONS]))
        return until

    def _receive(self, number: int, closing: Event) -> Any:
        """The bytes of the block that was asked for as this one."""
        socket = self._connections[number % CONNECTIONS].socket
        until_s = time.monotonic() + transport.WAIT_S + transport.CONNECT_S
        while not socket.poll(TURN_MS):
            if closing.is_set() or self.has_ended():
                raise TransferFailed("the other engine went away")
            if time.monotonic() > until_s:
                raise TransferFailed(FAILURES[GONE])
        frame = socket.recv(copy=False)
        if len(frame) <= 1:
            raise TransferFailed(FAILURES.get(frame.bytes, "the other engine answered nonsense"))
        return np.frombuffer(frame.buffer, dtype=np.uint8)

    def close(self) -> None:
        with self._lock:
            self._context.destroy(linger=0)


class Connection:
    """A socket, and what happens to its connection."""

    def __init__(self, context: "zmq.Context[Socket]", address: CurveAddress) -> None:
        own = KeyPair(zmq.curve_public(address.reader.encode()).decode(), address.reader)
        self.socket = context.socket(zmq.DEALER)
        for name, value in client_options(own, address.server):
            self.socket.setsockopt(name, value)
        self.socket.setsockopt(zmq.IPV6, int("[" in address.place))
        self.monitor: Socket = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | ENDED)
        self.socket.connect(f"tcp://{address.place}")

    def wait(self, until_s: float) -> None:
        """Until each side has proved itself to the other. Raises TransferFailed."""
        if not self.monitor.poll(max(0, int((until_s - time.monotonic()) * 1000))):
            raise TransferFailed("it does not answer")
        if recv_monitor_message(self.monitor)["event"] & ENDED:
            raise TransferFailed("it refuses the connection")

    def has_ended(self) -> bool:
        """By the events since the last look."""
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] & ENDED:
                return True
        return False
