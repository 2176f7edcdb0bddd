"""Prefill and decode engines on a real Ray cluster: the texts of one engine, KV by CURVE between them, and a node that
dies costs no request and no token."""

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_nodes import RayNodes, ray_cluster
from tests.cluster.test_ray import ENV, flags, until_up
from tests.story.models import save_model
from tests.story_server.servers import SMALL, command_of, family_of, running
from tests.story_server.slow_passes import slow_env
from tests.story_server.test_crash import Ask, all_answers, asks, speaking
from tests.story_server.test_disaggregated import ARRIVED, LOST, finished

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra [cluster] is not installed"),
]
Answers = list[tuple[int, list[int]]]


def wanted() -> list[Ask]:
    return asks(24, 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32768)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one engine answers."""
    limits = ("--max-model-len", "2048", "--max-num-batched-tokens", "64")
    with running(tmp_path_factory.mktemp("alone"), model, *SMALL, *limits) as server:
        return asyncio.run(all_answers(server, wanted(), lambda: None))


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """Room for two engines on each of two nodes."""
    with ray_cluster(head_cpus=2) as made:
        made.add(cpus=2)
        yield made


def roles(nodes: RayNodes, each: int, *more: str) -> tuple[str, ...]:
    chosen = ("--prefill", "disaggregated", "--prefill-replicas", str(each), "--decode-replicas", str(each))
    return flags(nodes, *chosen, "--max-num-batched-tokens", "64", *more)


def test_a_node_that_dies_costs_no_request_and_no_token(
    nodes: RayNodes, model: Path, alone: Answers, tmp_path: Path
) -> None:
    """KV goes by CURVE, as between machines; else engines of this one machine would share memory."""
    with running(tmp_path, model, *roles(nodes, 2, "--kv-transport", "tcp"), env=ENV | slow_env(0.01)) as server:
        until_up(server, 4)
        assert asyncio.run(all_answers(server, wanted(), lambda: None)) == alone
        server.wait_until_idle()
        now = server.metrics()
        assert now[ARRIVED] > 24
        assert now[LOST] == 0
        assert sum(finished(server, number, "handed") for number in (0, 1)) == 24
        assert sum(finished(server, number, "length") for number in (2, 3)) == 24
        assert len(sharing(nodes)) == 2, "only the prefill engines have mapped an outbox: their own"
        assert "curve" not in server.log(10**9), "an outbox's address is a secret"

        def kill_a_node() -> None:
            server.wait_for("some to speak", lambda: speaking(server) > 0)
            nodes.nodes[1].kill()

        assert asyncio.run(all_answers(server, wanted(), kill_a_node)) == alone
        until_up(server, 2)
        nodes.add(cpus=2)
        until_up(server, 4)
        before = server.metrics()[ARRIVED]
        assert asyncio.run(all_answers(server, wanted(), lambda: None)) == alone
        server.wait_until_idle()
        assert server.metrics()[ARRIVED] > before


def test_engines_of_one_node_share_memory(nodes: RayNodes, model: Path, alone: Answers, tmp_path: Path) -> None:
    with running(tmp_path, model, *roles(nodes, 1), env=ENV) as server:
        until_up(server, 2)
        assert asyncio.run(all_answers(server, wanted(), lambda: None)) == alone
        server.wait_until_idle()
        now = server.metrics()
        assert (now[ARRIVED] > 24, now[LOST]) == (True, 0)
        assert len(sharing(nodes)) == 2, "both engines have mapped the same outbox"


def sharing(nodes: RayNodes) -> list[int]:
    """The engines that have mapped an outbox."""
    pids = [pid for node in nodes.nodes for pid in family_of(node.process.pid)]
    engines = [pid for pid in pids if "shoal.processes.engine" in command_of(pid)]
    return [pid for pid in engines if "shoal-outbox" in Path(f"/proc/{pid}/maps").read_text()]
