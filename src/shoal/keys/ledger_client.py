"""The ledger as a front sees it: a call of a key with limits is reserved before it begins, and settled when it ends.

Owns this front's connection to the ledger's service and its open reservations. Tokens of all running calls are reported
together, about twice a second. A key without limits is not looked up at all. Knows no HTTP and no engine. Made and used
on one event loop.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from shoal.core.job import Refusal
from shoal.errors import LedgerDown
from shoal.keys.ledger import Demand
from shoal.keys.ledger_service import ADDRESS, LONGEST_LINE
from shoal.keys.limits import LimitsOf

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # longest wait for the ledger
RETRY_S = 5.0
REPORT_S = 0.5


class Reservation:
    """What one call has reserved. This one is of a call without limits: nothing is counted."""

    def follow(self, used: Callable[[], int]) -> None:
        """The call runs; `used` is asked from time to time how many tokens it has used, its prompts included."""

    def settle(self, used: int) -> None:
        """The call has ended after so many tokens, 0 if it never began. Later calls of this do nothing."""


class Limiter(Protocol):
    """Decides whether a call may begin."""

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        """Raises RateLimited, BadParameter where it can never be allowed, or LedgerDown."""


class NoLimiter:
    """There are no limits."""

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        return Reservation()


class OpenReservation(Reservation):
    """A reservation that the ledger knows."""

    def __init__(self, client: "LedgerClient", call: str) -> None:
        self._client = client
        self._call = call
        self._used: Callable[[], int] = lambda: 0
        self._reported = 0

    def follow(self, used: Callable[[], int]) -> None:
        self._used = used

    def settle(self, used: int) -> None:
        self._used = lambda: used  # the call is no longer needed
        self._client.settle(self._call, used)

    def news(self) -> int | None:
        """How much it has used so far; None if that was reported before."""
        used = self._used()
        if used == self._reported:
            return None
        self._reported = used
        return used


class LedgerClient:
    """A Limiter over the ledger's socket. Connects when the first key with limits calls."""

    def __init__(self, folder: Path, limits_of: LimitsOf) -> None:
        self._path = folder / ADDRESS
        self._limits_of = limits_of
        self._open: dict[str, OpenReservation] = {}
        self._asked: dict[str, asyncio.Future[Refusal | None]] = {}
        self._count = 0
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def reserve(self, tenant: str, demand: Demand) -> Reservation:
        if not self._limits_of(tenant):
            return Reservation()
        self._count += 1
        call = str(self._count)
        try:
            async with asyncio.timeout(ANSWER_S):
                refusal = await self._ask(call, tenant, demand)
        except (OSError, TimeoutError) as error:
            log.error("the ledger cannot be asked: %s", str(error) or f"no answer within {ANSWER_S:g} s")
            raise LedgerDown("the limits of this API key cannot be checked; try again soon", RETRY_S) from error
        if refusal is not None:
            raise refusal.as_error()
        reservation = self._open[call] = OpenReservation(self, call)
        return reservation

    async def _ask(self, call: str, tenant: str, demand: Demand) -> Refusal | None:
        await self._connect()
        answer: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._asked[call] = answer
        try:
            self._send({"reserve": [call, tenant, demand.prompt_tokens, demand.samples, demand.output_tokens]})
            return await answer
        except (TimeoutError, asyncio.CancelledError):
            self._send({"settle": [call, 0]})  # the answer may still be on its way
            raise
        finally:
            del self._asked[call]

    def settle(self, call: str, used: int) -> None:
        if self._open.pop(call, None) is not None:
            self._send({"settle": [call, used]})

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose()

    # ---- the connection ---------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        async with self._connecting:
            if self._writer is not None:
                return
            reader, self._writer = await asyncio.open_unix_connection(self._path, limit=LONGEST_LINE)
            self._tasks = [
                asyncio.create_task(self._listen(reader), name="ledger answers"),
                asyncio.create_task(self._report(), name="ledger reports"),
            ]

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                answer = self._asked.get(message["call"])
                if answer is not None and not answer.done():
                    answer.set_result(None if message["refusal"] is None else Refusal(*message["refusal"]))
        except OSError as error:
            log.warning("the connection to the ledger broke: %s", error)
        finally:
            self._tasks[1].cancel()
            self._lose()

    def _lose(self) -> None:
        """The connection is gone. The ledger has settled what was open on it."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._open.clear()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the connection closed"))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            news = {call: used for call, one in self._open.items() if (used := one.news()) is not None}
            if news:
                self._send({"charge": news})
