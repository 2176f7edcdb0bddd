"""The last step before the socket: uvicorn's HTTP protocol, with limits it does not have, and the server that runs it.

Owns connections: limits on the size and duration of a request's head and on the write buffer, disconnecting clients
that do not read, telling clients that have only finished sending from those that are gone, and answers that come before
the end of a body. Knows no routes and no requests.
"""

import asyncio
import contextlib
import fcntl
import logging
import select
import socket
import termios
from array import array
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.server.errors import HttpError
from shoal.server.settings import ServerSettings

log = logging.getLogger(__name__)

TRANSPORT = "shoal.transport"  # key in scope["extensions"] of a request's connection
WRITE_BUFFER_BYTES = 64 * 2**10  # beyond this a writer waits
PEER_CHECK_S = 0.25  # how often a connection is checked whose client has finished sending
PROBE_S = 10.0  # until something is sent on it again while its answer has not begun; doubled each time
LINGER_S = 5.0  # how long the rest of a body is read and dropped after its answer, which a reset could overtake …
LINGER_BYTES = 64 * 2**20  # … and how much of it
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"  # the only bytes that may precede an answer; clients skip them
SOCKET_BUFFER_BYTES = 128 * 2**10  # in the kernel; without a limit it takes megabytes for a client that does not read


def protocol_for(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class, with this server's limits in it."""

    class Limited(Protocol):
        limits = settings

    return Limited


class Protocol(HttpToolsProtocol):
    """One connection."""

    limits: ServerSettings
    _in_head = False  # a request's head has begun and is not complete
    _head_bytes = 0  # received so far of an incomplete head
    _field_bytes = 0  # parsed so far: request line and fields
    _fields = 0
    _closing = False  # input is ignored; the connection ends with the current answer
    _head_timer: asyncio.TimerHandle | None = None  # limits how long a head may take
    _read_timer: asyncio.TimerHandle | None = None  # runs while bytes are unread by the client
    _unread = 0  # unread bytes at the last check, the kernel's included …
    _progress_s = 0.0  # … and when that number last changed
    _peer_timer: asyncio.TimerHandle | None = None  # runs after the client has finished sending
    _linger_timer: asyncio.TimerHandle | None = None  # runs while the rest of a body is dropped …
    _linger_bytes = LINGER_BYTES  # … of which so many more are read
    _probe_s = 0.0  # when it is sent the next probe …
    _probe_wait_s = 0.0  # … and how long after the last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # a socket of another family
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a peer that vanished
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_watching()
        for timer in (self._peer_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.cycle = None  # type: ignore[assignment]  # it has the transport of this: no circle
        self.pipeline.clear()

    # ---- heads ------------------------------------------------------------------------------------------------------

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(self.limits.slow_client_timeout_s, self._too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._drop(data)
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_head_bytes:
                self._refuse_head()
        self._keep_timing()

    def _keep_timing(self) -> None:
        """An idle connection stays one: bytes that begin no request stop uvicorn's timer."""
        idle = self.cycle is not None and self.cycle.response_complete and not self._in_head
        if idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse_head(self) -> None:
        message = "the headers are too many or too large; send fewer or shorter ones"
        self._answer_and_close(431, "Request Header Fields Too Large", message)

    def _answer_and_close(self, status: int, phrase: str, message: str) -> None:
        """Answer input that never became a request, and end the connection."""
        if self.transport.is_closing() or self.lingering:
            return
        self._closing = True
        body = HttpError(status, message).body()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self._linger()
        self._watch_reader()

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.abort()  # anything written now would be read as part of that answer
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._answer_and_close(400, "Bad Request", "this is not HTTP")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._field_bytes = self._fields = 0
        self._start_head_timer()
        self.scope["extensions"] = {TRANSPORT: self.transport}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value)
        self._fields += 1
        if self._fields <= self.limits.max_headers:  # further ones are counted but not stored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request before the first is answered (pipelining). Queueing it would keep us from noticing a
            # disconnect, so the connection ends after the current answer.
            self._closing = True
            self.cycle.keep_alive = False
            return
        if self._fields > self.limits.max_headers or self._field_bytes > self.limits.max_head_bytes:
            self._refuse_head()  # it arrived in one piece and was parsed before it could be counted
            return
        if not self.flow.write_paused:
            self._stop_watching()  # its answer is added to the unsent bytes, until they reach the limit
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = AnswerTransport(self)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        if not self._closing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._closing:
            super().on_message_complete()

    # ---- clients that are still sending ------------------------------------------------------------------------------
    # A socket that is closed with unread bytes resets the connection, and the client may lose an answer that has
    # already arrived.

    def close_after_answer(self) -> None:
        """The answer is complete, and the connection ends with it."""
        if self.cycle is not None and self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    @property
    def lingering(self) -> bool:
        """Nothing is sent any more."""
        return self._linger_timer is not None

    def _linger(self) -> None:
        """Finish sending, and drop what still comes for a while."""
        if self.transport.is_closing() or self.lingering:
            return
        self._closing = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _drop(self, data: bytes) -> None:
        if self.lingering:
            self._linger_bytes -= len(data)
            if self._linger_bytes < 0:
                self.transport.close()

    # ---- clients that have finished sending --------------------------------------------------------------------------
    # A client that closes its socket and one that only finishes sending (a half-close) look the same until something is
    # sent: then the first resets the connection. Events of a stream do that; before an answer begins, an interim
    # response does. HTTP/1.0 has none, and TLS no half-close: there the end of input counts as the client's end.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open, since the client may still read its answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self._tls() or self.lingering:
            return False
        if not cycle.response_started and self.scope["http_version"] == "1.0":
            return False
        self._closing = True
        cycle.keep_alive = False
        self._probe_s, self._probe_wait_s = self.loop.time(), PROBE_S
        self._check_peer()
        return True

    def _check_peer(self) -> None:
        """Abort the connection once the client has reset it, and probe whether it would."""
        if self.transport.is_closing():
            return
        if is_reset(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        now_s = self.loop.time()
        if not self.cycle.response_started and now_s >= self._probe_s:
            self.transport.write(PROBE)
            self._probe_s, self._probe_wait_s = now_s + self._probe_wait_s, 2 * self._probe_wait_s
        self._peer_timer = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    # ---- answers that are not read ----------------------------------------------------------------------------------
    # While writing is paused, and from the end of an answer to the next request, no unsent bytes are added: if their
    # number does not fall, the client is not reading.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """Start checking that unsent bytes are being read; a client that reads none is disconnected."""
        self._stop_watching()
        if self._has_unsent() or self._tls():  # bytes just passed to TLS are not in the kernel yet
            self._unread, self._progress_s = self._count_unread(), self.loop.time()
            self._check_later()

    def _has_unsent(self) -> bool:
        """Whether there are bytes that the kernel does not take. Those inside the TLS layer cannot be counted."""
        sock = self.transport.get_extra_info("socket")
        return self.transport.get_write_buffer_size() > 0 or (self._tls() and is_full(sock))

    def _tls(self) -> bool:
        return self.scheme == "https"

    def _count_unread(self) -> int:
        """Unread bytes here and in the kernel, which may send many before it takes more from here."""
        return self.transport.get_write_buffer_size() + in_kernel(self.transport.get_extra_info("socket"))

    def _check_later(self) -> None:
        wait_s = min(1.0, max(0.05, self.limits.slow_client_timeout_s / 4))
        self._read_timer = self.loop.call_later(wait_s, self._check_reader)

    def _stop_watching(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_reader(self) -> None:
        self._read_timer = None
        if not self._has_unsent():
            return
        unread, now_s = self._count_unread(), self.loop.time()
        if unread != self._unread:
            self._unread, self._progress_s = unread, now_s
        limit_s = self.limits.slow_client_timeout_s
        if now_s - self._progress_s > limit_s:
            log.warning("a client was disconnected: it has read nothing for %g s", limit_s)
            self.transport.abort()
        else:
            self._check_later()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless the last answer is still being sent."""
        if self._has_unsent():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()


class AnswerTransport:
    """The transport that uvicorn writes an answer to; closing it is up to the protocol."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_after_answer

    def write(self, data: bytes) -> None:
        """What comes after the last answer is dropped: uvicorn may still invite a client to send its body."""
        if not self.protocol.lingering:
            self.protocol.transport.write(data)


def in_kernel(sock: Any) -> int:
    """Bytes passed to the kernel and not yet acknowledged; 0 where that is unknown."""
    count = array("i", [0])
    with contextlib.suppress(OSError, AttributeError, ValueError):  # closed, or none at all
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def is_reset(sock: Any) -> bool:
    """Whether the peer has reset the connection."""
    poll = select.poll()
    try:
        poll.register(sock.fileno(), 0)  # errors are always reported
        return bool(poll.poll(0))
    except (OSError, AttributeError, ValueError):  # closed, or none at all
        return False


def is_full(sock: Any) -> bool:
    """Whether the kernel takes no more bytes for it now."""
    poll = select.poll()
    try:
        poll.register(sock.fileno(), select.POLLOUT)
        return not poll.poll(0)
    except (OSError, AttributeError, ValueError):  # closed, or none at all
        return False


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers: set `should_exit` to stop it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: Any, settings: ServerSettings, *, ssl_certfile: str | None = None, ssl_keyfile: str | None = None
) -> Server:
    """A server for the app. When it exits, answers under way may finish, for drain_timeout_s at most."""
    config = uvicorn.Config(
        app,
        http=protocol_for(settings),
        loop="none",  # the caller has chosen the event loop
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=max(1, round(settings.keep_alive_s)),
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )
    return Server(config)


async def serve(server: Server, sock: socket.socket) -> None:
    """Serve on a socket that is already listening, until server.should_exit is set and answers under way are done."""
    await server.serve(sockets=[sock])
