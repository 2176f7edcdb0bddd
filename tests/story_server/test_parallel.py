"""A server whose engine has two ranks: a dead or hung rank is a dead engine, and every stream goes on."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.stopping import stop
from tests.story_server.servers import RESTARTS, SMALL, Server, command_of, family_of, running
from tests.story_server.test_crash import all_answers, asks

FLAGS = ("--tensor-parallel-size", "2", "--max-num-seqs", "12", "--max-model-len", "1024")
WANTED = asks(8, 60)


@pytest.fixture(scope="module")
def split(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("parallel"), tiny_model, *SMALL, *FLAGS) as server:
        yield server


def rank_pids(server: Server) -> list[int]:
    return [pid for pid in family_of(server.process.pid) if "shoal.processes.rank" in command_of(pid)]


def end_one(server: Server, pid: int, number: int) -> None:
    """Returns when another engine answers."""
    ranks = rank_pids(server)
    server.end_engine(pid, number)
    server.wait_for("the end of the old ranks", lambda: not any(map(command_of, ranks)))
    server.family |= family_of(server.process.pid)


@pytest.fixture(scope="module")
def undisturbed(split: Server) -> list[tuple[int, list[int]]]:
    found = asyncio.run(all_answers(split, WANTED, lambda: None))
    assert {status for status, _ in found} == {200}
    assert all(len(tokens) == ask["max_tokens"] for (_, tokens), ask in zip(found, WANTED, strict=True))
    return found


def test_streams_survive_the_death_of_a_rank(split: Server, undisturbed: list[tuple[int, list[int]]]) -> None:
    before = split.metrics()[RESTARTS]
    (rank,) = rank_pids(split)
    disturbed = asyncio.run(all_answers(split, WANTED, lambda: end_one(split, rank, signal.SIGKILL)))
    assert disturbed == undisturbed
    assert f"the engine ends: rank 1 (process {rank}) was killed by SIGKILL" in split.log(10**9)
    assert split.metrics()[RESTARTS] == before + 1
    split.wait_until_idle()


@pytest.mark.slow
def test_streams_survive_the_death_of_rank_0(split: Server, undisturbed: list[tuple[int, list[int]]]) -> None:
    before = split.metrics()[RESTARTS]
    (engine,) = split.engine_pids()
    assert asyncio.run(all_answers(split, WANTED, lambda: end_one(split, engine, signal.SIGKILL))) == undisturbed
    assert split.metrics()[RESTARTS] == before + 1
    split.wait_until_idle()


@pytest.mark.slow
def test_a_stopped_rank_is_a_dead_engine(split: Server) -> None:
    (rank,) = rank_pids(split)
    wanted = asks(4, 40)
    undisturbed = asyncio.run(all_answers(split, wanted, lambda: None))
    stop(rank)
    assert asyncio.run(all_answers(split, wanted, lambda: None)) == undisturbed
    assert f"rank 1 (process {rank}) has given no sign of life" in split.log(10**9)
