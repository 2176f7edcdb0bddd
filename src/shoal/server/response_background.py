"""Responses that are made in the background: which of them this front makes, and how they are cancelled.

Owns the list of them, and the heartbeat by which other fronts see that they are still being made. A request to cancel
one may come to another front: it leaves a note in the store, which the heartbeat finds. Knows no HTTP.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec

from shoal.server.response_record import ResponseRecord
from shoal.server.response_store import ResponseStore, StoredResponse, StoreFailed

BEAT_S = 0.5
LOST_S = 30.0  # without a heartbeat a response is lost: its front has ended
CANCEL_S = 10.0  # how long another front is waited for
LOST = {"code": "server_error", "message": "the process that made this response has ended; send the request again"}


class BackgroundResponses:
    """Those that this front makes. Used on one event loop."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[str, tuple[ResponseRecord, Callable[[], None]]] = {}
        self._beating: asyncio.Task[None] | None = None

    def add(self, record: ResponseRecord, cancel: Callable[[], None]) -> None:
        self._running[record.id] = record, cancel
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())

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
            record, cancel = self._running[id]
            record.cancelled = True
            cancel()

    async def _beat(self) -> None:
        while self._running:
            with suppress(StoreFailed):  # which was logged; the next beat may succeed
                for id in await self.store.beat(list(self._running)):
                    self._cancel(id)
            await asyncio.sleep(BEAT_S)
