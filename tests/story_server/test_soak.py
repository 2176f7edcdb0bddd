"""Soak: random traffic over HTTP for a long time, with cancellations, slow readers, bad and hostile requests and killed
engines.

Twenty minutes, or SOAK_S seconds. In the end nothing is held, nothing has grown, and every answer is accounted for:
finished, refused with a reason, or given up by its client.
"""

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.bench.hostile_bodies import Attack, attacks
from tests.story_server.servers import (
    RESTARTS,
    SMALL,
    Server,
    async_lines_of,
    family_of,
    name_of,
    resident_bytes,
    running,
)

SOAK_S = float(os.environ.get("SOAK_S", "1200"))
USERS = 40
KINDS = {"plain": 8, "stream": 8, "leave": 4, "slow": 2, "bad": 4, "schema": 2, "hostile": 1}
BAD: list[dict[str, Any]] = [
    {"prompt": []},
    {"prompt": [5], "max_tokens": -1},
    {"prompt": [10**9]},
    {"prompt": [5] * 5000, "max_tokens": 5},
    {"prompt": [5], "temperature": "hot"},
    {"prompt": [5], "n": 10**6},
    {"prompt": [5], "no_such_field": 1},
    {"model": "nobody", "prompt": [5]},
]

# those with an answer of their own that comes soon; templates and unfinished bodies have their tests in test_hostile.py
HOSTILE = [one for one in attacks() if one.finished and not one.name.startswith(("template", "the same, streamed"))]


@cache
def body_of(attack: Attack) -> bytes:
    return attack.body()


