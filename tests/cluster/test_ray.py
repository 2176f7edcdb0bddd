"""`shoal serve --cluster ray` on a real Ray cluster: nodes of this machine that are started and killed."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.ray_nodes import RayNodes, free_port, ray_cluster
from tests.story.models import save_model
from tests.story_server.servers import RESTARTS, SMALL, Server, command_of, family_of, running
from tests.story_server.test_crash import Ask, all_answers, answer, asks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra [cluster] is not installed"),
]
ENV = {"RAY_DISABLE_IMPORT_WARNING": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32768)


def flags(nodes: RayNodes, *more: str) -> tuple[str, ...]:
    cluster = ("--cluster", "ray", "--cluster-address", nodes.address, "--engine-cpus", "1")
    return (*SMALL, *cluster, "--max-model-len", "2048", "--max-num-batched-tokens", "128", *more)


def engines_up(server: Server) -> int:
    """As the metrics tell it."""
    text = server.http.get(f"{server.url}/metrics").text
    return sum(line.split()[-1] == "1.0" for line in text.splitlines() if line.startswith("shoal_engine_up"))


def until_up(server: Server, count: int) -> None:
    server.wait_for(f"{count} engines", lambda: engines_up(server) == count, 300)


@pytest.fixture
def two_nodes() -> Iterator[RayNodes]:
    with ray_cluster(head_cpus=1) as nodes:
        nodes.add()
        yield nodes


def test_a_node_that_dies_costs_no_request_and_no_token(two_nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model, *flags(two_nodes, "--replicas", "2"), env=ENV) as server:
        until_up(server, 2)
        wanted = asks(32, 400)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        assert {status for status, _ in undisturbed} == {200}

        def kill_a_node() -> None:
            server.wait_for("all to run", lambda: server.metrics().get("shoal_requests_running", 0) > 8)
            two_nodes.nodes[1].kill()

        assert asyncio.run(all_answers(server, wanted, kill_a_node)) == undisturbed
        until_up(server, 1)
        two_nodes.add()
        until_up(server, 2)  # placed there by Ray
        assert asyncio.run(all_answers(server, wanted[:8], lambda: None)) == undisturbed[:8]
        server.wait_until_idle()


def test_a_rolling_restart_loses_nothing(two_nodes: RayNodes, model: Path, tmp_path: Path) -> None:
    with running(tmp_path, model, *flags(two_nodes, "--replicas", "2"), env=ENV) as server:
        until_up(server, 2)
        wanted = asks(24, 400)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))

        def restart() -> None:
            server.wait_for("all to run", lambda: server.metrics().get("shoal_requests_running", 0) > 8)
            assert server.post("/admin/restart", {}).status_code == 202

        assert asyncio.run(all_answers(server, wanted, restart)) == undisturbed
        server.wait_for("both restarts", lambda: server.log(10**9).count("as asked, and is started again") == 2, 300)
        until_up(server, 2)
        assert asyncio.run(all_answers(server, wanted, lambda: None)) == undisturbed


def test_requests_survive_the_death_of_the_fleet(model: Path, tmp_path: Path) -> None:
    """Its engines die with it, and the next fleet starts others."""
    with (
        ray_cluster(head_cpus=1) as nodes,
        running(tmp_path, model, *flags(nodes), env=ENV) as server,
    ):
        until_up(server, 1)
        wanted = asks(8, 300)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))

        def kill_the_fleet() -> None:
            server.wait_for("all to run", lambda: server.metrics().get("shoal_requests_running", 0) == 8)
            (fleet,) = [pid for pid in family_of(server.process.pid) if "shoal.cluster.process" in command_of(pid)]
            os.kill(fleet, signal.SIGKILL)

        assert asyncio.run(all_answers(server, wanted, kill_the_fleet)) == undisturbed
        assert server.metrics()[RESTARTS] == 1, "epochs go on"
        server.wait_until_idle()


async def keep_asking(server: Server, wanted: list[Ask], enough: threading.Event) -> list[tuple[Ask, Any]]:
    """One client after the other, over and over, until there was enough."""
    found: list[tuple[Ask, Any]] = []

    async def ask_in_turn(client: httpx.AsyncClient, first: int) -> None:
        number = first
        while not enough.is_set():
            ask = wanted[number % len(wanted)]
            found.append((ask, await answer(client, server.url, ask)))
            number += 7

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=200)) as client:
        await asyncio.gather(*(ask_in_turn(client, first) for first in range(24)))
    return found


def test_a_burst_adds_engines_and_idleness_removes_them(model: Path, tmp_path: Path) -> None:
    scale = ("--min-replicas", "1", "--max-replicas", "3", "--scale-wait", "0.3", "--scale-in-after", "2")
    with (
        ray_cluster(head_cpus=3) as nodes,
        running(tmp_path, model, *flags(nodes, *scale, "--max-num-seqs", "2"), env=ENV) as server,
    ):
        until_up(server, 1)
        wanted = asks(12, 60)
        undisturbed = asyncio.run(all_answers(server, wanted, lambda: None))
        expected = {str(ask): got for ask, got in zip(wanted, undisturbed, strict=True)}
        enough = threading.Event()

        def watch() -> None:
            try:
                until_up(server, 3)
            finally:
                enough.set()

        watching = threading.Thread(target=watch)
        watching.start()
        found = asyncio.run(keep_asking(server, wanted, enough))
        watching.join()
        assert len(found) > 24
        for ask, got in found:
            assert got == expected[str(ask)]
        # while they are removed, requests come one at a time, which one engine is enough for
        lonely: list[Any] = []

        def one_is_left() -> bool:
            lonely.append(asyncio.run(all_answers(server, wanted[:1], lambda: None))[0])
            return engines_up(server) == 1

        server.wait_for("one engine", one_is_left, 300)
        assert set(map(str, lonely)) == {str(undisturbed[0])}
        server.wait_until_idle()


SERVING = """
import json, sys
import ray
from ray import serve
address, port, options = json.loads(sys.argv[1])
ray.init(address=address, logging_level="warning")
serve.start(http_options={"host": "127.0.0.1", "port": port})
from shoal.cluster import app
serve.run(app(options))
print("ready", flush=True)
sys.stdin.read()
serve.shutdown()
"""


def test_the_application_for_ray_serve_passes_streams_through(model: Path, tmp_path: Path) -> None:
    port = free_port()
    options = {"model": str(model), "dtype": "float32", "kv_memory": "64MiB", "served-model-name": ["tiny"]}
    options |= {"engine_cpus": 1, "max_model_len": 2048}
    with ray_cluster(head_cpus=2) as nodes, (tmp_path / "serving.log").open("wb") as log:
        given = json.dumps([nodes.address, port, options])
        command = [sys.executable, "-c", SERVING, given]
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            ready = any(b"ready" in line for line in driver.stdout)
            assert ready, (tmp_path / "serving.log").read_text(errors="replace")[-4000:]
            asyncio.run(ask_the_application(f"http://127.0.0.1:{port}"))
        finally:
            driver.stdin.close()
            try:
                driver.wait(120)
            finally:
                driver.kill()
                driver.stdout.close()


async def ask_the_application(url: str) -> None:
    streamed, whole = asks(2, 40)
    async with httpx.AsyncClient(timeout=300) as client:
        for ask in (streamed, whole):
            status, tokens = await answer(client, url, ask)
            assert (status, len(tokens)) == (200, ask["max_tokens"])
        assert (await client.get(f"{url}/health")).status_code == 200
        refused = await client.post(f"{url}/v1/completions", json={**whole, "max_tokens": "many"})
        assert refused.status_code == 400
        assert "max_tokens" in refused.json()["error"]["message"]
