"""Ctrl-C in the middle of a pass leaves the engine whole."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from tests.models.test_families import saved


@pytest.fixture(autouse=True)
def usual_ctrl_c() -> Iterator[None]:
    """What Ctrl-C does in a terminal, also where the tests were started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_call_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", kv_memory="16MiB", check=True) as llm:
        want = llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids
        other = llm.stream([7, 8, 9], params)
        first = next(other)
        runner = llm.loop.executor.runner  # type: ignore[attr-defined]
        forward, passes = runner.forward, []

        def interrupted(plan: object) -> object:
            passes.append(plan)
            if len(passes) == 5:
                signal.raise_signal(signal.SIGINT)  # on the runner's thread; Python handles it on the main one
            return forward(plan)

        monkeypatch.setattr(runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4, 5, 6]], params)
        monkeypatch.setattr(runner, "forward", forward)
        assert llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids == want
        rest = [token for chunk in other for token in chunk.token_ids]
        assert first.token_ids + rest == llm.generate([7, 8, 9], params)[0].outputs[0].token_ids
        llm.step()
        assert llm.loop.scheduler.kv.pool.held == 0
