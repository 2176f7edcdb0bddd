"""Requests to a server at given times, over plain sockets: what arrives is kept with its time and parsed after the run,
so that the client takes little of a machine that it shares with the server. Knows HTTP and records; no engine."""

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from shoal.bench.record import RequestRecord, RunRecord
from shoal.bench.sse import Events, StreamedAnswer
from shoal.workload.prompts import make_prompts
from shoal.workload.traces import TraceRequest

HEADERS = (
    "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    "Content-Length: {size}\r\nConnection: close\r\n\r\n"
)


class Stream(asyncio.Protocol):
    """One request: sends it, and keeps what arrives when; it is parsed after the run."""

    def __init__(self, message: bytes, done: "asyncio.Future[None]") -> None:
        self.message, self.done = message, done
        self.parts: list[tuple[float, bytes]] = []

    def connection_made(self, transport: Any) -> None:
        transport.write(self.message)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def record(self, one: TraceRequest, begun_s: float) -> RequestRecord:
        found, answer, events = RequestRecord(one.at_s, one.prompt, one.output), StreamedAnswer(), Events()
        try:
            for at_s, data in self.parts:
                for event in events.feed(data):
                    answer.add(event, at_s - begun_s)
        except ValueError as error:
            answer.error = f"not a stream: {error}"
        found.token_s, _ = answer.token_times()
        found.ended_s, found.reason = answer.ended_s, answer.error or answer.reason or "cut off"
        if not answer.reason and self.parts:
            found.reason += ": " + self.parts[0][1][:300].decode(errors="replace")
        return found


async def replay(url: str, trace: Sequence[TraceRequest], prompts: Sequence[list[int]], limit_s: float) -> RunRecord:
    """Each request at its time, whatever has become of the others; what has not ended after `limit_s` is cut off."""
    address = urlsplit(url)
    loop, streams, late_s = asyncio.get_running_loop(), list[Stream](), list[float]()
    fixed = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    messages = []
    for one, prompt in zip(trace, prompts, strict=True):
        body = json.dumps({"prompt": prompt, "max_tokens": one.output, **fixed}).encode()
        messages.append(HEADERS.format(host=address.netloc, size=len(body)).encode() + body)
    opening = []
    begun_s = time.perf_counter()
    for one, message in zip(trace, messages, strict=True):
        while (early_s := begun_s + one.at_s - time.perf_counter()) > 0:
            await asyncio.sleep(early_s)
        late_s.append(-early_s)
        streams.append(stream := Stream(message, loop.create_future()))
        opening.append(
            loop.create_task(loop.create_connection(lambda one=stream: one, address.hostname, address.port))  # type: ignore[misc]
        )
    left_s = max(1.0, limit_s - (time.perf_counter() - begun_s))
    await asyncio.wait([stream.done for stream in streams], timeout=left_s)
    refused = [task.exception() for task in opening if task.done() and not task.cancelled() and task.exception()]
    records = [stream.record(one, begun_s) for one, stream in zip(trace, streams, strict=True)]
    seconds = max((one.ended_s or 0.0 for one in records), default=0.0)
    settings = {"late_ms": 1000 * max(late_s, default=0.0), "refused": [str(one) for one in refused[:3]]}
    return RunRecord("", "", 0.0, settings, 0, records, [], seconds, 0.0)


def run_load(url: str, trace: Sequence[TraceRequest], vocab_size: int, seed: int, limit_s: float) -> RunRecord:
    prompts = make_prompts(trace, vocab_size, seed)
    try:
        import uvloop

        factory: Any = uvloop.new_event_loop
    except ImportError:
        factory = None
    gc.collect()
    gc.disable()  # a collection would make tokens late that are not
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(replay(url, trace, prompts, limit_s))
    finally:
        gc.enable()
