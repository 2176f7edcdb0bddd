"""A holder with a real engine process: started, reached over TCP with the deployment's key, killed, started again."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.holder import EngineHolder, HolderStatus
from shoal.config.engine import EngineConfig
from shoal.config.serve import as_json
from shoal.core.job import Job
from shoal.core.params import SamplingParams
from shoal.engine.client import ZmqClient
from shoal.engine.curve import KeyPair
from shoal.engine.members import Member
from shoal.engine.supervise import USERS_MISTAKE
from shoal.routing.router import Router
from tests.engine.hosts import Notes, until
from tests.story.models import save_model

pytestmark = pytest.mark.timeout(900)


def config(model: Path, keys: KeyPair, epoch: int, **chosen: Any) -> dict[str, Any]:
    engine = EngineConfig(model=str(model), dtype="float32", kv_memory=2**22, threads=1, device="cpu", **chosen)
    shared = {"log_level": "warning", "log_format": "text", "drain_timeout": 5.0, "client_key": keys.public}
    return {**shared, "engine": as_json(engine), "epoch": epoch}


async def reached(holder: EngineHolder, state: str) -> HolderStatus:
    found = holder.status()
    for _ in range(4000):
        found = holder.status()
        if found.state in (state, "ended"):
            break
        await asyncio.sleep(0.05)
    assert found.state == state, found
    return found


async def one_job(keys: KeyPair, status: HolderStatus, folder: Path, then: Callable[[], None]) -> list[int]:
    """The tokens of a job, which is aborted when `then` has been called amid it."""
    client = ZmqClient(folder, "front.0", engines=[Member(0, status.address, status.server_key).address(keys)])
    client.start()
    await until(lambda: client.info, "the engine answers")
    assert client.info is not None
    assert client.info.epoch == status.epoch
    note = Notes()
    client.submit(Job(id="a", prompt=[5, 6, 7], params=SamplingParams(max_tokens=30), seed=3), note)
    await note.grew.wait()
    then()
    await note.done.wait()
    await client.close()
    return note.tokens[0]


def test_an_engine_is_started_killed_and_started_again(tmp_path: Path) -> None:
    model, keys, holder = save_model(tmp_path / "model"), KeyPair.fresh(), EngineHolder("127.0.0.1")

    async def story() -> None:
        assert holder.status().state == "idle"
        holder.start(config(model, keys, 0))
        up = await reached(holder, "up")
        assert up.address.startswith("tcp://127.0.0.1:")
        first = await one_job(keys, up, tmp_path, lambda: None)
        assert first
        assert holder._process is not None
        os.kill(holder._process.pid, signal.SIGKILL)
        ended = await reached(holder, "ended")
        assert (ended.code, ended.was_up, ended.fault, ended.epoch) == (-9, True, False, 0)
        holder.start(config(model, keys, 1))
        again = await reached(holder, "up")
        assert again.server_key != up.server_key, "each start has its own keys"
        assert await one_job(keys, again, tmp_path, lambda: None) == first
        holder.drain()
        assert (await reached(holder, "ended")).code == 0

    try:
        asyncio.run(asyncio.wait_for(story(), 800))
    finally:
        folder = holder._folder
        holder.close()
    assert not folder.exists()


def test_a_refusal_comes_back_with_its_reason(tmp_path: Path) -> None:
    holder = EngineHolder("127.0.0.1")

    async def story() -> None:
        holder.start(config(tmp_path / "nothing", KeyPair.fresh(), 0))
        ended = await reached(holder, "ended")
        assert (ended.code, ended.was_up) == (USERS_MISTAKE, False)
        assert "nothing" in ended.refusal

    try:
        asyncio.run(asyncio.wait_for(story(), 250))
    finally:
        holder.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_ipv6_address_is_written_in_brackets(host: str) -> None:
    holder = EngineHolder(host)
    assert holder._host == ("[::1]" if host == "::1" else host)
    holder.close()


async def answered(client: ZmqClient, id: str, prompt: list[int]) -> list[int]:
    note = Notes()
    client.submit(Job(id=id, prompt=prompt, params=SamplingParams(max_tokens=30), seed=3), note)
    await note.done.wait()
    return note.tokens[0]


@pytest.mark.parametrize(
    "transport", [pytest.param(None, marks=pytest.mark.slow), "tcp"], ids=["shared memory", "CURVE"]
)
def test_engines_of_two_roles_hand_requests_over(tmp_path: Path, transport: str | None) -> None:
    """The second prompt meets the decode engine alone, which computes it itself."""
    model, keys = save_model(tmp_path / "model"), KeyPair.fresh()
    prompts = [[5 + (3 * number) % 200 for number in range(first, first + 100)] for first in (0, 50)]
    holders = [EngineHolder("127.0.0.1") for _ in range(3)]

    async def story() -> None:
        for holder, role in zip(holders, ("prefill", "decode", ""), strict=True):
            chosen = {"prefill": "disaggregated"} if role else {}
            holder.start({**config(model, keys, 0, **chosen), "role": role, "kv_transport": transport})
        found = [await reached(holder, "up") for holder in holders]
        addresses = [Member(n, one.address, one.server_key).address(keys) for n, one in enumerate(found)]
        alone = ZmqClient(tmp_path, "front.0", engines=[addresses[2]])
        apart = ZmqClient(tmp_path, "front.1", engines=addresses[:2], router=Router("prefix"))
        for client in (alone, apart):
            client.start()
        await until(lambda: alone.info and all(one.up for one in apart.engines), "all engines answer")
        wanted = [await answered(alone, f"a{n}", prompt) for n, prompt in enumerate(prompts)]
        assert await answered(apart, "b0", prompts[0]) == wanted[0]
        counted = await apart.ask("metrics", 1)
        assert "shoal_kv_blocks_arrived_total 6.0" in counted
        assert "shoal_kv_blocks_lost_total 0.0" in counted
        holders[0].kill()
        await until(lambda: not apart.engines[0].up, "its death is noticed")
        assert await answered(apart, "b1", prompts[1]) == wanted[1]
        for client in (alone, apart):
            await client.close()

    try:
        asyncio.run(asyncio.wait_for(story(), 800))
    finally:
        for holder in holders:
            holder.close()
