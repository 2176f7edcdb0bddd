"""Many streams at once, clients that go away, clients that stop reading: nothing is left behind, nobody harmed."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.story_server.servers import HELD, RESTARTS, RUNNING, SMALL, WAITING, Server, connect, raw_request, running

STREAMS = 300
MIB = 2**20


FLAGS = (*SMALL, "--max-num-seqs", "64", "--max-queue", "1000", "--max-model-len", "32768")
IMPATIENT_S = 5  # how long a client may stand still; those of the other tests may, on a busy machine


@pytest.fixture(scope="module")
def wide(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("wide"), tiny_model, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*FLAGS, "--slow-client-timeout", str(IMPATIENT_S))
    with running(tmp_path_factory.mktemp("impatient"), tiny_model, *flags) as server:
        yield server


def tokens_in(line: bytes) -> list[int]:
    return [token for choice in json.loads(line[6:])["choices"] for token in choice.get("token_ids") or []]


async def one_stream(http: aiohttp.ClientSession, url: str, seed: int, leave_after: int | None) -> list[int] | None:
    """All tokens of a stream; None when this client went away after so many events."""
    body = {
        "model": "tiny",
        "prompt": [5 + seed] * (20 + seed),
        "seed": seed,
        "max_tokens": 40,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    events = 0
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        if leave_after == 0:
            return None
        async for line in answer.content:
            if line.startswith(b"data: {"):
                tokens += tokens_in(line)
                events += 1
                if events == leave_after:
                    return None  # leaving the block closes the connection
            elif line.startswith(b"data: [DONE]"):
                return tokens
    raise EOFError("the stream ended without data: [DONE]")


async def one_of_many(http: aiohttp.ClientSession, url: str, i: int, dice: random.Random) -> list[int] | None:
    kind, seed = i % 4, i % 8
    if kind == 0:  # goes away after some events
        return await one_stream(http, url, seed, leave_after=dice.randrange(0, 39))
    if kind == 1:  # goes away whenever: perhaps before the first byte
        try:
            return await asyncio.wait_for(one_stream(http, url, seed, None), timeout=dice.random() * 3)
        except TimeoutError:
            return None
    return await one_stream(http, url, seed, None)


async def a_round(url: str, streams: int) -> list[list[int] | None]:
    dice = random.Random(0)
    timeout = aiohttp.ClientTimeout(total=240)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a connection of its own for each stream
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        return await asyncio.gather(*(one_of_many(http, url, i, dice) for i in range(streams)))


def check_round(told: list[list[int] | None]) -> None:
    """Who stayed has all tokens, and the same seed said the same, whatever happened around it."""
    by_seed: dict[int, list[int]] = {}
    for i, tokens in enumerate(told):
        if i % 4 >= 2:
            assert tokens is not None
            assert len(tokens) == 40
            assert by_seed.setdefault(i % 8, tokens) == tokens
    assert len({tuple(tokens) for tokens in by_seed.values()}) == len(by_seed)


def settle(server: Server) -> int:
    server.wait_until_idle()
    return server.resident_bytes()


def test_three_hundred_streams_with_cancellations_leave_nothing_behind(wide: Server) -> None:
    check_round(asyncio.run(a_round(wide.url, STREAMS)))
    after_one = settle(wide)
    check_round(asyncio.run(a_round(wide.url, STREAMS)))
    after_two = settle(wide)
    most = after_one + max(24 * MIB, after_one // 20)
    if after_two >= most:  # memory that was freed goes back to the system every 20 seconds
        wide.wait_for("memory to be given back", lambda: wide.resident_bytes() < most)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_rounds_do_not_grow(wide: Server) -> None:
    sizes = []
    for _ in range(10):
        check_round(asyncio.run(a_round(wide.url, STREAMS)))
        sizes.append(settle(wide))
    assert sizes[-1] - sizes[4] < 24 * MIB, [round(size / MIB) for size in sizes]


def flood(server: Server, n: int) -> Any:
    """A client that asks for much, with a receive buffer of almost nothing, and does not read."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "fish"}],
        "n": n,
        "max_tokens": 30_000,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
    }
    made = connect(server, receive_buffer=1024)
    made.sendall(raw_request("/v1/chat/completions", json.dumps(body).encode()))
    return made


def cut_off(server: Server) -> bool:
    return "a client was disconnected" in server.log(10**9)


def drained(made: Any) -> bytes:
    """What is still to be read, up to the end of the connection; only its last part is kept."""
    last = b""
    try:
        while part := made.recv(65536):
            last = (last + part)[-65536:]
    except ConnectionResetError:
        pass
    return last


def test_a_slow_reader_is_cut_off_and_slows_nobody(impatient: Server) -> None:
    with flood(impatient, n=4) as slow:
        impatient.wait_for(
            "the slow reader to run", lambda: impatient.metrics().get(RUNNING) == 4 or cut_off(impatient)
        )

        async def others() -> list[list[int] | None]:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
                return await asyncio.gather(*(one_stream(http, impatient.url, i, None) for i in range(16)))

        assert all(tokens is not None and len(tokens) == 40 for tokens in asyncio.run(others()))
        impatient.wait_until_idle()  # nothing was read all the while
        assert b"[DONE]" not in drained(slow)
    assert impatient.health() == 200
    assert cut_off(impatient)


def test_a_reader_that_is_only_slow_to_begin_is_served(impatient: Server) -> None:
    """Its whole answer fits into buffers; it reads it after the timeout has passed."""
    body = {"model": "tiny", "prompt": [5], "max_tokens": 20, "ignore_eos": True, "stream": True}
    with connect(impatient) as late:
        late.sendall(raw_request("/v1/completions", json.dumps(body).encode()))
        impatient.wait_until_idle()
        asyncio.run(asyncio.sleep(IMPATIENT_S + 1))
        assert b"data: [DONE]" in drained(late)


@pytest.mark.slow
def test_a_very_long_pass_blinds_nobody(tiny_model: Path, tmp_path: Path) -> None:
    """A pass of many seconds: /health and /metrics go on answering in full, and nobody takes the engine for dead."""
    flags = ("--max-num-batched-tokens", "32768", "--max-model-len", "32768")
    with running(tmp_path, tiny_model, *SMALL, *flags) as server:
        became: list[int] = []
        body = {"model": "tiny", "prompt": [5 + i % 300 for i in range(32_000)], "max_tokens": 1}
        asking = threading.Thread(
            target=lambda: became.append(server.post("/v1/completions", body, timeout_s=900).status_code)
        )
        asking.start()
        seen: list[tuple[int, dict[str, float]]] = []
        while asking.is_alive():
            seen.append((server.health(), server.metrics()))
        asking.join()
        assert became == [200]
        assert {health for health, _ in seen} == {200}
        assert all({RUNNING, WAITING, HELD} <= set(told) for _, told in seen)
        assert {told[RESTARTS] for _, told in seen} == {0}
