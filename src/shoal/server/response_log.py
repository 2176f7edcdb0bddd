"""The events of a response that is made in the background and streamed: kept, so that clients can follow them from any
point on, also again.

Owns the events in memory while the response is made, and how they are cut into stored parts. An event's number is its
place. The last event repeats the whole response, so it is made of that and not stored. Knows no HTTP and no store.

    created · in_progress · … deltas …            response.completed
    └──────────── stored, in parts ──────────┘    └─ from the response ─┘
"""

import asyncio
import zlib
from collections.abc import MutableMapping, Sequence
from typing import Any

END = b"\n\n"  # of an event; its JSON has no line feeds
MOST_BYTES = 8 * 2**20  # of events of one response; without those beyond, only the last one follows
QUICKLY = 1  # the level of zlib: events repeat themselves a lot
FINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}  # any other status: failed


class EventLog:
    """Those of one response. Used on one event loop."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.last = b""  # the one that ends the stream
        self.ended = False
        self._size = 0
        self._saved = 0  # events that are stored
        self._changed = asyncio.Event()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Takes what would be sent to a client."""
        events = split(message["body"])
        if not message["more_body"]:
            self.last = events.pop()
        for event in events:
            if self._size <= MOST_BYTES:
                self.events.append(event)
                self._size += len(event)
        self._wake()

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def change(self) -> None:
        """Wait for more. May be called by several tasks."""
        await self._changed.wait()

    def unsaved(self) -> tuple[int, list[bytes]]:
        """(the number of the first event that is not stored, all of these); they count as stored from now on."""
        first, self._saved = self._saved, len(self.events)
        return first, self.events[first:]


def split(body: bytes) -> list[bytes]:
    """The events in a piece of a stream.

    >>> split(b"data: 1\\n\\ndata: 2\\n\\n")
    [b'data: 1\\n\\n', b'data: 2\\n\\n']
    """
    return [one + END for one in body.split(END)[:-1]]


def packed(events: Sequence[bytes]) -> bytes:
    return zlib.compress(b"".join(events), QUICKLY)


def unpacked(part: bytes) -> list[bytes]:
    return split(zlib.decompress(part))


def final_event(status: str, number: int, answered: bytes) -> bytes:
    """The event that ends the stream of a response."""
    kind = FINAL.get(status, "response.failed").encode()
    data = b'{"type":"%b","sequence_number":%d,"response":%b}' % (kind, number, answered)
    return b"event: %b\ndata: %b%b" % (kind, data, END)
