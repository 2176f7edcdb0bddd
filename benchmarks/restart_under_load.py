"""Does a restart of the engine cost a request under load?

    python benchmarks/restart_under_load.py MODEL --requests 480 --rate 12 --kills 2 [--json out.json] -- --device cuda

A real `shoal serve` of the model; what follows -- goes to it. Streams arrive as a Poisson process, with lengths from a
fixed mix or a trace. The engine's process is killed by SIGKILL at equal distances in time, always while it answers. A
request has failed if its status is not 200, if its stream ends with an error or early, or if it does not have exactly
the tokens that were asked for. The wait of a request is the time from its arrival to its first token. Exit code 1 if
any request failed. Needs no packages beyond the server's.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from restart_bf16 import Server

from shoal.bench.sse import Events, StreamedAnswer, error_text
from shoal.workload.arrivals import poisson
from shoal.workload.prompts import make_prompts
from shoal.workload.synthetic import TABLES, draw_lengths
from shoal.workload.traces import TraceRequest, fit, read_trace

MIX = "mix"
PROMPTS, OUTPUTS = (32, 64, 128, 256, 512, 1024), (16, 32, 64, 128, 256)  # tokens, equally likely
AWAY_S = 180.0  # longest time for an engine to come back
STALL_S = 2.0  # tokens still on their way arrive within this time after a kill
HEADERS = (
    "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    "Content-Length: {size}\r\nConnection: close\r\n\r\n"
)


@dataclass
class Stream:
    """One request. All times are seconds since the run began."""

    arrived_s: float
    prompt: int
    asked: int  # tokens
    token_s: list[float] = field(default_factory=list)
    failure: str = ""  # status and reason

    @property
    def wait_s(self) -> float | None:
        return self.token_s[0] - self.arrived_s if self.token_s else None


@dataclass
class Kill:
    """One kill of the engine."""

    at_s: float
    healthy_s: float | None = None  # until /health answered 200 again
    first_token_s: float | None = None  # until the first token of any stream after the pause that it caused
    arrived: int = 0  # requests that arrived in that pause


class Load:
    """One run: the streams, the kills and their clock."""

    def __init__(self, server: Server, requests: list[TraceRequest], vocab_size: int, seed: int) -> None:
        self.server = server
        self.requests = requests
        self.prompts = make_prompts(requests, vocab_size, seed)
        self.streams = [Stream(one.at_s, one.prompt, one.output) for one in requests]
        self.kills: list[Kill] = []
        self.begun_s = time.monotonic()

    def now_s(self) -> float:
        return time.monotonic() - self.begun_s

    async def run(self, kills: int) -> None:
        self.begun_s = time.monotonic()
        span_s = self.requests[-1].at_s
        async with asyncio.TaskGroup() as group:
            for number in range(len(self.requests)):
                group.create_task(self.ask(number))
            group.create_task(self.kill([span_s * (number + 1) / (kills + 1) for number in range(kills)]))
        for number, kill in enumerate(self.kills):
            self.note_stall(kill, self.kills[number + 1].at_s if number + 1 < len(self.kills) else self.now_s())

    # ---- requests

    async def ask(self, number: int) -> None:
        stream = self.streams[number]
        await asyncio.sleep(max(0.0, stream.arrived_s - self.now_s()))
        answer = StreamedAnswer()
        try:
            stream.failure = await self.talk(number, answer)
        except (OSError, EOFError, ValueError) as error:
            stream.failure = f"connection: {type(error).__name__} {error}"
        stream.token_s, how = answer.token_times()
        if not stream.failure and (how != "exact" or len(stream.token_s) != stream.asked):
            stream.failure = f"{len(stream.token_s)} tokens ({how}) instead of {stream.asked}"

    async def talk(self, number: int, answer: StreamedAnswer) -> str:
        """Send the request and read its stream; returns why it failed, if it did."""
        fixed = {"temperature": 1.0, "seed": number, "ignore_eos": True, "stream": True, "return_token_ids": True}
        body = json.dumps(
            {"prompt": self.prompts[number], "max_tokens": self.requests[number].output, **fixed}
        ).encode()
        host = urlsplit(self.server.url).netloc
        reader, writer = await asyncio.open_connection(*host.rsplit(":", 1))
        try:
            writer.write(HEADERS.format(host=host, size=len(body)).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            status = head.split()[1]
            if status != "200":
                return f"{status} {error_text(json.loads(await reader.read()))}"
            events = Events()
            async for data in chunks(reader):
                for event in events.feed(data):
                    answer.add(event, self.now_s())
            if answer.error:
                return f"error in the stream: {answer.error}"
            return "" if answer.done else "the stream ended early"
        finally:
            writer.close()

    # ---- kills

    async def kill(self, times_s: list[float]) -> None:
        for at_s in times_s:
            await asyncio.sleep(max(0.0, at_s - self.now_s()))
            await self.until_healthy()
            kill = Kill(self.now_s())
            os.kill(self.server.engine(), signal.SIGKILL)
            self.kills.append(kill)
            await self.until_healthy(restarts=len(self.kills))
            kill.healthy_s = self.now_s() - kill.at_s

    async def until_healthy(self, restarts: int = 0) -> None:
        """Until /health answers 200 and the engine was restarted so often."""
        end_s = time.monotonic() + AWAY_S
        while await asyncio.to_thread(self.server.restarts) < restarts:
            if time.monotonic() > end_s:
                raise SystemExit(f"no engine came back within {AWAY_S:g} s")
            await asyncio.sleep(0.05)

    def note_stall(self, kill: Kill, until_s: float) -> None:
        """The longest pause of all streams together that begins at the kill or soon after."""
        times = sorted(at_s for one in self.streams for at_s in one.token_s if kill.at_s <= at_s <= until_s)
        pauses = [
            (later - earlier, earlier, later)
            for earlier, later in zip([kill.at_s, *times], times, strict=False)
            if earlier <= kill.at_s + STALL_S
        ]
        if pauses:
            _, began_s, ended_s = max(pauses)
            kill.first_token_s = ended_s - kill.at_s
            kill.arrived = sum(began_s < one.arrived_s < ended_s for one in self.streams)


async def chunks(reader: asyncio.StreamReader) -> Any:
    """The parts of a chunked body."""
    while size := int(await reader.readline(), 16):
        yield await reader.readexactly(size)
        await reader.readline()


# ---- the figures


def requests_of(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace == MIX:
        chance = random.Random(args.seed)
        drawn = [TraceRequest(0.0, chance.choice(PROMPTS), chance.choice(OUTPUTS)) for _ in range(args.requests)]
    elif args.trace in TABLES:
        drawn = draw_lengths(args.trace, args.requests, args.seed)
    else:
        drawn = read_trace(args.trace, args.requests)
    fitted = fit(drawn, scale=args.scale, max_prompt=args.max_prompt, max_output=args.max_output).requests
    return poisson(fitted, args.rate, args.seed)


def figures(load: Load) -> dict[str, Any]:
    failed = [one for one in load.streams if one.failure]
    waits = sorted(one.wait_s for one in load.streams if one.wait_s is not None)
    gaps = [
        later - earlier for one in load.streams for earlier, later in zip(one.token_s, one.token_s[1:], strict=False)
    ]
    return {
        "requests": len(load.streams),
        "failed": len(failed),
        "failures": dict(Counter(one.failure for one in failed).most_common()),
        "tokens": sum(len(one.token_s) for one in load.streams),
        "tokens_asked": sum(one.asked for one in load.streams),
        "median_wait_s": waits[len(waits) // 2] if waits else None,
        "longest_wait_s": waits[-1] if waits else None,
        "longest_gap_s": max(gaps, default=None),
        "seconds": load.now_s(),
        "kills": [asdict(kill) for kill in load.kills],
    }


def table(found: dict[str, Any]) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    lines = [
        f"{'requests':<34}{found['requests']}",
        f"{'failed':<34}{found['failed']}",
        *(f"  {count} x {why}" for why, count in found["failures"].items()),
        f"{'tokens / asked':<34}{found['tokens']} / {found['tokens_asked']}",
        f"{'median wait for the first token':<34}{seconds(found['median_wait_s'])}",
        f"{'longest wait for the first token':<34}{seconds(found['longest_wait_s'])}",
        f"{'longest gap in a stream':<34}{seconds(found['longest_gap_s'])}",
        f"{'whole run':<34}{seconds(found['seconds'])}",
    ]
    for number, kill in enumerate(found["kills"], 1):
        name = f"kill {number} at {seconds(kill['at_s'])}"
        lines.append(
            f"{name:<34}first token after {seconds(kill['first_token_s'])}, "
            f"healthy after {seconds(kill['healthy_s'])}, {kill['arrived']} requests arrived meanwhile"
        )
    return "\n".join(lines)


def longest_context(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as answer:
        return int(json.loads(answer.read())["data"][0]["max_model_len"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, .gguf file or hub name")
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second (default: %(default)s)")
    parser.add_argument(
        "--kills", type=int, default=2, help="of the engine, spread over the run (default: %(default)s)"
    )
    parser.add_argument("--trace", default=MIX, help=f"lengths: {MIX}, {', '.join(TABLES)}, or a trace file")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths (default: 1)")
    parser.add_argument("--max-prompt", type=int, help="cap prompts at so many tokens")
    parser.add_argument("--max-output", type=int, help="cap outputs at so many tokens")
    parser.add_argument(
        "--vocab-size", type=int, default=30_000, help="token ids of prompts are below (default: 30000)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the figures and all streams there")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    requests = requests_of(args)
    server = Server(args.model, "--log-level", "warning", *flags)
    try:
        longest = max(one.prompt + one.output for one in requests)
        if longest > longest_context(server):
            raise SystemExit(
                f"the longest request has {longest} tokens, the context {longest_context(server)}: --scale"
            )
        load = Load(server, requests, args.vocab_size, args.seed)
        asyncio.run(load.run(args.kills))
    finally:
        server.close()
    found = figures(load)
    print(table(found))
    if args.json:
        whole = {"args": vars(args), "flags": flags, **found, "streams": [asdict(one) for one in load.streams]}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
