"""Sampling through the whole engine: repeatable by seed alone, whoever runs beside it, preempted or not."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shoal import LLM, SamplingParams
from tests.story.models import EOS, first, greedy, open_llm, seeded, small_kv, token_ids

STORY = "Once upon a time there was a little fish who swam in a shoal of a thousand fish."
EVERYTHING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "repetition_penalty": 1.5, "top_k": 20},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {77: 4.0, 78: 4.0, EOS: 6.0}, "ignore_eos": False, "min_tokens": 25},
    {"temperature": 0.0, "logit_bias": {77: 10.0, EOS: 9.0}, "ignore_eos": False, "min_tokens": 20},
]


def logits(hf: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return hf(torch.tensor([ids])).logits[0, -1:]  # [1, vocab]


def test_greedy_repetition_penalty_is_that_of_transformers(llm: LLM, hf: LlamaForCausalLM) -> None:
    output = llm.generate(STORY, greedy(24, repetition_penalty=1.8))[0]
    ids = list(output.prompt_token_ids)
    process = RepetitionPenaltyLogitsProcessor(1.8)
    for token in output.outputs[0].token_ids:
        assert token == int(process(torch.tensor([ids]), logits(hf, ids)).argmax())
        ids.append(token)


def test_greedy_presence_and_frequency_penalty_are_openais(llm: LLM, hf: LlamaForCausalLM) -> None:
    output = llm.generate(STORY, greedy(24, presence_penalty=1.1, frequency_penalty=0.9))[0]
    ids = list(output.prompt_token_ids)
    said: Counter[int] = Counter()
    for token in output.outputs[0].token_ids:
        scores = logits(hf, ids)[0]
        for other, count in said.items():
            scores[other] -= 0.9 * count + 1.1 * (count > 0)
        assert token == int(scores.argmax())
        ids.append(token)
        said[token] += 1


@pytest.mark.parametrize("values", EVERYTHING[1:5], ids=str)
def test_only_tokens_come_that_transformers_would_keep(llm: LLM, hf: LlamaForCausalLM, values: dict[str, Any]) -> None:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(values["temperature"])])
    if "top_k" in values:
        warpers.append(TopKLogitsWarper(values["top_k"]))
    if "top_p" in values:
        warpers.append(TopPLogitsWarper(values["top_p"]))
    if "min_p" in values:
        warpers.append(MinPLogitsWarper(values["min_p"]))
    prompt = llm.encode(STORY)
    kept = torch.isfinite(warpers(torch.tensor([prompt]), logits(hf, prompt))[0])
    found = {one.token_ids[0] for one in llm.generate(STORY, seeded(3, 1, n=128, **values))[0].outputs}
    assert kept[list(found)].all()
    if int(kept.sum()) < 10:
        assert len(found) == int(kept.sum())


def test_first_tokens_of_many_samples_fit_the_softmax(llm: LLM, hf: LlamaForCausalLM) -> None:
    prompt = llm.encode(STORY)
    want = TopKLogitsWarper(6)(torch.tensor([prompt]), logits(hf, prompt))[0].softmax(-1)
    several = [seeded(seed, 1, n=128, top_k=6) for seed in range(6)]
    found = Counter(ids[0] for ids in token_ids(llm.generate([STORY] * 6, several)))
    count = sum(found.values())
    assert count == 768
    likely = want.topk(6).indices.tolist()
    assert set(found) <= set(likely)
    chi = sum((found[token] - float(want[token]) * count) ** 2 / (float(want[token]) * count) for token in likely)
    assert chi < 25  # 5 degrees of freedom


def test_neighbours_order_and_row_change_nothing(model: Path) -> None:
    mine: tuple[Any, SamplingParams] = (STORY, seeded(42, 24))
    others = [
        (list(range(5 + i, 8 + 3 * i)), seeded(i, 4 + 3 * i, **EVERYTHING[i % len(EVERYTHING)])) for i in range(20)
    ]
    with open_llm(model) as llm:
        alone = first(llm.generate(*mine)).token_ids
        others_alone = [first(llm.generate(*one)).token_ids for one in others]
    for place in (0, 11, 20):
        crowd = [*others[:place], mine, *others[place:]]
        with open_llm(model, check=True) as llm:
            found = token_ids(llm.generate([prompt for prompt, _ in crowd], [how for _, how in crowd]))
        assert found[place] == alone
        assert found[:place] + found[place + 1 :] == others_alone


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_token(model: Path, depth: int) -> None:
    """Every kind of sampling at once, with a cache too small for them: all are computed again, none differs."""
    prompts = [list(range(10 + i, 30 + 3 * i)) for i in range(len(EVERYTHING))]
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 60, "ignore_eos": True, **values})
        for i, values in enumerate(EVERYTHING)
    ]
    with open_llm(model) as llm:
        roomy = llm.generate(prompts, params)
    with open_llm(model, kv_memory=small_kv(14), depth=depth, check=True) as llm:
        tight = llm.generate(prompts, params)
        assert llm.loop.scheduler.kv.pool.held == 0
    assert token_ids(tight) == token_ids(roomy)
    assert [one.outputs[0].text for one in tight] == [one.outputs[0].text for one in roomy]
    assert [one.outputs[0].finish_reason for one in tight] == [one.outputs[0].finish_reason for one in roomy]
    preempted = [one.outputs[0].metrics.preemptions for one in tight]
    assert sum(count > 0 for count in preempted) >= len(prompts) // 3
    assert [one.outputs[0].metrics.preemptions for one in roomy] == [0] * len(prompts)
    assert all(len(ids) >= 20 for ids in token_ids(tight))


def test_preemption_changes_no_logprob_stop_or_sample(model: Path) -> None:
    prompts = [list(range(10 + i, 40 + i)) for i in range(4)]
    params = [seeded(i, 50, n=3, logprobs=2, stop_token_ids=[100 + i, 120], presence_penalty=0.3) for i in range(4)]
    with open_llm(model) as llm:
        roomy = llm.generate(prompts, params)
    with open_llm(model, kv_memory=small_kv(13), check=True) as llm:
        tight = llm.generate(prompts, params)
    assert sum(one.metrics.preemptions for output in tight for one in output.outputs) > 0
    assert token_ids(tight) == token_ids(roomy)
    for a, b in zip(roomy, tight, strict=True):
        for one, other in zip(a.outputs, b.outputs, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert [entry.token for entry in other.logprobs] == other.token_ids
            assert [entry.logprob for entry in one.logprobs] == pytest.approx(
                [entry.logprob for entry in other.logprobs], abs=1e-4
            )


def test_streams_survive_preemption(model: Path) -> None:
    prompts = [list(range(10 + i, 40 + i)) for i in range(6)]
    with open_llm(model) as llm:
        want = [one.outputs[0].text for one in llm.generate(prompts, seeded(1, 50))]
    with open_llm(model, kv_memory=small_kv(9), check=True) as llm:
        said = [""] * 6
        for chunk in llm.stream(prompts, seeded(1, 50)):
            said[chunk.prompt] += chunk.text
    assert said == want
