"""The ledger's service: the one ledger of a server, in a thread of `shoal serve`, which outlives engines and fronts.

Owns the socket in the private folder. Each front has one connection, and a connection is the owner of the calls begun
on it: when a front dies its connection closes, and its calls end with what it last reported. A message is a line of
JSON:

    front ──► {"reserve": [call, tenant, prompt tokens, samples, output tokens at most]}
          ◄── {"call": call, "refusal": null or [kind, message, seconds until a retry]}
    front ──► {"charge": {call: tokens used so far, …}}         about twice a second, no answer
    front ──► {"settle": [call, tokens used in all]}            no answer

Knows no HTTP and no engine.
"""

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

from shoal.core.clock import Clock, WallClock
from shoal.core.job import Refusal
from shoal.errors import BadConfig, BadRequest, Rejected
from shoal.keys.ledger import Demand, Ledger
from shoal.keys.limits import LimitsOf

log = logging.getLogger(__name__)

ADDRESS = "ledger"  # the socket's name in the private folder
LONGEST_LINE = 2**24  # bytes; a report of a hundred thousand calls is shorter
SWEEP_S = 1.0  # how often idle tenants are forgotten, and the socket looked for


class LedgerService:
    """Answers fronts from a thread of its own."""

    def __init__(self, folder: Path, limits_of: LimitsOf, clock: Clock | None = None) -> None:
        self.path = folder / ADDRESS
        self.ledger = Ledger(limits_of)
        self.clock = clock or WallClock()
        self._connections = 0
        self._talks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._listening = threading.Event()
        self._trouble: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def start(self) -> None:
        """Returns when fronts can connect."""
        self._thread.start()
        self._listening.wait()
        if self._trouble is not None:
            raise BadConfig(
                f"cannot open the socket {self.path}: {self._trouble}; set TMPDIR to a folder with a short path"
            )

    def stop(self) -> None:
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        try:
            server = await self._listen()
        except OSError as error:
            self._trouble = error
            return
        finally:
            self._listening.set()
        while not self._stopping.is_set():
            try:
                await asyncio.wait_for(self._stopping.wait(), SWEEP_S)
            except TimeoutError:
                server = await self._sweep(server)
        server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._talk, self.path, limit=LONGEST_LINE)

    async def _sweep(self, server: asyncio.Server) -> asyncio.Server:
        """Forget idle tenants; listen again where a cleaner of temporary files has removed the socket."""
        self.ledger.forget_idle(self.clock.now_s())
        if self.path.exists() or not self.path.parent.exists():
            return server
        try:
            fresh = await self._listen()
        except OSError as error:
            log.warning("the ledger's socket cannot be opened again: %s", error)
            return server
        server.close()  # its connections stay
        return fresh

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One front, until its connection closes."""
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        self._connections += 1
        owner = str(self._connections)
        try:
            while line := await reader.readline():
                answer = self._take(owner, json.loads(line))
                if answer is not None:
                    writer.write(json.dumps(answer).encode() + b"\n")
        except ConnectionError:
            pass
        except Exception:
            log.exception("a message of a front could not be processed; its connection is closed")
        finally:
            self.ledger.forget_owner(owner, self.clock.now_s())
            self._talks.discard(talk)
            writer.close()

    def _take(self, owner: str, message: dict[str, Any]) -> dict[str, Any] | None:
        now_s = self.clock.now_s()
        if "reserve" in message:
            call, tenant, prompt, samples, output = message["reserve"]
            refusal = self._reserve(owner, call, tenant, Demand(prompt, samples, output), now_s)
            return {"call": call, "refusal": refusal}
        if "settle" in message:
            call, used = message["settle"]
            self.ledger.settle(owner, call, used, now_s)
        for call, used in message.get("charge", {}).items():
            self.ledger.charge(owner, call, used, now_s)
        return None

    def _reserve(self, owner: str, call: str, tenant: str, demand: Demand, now_s: float) -> list[Any] | None:
        try:
            self.ledger.reserve(owner, call, tenant, demand, now_s)
        except (BadRequest, Rejected) as error:
            refusal = Refusal.of(error)
            return [refusal.kind, refusal.message, refusal.retry_after_s]
        return None
