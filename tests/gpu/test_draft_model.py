"""A draft model on a GPU: its own graphs and KV beside the model's; the tokens are those without it.

Equality is checked in float32, as in test_drafts.py.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import build_draft
from shoal.build import Built
from shoal.core.params import SamplingParams
from tests.gpu.drive import Answers, ask, greedy, opened
from tests.gpu.test_drafts import WAYS, of_all_ways
from tests.gpu.test_engine import ragged_prompts
from tests.models.test_families import SIZES, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNT = 12
OPTIONS: dict[str, Any] = {"dtype": "float32", "draft_tokens": 5}


def always_asked(built: Built) -> Counter[str]:
    """What passes take stays unknown, so that the draft model is asked in each. Returns what will be counted: draft
    tokens, those that were accepted, and passes whose draft tokens stayed on the device."""
    policy, counts = built.loop.scheduler.policies.drafts, Counter[str]()
    policy.times.learn = lambda *passed: None  # type: ignore[attr-defined]
    step = built.loop.step

    def counting(*args: Any) -> Any:
        events = step(*args)
        counts["proposed"] += events.proposed.get("draft", 0)
        counts["accepted"] += events.accepted.get("draft", 0)
        return events

    def begun(ids: Any, suspects: bool) -> None:
        newest = built.loop.scheduler.flights[-1]
        counts["stayed"] += any(draft.on_device for draft in newest.drafts.values())

    built.loop.step = counting  # type: ignore[method-assign]
    built.loop.on_begin = begun
    return counts


def params() -> list[SamplingParams]:
    return [replace(one, max_tokens=40, ignore_eos=True) for one in of_all_ways()]


def expected(folder: Path, prompts: list[list[int]]) -> Answers:
    with opened(folder, dtype="float32") as built:
        return ask(built, prompts, params())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("more", [{}, {"when_short": "swap", "host_kv_memory": "16MiB"}])
def test_a_draft_model_changes_no_token(depth: int, more: dict[str, Any], tmp_path: Path) -> None:
    """Its first layer, and another model; all ways of sampling, prompts beside decodes, and little memory."""
    model, other = tmp_path / "model", tmp_path / "other"
    saved("llama", model)
    saved("qwen2", other)
    prompts = ragged_prompts(COUNT, seed=3, longest=60)
    wanted = expected(model, prompts)
    for draft in ({"draft_layers": 1}, {"draft_model": str(other)}):
        block = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * 16 * 4 * 16
        tight = {"kv_memory": 2 * block * (33 * 2 + 16), "max_model_len": 128}
        with opened(model, speculate="draft", depth=depth, **OPTIONS, **draft, **tight, **more) as built:
            counts = always_asked(built)
            found = ask(built, prompts, params())
        assert found.of(COUNT) == wanted.of(COUNT)
        assert counts["proposed"] > 100


def test_a_draft_model_that_is_the_model_is_always_right(tmp_path: Path) -> None:
    """Another copy of the same weights, greedy and seeded: every draft token is accepted, up to rounding."""
    model, same = tmp_path / "model", tmp_path / "same"
    saved("llama", model)
    saved("llama", same)
    prompts = ragged_prompts(COUNT, seed=5, longest=60)
    for temperature in (0.0, 1.0):
        asked = [greedy(40, temperature=temperature, seed=number) for number in range(COUNT)]
        with opened(model, speculate="draft", draft_model=str(same), depth=2, **OPTIONS) as built:
            counts = always_asked(built)
            ask(built, prompts, asked)
        assert counts["proposed"] > 100
        assert counts["accepted"] > 0.95 * counts["proposed"], counts


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stay", [True, False])
def test_tokens_that_stay_on_the_device_change_none(
    depth: int, stay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ways of sampling that do not need drafts on the host; answers end anywhere, also in the middle of a draft;
    little memory. And the same with tokens that come to the host."""
    monkeypatch.setitem(build_draft.STAY_ON_DEVICE, "cuda", stay)
    model, same = tmp_path / "model", tmp_path / "same"
    saved("llama", model)
    saved("llama", same)
    asked = [one for one, way in zip(params(), WAYS, strict=True) if not any("penalty" in name for name in way)]
    prompts = ragged_prompts(len(asked), seed=9, longest=60)
    ends = frozenset(range(0, SIZES["vocab_size"], 20))
    with opened(model, dtype="float32") as built:
        wanted = ask(built, prompts, asked, stop_ids=ends).of(len(asked))
    assert any(len(tokens) < 40 for tokens in wanted)
    block = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * 16 * 4 * 16
    tight = {"kv_memory": 2 * block * (33 * 2 + 16), "max_model_len": 128}
    for draft in ({"draft_layers": 1}, {"draft_model": str(same)}):
        with opened(model, speculate="draft", depth=depth, **OPTIONS, **draft, **tight) as built:
            counts = always_asked(built)
            found = ask(built, prompts, asked, stop_ids=ends).of(len(asked))
        assert found == wanted
        assert counts["proposed"] > 50
        assert bool(counts["stayed"]) == stay
        if "draft_model" in draft:
            assert counts["accepted"] > 0.5 * counts["proposed"], counts  # some come after an end


def test_it_is_asked_by_what_passes_take(tmp_path: Path) -> None:
    """In bfloat16, with the policy as it is: the answers come, whether it is asked or not."""
    saved("llama", tmp_path)
    with opened(tmp_path, speculate="suffix+draft", draft_layers=1, dtype="bfloat16") as built:
        found = ask(built, ragged_prompts(COUNT, seed=7, longest=60), greedy(60))
    assert all(len(tokens) == 60 for tokens in found.of(COUNT))
