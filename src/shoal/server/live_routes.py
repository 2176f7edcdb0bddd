"""The live page, its stream of summaries (GET /live/events, server-sent events), and a recording of them in a file.

Access is that of the debug pages: an admin key where there are keys, else a direct connection from this machine. Knows
the summaries only as lines.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from shoal.server.debug import check_access
from shoal.server.exchange import Exchange, Watcher
from shoal.server.front_view import FrontView
from shoal.server.live import LiveHub

log = logging.getLogger(__name__)

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
LOOK_S = 1.0  # how often an idle stream looks whether the server stops


class LiveRoutes:
    """The handlers. `page`: serves the file."""

    def __init__(self, front: FrontView, hub: LiveHub, page: Callable[[Exchange], Awaitable[None]]) -> None:
        self.front = front
        self.hub = hub
        self._page = page

    async def page(self, exchange: Exchange) -> None:
        check_access(exchange)
        await self._page(exchange)

    async def events(self, exchange: Exchange) -> None:
        check_access(exchange)
        if exchange.method == "HEAD":  # the page asks whether it may watch; its connection is used again
            await exchange.start(200, HEADERS)
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        watcher = Watcher(exchange.receive)
        try:
            async with self.hub.watch() as lines:
                await exchange.start(200, HEADERS)
                await send(exchange, self.hub.head())
                while not watcher.gone and not self.front.draining:
                    try:
                        line = await asyncio.wait_for(lines.get(), LOOK_S)
                    except TimeoutError:
                        continue
                    if line is None:  # too slow, or the summaries failed: the page connects again
                        break
                    await send(exchange, line)
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.stop()


async def send(exchange: Exchange, line: bytes) -> None:
    await exchange.send({"type": "http.response.body", "body": b"data: " + line + b"\n\n", "more_body": True})


async def record(hub: LiveHub, path: Path, again: bool) -> None:
    """Write the summaries to a file, until cancelled. `again`: this process was restarted, and the file goes on."""
    try:
        with path.open("ab" if again else "wb") as file:
            while True:
                async with hub.watch() as lines:
                    file.write(hub.head() + b"\n")
                    while (line := await lines.get()) is not None:
                        file.write(line + b"\n")
                        if lines.empty():
                            file.flush()
    except OSError as error:
        log.error("the recording %s ends: %s", path, error.strerror)
