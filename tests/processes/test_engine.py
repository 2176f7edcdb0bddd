"""The engine's process: its hook for debugging. The rest is tried with real processes in tests/story_server."""

import logging

import pytest

from shoal.core.ports import Executor
from shoal.errors import BadConfig
from shoal.processes.engine import wrapped
from shoal.processes.hooks import EXECUTOR_WRAPPER
from tests.fakes import FakeExecutor


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
