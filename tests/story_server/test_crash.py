"""Engines that die: every stream goes on where it was, and the one request that kills them fails alone."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.story_server.servers import RESTARTS, SMALL, Server, running

POISON = 299  # a token id that stands in one prompt alone
Ask = dict[str, Any]


def asks(count: int, tokens: int) -> list[Ask]:
    """Half of them streamed; greedy and seeded; prompts of all lengths."""
    chance = random.Random(5)
    found = []
    for number in range(count):
        prompt = [chance.randrange(5, 290) for _ in range(1 + 13 * (number % 9))]
        chosen: Ask = {"temperature": 0} if number % 3 else {"temperature": 1.0, "seed": number, "top_p": 0.95}
        more = tokens // 2 + (number * 37) % tokens
        found.append({"model": "tiny", "prompt": prompt, "max_tokens": more, "ignore_eos": True, **chosen})
        found[-1] |= {"stream": number % 2 == 0, "return_token_ids": True}
    return found


async def answer(client: httpx.AsyncClient, url: str, ask: Ask) -> tuple[int, list[int]]:
    """Its status and all its tokens, once each and in order."""
    if not ask["stream"]:
        got = await client.post(f"{url}/v1/completions", json=ask)
        return got.status_code, got.json()["choices"][0]["token_ids"] if got.status_code == 200 else []
    tokens: list[int] = []
    async with client.stream("POST", f"{url}/v1/completions", json=ask) as got:
        if got.status_code != 200:
            return got.status_code, []
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return 500, tokens
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
    return 200, tokens


async def all_answers(server: Server, wanted: list[Ask], meanwhile: Callable[[], Any]) -> list[tuple[int, list[int]]]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=180, limits=limits) as client:
        asked = [asyncio.create_task(answer(client, server.url, one)) for one in wanted]
        await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*asked)


def kill_engine(server: Server) -> None:
    """As from outside; returns when another engine answers."""
    (pid,) = server.engine_pids()
    os.kill(pid, signal.SIGKILL)
    server.wait_for("another engine", lambda: server.engine_pids() not in ([], [pid]))
    server.wait_for("/health to say 200 again", lambda: server.health() == 200)


@pytest.fixture(scope="module")
def steady(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is killed a lot. --threads 1 and float32: the same tokens whatever the batch."""
    flags = ("--max-num-seqs", "24", "--max-model-len", "2048")
    with running(tmp_path_factory.mktemp("crash"), tiny_model, *SMALL, *flags) as server:
        yield server


def test_64_streams_survive_three_kills(steady: Server) -> None:
    wanted = asks(64, 300)
    undisturbed = asyncio.run(all_answers(steady, wanted, lambda: None))
    assert {status for status, _ in undisturbed} == {200}
    assert all(len(tokens) == ask["max_tokens"] for (_, tokens), ask in zip(undisturbed, wanted, strict=True))
    chance = random.Random(time.time_ns())

    def kills() -> None:
        for _ in range(3):
            time.sleep(chance.uniform(0.3, 1.5))
            kill_engine(steady)

    before = steady.metrics()[RESTARTS]
    disturbed = asyncio.run(all_answers(steady, wanted, kills))
    assert steady.metrics()[RESTARTS] == before + 3
    assert disturbed == undisturbed
    steady.wait_until_idle()


def test_killed_during_prefill(steady: Server) -> None:
    wanted = [
        {**asks(1, 8)[0], "prompt": [7 + place % 200 for place in range(1900)], "stream": number % 2 == 0}
        for number in range(8)
    ]
    undisturbed = asyncio.run(all_answers(steady, wanted, lambda: None))
    disturbed = asyncio.run(all_answers(steady, wanted, lambda: (time.sleep(0.15), kill_engine(steady))))
    assert disturbed == undisturbed
    steady.wait_until_idle()


@pytest.mark.slow
def test_killed_while_blocks_are_swapped(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--threads", "1", "--served-model-name", "tiny", "--max-model-len", "600")
    flags += ("--kv-memory", "640KiB", "--host-kv-memory", "64MiB", "--when-short", "swap", "--watermark", "0")
    with running(tmp_path, tiny_model, *flags) as server:
        wanted = asks(24, 200)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        assert server.metrics()["shoal_kv_blocks_out_total"] > 0, "nothing was swapped; the test has lost its point"
        disturbed = asyncio.run(all_answers(server, wanted, lambda: (time.sleep(0.8), kill_engine(server))))
        assert disturbed == undisturbed
        server.wait_until_idle()


@pytest.mark.slow
def test_killed_while_draining(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL, "--max-model-len", "2048") as server:
        wanted = asks(8, 400)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))

        def drain_and_kill() -> None:
            time.sleep(0.5)
            (pid,) = server.engine_pids()
            server.terminate()
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)

        assert asyncio.run(all_answers(server, wanted, drain_and_kill)) == undisturbed
        assert server.stop() == 0


@pytest.mark.parametrize("how", ["raise", pytest.param("crash", marks=pytest.mark.slow)])
def test_a_poisoned_request_fails_alone(tiny_model: Path, tmp_path: Path, how: str) -> None:
    wanted = asks(31, 120)
    poisoned = {**wanted[0], "prompt": [9, POISON, 9], "stream": False}
    flags = (*SMALL, "--max-model-len", "2048")
    with running(tmp_path, tiny_model, *flags, env={"_SHOAL_TEST_POISON": f"{POISON}:{how}"}) as server:
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        *neighbours, bad = asyncio.run(all_answers(server, [*wanted, poisoned], lambda: None))
        assert bad == (500, [])
        assert neighbours == undisturbed
        server.wait_for("/health to say 200", lambda: server.health() == 200)
        server.wait_until_idle()
        assert (server.metrics()[RESTARTS] > 0) == (how == "crash")


@pytest.mark.slow
def test_a_request_that_hangs_the_engine_is_found(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*SMALL, "--max-model-len", "2048", "--hang-timeout", "2.5")
    with running(tmp_path, tiny_model, *flags, env={"_SHOAL_TEST_POISON": f"{POISON}:hang"}) as server:
        poisoned = {**asks(1, 8)[0], "prompt": [9, POISON], "stream": False}
        good = asks(3, 60)
        undisturbed = asyncio.run(all_answers(server, good, lambda: None))
        *neighbours, bad = asyncio.run(all_answers(server, [*good, poisoned], lambda: None))
        assert bad == (500, [])
        assert neighbours == undisturbed
        assert "no sign of life" in server.log(20_000)
