"""What a front's process makes of its config."""

from typing import Any

import pytest

from shoal.cli.serve import make_children
from shoal.config.engine import EngineConfig
from shoal.config.serve import ServeConfig, serve_config_from_json
from shoal.engine.restart_policy import RefuseAtOnce, WaitForEngine
from shoal.processes.front import restart_policy


class Listener:
    """A socket's number is all that is needed of it."""

    def fileno(self) -> int:
        return 99


def front_config(engine: EngineConfig, serve: ServeConfig, tmp_path: Any) -> Any:
    _, front = make_children(engine, serve, tmp_path, Listener())  # type: ignore[arg-type]
    return front.config(0)


@pytest.mark.parametrize("max_wait_s", [None, 30.0])
def test_requests_wait_for_the_engine_within_the_limits_of_its_queue(tmp_path: Any, max_wait_s: float | None) -> None:
    config = front_config(EngineConfig(max_queue=7, max_wait=max_wait_s), ServeConfig(), tmp_path)
    policy = restart_policy(config, serve_config_from_json(config["serve"]))
    assert isinstance(policy, WaitForEngine)
    assert (policy.max_queue, policy.max_wait_s) == (7, max_wait_s)


def test_requests_are_refused_where_that_was_chosen(tmp_path: Any) -> None:
    config = front_config(EngineConfig(), ServeConfig(restart_policy="refuse"), tmp_path)
    assert isinstance(restart_policy(config, serve_config_from_json(config["serve"])), RefuseAtOnce)


def test_fronts_are_watched_like_the_engine(tmp_path: Any) -> None:
    serve = ServeConfig(hang_timeout=77.0, api_workers=2)
    children = make_children(EngineConfig(), serve, tmp_path, Listener())  # type: ignore[arg-type]
    assert [child.silence_s for child in children] == [77.0] * 3
