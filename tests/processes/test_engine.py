"""The engine's process: set-up and a debugging hook. The rest is tried with real processes in tests/story_server."""

import logging
import time
from pathlib import Path

import pytest

from shoal.config.engine import EngineConfig
from shoal.config.serve import as_json
from shoal.core.job import GrammarSpec
from shoal.core.ports import Executor
from shoal.engine.listen import PrivateListening
from shoal.errors import BadConfig
from shoal.processes import engine as module
from shoal.processes.engine import make_host, wrapped
from shoal.processes.hooks import EXECUTOR_WRAPPER
from shoal.text.grammar import Grammars
from tests.fakes import FakeExecutor
from tests.story.models import save_model


class Wrapper(FakeExecutor):
    inner: Executor


def wrap(executor: Executor) -> Executor:
    outer = Wrapper(8, 4)
    outer.inner = executor
    return outer


def test_without_the_variable_the_executor_stays_as_it_is() -> None:
    executor = FakeExecutor(8, 4)
    assert wrapped(executor, {}) is executor


def test_the_named_function_wraps_the_executor_and_the_log_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    executor = FakeExecutor(8, 4)
    with caplog.at_level(logging.WARNING):
        outer = wrapped(executor, {EXECUTOR_WRAPPER: f"{__name__}:wrap"})
    assert isinstance(outer, Wrapper)
    assert outer.inner is executor
    assert f"{__name__}:wrap" in caplog.text


@pytest.mark.parametrize("name", ["no_such_module:f", f"{__name__}:no_such_function", "no-colon", ":f"])
def test_a_name_that_cannot_be_imported_is_refused(name: str) -> None:
    with pytest.raises(BadConfig, match=EXECUTOR_WRAPPER):
        wrapped(FakeExecutor(8, 4), {EXECUTOR_WRAPPER: name})


def test_grammars_are_set_up_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Grammars] = []
    warming = module.warming
    monkeypatch.setattr(module, "warming", lambda *given: made.append(warming(*given)) or made[-1])
    config = EngineConfig(model=str(save_model(tmp_path / "model")), kv_memory=2**20, device="cpu")
    listening = PrivateListening(tmp_path)
    host = make_host({"engine": as_json(config), "folder": str(tmp_path), "epoch": 0}, listening.socket)
    while made[0]._vocabulary is None:
        time.sleep(0.01)
    assert host.make_grammar is not None
    assert not host.make_grammar(GrammarSpec("regex", "a+"), ()).error
    host.loop.close()
    listening.close()
