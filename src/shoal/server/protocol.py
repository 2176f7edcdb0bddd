"""The last step before the socket: uvicorn's HTTP protocol, with limits it does not have, and the server that runs it.

Owns connections: how large a request's head may be and how long it may take, what waits in the write buffer, and who
is cut off. Knows no routes and no requests.
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

TRANSPORT = "shoal.transport"  # where in scope["extensions"] a request finds its connection
WRITE_BUFFER_BYTES = 64 * 2**10  # beyond this a writer waits
SOCKET_BUFFER_BYTES = 128 * 2**10  # the kernel's part; without a limit it takes megabytes for one who does not read


def protocol_for(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class, with this server's limits in it."""

    class Limited(Protocol):
        limits = settings

    return Limited


class Protocol(HttpToolsProtocol):
    """One connection."""

    limits: ServerSettings
    _in_head = False  # a request's head has begun and not come to its end
    _head_bytes = 0  # as they arrived, while the head has not come to its end
    _field_bytes = 0  # of its request line and fields, as they were read
    _fields = 0
    _deaf = False  # nothing more is read: the connection ends with the answer under way
    _patience: asyncio.TimerHandle | None = None  # for a head to come
    _looking: asyncio.TimerHandle | None = None  # while bytes wait for a client that may not read
    _unread = 0  # how many they were at the last look, with the kernel's …
    _moved_s = 0.0  # … and when that last changed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # a socket of another family
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a peer that vanished
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    # ---- heads ----------------------------------------------------------------------------------------------------

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(self.limits.slow_client_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.max_head_bytes:
                self._refuse_head()

    def _refuse_head(self) -> None:
        message = "the headers are too many or too large; send fewer or shorter ones"
        self._hang_up(431, "Request Header Fields Too Large", message)

    def _hang_up(self, status: int, phrase: str, message: str) -> None:
        """Answer what never became a request, and end the connection."""
        if self.transport.is_closing():
            return
        self._deaf = True
        body = HttpError(status, message).body()
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
        self._look_after_reader()

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                self.transport.abort()  # whatever is written now would be taken for a part of that answer
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._hang_up(400, "Bad Request", "this is not HTTP")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._field_bytes = self._fields = 0
        self._wait_for_head()
        self.scope["extensions"] = {TRANSPORT: self.transport}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value)
        self._fields += 1
        if self._fields <= self.limits.max_headers:  # more are counted, and not kept
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request before the first is answered. Held back, it would stop us from noticing that the client
            # went away; clients that do this must cope with a connection that ends after one answer.
            self._deaf = True
            self.cycle.keep_alive = False
            return
        if self._fields > self.limits.max_headers or self._field_bytes > self.limits.max_head_bytes:
            self._refuse_head()  # it came in one piece, and so was read before it could be counted
            return
        if not self.flow.write_paused:
            self._stop_looking()  # its answer comes on top of what waits, until that is too much
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()

    # ---- answers that are not read --------------------------------------------------------------------------------
    # While writers must wait, and from the end of an answer to the next request, nothing is added to what waits to be
    # sent: if it does not get less, the client does not read.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_after_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_looking()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look_after_reader()

    def _look_after_reader(self) -> None:
        """See to it that what waits to be sent is read, or the client cut off."""
        self._stop_looking()
        if self._waits() or self._tls():  # what TLS has just been given is not in the kernel yet
            self._unread, self._moved_s = self._count_unread(), self.loop.time()
            self._look_later()

    def _waits(self) -> bool:
        """Whether bytes wait that the kernel does not take. Those that TLS has packed can be counted by nobody."""
        sock = self.transport.get_extra_info("socket")
        return self.transport.get_write_buffer_size() > 0 or (self._tls() and is_full(sock))

    def _tls(self) -> bool:
        return self.scheme == "https"

    def _count_unread(self) -> int:
        """What waits here and in the kernel: that lets much be read before it takes more from here."""
        return self.transport.get_write_buffer_size() + in_kernel(self.transport.get_extra_info("socket"))

    def _look_later(self) -> None:
        wait_s = min(1.0, max(0.05, self.limits.slow_client_timeout_s / 4))
        self._looking = self.loop.call_later(wait_s, self._look)

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self._looking = None
        if not self._waits():
            return
        unread, now_s = self._count_unread(), self.loop.time()
        if unread != self._unread:
            self._unread, self._moved_s = unread, now_s
        limit_s = self.limits.slow_client_timeout_s
        if now_s - self._moved_s > limit_s:
            log.warning("a client was cut off: it has read nothing for %g s", limit_s)
            self.transport.abort()
        else:
            self._look_later()

    def timeout_keep_alive_handler(self) -> None:
        """Idle for long enough to close it; unless the last answer is still on its way."""
        if self._waits():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()


def in_kernel(sock: Any) -> int:
    """Bytes that were handed to the kernel and have not arrived; 0 where it does not say."""
    count = array("i", [0])
    with contextlib.suppress(OSError, AttributeError, ValueError):  # closed, or none at all
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    return count[0]


def is_full(sock: Any) -> bool:
    """Whether the kernel takes no more bytes for it now."""
    poll = select.poll()
    try:
        poll.register(sock.fileno(), select.POLLOUT)
        return not poll.poll(0)
    except (OSError, AttributeError, ValueError):  # closed, or none at all
        return False


class Server(uvicorn.Server):
    """uvicorn's server, leaving signals to whoever runs it: set `should_exit` to stop it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: Any, settings: ServerSettings, *, ssl_certfile: str | None = None, ssl_keyfile: str | None = None
) -> Server:
    """A server for the app. When told to exit it lets answers under way finish, for drain_timeout_s at most."""
    config = uvicorn.Config(
        app,
        http=protocol_for(settings),
        loop="none",  # whoever runs it has chosen the event loop
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
    """Answer on a socket that listens already, until server.should_exit is set and answers under way are done."""
    await server.serve(sockets=[sock])
