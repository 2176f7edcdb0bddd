"""Prefill and decode engines behind one front: jobs are handed over with their blocks, and no engine's death loses or
doubles a token."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shoal.core.job import Job
from shoal.engine.client import ZmqClient
from shoal.engine.link import EngineAddress
from shoal.routing.router import Router
from tests.disagg.world import PeerExecutor
from tests.engine.hosts import EngineThread, Notes, SlowExecutor, expected, make_job, run, until
from tests.engine.test_replicas import all_right, homes, submit, up


class Device(PeerExecutor, SlowExecutor):
    """On a thread: waits for other threads where the other fake drives them."""

    outboxes: ClassVar[dict[str, PeerExecutor]] = {}  # type: ignore[misc]
    fails = False

    def go_on(self) -> bool:  # type: ignore[override]
        time.sleep(0.001)
        return True

    def lost(self, copy: int) -> bool:  # type: ignore[override]
        return self.fails


class RoleThread(EngineThread):
    """An engine of a role; its outbox is known by its folder."""

    def __init__(self, folder: Path, role: str, **more: Any) -> None:
        options = {"host_blocks": 64} if role == "prefill" else {}
        super().__init__(folder, role=role, device=Device, blocks=200, **options, **more)
        assert isinstance(self.loop.executor, Device)
        self.device = self.loop.executor
        Device.outboxes[str(folder)] = self.device

    def kill(self) -> None:
        super().kill()
        Device.outboxes.pop(self.host.info.outbox, None)

    @property
    def computed(self) -> int:
        return self.device.computed_tokens

    def check_empty(self) -> None:
        kv = self.loop.scheduler.kv
        assert self.loop.scheduler.idle
        assert kv.pool.held == 0
        assert kv.host is None or not kv.host.pinned()


@asynccontextmanager
async def front(folder: Path, count: int) -> AsyncIterator[ZmqClient]:
    addresses = [EngineAddress.in_folder(home, number) for number, home in enumerate(homes(folder, count))]
    client = ZmqClient(folder, "front.0", engines=addresses, router=Router("prefix"))
    client.start()
    try:
        yield client
    finally:
        await client.close()


def jobs_of(count: int, tokens: int = 40) -> list[Job]:
    return [
        make_job(
            f"job-{k}",
            [(k + i * (k + 1)) % 40 + 4 for i in range(4 + 9 * (k % 6))],
            max_tokens=tokens,
            min_tokens=tokens,
        )
        for k in range(count)
    ]


async def settled(client: ZmqClient, engines: list[RoleThread]) -> None:
    await until(lambda: not client.jobs and not len(client.handoffs.table), "all jobs have ended")
    await until(lambda: all(one.loop.scheduler.idle for one in engines), "the engines are idle")
    await until(lambda: not any(one.loop.scheduler.kv.pool.held for one in engines), "no block is held")
    hosts = [one.loop.scheduler.kv.host for one in engines]
    await until(lambda: not any(host.pinned() for host in hosts if host), "no block is kept")
    client.router.check()
    assert all(one.intended == 0 for one in client.router.engines.values())


def test_jobs_are_handed_over_with_their_blocks(tmp_path: Path) -> None:
    engines = [RoleThread(home, role) for home, role in zip(homes(tmp_path, 2), ("prefill", "decode"), strict=True)]

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            jobs = jobs_of(12)
            notes = submit(client, jobs)
            await all_right(jobs, notes)
            await settled(client, engines)
            assert all(note.endings[0].cached_tokens == 0 for note in notes), "what was sent was not cached before"

    run(story())
    outputs = engines[1].observers[0].tokens
    assert outputs == 12 * 39, "all but the first token come from the decode engine"
    assert engines[1].device.received > 40
    assert engines[1].computed <= outputs + 12 * (4 + 2), "it computes no more than the ends of the prompts"
    for engine in engines:
        engine.kill()


def test_several_samples_share_what_was_sent(tmp_path: Path) -> None:
    engines = [RoleThread(home, role) for home, role in zip(homes(tmp_path, 2), ("prefill", "decode"), strict=True)]

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            job = make_job("many", [7] * 30, n=3, max_tokens=20)
            note = Notes(3)
            client.submit(job, note)
            await note.done.wait()
            assert [note.tokens[sample] for sample in range(3)] == [expected(job, sample) for sample in range(3)]
            await settled(client, engines)

    run(story())
    assert engines[1].device.received == 7
    for engine in engines:
        engine.kill()


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_dead_engine_of_either_role_loses_nothing(victim: int, tmp_path: Path) -> None:
    roles = ("prefill", "prefill", "decode", "decode")
    gates = [threading.Semaphore(0) for _ in roles]
    places = homes(tmp_path, 4)
    engines = [RoleThread(home, role, gate=gate) for home, role, gate in zip(places, roles, gates, strict=True)]

    async def story() -> None:
        async with front(tmp_path, 4) as client:
            await until(lambda: up(client) == [0, 1, 2, 3], "all engines are up")
            jobs = jobs_of(16)
            notes = submit(client, jobs)

            def some_speak() -> bool:
                for gate in gates:
                    gate.release()
                return sum(bool(note.tokens[0]) for note in notes) >= 6

            await until(some_speak, "some jobs have a token")
            await asyncio.to_thread(engines[victim].kill)
            for gate in gates:
                gate.release(100_000)
            await all_right(jobs, notes)
            left = [engine for number, engine in enumerate(engines) if number != victim]
            await settled(client, left)

    run(story())
    for number, engine in enumerate(engines):
        if number != victim:
            engine.kill()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_role_alone_serves_everything(role: str, tmp_path: Path) -> None:
    """And a job goes on where it is when the other role is back."""
    gate = threading.Semaphore(0)
    number = ("prefill", "decode").index(role)
    places = homes(tmp_path, 2)
    first = RoleThread(places[number], role, gate=gate)
    engines = [first]

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [number], "one engine is up")
            jobs = jobs_of(6)
            notes = submit(client, jobs)
            gate.release(5)
            engines.append(RoleThread(places[1 - number], "decode" if role == "prefill" else "prefill"))
            await until(lambda: up(client) == [0, 1], "both engines are up")
            gate.release(100_000)
            more = [make_job(f"late-{k}", [k + 4] * 20, max_tokens=10) for k in range(4)]
            notes += submit(client, more)
            await all_right(jobs + more, notes)
            await settled(client, engines)

    run(story())
    for engine in engines:
        engine.kill()


def test_failed_transfers_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "fails", True)
    engines = [RoleThread(home, role) for home, role in zip(homes(tmp_path, 2), ("prefill", "decode"), strict=True)]

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            jobs = jobs_of(8)
            notes = submit(client, jobs)
            await all_right(jobs, notes)
            await settled(client, engines)

    run(story())
    assert engines[1].device.received == 0
    for engine in engines:
        engine.kill()


def test_an_aborted_job_leaves_nothing_behind(tmp_path: Path) -> None:
    gates = [threading.Semaphore(0) for _ in range(2)]
    engines = [
        RoleThread(home, role, gate=gate)
        for home, role, gate in zip(homes(tmp_path, 2), ("prefill", "decode"), gates, strict=True)
    ]

    async def story() -> None:
        async with front(tmp_path, 2) as client:
            await until(lambda: up(client) == [0, 1], "both engines are up")
            for released in range(12):  # at every stage
                job = make_job(f"job-{released}", [released + 4] * 33, max_tokens=30, min_tokens=30)
                client.submit(job, Notes())
                for _ in range(released):
                    gates[released % 2].release()
                    await asyncio.sleep(0.01)
                client.abort(job.id)
            for gate in gates:
                gate.release(100_000)
            await settled(client, engines)

    run(story())
    for engine in engines:
        engine.kill()
