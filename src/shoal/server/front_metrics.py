"""The metrics of all fronts of a server: each front serves its own numbers on a socket in the server's private folder.

Owns that socket, and querying the others'. A metrics scraper keeps its connection and so reaches one front only, which
therefore reports what all of them counted. A front that is dead or stuck is left out after a short wait, and none of
its numbers are kept. Knows no metrics: the numbers are opaque bytes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from shoal.core.report import EngineStatus

log = logging.getLogger(__name__)

ENDING = ".front"  # of the sockets' names in the folder
WAIT_S = 0.5  # for all other fronts together, so that a stuck one cannot delay a scrape for longer
MOST_BYTES = 2**20  # of one front's reply


class FrontCounters(Protocol):
    """What a front counts; obs/metrics.py implements it for Prometheus."""

    def count(self, route: str, status: int) -> None: ...

    def count_refusal(self, kind: str) -> None:
        """A request was refused because of its key's limits; `kind` is the name of the error."""

    def render(self, active: int, engines: Sequence[EngineStatus], others: Sequence[bytes]) -> bytes:
        """As Prometheus text, together with the numbers of the other fronts."""

    def tell(self, active: int, engines: Sequence[EngineStatus]) -> bytes:
        """For another front, which passes it to its own render()."""


class NoCounters:
    """Counts nothing."""

    def count(self, route: str, status: int) -> None: ...

    def count_refusal(self, kind: str) -> None: ...

    def render(self, active: int, engines: Sequence[EngineStatus], others: Sequence[bytes]) -> bytes:
        return b""

    def tell(self, active: int, engines: Sequence[EngineStatus]) -> bytes:
        return b""


class OtherFronts(Protocol):
    """The other fronts, as one front sees them."""

    async def ask(self) -> list[bytes]:
        """The numbers of each; those that do not reply in time are left out. Raises nothing."""


class NoOtherFronts:
    """There is only one front."""

    async def ask(self) -> list[bytes]:
        return []


class SocketFronts:
    """Fronts on one machine that share a folder. Opened and used on one event loop."""

    def __init__(self, folder: Path, name: str, tell: Callable[[], bytes]) -> None:
        self._own = folder / f"{name}{ENDING}"
        self._tell = tell

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Serve this front's numbers. If that fails, only the other fronts' reports lack them."""
        server: asyncio.Server | None = None
        try:
            self._own.unlink(missing_ok=True)  # left by an earlier process
            server = await asyncio.start_unix_server(self._answer, self._own)
        except OSError as error:
            log.warning("this front's metrics will be missing in those of the other fronts: %s", error)
        try:
            yield
        finally:
            if server is not None:
                server.close()
                self._own.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            writer.write(self._tell())
            await writer.drain()

    async def ask(self) -> list[bytes]:
        others = [path for path in self._own.parent.glob(f"*{ENDING}") if path != self._own]
        replies = await asyncio.gather(*map(self._ask, others))
        return [reply for reply in replies if reply]

    async def _ask(self, path: Path) -> bytes:
        """One front's whole reply; empty if it does not arrive in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                with contextlib.closing(writer):
                    return await read_all(reader)
        except (OSError, TimeoutError):
            return b""


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read to the end; empty if there are more than MOST_BYTES."""
    found = bytearray()
    while part := await reader.read(65536):
        found += part
        if len(found) > MOST_BYTES:
            return b""
    return bytes(found)
