"""Jobs that arrive while there is no engine: they wait within the limits of its queue, or are refused at once."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.core.clock import VirtualClock
from shoal.core.job import Job
from shoal.engine import client as client_module
from shoal.engine import wire
from shoal.engine.client import ZmqClient
from shoal.engine.restart_policy import RETRY_S, RefuseAtOnce, WaitForEngine
from shoal.errors import BadParameter, EngineDown, QueueFull
from tests.engine.hosts import EngineThread, Notes, connected, expected, make_job, run, until


@asynccontextmanager
async def waiting(folder: Path, **options: Any) -> AsyncIterator[ZmqClient]:
    """A client before its first engine."""
    client = ZmqClient(folder, "front", **options)
    client.start()
    try:
        yield client
    finally:
        await client.close()


def submit(client: ZmqClient, *jobs: Job) -> list[Notes]:
    notes = [Notes(job.params.n) for job in jobs]
    for job, note in zip(jobs, notes, strict=True):
        client.submit(job, note)
    return notes


def held(engine: EngineThread) -> list[str]:
    """The requests of an engine in the order of their arrival there."""
    return [one.id for one in sorted(engine.loop.scheduler.requests.values(), key=lambda one: one.order)]


def refusals(notes: list[Notes]) -> list[str]:
    return [note.refusal.kind if note.refusal else "" for note in notes]


def test_jobs_wait_for_the_first_engine_and_for_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with waiting(tmp_path) as client:
            assert client.accepting
            assert client.last_info is None
            early = [make_job(f"early-{number}", n=2) for number in range(3)]
            notes = submit(client, *early)
            first = EngineThread(tmp_path)
            for job, note in zip(early, notes, strict=True):
                await note.done.wait()
                assert note.tokens == {sample: expected(job, sample) for sample in range(2)}
            await asyncio.to_thread(first.kill)
            await until(lambda: client.info is None, "the client notices")
            assert client.accepting
            assert client.last_info is not None
            (late,) = submit(client, make_job("late"))
            second = EngineThread(tmp_path, epoch=1)
            await late.done.wait()
            assert late.tokens[0] == expected(make_job("late"))
            assert client.jobs == 0
            await asyncio.to_thread(second.kill)

    run(story())


def test_resumed_jobs_come_first_and_the_others_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    clock, gate = VirtualClock(), threading.Semaphore(0)

    def long_job(id: str) -> Job:
        return make_job(id, max_tokens=190, min_tokens=190)

    async def arrived(engine: EngineThread, count: int) -> None:
        """The engine reads messages between two passes."""
        await until(lambda: gate.release() or len(held(engine)) == count, f"{count} requests arrive")

    async def story() -> None:
        first = EngineThread(tmp_path, gate=gate)
        async with connected(tmp_path, clock=clock) as client:
            submit(client, long_job("a"), long_job("b"))
            await arrived(first, 2)
            await asyncio.to_thread(first.kill)
            await until(lambda: client.info is None, "the client notices")
            clock.advance(1.0)
            submit(client, long_job("c"), long_job("d"), long_job("gone"))
            clock.advance(2.0)
            submit(client, long_job("e"))
            client.abort("gone")  # its client disconnected
            second = EngineThread(tmp_path, epoch=1, gate=gate)
            await arrived(second, 5)
            assert held(second) == ["a.0", "b.0", "c.0", "d.0", "e.0"]
            requests = second.loop.scheduler.requests
            assert [requests[id].resumed for id in held(second)] == [True, True, False, False, False]
            assert [requests[id].waited_s for id in held(second)] == [3.0, 3.0, 2.0, 2.0, 0.0]
            await asyncio.to_thread(second.kill)

    run(story())


def test_a_job_sent_to_an_engine_that_has_just_died_waits(tmp_path: Path) -> None:
    async def story() -> None:
        first = EngineThread(tmp_path)
        async with connected(tmp_path) as client:
            first.kill()  # the event loop does not run meanwhile, so the client cannot know
            assert client.info is not None
            (sent,) = submit(client, make_job("sent"))
            second = EngineThread(tmp_path, epoch=1)
            await sent.done.wait()
            assert sent.tokens[0] == expected(make_job("sent"))
            await asyncio.to_thread(second.kill)

    run(story())


def test_a_job_that_could_not_be_sent_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        first = EngineThread(tmp_path)
        async with connected(tmp_path) as client:
            with monkeypatch.context() as patched:
                patched.setattr(client._links[0], "send", lambda message: False)
                (unsent,) = submit(client, make_job("unsent"))
            assert client.jobs == 1
            await asyncio.to_thread(first.kill)
            second = EngineThread(tmp_path, epoch=1)
            await unsent.done.wait()
            assert unsent.tokens[0] == expected(make_job("unsent"))
            await asyncio.to_thread(second.kill)

    run(story())


def test_no_more_jobs_wait_than_the_queue_holds(tmp_path: Path) -> None:
    async def story() -> None:
        async with waiting(tmp_path, restart=WaitForEngine(max_queue=3)) as client:
            submit(client, make_job("a", n=2), make_job("b"))
            with pytest.raises(QueueFull, match="3 requests wait already, and at most 3 may") as refused:
                client.submit(make_job("c"), Notes())
            assert refused.value.retry_after_s == RETRY_S
            with pytest.raises(BadParameter, match="n is 4, but only 3"):
                client.submit(make_job("never", n=4), Notes())
            client.abort("a")
            submit(client, make_job("c"))
            assert client.jobs == 2

    run(story())


def test_admission_applies_to_jobs_that_waited(tmp_path: Path) -> None:
    """The engine had not accepted them: its limits hold for them, and an impossible one is refused."""

    async def story() -> None:
        async with waiting(tmp_path) as client:
            jobs = [make_job(f"job-{number}") for number in range(8)]
            notes = submit(client, *jobs)
            (impossible,) = submit(client, make_job("impossible", [1] * 300))
            engine = EngineThread(tmp_path, max_queue=1, max_num_seqs=1)
            for note in (*notes, impossible):
                await note.done.wait()
            assert refusals([impossible]) == ["PromptTooLong"]
            assert notes[0].tokens[0] == expected(jobs[0])
            assert set(refusals(notes)) == {"", "QueueFull"}
            await asyncio.to_thread(engine.kill)

    run(story())


def test_the_wait_for_an_engine_ends_with_the_longest_wait_and_with_the_timeout(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def story() -> None:
        async with waiting(tmp_path, restart=WaitForEngine(max_wait_s=10.0), clock=clock) as client:
            impatient = replace(make_job("impatient", n=3), timeout_s=4.0)
            notes = submit(client, make_job("patient", n=2), impatient)
            clock.advance(3.9)
            submit(client, make_job("later"))
            await asyncio.sleep(2 * client_module.LATE_S)
            assert client.jobs == 3
            clock.advance(0.1)
            await notes[1].done.wait()
            assert notes[1].refusal is not None
            assert notes[1].flushes == 1
            assert "no token after 4.0 s" in notes[1].refusal.message
            assert "its timeout is 4 s; raise timeout" in notes[1].refusal.message
            assert client.jobs == 2
            clock.advance(6.0)
            await notes[0].done.wait()
            assert notes[0].refusal is not None
            assert "not started after 10.0 s" in notes[0].refusal.message
            assert "the longest wait is 10 s" in notes[0].refusal.message
            assert client.jobs == 1
            for note in notes:
                assert note.refusal is not None
                assert (note.refusal.kind, note.refusal.retry_after_s) == ("DeadlinePassed", RETRY_S)

    run(story())


def test_a_wait_at_the_front_counts_in_the_engine(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def story() -> None:
        async with waiting(tmp_path, restart=WaitForEngine(max_wait_s=10_000.0), clock=clock) as client:
            submit(client, replace(make_job("long", max_tokens=100, min_tokens=100), timeout_s=1e6))
            clock.advance(9_000.0)
            (late,) = submit(client, replace(make_job("late"), timeout_s=1e6))
            clock.advance(900.0)
            engine = EngineThread(tmp_path, max_wait_s=500.0, max_num_seqs=1, gate=(gate := threading.Semaphore(0)))
            await late.done.wait()
            assert late.refusal is not None
            assert "not started after 900." in late.refusal.message
            gate.release()
            await asyncio.to_thread(engine.kill)

    run(story())


def test_an_answer_that_has_begun_ends_with_its_timeout_although_there_is_no_engine(tmp_path: Path) -> None:
    clock = VirtualClock()

    async def story() -> None:
        engine = EngineThread(tmp_path, gate=threading.Semaphore(3))
        async with connected(tmp_path, clock=clock) as client:
            (note,) = submit(client, replace(make_job("a", n=2, max_tokens=100, min_tokens=100), timeout_s=50.0))
            await note.grew.wait()
            await asyncio.to_thread(engine.kill)
            await until(lambda: client.info is None, "the client notices")
            clock.advance(50.0)
            await note.done.wait()
            assert note.refusal is None
            assert {ending.reason for ending in note.endings.values()} == {"timeout"}
            assert len(note.endings) == 2
            assert client.jobs == 0

    run(story())


def test_where_jobs_are_refused_at_once_they_are_told_when_to_try_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with waiting(tmp_path, restart=RefuseAtOnce()) as client:
            assert not client.accepting
            with pytest.raises(EngineDown, match="being restarted") as refused:
                client.submit(make_job(), Notes())
            assert refused.value.retry_after_s == RETRY_S
            assert client.jobs == 0
            engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(2)))
            await until(lambda: client.accepting, "the engine answers")
            (begun,) = submit(client, make_job("begun"))
            await begun.grew.wait()
            await asyncio.to_thread(engine.kill)
            await until(lambda: not client.accepting, "the client notices")
            second = EngineThread(tmp_path, epoch=1)
            await begun.done.wait()
            assert begun.tokens[0] == expected(make_job("begun")), "what the engine had begun is resumed all the same"
            await asyncio.to_thread(second.kill)
            del gate

    run(story())


def test_jobs_that_wait_are_refused_when_no_engine_will_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PING_S", 0.05)

    async def story() -> None:
        async with waiting(tmp_path) as client:
            notes = submit(client, make_job("a"), make_job("b", n=3))
            (tmp_path / wire.GIVEN_UP).touch()
            for note in notes:
                await note.done.wait()
            assert refusals(notes) == ["EngineDown", "EngineDown"]
            assert client.jobs == 0
            assert not client.accepting

    run(story())


def test_a_stop_string_found_before_a_kill_ends_its_sample_after_it(tmp_path: Path) -> None:
    gate = threading.Semaphore(3)  # three passes, then the engine stands still

    async def story() -> None:
        first = EngineThread(tmp_path, gate=gate)
        async with connected(tmp_path) as client:
            (note,) = submit(client, make_job("a", n=2, max_tokens=190, min_tokens=190))
            await until(lambda: note.tokens[0] and note.tokens[1], "a token of each sample")
            client.finish_at("a", 0, 1)  # the engine will not read it
            await asyncio.to_thread(first.kill)
            await until(lambda: client.info is None, "the client notices")
            second = EngineThread(tmp_path, epoch=1, gate=gate)
            await until(lambda: gate.release() or held(second) == ["a.1"], "only the other sample is resumed")
            assert note.endings[0].reason == "stop"
            await asyncio.to_thread(second.kill)

    run(story())


def test_many_jobs_are_submitted_to_a_new_engine_in_turns_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.core.turns.TURN_S", 0.0)  # others have the loop after each job
    gate = threading.Semaphore(0)

    async def story() -> None:
        async with waiting(tmp_path) as client:
            submit(client, *(make_job(f"early-{number}") for number in range(20)))
            engine = EngineThread(tmp_path, gate=gate)
            await until(lambda: client.info is not None, "the engine is there")
            submit(client, make_job("late-0"), make_job("late-1"))
            await until(lambda: gate.release() or len(held(engine)) >= 22 or client.jobs < 22, "all arrive")
            names = [*(f"early-{number}.0" for number in range(20)), "late-0.0", "late-1.0"]
            assert held(engine) == names[-len(held(engine)) :]
            await asyncio.to_thread(engine.kill)

    run(story())
