"""Two engines that share a process, as `shoal compare --presets splitwise` runs them."""

import random

import pytest

from shoal.bench.replay import replay
from shoal.bench.split_engines import SplitEngines
from shoal.build import Loaded, assemble, load
from shoal.cli.compare import make_split
from shoal.config.engine import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Reason, Request
from shoal.engine.loop import EngineLoop
from shoal.workload.traces import TraceRequest
from tests.story.models import save_model

CONFIG = EngineConfig(dtype="float32", kv_memory=2**23, max_num_seqs=6, max_num_batched_tokens=24, check=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    config = EngineConfig(model=str(save_model(tmp_path_factory.mktemp("model"))), dtype="float32", threads=1)
    return load(config)


def requests() -> list[Request]:
    chance = random.Random(4)
    found = []
    for number in range(14):
        prompt = [chance.randrange(5, 290) for _ in range(1 + 11 * number % 90)]
        params = SamplingParams(max_tokens=1 + 5 * number % 17, temperature=float(number % 2), ignore_eos=True)
        found.append(Request(str(number), prompt, params, seed=number))
    return found


def answers(engine: EngineLoop | SplitEngines) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    for request in requests():
        engine.scheduler.submit(request, engine.clock.now_s())
        told[request.id] = []
    while not engine.idle:
        events = engine.step(engine.clock.now_s() + 1)
        for id, index, token in zip(events.owners, events.indexes, events.tokens, strict=True):
            assert index == len(told[id]), "a token was lost or doubled"
            told[id].append(token)
        assert all(end.reason is Reason.LENGTH for end in events.finished)
    engine.close()
    return told


def test_the_texts_are_those_of_one_engine(loaded: Loaded) -> None:
    alone = answers(assemble(loaded, CONFIG).loop)
    split = make_split(loaded, EngineConfig(**{**vars(CONFIG), "prefill": "disaggregated"}))
    decode = split.scheduler.second.scheduler
    assert answers(split) == alone
    assert decode.kv.pool.held == 0
    assert decode.kv.pool.cached > 10, "blocks came from the other engine"


def test_a_trace_is_replayed(loaded: Loaded) -> None:
    trace = [TraceRequest(0.01 * number, 20 + number, 1 + number % 7) for number in range(12)]
    prompts = [[5 + number] * one.prompt for number, one in enumerate(trace)]
    split = make_split(loaded, EngineConfig(**{**vars(CONFIG), "prefill": "disaggregated"}))
    run = replay(split, trace, prompts, preset="splitwise", label="", rate=1.0, max_tokens=20)  # type: ignore[arg-type]
    split.close()
    assert [len(record.token_s) for record in run.requests] == [one.output for one in trace]
    assert all(record.reason for record in run.requests)
    assert all(record.token_s == sorted(record.token_s) for record in run.requests)


def test_an_engine_that_fails_is_reported(loaded: Loaded) -> None:
    split = make_split(loaded, EngineConfig(**{**vars(CONFIG), "prefill": "disaggregated"}))
    split.scheduler.submit(Request("x", [10**6], SamplingParams()), 0.0)  # not in the vocabulary
    with pytest.raises(Exception, match="vocabulary"):
        split.step()
    split.close()
