"""The processes of ranks: what rank 0 notices of them, and that none outlives it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadConfig, EngineLost
from shoal.runner.ranks import Ranks
from tests.processes.stopping import stop
from tests.story.models import greedy, open_llm, save_model, token_ids
from tests.story_server.servers import command_of, family_of

ROOT = Path(__file__).parents[2]
LIMIT_S = 60  # far more than needed: a hang must fail, a slow machine must not
PARENT = """
import sys, time
from shoal.runner.ranks import Ranks
ranks = Ranks([{"given": 1}] * 2, [{"PYTHONPATH": %r}] * 2, "tests.runner.toy_rank")
print(*[one["pid"] for one in ranks.answers()], flush=True)
time.sleep(1e6)
"""


def toys(count: int = 2, **more: Any) -> Ranks:
    environs = [{"PYTHONPATH": str(ROOT)}] * count
    return Ranks([{"given": number} for number in range(count)], environs, "tests.runner.toy_rank", **more)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = toys()
    yield made
    made.close()
    assert all(rank.process.returncode is not None for rank in made.ranks), "all were waited for"


def until(what: str, came: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not came():
        assert time.monotonic() < end_s, f"{what} never came"
        time.sleep(0.02)


def test_questions_passes_and_refusals(ranks: Ranks) -> None:
    assert [(one["rank"], one["given"]) for one in ranks.answers()] == [(1, 0), (2, 1)]
    for number in range(100):
        ranks.send_pass(f"pass {number}".encode())
    large = "x" * 2_000_000  # more than a socket holds
    ranks.send_pass(large.encode())
    assert ranks.ask("passes") == [{"passes": [*(f"pass {n}" for n in range(100)), large]}] * 2, "in order, to all"
    with pytest.raises(BadConfig, match="rank 1: too many fish; catch fewer"):
        ranks.ask("refuse")
    assert ranks.lost is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_rank_is_named_and_takes_the_others_with_it(ranks: Ranks, number: int) -> None:
    pids = [one["pid"] for one in ranks.answers()]
    told: list[EngineLost] = []
    ranks.on_lost = told.append
    os.kill(pids[1], number)
    until("the loss", lambda: bool(told))
    assert f"rank 2 (process {pids[1]}) was killed by {signal.Signals(number).name}" in str(told[0])
    assert told[0].fault == (number == signal.SIGSEGV), "a kill from outside blames no request"
    assert ranks.loss(RuntimeError("connection closed")) is told[0]
    until("the end of the others", lambda: all(rank.process.poll() is not None for rank in ranks.ranks))
    with pytest.raises(EngineLost, match="rank 2"):
        ranks.ask("passes")
    assert len(told) == 1


def test_a_rank_that_fails_says_why(ranks: Ranks) -> None:
    ranks.answers()
    with pytest.raises(EngineLost, match=r"rank 1 .* ended with code 1: RuntimeError: out of water") as caught:
        ranks.ask("fail", rank=1)
    assert caught.value.fault


def test_a_rank_that_hangs_is_named() -> None:
    ranks = toys()
    pids = [one["pid"] for one in ranks.answers()]
    ranks._silence_s = 3.0  # only now: their start may take long
    stop(pids[0])
    until("the loss", lambda: ranks.lost is not None)
    assert f"rank 1 (process {pids[0]}) has given no sign of life for" in str(ranks.lost)
    ranks.close()
    assert not command_of(pids[0]), "a stopped process is ended, too"


def test_a_failure_of_rank_0_alone_ends_the_engine(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.runner.ranks.NOTICE_S", 0.0)
    ranks.answers()
    assert "a pass failed on rank 0, and the other ranks are out of step: no luck" in str(
        ranks.loss(ValueError("no luck"))
    )
    assert ranks.lost is not None


@pytest.mark.parametrize("stopped", [False, True])
def test_no_rank_outlives_rank_0(stopped: bool) -> None:
    command = [sys.executable, "-c", PARENT % str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        if stopped:
            stop(pids[0])
        parent.kill()
    until("the end of the ranks", lambda: not any(map(command_of, pids)))


def test_ranks_outlive_the_thread_that_started_them() -> None:
    made: list[Ranks] = []
    thread = threading.Thread(target=lambda: made.append(toys(1)))
    thread.start()
    thread.join()
    made[0].answers()
    assert made[0].ask("passes") == [{"passes": []}]
    made[0].close()


def test_an_engine_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks: the same tokens; killed in the middle of an answer, the caller hears which rank it was."""
    monkeypatch.setattr("shoal.runner.ranks.NOTICE_S", 60.0)
    folder = save_model(tmp_path / "model")
    prompts = [[7, 8, 9], [5] * 50]
    with open_llm(folder) as llm:
        wanted = token_ids(llm.generate(prompts, greedy(20)))
    before = family_of(os.getpid())
    llm = open_llm(folder, tensor_parallel_size=2)
    (pid,) = [pid for pid in family_of(os.getpid()) - before if "shoal.processes.rank" in command_of(pid)]
    assert token_ids(llm.generate(prompts, greedy(20))) == wanted
    pieces = llm.stream(prompts, greedy(400))
    next(pieces)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=rf"rank 1 \(process {pid}\) was killed by SIGKILL"):
        list(pieces)
    llm.close()
    assert not command_of(pid)
