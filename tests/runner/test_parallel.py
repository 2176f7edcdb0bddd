"""Tensor parallelism over gloo: the same tokens as one process, for every family and everything an engine does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal import LLM
from shoal.core.params import SamplingParams
from shoal.core.plan import BlockCopy, RowStart, StepPlan
from shoal.errors import BadConfig, EngineLost
from shoal.runner.rank_wire import pack, unpack
from tests.models.test_families import MODELS, saved
from tests.runner.rank_threads import made, use_threads
from tests.story.models import greedy, open_llm, save_model, seeded, small_kv, token_ids

PROMPTS = [[7, 8, 9, 10, 11], [5] * 40, [250], list(range(3, 90)), [7, 8, 9, 10, 11, 12, 13]]
FAMILIES = [*MODELS, "llama-uneven"]
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 100}


@pytest.fixture(autouse=True)
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def answers(llm: LLM, prompts: Any = PROMPTS, params: Any = None, **more: Any) -> Any:
    return llm.generate(prompts, params or greedy(16), **more)


def same_tokens(whole: Any, split: Any) -> None:
    """Token for token; at the first difference of an answer its two scores must be within 1e-4."""
    for one, other in zip(whole, split, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        for at, (token, found) in enumerate(zip(mine.token_ids, theirs.token_ids, strict=True)):
            if token != found:
                scores = dict(zip(mine.logprobs[at].top_tokens, mine.logprobs[at].top_logprobs, strict=True))
                assert abs(scores[token] - scores[found]) < 1e-4, (at, token, found)
                break


# ---- the same model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_what_one_process_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "llama-uneven", ("Llama", UNEVEN))
    saved(name, tmp_path)
    found = {}
    for size in (1, 2):
        with open_llm(tmp_path, tensor_parallel_size=size, max_model_len=256) as llm:
            found[size] = answers(llm, params=greedy(16, logprobs=2))
    same_tokens(found[1], found[2])
    held = made[0].threads[0].built
    assert held is not None
    kv_heads = MODELS[name][1].get("num_key_value_heads", 2)
    assert held.model.spec.kv_heads == max(1, kv_heads // 2)


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_than_two(size: int, folder: Path) -> None:
    """Four ranks, two KV heads: each is held twice. Three do not fit two KV heads."""
    if size == 3:
        with pytest.raises(
            BadConfig, match=r"3 does not fit a model with 4 query heads and 2 KV heads.* use 1 to 2, 4"
        ):
            open_llm(folder, tensor_parallel_size=size)
        return
    with open_llm(folder) as whole, open_llm(folder, tensor_parallel_size=size) as split:
        tokens = [llm.loop.scheduler.kv.pool.total for llm in (whole, split)]
        assert tokens[0] == 2 * tokens[1], "the memory is that of all ranks"
        assert {rank.built.follower.runner.kv.scratch for rank in made[-1].threads if rank.built} == {tokens[1]}
        assert token_ids(answers(whole)) == token_ids(answers(split))


def test_eight_bits(folder: Path) -> None:
    """Rows have the scales they have in one process; columns have finer ones, so scores differ a little."""
    with open_llm(folder, quantization="int8", tensor_parallel_size=2) as split:
        assert len(token_ids(answers(split))[0]) == 16


def test_random_weights_are_parts_of_the_same_model(folder: Path) -> None:
    with (
        open_llm(folder, load_format="dummy") as whole,
        open_llm(folder, load_format="dummy", tensor_parallel_size=2) as split,
    ):
        assert token_ids(answers(whole)) == token_ids(answers(split))


# ---- everything an engine does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_seeds_logprobs_and_prompt_logprobs(folder: Path, depth: int) -> None:
    params = [
        seeded(3, logprobs=2),
        seeded(4, top_p=0.8, top_k=40, presence_penalty=0.5),
        greedy(12, prompt_logprobs=1, logprobs=1),
        seeded(5, logit_bias={17: 2.0}, min_p=0.01),
        greedy(12, repetition_penalty=1.3),
    ]
    with open_llm(folder, depth=depth) as llm:
        whole = llm.generate(PROMPTS, params)
    with open_llm(folder, depth=depth, tensor_parallel_size=2) as llm:
        split = llm.generate(PROMPTS, params)
    assert token_ids(whole) == token_ids(split)
    for one, other in zip(whole, split, strict=True):
        for mine, theirs in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert mine.rank == theirs.rank
            assert abs(mine.logprob - theirs.logprob) < 1e-4
    mine, theirs = whole[2].prompt_logprobs, split[2].prompt_logprobs
    assert len(mine) == len(theirs) == len(PROMPTS[2])
    with open_llm(folder, depth=depth, tensor_parallel_size=2) as llm:
        longer = llm.generate([PROMPTS[3]], greedy(2, prompt_logprobs=1))
    assert len(longer[0].prompt_logprobs) == len(PROMPTS[3])


@pytest.mark.parametrize("options", [
    {"when_short": "swap", "host_kv_memory": "8MiB"},
    {"when_short": "recompute", "max_num_batched_tokens": 24},
    {"layout": "padded", "batching": "static", "group_size": 3},
    {"speculate": "suffix", "depth": 1},
    {"prefill": "inline", "depth": 2},
], ids=lambda options: next(iter(options.values())))  # fmt: skip
def test_policies(folder: Path, options: dict[str, Any]) -> None:
    """Preemption with swap, chunks, rectangles, drafts: whatever the plan asks for, all ranks compute it."""
    prompts = [[number, *([7, 8, 9] * 12), number] for number in range(3, 11)]
    params = [greedy(40) if number % 2 else seeded(number, 40) for number in range(8)]
    small = {"kv_memory": small_kv(24), "max_model_len": 128, "check": True} if "when_short" in options else {}
    with open_llm(folder, **small, **options) as llm:
        whole = token_ids(llm.generate(prompts, params))
    with open_llm(folder, tensor_parallel_size=2, **small, **options) as llm:
        split = token_ids(llm.generate(prompts, params))
        counted = [unpack(data) for data in made[-1].threads[0].plans]
    assert whole == split
    copies = sum(len(plan.copies) for plan in counted)
    assert (copies > 2) == (options.get("when_short") == "swap")
    assert any(plan.width for plan in counted) == ("layout" in options)
    assert any((plan.draws > 1).any() for plan in counted) == ("speculate" in options)


def test_prefix_cache_and_grammar(folder: Path) -> None:
    from shoal.core.job import GrammarSpec

    grammar = GrammarSpec("regex", "(fish|fox|dog)( fish| fox| dog){3}")
    shared = [[9, 8, 7] * 20, [9, 8, 7] * 20 + [4], [9, 8, 7] * 20]
    found = []
    for size in (1, 2):
        with open_llm(folder, tensor_parallel_size=size) as llm:
            texts = [one.outputs[0].text for one in llm.generate("the", seeded(1, 20), grammar=grammar)]
            found.append((texts, [token_ids(llm.generate(prompt, greedy(8))) for prompt in shared]))
    assert found[0] == found[1]
    plans = [unpack(data) for data in made[-1].threads[0].plans]
    assert sum(int((plan.starts[plan.counts > 1] >= 48).sum()) for plan in plans) == 2, "two prompts began in the cache"


def test_a_pass_that_fails_on_one_rank_ends_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(folder, tensor_parallel_size=2)
    runner = llm.loop.executor.runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner, "forward", lambda plan: 1 / 0)
    with pytest.raises(EngineLost, match="division by zero"):
        answers(llm)


# ---- the wire ------------------------------------------------------------------------------------------------------


def test_a_plan_survives_the_wire_without_what_sampling_needs() -> None:
    params = SamplingParams(temperature=0.3, logit_bias={3: 1.0})
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, tokens = int(rng.integers(0, 6)), int(rng.integers(0, 30))
        starting = tuple(
            RowStart(row, 4, (1, 2, 3, 4), 3, params, 9, 1, frozenset({2}), tuple(range(row, 2 * row)), row % 2 == 1, 7)
            for row in range(int(rng.integers(0, 4)))
        )
        copies = tuple(
            BlockCopy(number, (1, 2, number), (5, 6, 7), "out" if number % 2 else "in")
            for number in range(int(rng.integers(0, 3)))
        )
        arrays = [rng.integers(-2, 2**40, rows) for _ in range(5)]
        grown = rng.integers(0, 99, (int(rng.integers(0, 4)), 3))
        plan = StepPlan(3, starting, grown, *arrays, rng.integers(-1, 999, tokens), copies, 5, 2)
        found = unpack(pack(plan))
        for name in ("grown", "rows", "generations", "starts", "counts", "draws", "tokens"):
            assert np.array_equal(getattr(found, name), getattr(plan, name)), name
        assert (found.step, found.copies, found.width, found.dead) == (3, copies, 5, 2)
        for mine, theirs in zip(plan.starting, found.starting, strict=True):
            assert (mine.row, mine.generation, mine.blocks) == (theirs.row, theirs.generation, theirs.blocks)
            assert theirs.needs_prompt_logprobs == mine.needs_prompt_logprobs
            assert len(theirs.tokens) == (3 if mine.needs_prompt_logprobs else 0), "the prompt's length, not the prompt"


def test_torch_is_left_with_one_thread() -> None:
    assert torch.get_num_threads() == 1
