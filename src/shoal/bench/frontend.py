"""What the fronts cost: streams from a paced engine, one SSE event per token, parsed by a client in this process.

Owns the client (plain sockets, so that the client is not the bottleneck) and the figures: tokens per second that
arrived, and the delay added between the scheduler and the parsed event. Knows only an address and a file of emissions.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

HEADERS = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
)


class Choice(msgspec.Struct):
    """Choice of one chunk; other fields are skipped."""

    text: str
    finish_reason: str | None = None
    token_ids: list[int] = []


class Event(msgspec.Struct):
    """One chunk of a streamed completion."""

    id: str
    choices: list[Choice]


_events = msgspec.json.Decoder(Event)


class StreamClient(asyncio.Protocol):
    """One stream: sends its request, parses every event, records when each arrived."""

    def __init__(self, body: bytes, done: "asyncio.Future[None]") -> None:
        self.body = body
        self.done = done
        self.id = ""
        self.sent_s = 0.0
        self.arrived_s: list[float] = []
        self.problem = ""
        self._rest = b""
        self._in_body = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.sent_s = time.monotonic()
        transport.write(HEADERS.format(len(self.body)).encode() + self.body)

    def data_received(self, data: bytes) -> None:
        self._rest += data
        if not self._in_body:
            head, found, rest = self._rest.partition(b"\r\n\r\n")
            if not found:
                return
            if b" 200 " not in head.split(b"\r\n")[0]:
                self._end(self._rest[:500].decode(errors="replace"))
                return
            self._in_body, self._rest = True, rest
        *whole, self._rest = self._rest.split(b"\n\n")
        for part in whole:
            at = part.find(b"data: ")  # HTTP chunk sizes precede it
            if at < 0:
                continue
            if part.startswith(b"[DONE]", at + 6):
                self._end("")
                return
            event = _events.decode(part[at + 6 :])
            if event.choices and (event.choices[0].text or event.choices[0].token_ids):  # ids: there is no tokenizer
                self.arrived_s.append(time.monotonic())
                self.id = event.id

    def connection_lost(self, error: Exception | None) -> None:
        self._end("the connection was closed early")

    def _end(self, problem: str) -> None:
        if not self.done.done():
            self.problem = problem
            self.transport.close()
            self.done.set_result(None)


@dataclass
class Arrivals:
    """What the client received."""

    streams: dict[str, list[float]] = field(default_factory=dict)  # request id → when its tokens arrived
    problems: list[str] = field(default_factory=list)
    sent_s: dict[str, float] = field(default_factory=dict)  # request id → when it was sent

    def add(self, other: "Arrivals") -> None:
        self.streams |= other.streams
        self.problems += other.problems
        self.sent_s |= other.sent_s


async def read_streams(host: str, port: int, streams: int, tokens: int) -> Arrivals:
    """Open all streams at once and read them to their ends."""
    body = json.dumps(
        {"prompt": [1, 2, 3], "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "stream": True}
    ).encode()
    loop = asyncio.get_running_loop()
    clients = [StreamClient(body, loop.create_future()) for _ in range(streams)]
    await asyncio.gather(*(loop.create_connection(lambda one=one: one, host, port) for one in clients))  # type: ignore[misc]
    await asyncio.gather(*(one.done for one in clients))
    found = Arrivals({one.id: one.arrived_s for one in clients if one.id})
    found.sent_s = {one.id: one.sent_s for one in clients if one.id}
    found.problems = [one.problem for one in clients if one.problem]
    return found


def run_streams(host: str, port: int, streams: int, tokens: int) -> Arrivals:
    """read_streams() on uvloop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(read_streams(host, port, streams, tokens))


def figures(sent: dict[str, list[float]], seen: Arrivals, offered: float) -> dict[str, Any]:
    """Rate and added delay over the middle of the run, when all streams are open."""
    delays, arrived, missing = [], [], 0
    before = []  # between a request and its first token in the engine
    for id, times in seen.streams.items():
        left = sent.get(f"{id.removeprefix('cmpl-')}.0.0", [])  # its first prompt, its first sample
        missing += len(left) - len(times)
        before += [left[0] - seen.sent_s[id]] if left and id in seen.sent_s else []
        delays += [there - then for then, there in zip(left, times, strict=False)]
        arrived += times
    if not arrived:
        return {"offered_tok_s": offered, "tok_s": 0.0, "problems": seen.problems[:3]}
    first = max(times[0] for times in seen.streams.values())
    last = min(times[-1] for times in seen.streams.values())
    middle = sum(first <= at <= last for at in arrived)
    spread = np.percentile(np.array(delays) * 1000, [50, 90, 99, 100])
    return {
        "offered_tok_s": offered,
        "tok_s": middle / max(last - first, 1e-9),
        "delay_ms": dict(zip(("p50", "p90", "p99", "max"), (round(float(one), 2) for one in spread), strict=True)),
        "before_ms": round(float(np.median(before)) * 1000, 3) if before else 0.0,
        "streams": len(seen.streams),
        "tokens": len(arrived),
        "missing": missing,
        "problems": seen.problems[:3],
    }
