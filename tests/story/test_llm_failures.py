"""LLM when a call goes wrong: nothing hangs, and nothing of it stays in the engine."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import SamplingParams
from shoal.errors import EngineError
from shoal.output.sample import Sample
from tests.story.models import first, greedy, open_llm

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def test_a_stream_of_an_engine_that_was_closed_fails(model: Path) -> None:
    with open_llm(model) as llm:
        stream = llm.stream("Once upon a time", LONG)
        next(stream)
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate("x", greedy(2))
    llm.close()


def test_an_interrupt_while_prompts_are_submitted_leaves_none(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(model, check=True) as llm:
        submit_all, calls = llm.loop.submit_all, []

        def interrupted(requests: Any, resumed: bool = False) -> None:
            calls.append(requests)
            if len(calls) == 3:
                raise KeyboardInterrupt
            submit_all(requests, resumed)

        monkeypatch.setattr(llm.loop, "submit_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c", "d"], LONG)
        assert llm.loop.idle


@pytest.mark.parametrize("streams", [False, True])
def test_an_error_in_one_sample_ends_its_call_and_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    with open_llm(model, check=True) as llm:
        want = first(llm.generate("a lazy dog", LONG)).token_ids
        other = llm.stream("a lazy dog", LONG)
        take = Sample.take

        def broken(self: Sample, token: int, logprobs: Any) -> str:
            if self.index == 1 and len(self.tokens) == 2:
                raise RuntimeError("a bug in the detokenizer")
            return take(self, token, logprobs)

        monkeypatch.setattr(Sample, "take", broken)
        call: Callable[..., Any] = llm.stream if streams else llm.generate
        with pytest.raises(RuntimeError, match="a bug"):
            list(call(["a", "b", "c"], LONG))
        assert len(llm.loop.scheduler.requests) == 1
        assert sum([chunk.token_ids for chunk in other], []) == want  # noqa: RUF017


def test_only_the_core_dependencies_are_needed(model: Path) -> None:
    """LLM, with text and stop strings, where the extra `server` is not installed."""
    script = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ImportError(f"{name} is not a core dependency")

sys.meta_path.insert(0, Blocked())
from shoal import LLM, AsyncLLM, SamplingParams
with LLM(sys.argv[1], kv_memory="8MiB", dtype="float32") as llm:
    print(len(llm.generate("Once upon", SamplingParams(max_tokens=5, ignore_eos=True, stop="#"))[0].outputs))
"""
    extras = "starlette,uvicorn,uvloop,httptools,msgspec,zmq,prometheus_client,llguidance,yaml,matplotlib,aiohttp"
    done = subprocess.run(
        [sys.executable, "-c", script, str(model), extras], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