class Soak:
    """Users that come back for ever, each answer counted once."""

    def __init__(self, server: Server, until_s: float, least_hostile: int = 0) -> None:
        self.server = server
        self.until_s = until_s
        self.least_hostile = least_hostile  # hostile bodies to be sent, however long that takes
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def user(self, number: int) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(timeout=120) as client:
            while time.monotonic() < self.until_s or self.counts["hostile"] < self.least_hostile:
                self.counts["asked"] += 1
                kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
                try:
                    self.counts[await getattr(self, f"_{kind}")(client, chance)] += 1
                except (TimeoutError, httpx.TransportError) as error:
                    self.counts["broken"] += 1
                    self.wrong.append(f"{kind}: {error!r}")
                await asyncio.sleep(chance.expovariate(5))

    def _body(self, chance: random.Random, **more: Any) -> dict[str, Any]:
        shared = [9] * (16 * chance.randrange(4))
        prompt = shared + [chance.randrange(5, 290) for _ in range(chance.randrange(1, 60))]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": chance.randrange(1, 200), "ignore_eos": True}
        body |= {
            "temperature": chance.choice([0, 1]),
            "n": chance.choice([1, 1, 1, 3]),
            "priority": chance.randrange(3),
        }
        return body | more

    async def _plain(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        body = self._body(chance)
        if chance.random() < 0.1:
            body["timeout"] = 0.3
        return self._judge(await client.post(f"{self.server.url}/v1/completions", json=body), body)

    async def _schema(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        body = self._body(chance, n=1, structured_outputs={"regex": "[a-z]{3,8}( [a-z]{3,8}){0,9}"}, ignore_eos=False)
        return self._judge(await client.post(f"{self.server.url}/v1/completions", json=body), body)

    async def _bad(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        body = {"model": "tiny", **chance.choice(BAD)}
        got = await client.post(f"{self.server.url}/v1/completions", json=body)
        if got.status_code not in (400, 404, 413, 503) or "error" not in got.json():
            self.wrong.append(f"{body} was answered with {got.status_code}: {got.text[:200]}")
        return "refused"

    async def _hostile(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        attack = HOSTILE[self.counts["hostile"] % len(HOSTILE)]
        self.counts["hostile"] += 1
        headers = {"Content-Type": "application/json"}
        got = await client.post(f"{self.server.url}{attack.path}", content=body_of(attack), headers=headers)
        if got.status_code not in (200, 400, 413, 429, 503):
            self.wrong.append(f"{attack.name} was answered with {got.status_code}: {got.text[:200]}")
        return "finished" if got.status_code == 200 else "refused"

    async def _stream(
        self, client: httpx.AsyncClient, chance: random.Random, slow_s: float = 0.0, most: int = 10**9
    ) -> str:
        body = self._body(chance, stream=True)
        events = 0
        async with client.stream("POST", f"{self.server.url}/v1/completions", json=body) as got:
            if got.status_code != 200:
                await got.aread()
                return self._judge(got, body)
            done = False
            async for line in async_lines_of(got):
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: ") and "error" in json.loads(line[6:]):
                    self.wrong.append(line)
                events += 1
                if events >= most:
                    return "left"
                if slow_s:
                    await asyncio.sleep(slow_s)
        if not done:
            self.wrong.append("a stream ended without [DONE]")
        return "finished"

    async def _leave(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        return await self._stream(client, chance, most=chance.randrange(1, 40))

    async def _slow(self, client: httpx.AsyncClient, chance: random.Random) -> str:
        return await self._stream(client, chance, slow_s=0.02)

    def _judge(self, got: httpx.Response, body: dict[str, Any]) -> str:
        if got.status_code == 200:
            return "finished"
        if got.status_code in (429, 503) and got.json()["error"]["message"]:
            return "refused"
        self.wrong.append(f"{got.status_code} {got.text[:300]} for {str(body)[:200]}")
        return "wrong"

    async def killer(self) -> None:
        """Kills an engine about once a minute."""
        chance = random.Random(0)
        while time.monotonic() < self.until_s - 20:
            await asyncio.sleep(min(chance.uniform(20, 80), SOAK_S / 4))
            for pid in self.server.engine_pids():
                os.kill(pid, signal.SIGKILL)
                self.counts["kills"] += 1

    async def run(self) -> None:
        await asyncio.gather(self.killer(), *(self.user(number) for number in range(USERS)))


def handles(server: Server) -> int:
    """Open files of all processes."""
    count = 0
    for pid in family_of(server.process.pid):
        try:
            count += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            continue
    return count


def memory(server: Server) -> dict[str, int]:
    """Bytes of all processes but the engines, which are killed and start anew."""
    pids = family_of(server.process.pid) - set(server.engine_pids())
    return {f"{name_of(pid)} {pid}": resident_bytes(pid) for pid in sorted(pids)}


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
def test_a_long_day(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "24", "--max-model-len", "2048", "--slow-client-timeout", "20", "--max-queue", "64")
    flags += ("--kv-memory", "2MiB", "--host-kv-memory", "8MiB", "--when-short", "auto")
    small = tuple(flag for flag in SMALL if flag not in ("--kv-memory", "64MiB"))
    with running(tmp_path, tiny_model, *small, *flags) as server:
        warm = Soak(server, time.monotonic() + min(60.0, SOAK_S / 4), least_hostile=4 * len(HOSTILE))
        asyncio.run(warm.run())
        server.wait_for("/health to say 200", lambda: server.health() == 200)
        server.wait_until_idle()
        before = handles(server), memory(server)
        soak = Soak(server, time.monotonic() + SOAK_S)
        asyncio.run(soak.run())
        server.wait_for("/health to say 200", lambda: server.health() == 200)
        server.wait_until_idle()
        time.sleep(2)
        after = handles(server), memory(server)
        assert not soak.wrong, soak.wrong[:10]
        answered = sum(soak.counts[kind] for kind in ("finished", "refused", "left"))
        assert answered == soak.counts["asked"], soak.counts
        assert soak.counts["kills"] >= 1
        assert server.metrics()[RESTARTS] == warm.counts["kills"] + soak.counts["kills"]
        assert after[0] <= before[0] + 5, f"open files grew from {before[0]} to {after[0]}"
        grown = f"memory grew from {before[1]} to {after[1]}"
        assert sum(after[1].values()) <= sum(before[1].values()) * 1.15 + 10 * 2**20, grown
