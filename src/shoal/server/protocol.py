"""The last step before the socket: uvicorn's HTTP protocol, with limits it does not have, and the server that runs it.

Owns connections: how large a request's head may be and how long it may take, what waits in the write buffer, and who
is cut off. Knows no routes and no requests.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.server.errors import HttpError
from shoal.server.settings import ServerSettings

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
    _patience: asyncio.TimerHandle | None = None
    _unsent = 0

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
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._deaf:
            super().on_message_complete()

    # ---- answers that are not read --------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._patience = self.loop.call_later(self.limits.slow_client_timeout_s, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Idle for long enough to close it; unless the last answer is still on its way and moving."""
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            super().timeout_keep_alive_handler()
        elif unsent == self._unsent:
            self.transport.abort()
        else:
            self._unsent = unsent
            self.timeout_keep_alive_task = self.loop.call_later(
                self.limits.slow_client_timeout_s, self.timeout_keep_alive_handler
            )


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
