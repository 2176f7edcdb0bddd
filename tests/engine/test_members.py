"""Fronts that follow the members file: engines on TCP that join, move and leave while jobs run."""

import asyncio
from pathlib import Path

import pytest

from shoal.engine.client import ZmqClient
from shoal.engine.curve import KeyPair
from shoal.engine.members import NAME, Follower, Member, Membership
from shoal.routing.router import Router
from tests.engine.hosts import Notes, expected, make_job, run, until
from tests.engine.test_curve import NetworkEngine


def member(number: int, engine: NetworkEngine) -> Member:
    return Member(number, engine.reach.address, engine.reach.server_key)


def test_engines_join_move_and_leave(tmp_path: Path) -> None:
    keys = KeyPair.fresh()
    engines = [NetworkEngine(keys.public) for _ in range(3)]
    jobs = [make_job(f"job-{number}", [1 + number, 2, 3], max_tokens=100) for number in range(12)]

    async def story() -> None:
        client = ZmqClient(tmp_path, "front.0", engines=(), router=Router("round-robin"))
        client.start()
        following = asyncio.create_task(Follower(client, tmp_path, keys).run())
        try:
            notes = [Notes() for _ in jobs]
            for job, note in zip(jobs[:4], notes, strict=False):
                client.submit(job, note)  # before there is any engine
            Membership((member(0, engines[0]),), {0: 1}).write(tmp_path)
            await until(lambda: client.info, "the first engine answers")
            Membership((member(0, engines[0]), member(1, engines[1])), {0: 1, 1: 1}).write(tmp_path)
            await until(lambda: sum(one.up for one in client.engines) == 2, "the second engine answers")
            for job, note in zip(jobs[4:8], notes[4:], strict=False):
                client.submit(job, note)
            Membership((member(0, engines[2]), member(1, engines[1])), {0: 2, 1: 1}).write(tmp_path)
            await asyncio.to_thread(engines[0].kill)
            for job, note in zip(jobs[8:], notes[8:], strict=True):
                client.submit(job, note)
            await until(lambda: engines[2].host.fronts, "engine 0 answers at its new address")
            Membership((member(0, engines[2]),), {0: 2, 1: 1}).write(tmp_path)
            for job, note in zip(jobs, notes, strict=True):
                await note.done.wait()
                assert note.tokens[0] == expected(job)
            await until(lambda: [one.number for one in client.engines] == [0], "engine 1 has left")
        finally:
            following.cancel()
            await client.close()

    run(story())
    for engine in engines[1:]:
        engine.kill()


def test_a_front_ends_while_an_engine_is_being_removed(tmp_path: Path) -> None:
    keys = KeyPair.fresh()
    engine = NetworkEngine(keys.public)

    async def story() -> None:
        client = ZmqClient(tmp_path, "front.0", engines=(), router=Router("round-robin"))
        client.start()
        following = asyncio.create_task(Follower(client, tmp_path, keys).run())
        Membership((member(0, engine),), {0: 1}).write(tmp_path)
        await until(lambda: client.info, "the engine answers")
        following.cancel()
        removal = asyncio.create_task(client.remove_engine(0))
        await asyncio.sleep(0)  # it has begun, and waits for the link to close
        assert not client.engines
        removal.cancel()
        await client.close()  # would wait for ever for the link's socket

    run(story())
    engine.kill()


def test_a_file_that_cannot_be_read_has_no_members(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Membership.read(tmp_path) == Membership()
    assert not caplog.text
    for text in ("", "[]", '{"members": [{"number": 1}], "starts": {}}'):
        (tmp_path / NAME).write_text(text)
        assert Membership.read(tmp_path) == Membership()
    assert "members file cannot be read" in caplog.text


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = Membership((Member(3, "tcp://10.0.0.1:4000", "key"),), {3: 7})
    written.write(tmp_path)
    assert Membership.read(tmp_path) == written
