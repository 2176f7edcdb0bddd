"""What a front's process makes of its config, and what it sets up before it answers."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.serve import make_children
from shoal.config.engine import EngineConfig
from shoal.config.serve import ServeConfig, serve_config_from_json
from shoal.engine.restart_policy import RefuseAtOnce, WaitForEngine
from shoal.processes import front as module
from shoal.processes.front import open_store, restart_policy
from shoal.server.app import Front
from shoal.server.response_store import NoStore, SqliteStore
from shoal.server.templates import TemplateWorker
from shoal.text.grammar import Grammars
from tests.story.models import save_model


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


@pytest.mark.parametrize("named", [False, True])
def test_responses_are_stored_in_the_servers_folder_or_in_a_file_of_the_operators(tmp_path: Path, named: bool) -> None:
    file = tmp_path / "kept.sqlite"
    serve = ServeConfig(response_store=str(file) if named else None, response_store_size=2**21, response_store_age=60.0)
    config = front_config(EngineConfig(), serve, tmp_path)
    store = open_store(config, serve_config_from_json(config["serve"]))
    assert isinstance(store, SqliteStore)
    assert store.path == (file if named else tmp_path / "responses.sqlite")
    assert (store.most_bytes, store.most_age_s) == (2**21, 60.0)
    asyncio.run(store.close())
    assert isinstance(open_store(config, ServeConfig(response_store_size=0)), NoStore)


def test_fronts_are_watched_like_the_engine(tmp_path: Any) -> None:
    serve = ServeConfig(hang_timeout=77.0, api_workers=2)
    children = make_children(EngineConfig(), serve, tmp_path, Listener())  # type: ignore[arg-type]
    assert [child.silence_s for child in children] == [77.0] * 3


def test_everything_slow_is_set_up_before_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Front] = []

    async def answer(front: Front, *others: Any) -> None:
        assert front.tokenizer is not None
        assert "_hiding" in vars(front.tokenizer)  # the second tokenizer
        assert isinstance(front.preparer.grammars, Grammars)
        assert front.preparer.grammars._vocabulary is not None
        assert isinstance(front.preparer.templates, TemplateWorker)
        assert front.preparer.templates._serving is not None  # the process is being started
        seen.append(front)

    monkeypatch.setattr(module, "answer", answer)
    config = front_config(EngineConfig(model=str(save_model(tmp_path / "model"))), ServeConfig(), tmp_path)
    before = gc.get_threshold()
    try:
        asyncio.run(module.run(config))
    finally:  # as a front sets it, for a process of its own
        gc.set_threshold(*before)
        gc.unfreeze()
    assert seen
