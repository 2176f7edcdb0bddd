"""Responses that are made in the background: which of them this front makes, how they are cancelled, and how their
events are followed.

Owns the list of them, and the heartbeat by which other fronts see that they are still being made, and which stores
their events. A request to cancel one may come to another front: it leaves a note in the store, which the heartbeat
finds. One that follows the events of another front's response reads them from the store. Knows no HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
from msgspec import Struct

from shoal.server.response_log import EventLog, final_event, packed, unpacked
from shoal.server.response_record import ResponseRecord
from shoal.server.response_store import ResponseStore, StoredResponse, StoreFailed

BEAT_S = 0.5
LOST_S = 30.0  # without a heartbeat a response is lost: its front has ended
CANCEL_S = 10.0  # how long another front is waited for
MARK = -1  # the number of an empty part, which says that the events of a response are kept
FOLLOWED = 256  # events of a log that are handed on at a time
LOST = {"code": "server_error", "message": "the process that made this response has ended; send the request again"}


class Ended(Struct):
    """The part of a stored response that says how it ended."""

    status: str


HowEnded = msgspec.json.Decoder(Ended)


@dataclass(frozen=True)
class RunningResponse:
    """One that this front makes. `log`: its events, where it is streamed."""

    record: ResponseRecord
    cancel: Callable[[], None]
    log: EventLog | None = None


class BackgroundResponses:
    """Those that this front makes. Used on one event loop."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[str, RunningResponse] = {}
        self._beating: asyncio.Task[None] | None = None

    def add(self, record: ResponseRecord, cancel: Callable[[], None], log: EventLog | None = None) -> None:
        self._running[record.id] = RunningResponse(record, cancel, log)
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())

    async def add_streamed(self, record: ResponseRecord, cancel: Callable[[], None]) -> EventLog:
        """The same for one whose events are kept. Raises StoreFailed."""
        await self.store.add_events(record.tenant, record.id, MARK, 0, b"")
        self.add(record, cancel, log := EventLog())
        return log

    def discard(self, id: str) -> None:
        self._running.pop(id, None)

    async def find(self, tenant: str, id: str) -> StoredResponse | None:
        """A stored response. One that was lost has failed."""
        found = await self.store.get(tenant, id)
        if found is None or found.ended or found.silent_s < LOST_S:
            return found
        response = {**msgspec.json.decode(found.answered), "status": "failed", "error": LOST}
        answered = msgspec.json.encode(response)
        await self.store.finish(tenant, id, answered)
        return replace(found, answered=answered, ended=True)

    async def cancel(self, tenant: str, id: str) -> None:
        """Returns when it has ended, or cannot be waited for any longer."""
        if id in self._running:
            self._cancel(id)
        else:
            await self.store.ask_to_cancel(tenant, id)
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                while (found := await self.find(tenant, id)) is not None and not found.ended:
                    await asyncio.sleep(BEAT_S / 5)

    def _cancel(self, id: str) -> None:
        if id in self._running:
            self._running[id].record.cancelled = True
            self._running[id].cancel()

    async def _beat(self) -> None:
        while self._running:
            with suppress(StoreFailed):  # which was logged; the next beat may succeed
                for id in list(self._running):
                    await self.save(id)
                for id in await self.store.beat(list(self._running)):
                    self._cancel(id)
            await asyncio.sleep(BEAT_S)

    # ---- events -----------------------------------------------------------------------------------------------------

    async def save(self, id: str) -> None:
        """Store the events so far. Raises StoreFailed."""
        one = self._running.get(id)
        if one is None or one.log is None:
            return
        first, events = one.log.unsaved()
        if events:
            part = await asyncio.to_thread(packed, events)
            await self.store.add_events(one.record.tenant, id, first, len(events), part)

    async def has_events(self, tenant: str, id: str) -> bool:
        """Whether those of a stored response are kept, to be followed."""
        return bool(await self.store.events(tenant, id, MARK - 2))

    async def follow(self, tenant: str, id: str, after: int) -> AsyncIterator[bytes]:
        """The events above number `after`, as they come, to the last one; b"": there are no more yet. They must be
        kept."""
        one = self._running.get(id)
        if one is not None and one.log is not None:
            async for events in followed(one.log, after):
                yield events
            return
        while True:
            found = await self.find(tenant, id)  # looked at first: when it has ended, all events are there
            for first, part in await self.store.events(tenant, id, after):
                stored = await asyncio.to_thread(unpacked, part)
                yield b"".join(stored[max(0, after + 1 - first) :])
                after = max(after, first + len(stored) - 1)
            if found is None:
                return  # it was deleted
            if found.ended and not await self.store.events(tenant, id, after):
                yield final_event(HowEnded.decode(found.answered).status, after + 1, found.answered)
                return
            if not found.ended:
                yield b""
                await asyncio.sleep(BEAT_S)


async def followed(log: EventLog, after: int) -> AsyncIterator[bytes]:
    """The same of a log in memory."""
    at = after + 1
    while True:
        if at < len(log.events):
            events = log.events[at : at + FOLLOWED]
            at += len(events)
            yield b"".join(events)
        elif log.ended:
            yield log.last
            return
        else:
            await log.change()
