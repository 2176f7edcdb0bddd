"""Several engines behind one server: streams outlive any of them, token for token, and a restart of all."""

import asyncio
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shoal.cli import main
from tests.story_server.poison import poison_env
from tests.story_server.servers import RESTARTS, SMALL, Server, running
from tests.story_server.slow_passes import slow_env
from tests.story_server.test_crash import POISON, all_answers, asks, requests_of, speaking

STORIES = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260K"


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--replicas", "2", "--max-num-seqs", "64", "--max-model-len", "2048", "--max-num-batched-tokens", "256")
    with running(tmp_path_factory.mktemp("replicas"), tiny_model, *SMALL, *flags, env=slow_env(0.01)) as server:
        server.wait_for("all engines", lambda: not down(server))
        yield server


def down(server: Server) -> list[int]:
    """Engines that the server says are down."""
    found: list[int] = server.http.get(f"{server.url}/health").json().get("engines_down", [])
    return found


def kill_one(server: Server) -> None:
    """Of those that are up, while another one is; returns when its loss was noticed."""
    server.wait_for("two engines", lambda: len(server.engine_pids()) - len(down(server)) >= 2)
    before = server.metrics()[RESTARTS]
    os.kill(min(server.engine_pids()), signal.SIGKILL)  # the one that was started first
    server.wait_for("another start", lambda: server.metrics()[RESTARTS] > before)


def test_streams_go_on_on_another_engine_when_theirs_is_killed(pair: Server) -> None:
    wanted = asks(24, 240)
    undisturbed = asyncio.run(all_answers(pair, wanted, lambda: None))
    assert {status for status, _ in undisturbed} == {200}
    assert all(len(tokens) == ask["max_tokens"] for (_, tokens), ask in zip(undisturbed, wanted, strict=True))
    statuses: list[int] = []

    def kill() -> None:
        pair.wait_for("some to speak", lambda: speaking(pair) > 0)
        kill_one(pair)
        statuses.append(pair.health())

    assert asyncio.run(all_answers(pair, wanted, kill)) == undisturbed
    assert statuses == [200], "the server is healthy while one engine is up"
    pair.wait_until_idle()


