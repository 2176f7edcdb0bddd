"""Does a stream notice that its engine dies, while other replicas are up?

    python benchmarks/kill_replicas.py MODEL --kills 5 --every 5 --restart -- --max-num-seqs 128

A real `shoal serve` of the model in float32; what follows -- goes to it. First every stream runs undisturbed. Then the
same streams run again and again, always as many at once, while the oldest engine is killed by SIGKILL, as often as
asked and whenever another one is up (--up); with --restart, a rolling restart follows. One engine must have room for
all streams, or they wait for each other. Prints how many answers differ from the undisturbed ones (none may), and the
longest gaps between two events of a stream: in the undisturbed run, and around each kill. Beside each stands the
longest time for which the system left a thread of an engine that wanted to compute without a CPU, which is no matter of
engines (Linux only). Exit code 1 if an answer differs or fails. Needs no packages beyond the server's.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from restart_bf16 import Server
from restart_under_load import HEADERS, chunks

from shoal.bench.sse import Events

AROUND_S = 3.0  # a gap that begins within this time after a kill belongs to it


class CpuWaits:
    """How long threads of the engines wait for a CPU, as Linux counts it."""

    EVERY_S = 0.25  # a wait is counted when it is over, so a long one is seen whole; to look takes CPU time itself

    def __init__(self, fire: "Fire") -> None:
        self._fire = fire
        self._before: dict[str, int] = {}
        self.waits: list[tuple[float, float]] = []  # (when it ended, how long)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._fire.over:
            for pid in self._fire.engines():
                with suppress(OSError):
                    self._read(f"/proc/{pid}/task")
            time.sleep(self.EVERY_S)

    def _read(self, folder: str) -> None:
        for thread in os.listdir(folder):
            with open(f"{folder}/{thread}/schedstat") as file:  # ns computed, ns waited (told when it is over), turns
                waited = int(file.read().split()[1])
            self.waits.append((time.monotonic(), (waited - self._before.get(thread, waited)) / 1e9))
            self._before[thread] = waited

    def longest(self, first_s: float, last_s: float) -> float:
        return max((wait for at_s, wait in self.waits if first_s <= at_s <= last_s + wait), default=0.0)


@dataclass
class Answer:
    """One stream: its tokens, and when events with tokens came."""

    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    failure: str = ""


class Fire:
    """Streams, and what is done to their engines."""

    def __init__(self, server: Server, streams: int, tokens: int, up: int, vocab_size: int = 400) -> None:
        self.server = server
        self.up = up  # engines that must be up before a kill
        chance = random.Random(5)
        self.bodies = [
            {
                "prompt": [chance.randrange(5, vocab_size) for _ in range(1 + 13 * (number % 5))],
                "max_tokens": tokens // 2 + (number * 37) % (tokens // 2),
                "temperature": number % 2,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            for number in range(streams)
        ]
        self.over = False
        self.kills: list[float] = []
        self.restart: tuple[float, float] | None = None
        self.cpu_waits: CpuWaits | None = None

    async def once(self) -> list[Answer]:
        return list(await asyncio.gather(*map(self.ask, self.bodies)))

    async def under_fire(self, kills: int, every_s: float, restart: bool) -> list[list[Answer]]:
        """By stream: all its answers while engines are killed; each stream begins again when it has ended."""

        async def again(body: dict[str, Any]) -> list[Answer]:
            found = []
            while not self.over:
                found.append(await self.ask(body))
            return found

        self.cpu_waits = CpuWaits(self)
        running = [asyncio.create_task(again(body)) for body in self.bodies]
        try:
            for _ in range(kills):
                await asyncio.sleep(every_s)
                await asyncio.to_thread(self.wait_for_engines)
                os.kill(self.engines()[0], signal.SIGKILL)  # the oldest, so it is up
                self.kills.append(time.monotonic())
            if restart:
                await asyncio.sleep(every_s)
                begun_s = time.monotonic()
                code = await asyncio.to_thread(self.rolling_restart)
                self.restart = (begun_s, time.monotonic())
                assert code == 0, "shoal restart failed"
            await asyncio.sleep(AROUND_S)
        finally:
            self.over = True
        return list(await asyncio.gather(*running))

    def wait_for_engines(self) -> None:
        """Until so many engines are up that the jobs of a killed one have somewhere to go."""
        while True:
            with urllib.request.urlopen(f"{self.server.url}/health", timeout=30) as answer:
                if len(self.engines()) - len(json.load(answer).get("engines_down", ())) >= self.up:
                    return
            time.sleep(0.1)

    def engines(self) -> list[int]:
        """Process ids, without the spare one."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    name, _, rest = stat.read().rpartition(")")
                if int(rest.split()[1]) == self.server.process.pid and name.endswith("(shoal-engine"):
                    found.append(int(pid))
            except OSError:
                continue
        return sorted(found)

    def rolling_restart(self) -> int:
        from shoal.cli import main

        return main(["restart", "--url", self.server.url])

    async def ask(self, body: dict[str, Any]) -> Answer:
        answer = Answer()
        data = json.dumps(body).encode()
        host = urlsplit(self.server.url).netloc
        try:
            reader, writer = await asyncio.open_connection(*host.rsplit(":", 1))
            try:
                writer.write(HEADERS.format(host=host, size=len(data)).encode() + data)
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                if head.split()[1] != "200":
                    answer.failure = f"status {head.split()[1]}: {(await reader.read()).decode()}"
                    return answer
                events = Events()
                async for part in chunks(reader):
                    for event in events.feed(part):
                        self.take(answer, event)
            finally:
                writer.close()
        except (OSError, EOFError, ValueError) as error:
            answer.failure = f"connection: {type(error).__name__} {error}"
        return answer

    @staticmethod
    def take(answer: Answer, event: bytes) -> None:
        if event == b"[DONE]":
            return
        found = json.loads(event)
        if "error" in found:
            answer.failure = f"error in the stream: {found['error']}"
        tokens = [token for choice in found.get("choices", ()) for token in choice.get("token_ids") or ()]
        if tokens:
            answer.tokens += tokens
            answer.at_s.append(time.monotonic())


