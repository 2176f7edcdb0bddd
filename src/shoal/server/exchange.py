"""One HTTP request and its answer: id, body within limits, headers, and the access log.

Owns what all answers have in common, so that no middleware is needed between a stream and its socket. Knows no routes.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from shoal.keys.api_key import ApiKey
from shoal.server.body_memory import BodyMemory
from shoal.server.errors import HttpError
from shoal.server.settings import ServerSettings

log = logging.getLogger("shoal.server.access")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]
JSON = b"application/json"
OF_PAGES = (b"origin", b"sec-fetch-site")  # headers by which browsers mark what pages of other sites send
MOST_ID = 128  # characters of an X-Request-Id
POLLED = ("/health", "/ping", "/load", "/metrics", "/debug/requests")  # polled every few seconds by monitoring


class Exchange:
    """A request being answered."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, settings: ServerSettings, body_memory: BodyMemory
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.settings = settings
        self.body_memory = body_memory
        self.body_bytes = 0  # of the body, counted in body_memory
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.uid = secrets.token_hex(12)  # unique; names the jobs
        self.id = valid_id(self.headers.get(b"x-request-id")) or self.uid
        self.name = self.uid  # in the answer's id
        self.route = "unknown"
        self.key: ApiKey | None = None  # the API key it came with; None where no keys are required
        self.any_kind = False  # its clients do not all declare JSON
        self.error_body: Callable[[HttpError], bytes] = HttpError.body  # as its API writes errors
        self.status = 0  # 0: no answer has begun
        self.began_s = time.monotonic()
        self.facts: dict[str, Any] = {}  # for the log

    def rename(self, request_id: str) -> None:
        """The body brings a name for the request; the header's takes precedence in the log."""
        if request_id:
            self.name = request_id
            self.id = request_id if self.id == self.uid else self.id

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def json_body(self) -> bytes:
        """The body, if declared as JSON: for a page of another site, that requires a CORS preflight."""
        kind = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != JSON and not (self.any_kind and not any(name in self.headers for name in OF_PAGES)):
            raise HttpError(415, "send the body as JSON, with the header 'Content-Type: application/json'")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise HttpError(415, "send the body as it is, without Content-Encoding")
        return await self.body()

    async def body(self) -> bytes:
        limit = self.settings.max_body_bytes
        declared = self.headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > limit:
            raise too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.slow_client_timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    body += message.get("body", b"")
                    self._count_body(len(body), limit)
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise HttpError(
                408,
                f"the body did not arrive within {self.settings.slow_client_timeout_s:g} s; send it faster",
                headers=((b"connection", b"close"),),
            ) from None

    def _count_body(self, size: int, limit: int) -> None:
        if size > limit:
            raise too_large(limit)
        if not self.body_memory.resize(self.body_bytes, size):
            raise no_body_memory(self.body_memory.limit)
        self.body_bytes = size

    def release_body(self) -> None:
        """The body is no longer needed."""
        self.body_memory.resize(self.body_bytes, 0)
        self.body_bytes = 0

    # ---- out --------------------------------------------------------------------------------------------------------

    async def start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        headers.append((b"x-request-id", self.id.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def reply(self, status: int, body: bytes, kind: bytes = JSON, headers: tuple[Header, ...] = ()) -> None:
        """A whole answer at once."""
        await self.start(status, [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *headers])
        await self.send({"type": "http.response.body", "body": body})

    async def reply_json(self, value: Any, status: int = 200, headers: tuple[Header, ...] = ()) -> None:
        await self.reply(status, msgspec.json.encode(value), headers=headers)

    async def reply_error(self, error: HttpError) -> None:
        await self.reply(error.status, self.error_body(error), headers=error.headers)

    # ---- afterwards -------------------------------------------------------------------------------------------------

    def write_log(self) -> None:
        fields = {
            "id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "total_s": round(time.monotonic() - self.began_s, 6),
            **({"key": self.key.name} if self.key else {}),
            **self.facts,
        }
        quiet = self.route in POLLED and self.status in (200, 503)
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


class Watcher:
    """Notices when the client disconnects, from the moment its request was read."""

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self.on_disconnect: Callable[[], None] | None = None
        self.task = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self.on_disconnect is not None:
            self.on_disconnect()

    def stop(self) -> None:
        self.on_disconnect = None  # else a cancelled task would keep the call alive
        self.task.cancel()
        del self.task  # whose error keeps this object, too: no circle


class Disconnected(Exception):
    """The client disconnected before its request was complete."""


def too_large(limit: int) -> HttpError:
    return HttpError(
        413,
        f"the body has more than {limit} bytes; send less, or raise --max-body",
        code="body_too_large",
        headers=((b"connection", b"close"),),  # the rest of it is not read
    )


def no_body_memory(limit: int) -> HttpError:
    return HttpError(
        503,
        f"the bodies of other requests take all of the {limit} bytes of memory for them; retry in a moment, or raise "
        "--max-body-memory",
        type="service_unavailable_error",
        code="body_memory",
        headers=((b"retry-after", b"1"), (b"connection", b"close")),
    )


def valid_id(header: bytes | None) -> str | None:
    """The client's request id, if it is safe to write into a log and a header.

    >>> valid_id(b"abc-1"), valid_id(b"a\\x00"), valid_id(b"")
    ('abc-1', None, None)
    """
    if not header or len(header) > MOST_ID or not all(0x21 <= byte <= 0x7E for byte in header):
        return None
    return header.decode("ascii")
