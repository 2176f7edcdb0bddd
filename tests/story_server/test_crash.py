"""Engines that die: every stream goes on where it was, and the one request that kills them fails alone."""

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes.stopping import stop
from tests.story_server.poison import poison_env
from tests.story_server.servers import (
    RESTARTS,
    SMALL,
    Server,
    assert_error_shape,
    async_lines_of,
    long_stream,
    running,
)
from tests.story_server.slow_passes import slow_env

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
        async for line in async_lines_of(got):
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return 500, tokens
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
    return 200, tokens


async def all_answers(server: Server, wanted: list[Ask], meanwhile: Callable[[], Any]) -> list[tuple[int, list[int]]]:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=180, limits=limits, verify=False) as client:
        asked = [asyncio.create_task(answer(client, server.url, one)) for one in wanted]
        await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*asked)


@pytest.fixture(scope="module")
def steady(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is killed a lot. --threads 1 and float32: the same tokens whatever the batch."""
    flags = ("--max-num-seqs", "24", "--max-model-len", "2048", "--max-num-batched-tokens", "128", "--spare-engine")
    with running(tmp_path_factory.mktemp("crash"), tiny_model, *SMALL, *flags, env=slow_env(0.005)) as server:
        yield server


def test_64_streams_survive_three_kills(steady: Server) -> None:
    wanted = asks(64, 200)
    undisturbed = asyncio.run(all_answers(steady, wanted, lambda: None))
    assert {status for status, _ in undisturbed} == {200}
    assert all(len(tokens) == ask["max_tokens"] for (_, tokens), ask in zip(undisturbed, wanted, strict=True))

    def kills() -> None:
        kill_when(steady, "some to speak", lambda: speaking(steady) > 0)
        for _ in range(2):  # all may have ended by then, if this process is late
            kill_when(steady, "some to speak, or none", lambda: speaking(steady) > 0 or not requests_of(steady))

    before = steady.metrics()[RESTARTS]
    disturbed = asyncio.run(all_answers(steady, wanted, kills))
    assert steady.metrics()[RESTARTS] == before + 3
    assert disturbed == undisturbed
    steady.wait_until_idle()


def test_a_spare_process_becomes_the_next_engine(steady: Server) -> None:
    asked = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
    text = steady.complete(**asked).json()["choices"][0]["text"]
    steady.wait_for("a spare process", lambda: len(steady.spare_pids()) == 1)
    (spare,) = steady.spare_pids()
    steady.kill_engine()
    assert steady.engine_pids() == [spare]
    assert steady.complete(**asked).json()["choices"][0]["text"] == text
    steady.wait_for("a spare process", lambda: len(steady.spare_pids()) == 1)
    (spare,) = steady.spare_pids()
    os.kill(spare, signal.SIGKILL)
    steady.wait_for("its end", lambda: not steady.spare_pids())
    (old,) = steady.engine_pids()
    steady.kill_engine()  # with none at hand, one is started
    assert steady.engine_pids() not in ([old], [spare])
    assert steady.complete(**asked).json()["choices"][0]["text"] == text


def requests_of(server: Server) -> list[dict[str, Any]]:
    """Who runs and who waits; nobody while there is no engine."""
    got = server.http.get(f"{server.url}/debug/requests")
    return got.json()["requests"] if got.status_code == 200 else []


def speaking(server: Server) -> int:
    """How many have said something and have not ended."""
    return sum(bool(one["output_tokens"]) for one in requests_of(server))


def kill_when(server: Server, what: str, holds: Callable[[], bool]) -> None:
    server.wait_for(what, holds)
    server.kill_engine()


def test_requests_that_come_during_a_restart_wait_or_are_refused_when_they_cannot(steady: Server) -> None:
    wanted = asks(24, 20)
    undisturbed = asyncio.run(all_answers(steady, wanted, lambda: None))
    before = steady.metrics()[RESTARTS]
    (pid,) = steady.engine_pids()
    try:
        stop(steady.process.pid)  # the next engine cannot come too early for this test
        os.kill(pid, signal.SIGKILL)
        steady.wait_for("/health to say 503", lambda: steady.health() == 503)
        hurried = steady.complete(max_tokens=1, timeout=0.5)
        disturbed = asyncio.run(all_answers(steady, wanted, lambda: os.kill(steady.process.pid, signal.SIGCONT)))
    finally:
        os.kill(steady.process.pid, signal.SIGCONT)
    assert hurried.status_code == 503
    assert assert_error_shape(hurried)["code"] == "deadline_passed"
    assert int(hurried.headers["retry-after"]) > 0
    assert disturbed == undisturbed
    assert steady.metrics()[RESTARTS] == before + 1
    steady.wait_until_idle()


def test_killed_during_prefill(steady: Server) -> None:
    """First with the kill: afterwards the prompts would be in the prefix cache."""
    chance = random.Random(6)
    wanted = [
        {**asks(1, 8)[0], "prompt": [chance.randrange(5, 290) for _ in range(1900)], "stream": number % 2 == 0}
        for number in range(20)
    ]

    def amid_a_prompt() -> bool:
        return any(one["why"] == "prompt" and one["computed"] for one in requests_of(steady))

    disturbed = asyncio.run(all_answers(steady, wanted, lambda: kill_when(steady, "half a prompt", amid_a_prompt)))
    assert disturbed == asyncio.run(all_answers(steady, wanted, lambda: None))
    assert {status for status, _ in disturbed} == {200}
    steady.wait_until_idle()


@pytest.mark.slow
def test_killed_while_blocks_are_swapped(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--threads", "1", "--served-model-name", "tiny", "--max-model-len", "600")
    flags += ("--kv-memory", "640KiB", "--host-kv-memory", "64MiB", "--when-short", "swap", "--watermark", "0")
    with running(tmp_path, tiny_model, *flags) as server:
        wanted = asks(96, 200)  # enough that some are swapped whenever that is checked
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        before = server.metrics()["shoal_kv_blocks_in_total"]
        assert before > 0, "nothing was swapped; the test has lost its point"

        def amid_a_swap() -> bool:
            """One has lost its blocks to others while it had begun to speak, and some have come back already."""
            waits = any(one["state"] != "running" and one["preemptions"] for one in requests_of(server))
            return waits and server.metrics().get("shoal_kv_blocks_in_total", 0) > before

        disturbed = asyncio.run(all_answers(server, wanted, lambda: kill_when(server, "a swap", amid_a_swap)))
        assert disturbed == undisturbed
        server.wait_until_idle()


@pytest.mark.slow
def test_killed_while_draining(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL, "--max-model-len", "4096") as server:
        wanted = asks(8, 3500)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))

        def drain_and_kill() -> None:
            (pid,) = server.engine_pids()
            server.wait_for("all to speak", lambda: speaking(server) == 8)
            stop(pid)  # so that none ends before it is killed, however late this process is
            server.terminate()
            server.wait_for("draining", lambda: "draining: 8 running requests" in server.log())
            os.kill(pid, signal.SIGKILL)

        assert asyncio.run(all_answers(server, wanted, drain_and_kill)) == undisturbed
        assert "8 jobs wait for its restart" in server.log(10**9)
        assert server.stop() == 0


async def with_killed_fronts(server: Server, wanted: list[Ask], count: int) -> list[Any]:
    """What becomes of them if so many fronts are killed while all of them run."""
    async with httpx.AsyncClient(timeout=180) as client:
        asked = [asyncio.create_task(answer(client, server.url, one)) for one in wanted]
        await asyncio.to_thread(server.wait_for, "all to run", lambda: len(requests_of(server)) == len(wanted))
        for pid in server.front_pids()[:count]:
            os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.slow
def test_a_killed_front_takes_its_requests_along_and_no_others(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL, "--api-workers", "2") as server:
        one = {**asks(1, 8)[0], "stream": True, "max_tokens": 1000}
        (alone,) = asyncio.run(all_answers(server, [one], lambda: None))
        for got in asyncio.run(with_killed_fronts(server, [one] * 8, 1)):
            assert got == alone or isinstance(got, httpx.TransportError), "the other front's go on as they were"
        server.wait_for("two fronts", lambda: len(server.front_pids()) == 2 and server.health() == 200)
        server.wait_until_idle()
        endless = {**one, "max_tokens": 30_000}
        lost = asyncio.run(with_killed_fronts(server, [endless] * 4, 2))
        assert all(isinstance(got, httpx.TransportError) for got in lost), lost
        server.wait_for("a front", lambda: server.health() == 200)
        server.wait_until_idle()
        assert server.metrics()[RESTARTS] == 0
        assert asyncio.run(all_answers(server, [one], lambda: None)) == [alone]


@pytest.mark.slow
def test_an_engine_that_cannot_be_started_again_is_told_to_everybody(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with running(tmp_path / "logs", model, *SMALL) as server:
        asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 20_000, "ignore_eos": True}
        whole: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", asked)))
        with long_stream(server) as events:
            waiting.start()
            server.wait_for("both to speak", lambda: speaking(server) == 2)
            for file in model.glob("*.safetensors"):
                file.write_bytes(b"no weights")
            (pid,) = server.engine_pids()
            os.kill(pid, signal.SIGKILL)
            *_, last = events
        assert last["error"]["code"] == "engine_down", last
        waiting.join()
        for got in (whole[0], server.complete(max_tokens=1)):
            assert got.status_code == 503
            assert "must be restarted" in assert_error_shape(got)["message"]
            assert int(got.headers["retry-after"]) > 0
        assert server.health() == 503
        assert not server.engine_pids(), "it is not tried again and again"
        assert "failed to start 5 times in a row" in server.log(10**9)
        assert server.metrics()["shoal_engine_up"] == 0


def limit_memory(pid: int, limit: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@pytest.mark.slow
def test_an_engine_that_runs_out_of_memory_costs_nobody_a_token(tiny_model: Path, tmp_path: Path) -> None:
    """It may have no more memory than it has now; the request that needs much breaks a pass, or kills it."""
    flags = (*SMALL, "--max-model-len", "32768", "--max-num-batched-tokens", "32768")
    with running(tmp_path, tiny_model, *flags) as server:
        assert server.complete(max_tokens=5).status_code == 200
        (pid,) = server.engine_pids()
        limit_memory(pid, 1)  # no more than it has, nor again what it gives back
        small = asks(6, 200)
        large = {**small[0], "prompt": [7 + place % 200 for place in range(32000)], "max_tokens": 5, "stream": False}
        large |= {"echo": True, "logprobs": 5}  # so that the whole prompt needs logits
        *neighbours, hungry = asyncio.run(all_answers(server, [*small, large], lambda: None))
        log = server.log(10**9)
        assert "a pass failed" in log or "the engine was killed" in log or "the engine ended" in log, "it had enough"
        assert hungry[0] in (200, 500), "an engine that died of it is started again without the limit"
        server.wait_for("/health to say 200", lambda: server.health() == 200)
        for left in server.engine_pids():
            limit_memory(left, resource.RLIM_INFINITY)
        *undisturbed, fed = asyncio.run(all_answers(server, [*small, large], lambda: None))
        assert neighbours == undisturbed
        assert (fed[0], len(fed[1])) == (200, 5)
        server.wait_until_idle()


@pytest.mark.parametrize("how", ["raise", pytest.param("crash", marks=pytest.mark.slow)])
def test_a_poisoned_request_fails_alone(tiny_model: Path, tmp_path: Path, how: str) -> None:
    wanted = asks(15, 80)
    poisoned = {**wanted[0], "prompt": [9, POISON, 9], "stream": False}
    flags = (*SMALL, "--max-model-len", "2048")
    with running(tmp_path, tiny_model, *flags, env=poison_env(POISON, how)) as server:
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        *neighbours, bad = asyncio.run(all_answers(server, [*wanted, poisoned], lambda: None))
        assert bad == (500, [])
        assert neighbours == undisturbed
        if how == "raise":
            told = server.complete(**poisoned)
            assert told.status_code == 500
            assert "poisoned" not in told.text, "what was raised is for the log alone"
            assert "a poisoned request" in server.log(10**9)
        server.wait_for("/health to say 200", lambda: server.health() == 200)
        server.wait_until_idle()
        assert (server.metrics()[RESTARTS] > 0) == (how == "crash")
        assert ("the engine was killed by SIGSEGV" in server.log(10**9)) == (how == "crash")


@pytest.fixture(scope="module")
def watched(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes may be silent for 6 s, and hangs in its engine when the poisoned token comes."""
    flags = (*SMALL, "--max-model-len", "4096", "--hang-timeout", "6")
    with running(tmp_path_factory.mktemp("hang"), tiny_model, *flags, env=poison_env(POISON, "hang")) as server:
        yield server


@pytest.mark.slow
def test_a_request_that_hangs_the_engine_is_found(watched: Server) -> None:
    poisoned = {**asks(1, 8)[0], "prompt": [9, POISON], "stream": False}
    good = asks(3, 60)
    undisturbed = asyncio.run(all_answers(watched, good, lambda: None))
    *neighbours, bad = asyncio.run(all_answers(watched, [*good, poisoned], lambda: None))
    assert bad == (500, [])
    assert neighbours == undisturbed
    assert "the engine has given no sign of life" in watched.log(20_000)


@pytest.mark.slow
def test_a_front_that_hangs_is_found(watched: Server) -> None:
    (front,), engines = watched.front_pids(), watched.engine_pids()
    stop(front)
    watched.wait_for("another front", lambda: watched.front_pids() not in ([], [front]))
    watched.wait_for("/health to say 200 again", lambda: watched.health() == 200)
    assert watched.complete(max_tokens=5).status_code == 200
    assert "front-0 has given no sign of life" in watched.log(20_000)
    assert watched.engine_pids() == engines
    watched.wait_until_idle()


@pytest.mark.slow
def test_a_server_that_was_paused_goes_on_as_if_nothing_had_been(watched: Server) -> None:
    """As on a laptop that sleeps in the middle of a stream."""
    wanted = asks(4, 1500)
    undisturbed = asyncio.run(all_answers(watched, wanted, lambda: None))
    front, engine, supervisor = *watched.front_pids(), *watched.engine_pids(), watched.process.pid

    def pause() -> None:
        watched.wait_for("all to speak", lambda: speaking(watched) == 4)
        for pid in (front, engine, supervisor):
            stop(pid)
        time.sleep(8)
        for pid in (supervisor, engine, front):
            os.kill(pid, signal.SIGCONT)
            time.sleep(1)

    assert asyncio.run(all_answers(watched, wanted, pause)) == undisturbed
    assert (watched.front_pids(), watched.engine_pids()) == ([front], [engine])
    watched.wait_until_idle()
