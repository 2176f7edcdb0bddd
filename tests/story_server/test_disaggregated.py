"""Prefill and decode in different engines behind one server: the texts of one engine, whichever of them dies."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli import main
from tests.story_server.servers import RESTARTS, SMALL, Server, running
from tests.story_server.slow_passes import slow_env
from tests.story_server.test_crash import Ask, all_answers, asks, speaking

FLAGS = ("--max-num-seqs", "64", "--max-model-len", "2048", "--max-num-batched-tokens", "64")
ARRIVED, LOST = "shoal_kv_blocks_arrived_total", "shoal_kv_blocks_lost_total"


@pytest.fixture(scope="module")
def apart(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = (*SMALL, *FLAGS, "--prefill", "disaggregated")
    with running(tmp_path_factory.mktemp("apart"), tiny_model, *flags, env=slow_env(0.01)) as server:
        server.wait_for("both engines", lambda: not down(server))
        yield server


@pytest.fixture(scope="module")
def alone(tiny: Server) -> list[tuple[int, list[int]]]:
    """What one engine answers."""
    return asyncio.run(all_answers(tiny, wanted(), lambda: None))


def wanted() -> list[Ask]:
    return asks(24, 240)  # long enough that some speak when that is looked at


def down(server: Server) -> list[int]:
    found: list[int] = server.http.get(f"{server.url}/health").json().get("engines_down", [])
    return found


def finished(server: Server, engine: int, reason: str) -> float:
    text = server.http.get(f"{server.url}/metrics").text
    name = "shoal_requests_finished_total{"
    lines = [line for line in text.splitlines() if line.startswith(name) and f'reason="{reason}"' in line]
    return sum(float(line.split()[-1]) for line in lines if f'engine="{engine}"' in line)


def test_greedy_and_seeded_texts_are_those_of_one_engine(apart: Server, alone: list[tuple[int, list[int]]]) -> None:
    assert asyncio.run(all_answers(apart, wanted(), lambda: None)) == alone
    apart.wait_until_idle()
    now = apart.metrics()
    assert now[ARRIVED] > 24
    assert now[LOST] == 0
    assert finished(apart, 0, "handed") == 24
    assert finished(apart, 1, "length") == 24
    assert finished(apart, 0, "length") == 0


def test_what_was_sent_is_not_called_cached(apart: Server) -> None:
    prompt = [7, 9, 11] * 40
    usage = apart.complete(prompt=prompt, max_tokens=4).json()["usage"]
    assert usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
    again = apart.complete(prompt=prompt, max_tokens=4).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == 112


def test_a_stop_string_in_the_first_token_ends_the_answer(apart: Server) -> None:
    whole = apart.complete(prompt=[5, 6, 7] * 30, max_tokens=30, temperature=0).json()["choices"][0]
    first = apart.complete(prompt=[5, 6, 7] * 30, max_tokens=1, temperature=0).json()["choices"][0]
    assert first["finish_reason"] == "length"
    if first["text"]:
        cut = apart.complete(prompt=[5, 6, 7] * 30, max_tokens=1500, temperature=0, stop=[first["text"]]).json()
        assert cut["choices"][0]["finish_reason"] == "stop"
        assert cut["choices"][0]["text"] == whole["text"].partition(first["text"])[0]
    apart.wait_until_idle()


@pytest.mark.parametrize("engine", [0, 1], ids=["prefill", "decode"])
def test_a_killed_engine_loses_nothing(engine: int, apart: Server, alone: list[tuple[int, list[int]]]) -> None:
    apart.wait_for("both engines", lambda: not down(apart))
    pids = by_number(apart)

    def kill() -> None:
        apart.wait_for("some to speak", lambda: speaking(apart) > 0)
        before = apart.metrics()[RESTARTS]
        os.kill(pids[engine], signal.SIGKILL)
        apart.wait_for("another start", lambda: apart.metrics()[RESTARTS] > before)

    assert asyncio.run(all_answers(apart, wanted(), kill)) == alone
    apart.wait_for("both engines", lambda: not down(apart))
    assert asyncio.run(all_answers(apart, wanted(), lambda: None)) == alone
    apart.wait_until_idle()


def by_number(server: Server) -> list[int]:
    """The process of each engine: the one that has mapped or opened its own folder's socket."""
    found: dict[int, int] = {}
    for pid in server.engine_pids():
        for number in (0, 1):
            if listens(pid, f"/e{number}/engine.ipc"):
                found[number] = pid
    assert len(found) == 2, found
    return [found[number] for number in (0, 1)]


def listens(pid: int, ending: str) -> bool:
    inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(ending)}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).removeprefix("socket:[").removesuffix("]") in inodes:
                return True
        except OSError:
            continue
    return False


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_two_engines_of_each_role_under_kills(
    transport: str, tiny_model: Path, tmp_path: Path, alone: list[tuple[int, list[int]]]
) -> None:
    flags = ("--prefill", "disaggregated", "--prefill-replicas", "2", "--decode-replicas", "2")
    flags = (*SMALL, *FLAGS, *flags, "--kv-transport", transport)
    with running(tmp_path, tiny_model, *flags, env=slow_env(0.01)) as server:
        server.wait_for("all engines", lambda: not down(server))
        for round in range(4):

            def kill(number: int = round) -> None:
                server.wait_for("some to speak", lambda: speaking(server) > 0)
                os.kill(sorted(server.engine_pids())[number % len(server.engine_pids())], signal.SIGKILL)

            assert asyncio.run(all_answers(server, wanted(), kill)) == alone
            server.wait_for("all engines", lambda: not down(server))
        assert main(["restart", "--url", server.url]) == 0
        assert asyncio.run(all_answers(server, wanted(), lambda: None)) == alone
        assert server.metrics()[ARRIVED] > 24
        server.wait_until_idle()