def gaps_of(answers: list[Answer]) -> list[tuple[float, float]]:
    """(when it began, how long) of every gap between two events of a stream."""
    return [
        (earlier, later - earlier) for one in answers for earlier, later in zip(one.at_s, one.at_s[1:], strict=False)
    ]


def figures(fire: Fire, quiet: list[Answer], found: list[list[Answer]]) -> dict[str, Any]:
    answers = [one for stream in found for one in stream]
    wrong = sum(one.tokens != quiet[number].tokens for number, stream in enumerate(found) for one in stream)
    gaps = gaps_of(answers)

    def longest(first_s: float, last_s: float) -> float:
        return max((gap for begun, gap in gaps if first_s - gap <= begun <= last_s), default=0.0)

    waits = fire.cpu_waits

    return {
        "streams": len(found),
        "answers": len(answers),
        "failed": sum(bool(one.failure) for one in answers),
        "failures": sorted({one.failure for one in answers if one.failure})[:5],
        "different": wrong,
        "tokens": sum(len(one.tokens) for one in answers),
        "longest_gap_undisturbed_s": max((gap for _, gap in gaps_of(quiet)), default=0.0),
        "longest_gap_around_kills_s": [longest(at_s, at_s + AROUND_S) for at_s in fire.kills],
        "without_a_cpu_around_kills_s": [waits.longest(at_s, at_s + AROUND_S) for at_s in fire.kills if waits],
        "longest_gap_in_the_restart_s": longest(*fire.restart) if fire.restart else None,
        "without_a_cpu_in_the_restart_s": waits.longest(*fire.restart) if fire.restart and waits else None,
        "restart_s": fire.restart[1] - fire.restart[0] if fire.restart else None,
    }


def run(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    fire = Fire(server, args.streams, args.tokens, args.up)
    quiet = asyncio.run(fire.once())
    assert not any(one.failure for one in quiet), [one.failure for one in quiet if one.failure][:3]
    return figures(fire, quiet, asyncio.run(fire.under_fire(args.kills, args.every, args.restart)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, .gguf file or hub name")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=400, help="of the longest answer (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="between two kills (default: 5)")
    parser.add_argument("--up", type=int, default=2, help="engines that must be up before a kill (default: 2)")
    parser.add_argument("--restart", action="store_true", help="restart all engines one by one at the end")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    fixed = ("--dtype", "float32", "--log-level", "warning", "--replicas", str(args.replicas))
    server = Server(args.model, *fixed, *flags)
    try:
        found = run(server, args)
    finally:
        server.close()
    for name, value in found.items():
        shown = [round(one, 3) for one in value] if isinstance(value, list) and name.endswith("_s") else value
        print(f"{name:<32}{round(shown, 3) if isinstance(shown, float) else shown}")
    return 1 if found["failed"] or found["different"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
