"""One front and several engines: jobs are spread, move when an engine dies or leaves, and lose no token."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.core.job import Job
from shoal.engine import blackbox, wire
from shoal.engine import client as client_module
from shoal.engine.client import ZmqClient
from shoal.engine.link import EngineAddress
from shoal.routing.engines import RoutedEngine
from shoal.routing.router import Router
from shoal.routing.work import Work
from tests.engine.hosts import EngineThread, Notes, expected, make_job, run, until


class OnlyEngine:
    """Sends every job to one engine."""

    uses_names = False

    def __init__(self, number: int) -> None:
        self.number = number

    def choose(self, work: Work, engines: Sequence[RoutedEngine]) -> RoutedEngine:
        return next(one for one in engines if one.number == self.number)


def homes(folder: Path, count: int) -> list[Path]:
    found = [folder / f"engine-{number}" for number in range(count)]
    for home in found:
        home.mkdir(exist_ok=True)
    return found


@asynccontextmanager
async def front(folder: Path, count: int, policy: str = "least-load", **options: Any) -> AsyncIterator[ZmqClient]:
    addresses = [EngineAddress.in_folder(home, number) for number, home in enumerate(homes(folder, count))]
    client = ZmqClient(folder, "front.0", engines=addresses, router=Router(policy), **options)
    client.start()
    try:
        yield client
    finally:
        await client.close()


def up(client: ZmqClient) -> list[int]:
    return [one.number for one in client.engines if one.up]


def long_jobs(count: int) -> list[Job]:
    return [make_job(f"job-{k}", [k % 40 + 1] * (k % 7 + 1), max_tokens=60, min_tokens=60) for k in range(count)]


def submit(client: ZmqClient, jobs: list[Job]) -> list[Notes]:
    notes = [Notes(job.params.n) for job in jobs]
    for job, note in zip(jobs, notes, strict=True):
        client.submit(job, note)
    return notes


async def all_speak(notes: list[Notes], gates: list[threading.Semaphore]) -> None:
    """Let the engines compute until each job has a token; they are not done then."""
    passes = iter(range(40))  # fewer than a job needs, should news of them come late

    def speak() -> bool:
        if next(passes, None) is not None:
            for gate in gates:
                gate.release()
        return all(note.tokens[0] for note in notes)

    await until(speak, "a token of each job")
    assert not any(note.endings for note in notes)


async def all_right(jobs: list[Job], notes: list[Notes]) -> None:
    for job, note in zip(jobs, notes, strict=True):
        await note.done.wait()
        assert note.refusal is None
        assert note.tokens[0] == expected(job)
        assert note.was_accepted == 1


def test_jobs_are_spread_over_the_engines(tmp_path: Path) -> None:
    engines = [EngineThread(home) for home in homes(tmp_path, 3)]

    async def story() -> None:
        async with front(tmp_path, 3) as client:
            await until(lambda: up(client) == [0, 1, 2], "all engines are up")
            jobs = long_jobs(12)
            notes = submit(client, jobs)
            assert [client.router.engines[number].jobs for number in range(3)] == [4, 4, 4]
            await all_right(jobs, notes)
            client.router.check()
            assert client.jobs == 0

    run(story())
    for engine in engines:
        assert engine.observers[0].tokens == 4 * 60
        engine.kill()


def test_the_jobs_of_a_dead_engine_go_on_at_once_on_the_others(tmp_path: Path) -> None:
    gates = [threading.Semaphore(0) for _ in range(3)]
    engines = [EngineThread(home, gate=gate) for home, gate in zip(homes(tmp_path, 3), gates, strict=True)]

    async def story() -> None:
        async with front(tmp_path, 3) as client:
            await until(lambda: up(client) == [0, 1, 2], "all engines are up")
            jobs = long_jobs(12)
            notes = submit(client, jobs)
            await all_speak(notes, gates)
            await asyncio.to_thread(engines[1].kill)  # and it never comes back
            for gate in (gates[0], gates[2]):
                gate.release(1000)
            await all_right(jobs, notes)
            assert up(client) == [0, 2]
            client.router.check()

    run(story())
    engines[0].kill()
    engines[2].kill()


def test_an_engine_that_leaves_hands_its_jobs_over_and_ends(tmp_path: Path) -> None:
    gates = [threading.Semaphore(0) for _ in range(2)]
    engines = [EngineThread(home, gate=gate) for home, gate in zip(homes(tmp_path, 2), gates, strict=True)]

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            jobs = long_jobs(8)
            notes = submit(client, jobs)
            await all_speak(notes, gates)
            engines[0].host.drain(60.0)
            for gate in gates:
                gate.release(1000)
            await asyncio.to_thread(engines[0].thread.join, 10)
            assert not engines[0].thread.is_alive(), "it has no jobs any more, so it ends"
            assert not engines[0].loop.scheduler.requests, "they were aborted there"
            late = long_jobs(10)[8:]
            jobs, notes = jobs + late, notes + submit(client, late)
            await all_right(jobs, notes)

    run(story())
    for engine in engines:
        engine.kill()


def test_jobs_of_a_leaving_engine_stay_until_another_is_up(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    first = EngineThread(homes(tmp_path, 2)[0], gate=gate)

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [0], "the first engine is up")
            jobs = long_jobs(4)
            notes = submit(client, jobs)
            await all_speak(notes, [gate])
            first.host.drain(60.0)
            gate.release(2)
            await until(lambda: not client.router.engines, "the front has heard of it")
            late = long_jobs(6)[4:]
            notes += submit(client, late)
            assert first.thread.is_alive(), "its jobs have nowhere to go"
            second = EngineThread(homes(tmp_path, 2)[1])
            await all_right(jobs + late, notes)
            gate.release(1000)
            await asyncio.to_thread(first.thread.join, 10)
            assert not first.thread.is_alive()
            assert set(first.loop.scheduler.requests) == set()
            await asyncio.to_thread(second.kill)

    run(story())
    first.kill()


def test_the_front_knows_exactly_the_blocks_that_the_engines_have(tmp_path: Path) -> None:
    engines = [EngineThread(home, blocks=24) for home in homes(tmp_path, 2)]

    def held(number: int) -> set[bytes]:
        return {name[:16] for name in engines[number].loop.scheduler.kv.index.names()}

    async def story() -> None:
        async with front(tmp_path, 2, "prefix") as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            for turn in range(3):  # some are evicted by the next ones
                jobs = long_jobs(6 + turn)
                await all_right(jobs, submit(client, jobs))
                for number in range(2):
                    await until(
                        lambda number=number: client.router.engines[number].names == held(number), "the same names"
                    )
                    assert held(number), "nothing was cached; the test has lost its point"
            routed = client.router.engines.values()
            await until(lambda: all(one.load == 0 and not one.promised for one in routed), "no work is left")

    run(story())
    for engine in engines:
        engine.kill()


def test_engines_come_and_go_while_the_front_runs(tmp_path: Path) -> None:
    paths = homes(tmp_path, 3)
    engines = [EngineThread(home) for home in paths]

    async def story() -> None:
        async with front(tmp_path, 1) as client:
            await until(lambda: up(client) == [0], "the first engine is up")
            for number in (1, 2):
                client.add_engine(EngineAddress.in_folder(paths[number], number))
            await until(lambda: up(client) == [0, 1, 2], "the others are")
            jobs = long_jobs(9)
            notes = submit(client, jobs)
            await client.remove_engine(1)
            await all_right(jobs, notes)
            assert up(client) == [0, 2]

    run(story())
    for engine in engines:
        engine.kill()


def test_only_the_suspects_of_a_fault_wait_for_their_engine(tmp_path: Path) -> None:
    """The others go on at once; no other engine dies of the one that is guilty."""
    paths, gate = homes(tmp_path, 2), threading.Semaphore(0)
    engines = [EngineThread(paths[0], gate=gate), EngineThread(paths[1], max_num_seqs=1)]

    async def story() -> None:
        async with front(tmp_path, 2, "round-robin") as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            jobs = long_jobs(8)
            notes = submit(client, jobs)
            await all_speak(notes[::2], [gate])
            blackbox.BlackBox(paths[0]).note(["job-0.0", "job-4.0"], tried=False)
            blackbox.mark_fault(paths[0], 0)
            await asyncio.to_thread(engines[0].kill)
            await all_right([*jobs[1::2], jobs[2], jobs[6]], [*notes[1::2], notes[2], notes[6]])
            assert not notes[0].endings
            assert not notes[4].endings
            again = EngineThread(paths[0], epoch=1)
            await all_right(jobs, notes)
            assert again.observers[0].tokens > 0, "the suspects ended there"
            await asyncio.to_thread(again.kill)

    run(story())
    engines[1].kill()


def test_suspects_go_elsewhere_when_their_engine_will_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PING_S", 0.05)
    paths, gate = homes(tmp_path, 2), threading.Semaphore(0)
    engines = [EngineThread(paths[0], gate=gate), EngineThread(paths[1])]

    async def story() -> None:
        async with front(tmp_path, 2, "round-robin") as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            jobs = long_jobs(1)
            notes = submit(client, jobs)
            await all_speak(notes, [gate])
            blackbox.BlackBox(paths[0]).note(["job-0.0"], tried=False)
            blackbox.mark_fault(paths[0], 0)
            await asyncio.to_thread(engines[0].kill)
            await until(lambda: up(client) == [1], "the client notices")
            assert not notes[0].endings
            (paths[0] / wire.GIVEN_UP).touch()
            await all_right(jobs, notes)

    run(story())
    engines[1].kill()


def test_each_engines_fair_order_counts_what_the_other_computes(tmp_path: Path) -> None:
    """A tenant that was served a lot by one engine does not go first on the other."""
    engines = [EngineThread(home, order="fair", max_num_seqs=1) for home in homes(tmp_path, 2)]
    orders = [engine.loop.scheduler.policies.order for engine in engines]

    async def story() -> None:
        async with front(tmp_path, 2, "round-robin") as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            client.router.policy = OnlyEngine(0)
            busy = [replace(job, tenant="busy") for job in long_jobs(30)]
            notes = submit(client, busy)
            await until(lambda: "busy" in orders[1].elsewhere, "the other engine hears of it")
            await all_right(busy, notes)
            computed = sum(len(job.prompt) + 2.0 * 60 for job in busy)  # at their prices
            await until(lambda: orders[1].served.get("busy") == computed, "all of it is counted there")
            client.router.policy = OnlyEngine(1)
            notes = submit(client, [replace(job, tenant="new") for job in long_jobs(1)])
            await all_right(long_jobs(1), notes)
            assert orders[1].served["busy"] == computed, "still there, and higher than a tenant's that has just come"

    run(story())
    for engine in engines:
        engine.kill()