def test_a_rolling_restart_under_load_loses_nothing(pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = asks(8, 80)
    undisturbed = asyncio.run(all_answers(pair, wanted, lambda: None))
    pair.wait_for("all engines", lambda: not down(pair))
    before, codes = set(pair.engine_pids()), list[int]()
    restarting = threading.Thread(target=lambda: codes.append(main(["restart", "--url", pair.url])))
    restarting.start()
    rounds = 0
    while restarting.is_alive():
        assert asyncio.run(all_answers(pair, wanted, lambda: None)) == undisturbed
        rounds += 1
    assert codes == [0]
    assert rounds
    assert not before & set(pair.engine_pids())
    assert "(2 of 2)" in capsys.readouterr().out
    pair.wait_until_idle()


def test_every_view_shows_all_engines(pair: Server, capsys: pytest.CaptureFixture[str]) -> None:
    pair.wait_for("all engines", lambda: not down(pair))
    text = pair.http.get(f"{pair.url}/metrics").text
    for number in range(2):
        assert f'shoal_engine_up{{engine="{number}"}} 1.0' in text
        assert f'shoal_requests_running{{engine="{number}"}}' in text
    assert text.count("# TYPE shoal_requests_running ") == 1
    seen = pair.http.get(f"{pair.url}/debug/requests").json()
    assert [one["engine"] for one in seen["engines"]] == [0, 1]
    assert all(one["up"] for one in seen["engines"])
    assert seen["engine"]["blocks"]["total"] == sum(one["blocks"]["total"] for one in seen["engines"])
    assert main(["top", "--url", pair.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 engines up" in shown
    assert "engine 1  running" in shown


def test_requests_of_one_prefix_go_to_the_engine_that_holds_it(pair: Server) -> None:
    chance = random.Random(3)
    prompts = [[chance.randrange(5, 290) for _ in range(600)] for _ in range(3)]
    for prompt in prompts:
        assert pair.complete(prompt=prompt, max_tokens=2).status_code == 200
    for turn in range(4):
        for prompt in prompts:
            got = pair.complete(prompt=[*prompt, 7 + turn, 8], max_tokens=2).json()
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 592


@pytest.mark.slow
def test_one_engine_is_restarted_after_its_streams_have_ended(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL, "--max-model-len", "2048") as server:
        wanted = asks(6, 1200)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        (pid,) = server.engine_pids()

        def restart() -> None:
            server.wait_for("some to speak", lambda: speaking(server) > 0)
            assert main(["restart", "--url", server.url]) == 0

        assert asyncio.run(all_answers(server, wanted, restart)) == undisturbed
        assert server.engine_pids() not in ([], [pid])
        assert server.complete(max_tokens=2).status_code == 200


def test_only_this_machine_or_an_admin_may_restart(tiny: Server) -> None:
    path = f"{tiny.url}/admin/restart"
    assert tiny.http.get(path).status_code == 405
    assert tiny.http.post(path, content=b"{}").status_code == 415, "a page of another site cannot ask for it"
    assert tiny.http.post(path, json={}, headers={"X-Forwarded-For": "1.2.3.4"}).status_code == 403


@pytest.mark.slow
def test_a_request_that_kills_engines_is_found_and_kills_no_second_one(tiny_model: Path, tmp_path: Path) -> None:
    wanted = asks(20, 80)
    poisoned = {**wanted[0], "prompt": [9, POISON, 9], "stream": False}
    flags = (*SMALL, "--max-model-len", "2048", "--replicas", "2")
    with running(tmp_path, tiny_model, *flags, env=poison_env(POISON, "crash")) as server:
        server.wait_for("all engines", lambda: not down(server))
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        *neighbours, bad = asyncio.run(all_answers(server, [*wanted, poisoned], lambda: None))
        assert bad == (500, [])
        assert neighbours == undisturbed
        killed = {
            line.split(" was killed")[0][-8:] for line in server.log(10**9).splitlines() if " was killed by" in line
        }
        assert len(killed) == 1, "only the engine that had it died of it"


@pytest.mark.slow
def test_a_hundred_streams_survive_five_kills_and_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    """benchmarks/kill_replicas.py measures the pauses; this is about the tokens alone."""
    model = STORIES if STORIES.exists() else tiny_model
    flags = ("--dtype", "float32", "--replicas", "3", "--max-num-seqs", "128", "--kv-memory", "600MiB")
    with running(tmp_path, model, *flags, "--served-model-name", "tiny") as server:
        server.wait_for("all engines", lambda: not down(server))
        wanted = asks(100, 200)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        assert {status for status, _ in undisturbed} == {200}
        over = threading.Event()

        def disturb() -> None:
            for _ in range(5):
                time.sleep(5)
                kill_one(server)
            main(["restart", "--url", server.url])
            over.set()

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        while not over.is_set():
            assert asyncio.run(all_answers(server, wanted, lambda: None)) == undisturbed
        disturbing.join()
        server.wait_until_idle()


@pytest.mark.slow
def test_an_engine_that_cannot_be_restarted_costs_nothing_while_others_are_up(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with running(tmp_path / "logs", model, *SMALL, "--replicas", "2") as server:
        server.wait_for("all engines", lambda: not down(server))
        for file in model.glob("*.safetensors"):
            file.write_bytes(b"no weights")
        os.kill(min(server.engine_pids()), signal.SIGKILL)
        server.wait_for("it to be given up", lambda: "is not started again" in server.log(10**9), 240)  # five starts
        assert "the other engines compute" in server.log(10**9)
        assert server.health() == 200
        assert len(down(server)) == 1
        assert server.complete(max_tokens=5).status_code == 200


@pytest.mark.slow
def test_requests_wait_while_no_engine_is_up(pair: Server) -> None:
    wanted = asks(12, 60)
    undisturbed = asyncio.run(all_answers(pair, wanted, lambda: None))
    for pid in pair.engine_pids():
        os.kill(pid, signal.SIGKILL)
    pair.wait_for("all to be down", lambda: pair.health() == 503)
    assert asyncio.run(all_answers(pair, wanted, lambda: None)) == undisturbed
    pair.wait_for("all engines", lambda: not down(pair))
    assert isinstance(httpx.get(f"{pair.url}/health").json(), dict)
    assert not requests_of(pair)
