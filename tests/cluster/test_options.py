"""The options of a cluster: what they default to, what is refused, and who is handed which keys."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.serve import make_children
from shoal.cluster.needs import Needs
from shoal.config.engine import EngineConfig
from shoal.config.serve import ServeConfig
from shoal.engine.curve import KeyPair
from shoal.errors import BadConfig


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({}, (1, 1)),
        ({"replicas": 3}, (3, 3)),
        ({"max_replicas": 4}, (1, 4)),
        ({"replicas": 2, "max_replicas": 4}, (2, 4)),
        ({"replicas": 2, "min_replicas": 1, "max_replicas": 5}, (1, 5)),
    ],
)
def test_the_bounds_default_to_the_replicas(given: dict[str, int], bounds: tuple[int, int]) -> None:
    serve = ServeConfig(cluster="ray", **given)  # type: ignore[arg-type]
    assert (serve.least_replicas, serve.most_replicas) == bounds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cluster": "slurm"}, "ray"),
        ({"cluster": "ray", "min_replicas": 0}, "min_replicas"),
        ({"cluster": "ray", "min_replicas": 4, "max_replicas": 3}, "--max-replicas"),
        ({"cluster": "ray", "replicas": 4, "max_replicas": 3}, "--max-replicas"),
        ({"cluster": "ray", "engine_cpus": 0}, "engine_cpus"),
        ({"cluster": "ray", "engine_gpus": -1}, "engine_gpus"),
        ({"cluster": "ray", "scale_wait": 0.0}, "scale_wait"),
        ({"cluster": "ray", "scale_in_after": -1.0}, "scale_in_after"),
        ({"cluster": "ray", "cluster_address": "ray://10.0.0.1:10001"}, "HOST:PORT"),
        ({"max_replicas": 3}, "--cluster ray"),
        ({"cluster_address": "10.0.0.1:6379"}, "--cluster ray"),
        ({"engine_gpus": 1}, "--cluster ray"),
    ],
)
def test_bad_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        ServeConfig(**wrong)


@pytest.mark.parametrize(
    ("asked", "device", "nodes", "found"),
    [
        (Needs(), "auto", [{"CPU": 8.0}, {"CPU": 2.0}], Needs(2, 0)),
        (Needs(), "auto", [{"CPU": 8.0, "GPU": 4.0}], Needs(1, 1)),
        (Needs(), "cpu", [{"CPU": 8.0, "GPU": 4.0}], Needs(8, 0)),
        (Needs(cpus=3), "auto", [{"CPU": 8.0, "GPU": 4.0}], Needs(3, 1)),
        (Needs(gpus=2), "auto", [{"CPU": 8.0}], Needs(1, 2)),
        (Needs(), "auto", [{}], Needs(1, 0)),  # a head without cores: nodes may come
    ],
)
def test_what_an_engine_needs_follows_from_the_nodes(
    asked: Needs, device: str, nodes: list[dict[str, float]], found: Needs
) -> None:
    assert asked.resolved(device, list(nodes)) == found


def test_keys_go_to_the_fleet_and_the_fronts_alone_and_differ_each_time(tmp_path: Path) -> None:
    with socket.socket() as listener:
        serve = ServeConfig(cluster="ray", api_workers=2)
        made = [make_children(EngineConfig(), serve, tmp_path, listener) for _ in range(2)]
        alone = make_children(EngineConfig(), ServeConfig(), tmp_path, listener)
    fleet, *fronts = made[0]
    keys = KeyPair.from_json(fleet.config(0)["client_keys"])
    assert (fleet.module, len(fronts)) == ("shoal.cluster.process", 2)
    assert all(KeyPair.from_json(front.config(0)["client_keys"]) == keys for front in fronts)
    assert KeyPair.from_json(fleet.config(1)["client_keys"]) == keys, "across restarts"
    assert keys.secret not in json.dumps(made[1][0].config(0))
    assert alone[0].module == "shoal.processes.engine"
    assert not alone[1].config(0)["client_keys"]
