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
from tests.engine.hosts import Notes, until
from tests.story.models import save_model


def config(model: Path, keys: KeyPair, epoch: int) -> dict[str, Any]:
    engine = EngineConfig(model=str(model), dtype="float32", kv_memory=2**22, threads=1, device="cpu")
    shared = {"log_level": "warning", "log_format": "text", "drain_timeout": 5.0, "client_key": keys.public}
    return {**shared, "engine": as_json(engine), "epoch": epoch}


async def reached(holder: EngineHolder, state: str) -> HolderStatus:
    found = holder.status()
    for _ in range(1200):
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
        asyncio.run(asyncio.wait_for(story(), 200))
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
        asyncio.run(asyncio.wait_for(story(), 100))
    finally:
        holder.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_ipv6_address_is_written_in_brackets(host: str) -> None:
    holder = EngineHolder(host)
    assert holder._host == ("[::1]" if host == "::1" else host)
    holder.close()
