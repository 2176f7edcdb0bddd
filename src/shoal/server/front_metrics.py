"""The other fronts of this server: each tells its numbers to whoever asks on a socket in the server's private folder.

Owns that socket, and asking at the others'. Whoever scrapes metrics keeps its connection and so reaches one front only,
which therefore tells what all of them counted. A front that is dead or stuck is left out after a short wait, and no
number of it is kept. Knows no metrics: what is told are bytes.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from shoal.core.job import EngineInfo

log = logging.getLogger(__name__)

ENDING = ".front"  # of the sockets' names in the folder
WAIT_S = 0.5  # for all the others together; a scrape must not wait longer for one that is stuck
MOST_BYTES = 2**20  # what one may tell


class FrontCounters(Protocol):
    """What a front counts; obs/metrics.py implements it for Prometheus."""

    def count(self, route: str, status: int) -> None: ...

    def render(self, active: int, info: EngineInfo | None, others: Sequence[bytes]) -> bytes:
        """As Prometheus text, together with the numbers of the other fronts."""

    def tell(self, active: int, info: EngineInfo | None) -> bytes:
        """For another front, which passes it to its own render()."""


class NoCounters:
    """Counts nothing."""

    def count(self, route: str, status: int) -> None: ...

    def render(self, active: int, info: EngineInfo | None, others: Sequence[bytes]) -> bytes:
        return b""

    def tell(self, active: int, info: EngineInfo | None) -> bytes:
        return b""


class OtherFronts(Protocol):
    """The other fronts, as one front sees them."""

    async def ask(self) -> list[bytes]:
        """What each of them tells; those that do not answer soon are left out. Raises nothing."""


class NoOtherFronts:
    """There is one front only."""

    async def ask(self) -> list[bytes]:
        return []


class SocketFronts:
    """Fronts on one machine that share a folder. Opened and used on one event loop."""

    def __init__(self, folder: Path, name: str, tell: Callable[[], bytes]) -> None:
        self._own = folder / f"{name}{ENDING}"
        self._tell = tell

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Be there for the others. A front that cannot be is missing in their answers, and serves all the same."""
        server: asyncio.Server | None = None
        try:
            self._own.unlink(missing_ok=True)  # of a life before this one
            server = await asyncio.start_unix_server(self._answer, self._own)
        except OSError as error:
            log.warning("the other fronts cannot ask this one for its metrics: %s", error)
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
        told = await asyncio.gather(*map(self._ask, others))
        return [one for one in told if one]

    async def _ask(self, path: Path) -> bytes:
        """All that one front tells; nothing if that does not come in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                with contextlib.closing(writer):
                    return await read_all(reader)
        except (OSError, TimeoutError):
            return b""


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Up to the end; nothing if that is too far away."""
    told = bytearray()
    while part := await reader.read(65536):
        told += part
        if len(told) > MOST_BYTES:
            return b""
    return bytes(told)
