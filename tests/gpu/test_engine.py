"""The engine on a GPU: what comes out must not depend on graphs, neighbours, preemption, cache or layout.

Equality of tokens is checked in float32, where nothing but a real mistake tips the scales. For bfloat16 the rule is:
in transformers' float32 run of the same (bfloat16) weights, the token that Shoal chose falls behind the best one by at
most three times the largest error that transformers' own bfloat16 run makes in any score of the same sequence.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.params import SamplingParams
from shoal.core.request import Request
from tests.gpu.drive import ask, greedy, opened
from tests.models.test_families import MODELS, SIZES, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OUTPUT = 48
TRAFFIC_S = float(os.environ.get("SHOAL_TRAFFIC_S", "180"))


def ragged_prompts(count: int, seed: int, longest: int = 700) -> list[list[int]]:
    source = random.Random(seed)
    lengths = [1, longest, 2, 16, 17, 31, 33]
    lengths += [min(longest, int(source.lognormvariate(3.5, 1.2)) + 1) for _ in range(count)]
    return [[source.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in lengths[:count]]


@torch.inference_mode()
def scores(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Of transformers, for every token of the answer."""
    ids = torch.tensor([prompt + answer], device=model.device)
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


@pytest.mark.parametrize("name", ["llama", "llama-biases", "llama-tied", "mistral-window", "qwen2", "qwen3"])
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """One alone, then 33 together, whose number and lengths pass through many graphs."""
    assert name in MODELS
    model = saved(name, tmp_path).cuda()
    with opened(tmp_path, dtype="float32") as built:
        for count in (1, 33):
            prompts = ragged_prompts(count, seed=count)
            params = [greedy(OUTPUT - number) for number in range(count)]
            for prompt, answer in zip(prompts, ask(built, prompts, params).of(count), strict=True):
                assert answer == scores(model, prompt, answer).argmax(-1).tolist(), f"prompt of {len(prompt)}"


@pytest.mark.parametrize("together", [1, 33])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}), ("llama-biases", {}), ("qwen2", {}), ("qwen3", {}),
        ("llama", {"head_dim": 64}), ("qwen3", {"head_dim": 64}), ("mistral-window", {"head_dim": 64}),
    ],
)  # fmt: skip
def test_bfloat16_chooses_as_well_as_transformers(
    name: str, changes: dict[str, int], together: int, tmp_path: Path
) -> None:
    """Several requests, and each of a few alone: a pass with one row has kernels of its own, also for some heads."""
    model = saved(name, tmp_path, **changes).cuda()
    half = type(model)(model.config).to(device="cuda", dtype=torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    model.load_state_dict(half.state_dict())  # the same rounded weights, computed in float32
    prompts = ragged_prompts(max(together, 4), seed=5)
    with opened(tmp_path, dtype="bfloat16") as built:
        groups = [prompts[at : at + together] for at in range(0, len(prompts), together)]
        answers = [answer for group in groups for answer in ask(built, group, greedy(OUTPUT)).of(together)]
    same = []
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = scores(model, prompt, answer)
        error = (scores(half, prompt, answer) - wanted).abs().max()
        chosen = wanted.gather(1, torch.tensor(answer, device="cuda").unsqueeze(1)).squeeze(1)
        assert (wanted.max(-1).values - chosen).max() <= 3 * error
        same += (wanted.argmax(-1) == torch.tensor(answer, device="cuda")).tolist()
    assert np.mean(same) > 0.9


def test_preemption_and_prefix_cache_change_nothing(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    prompts = ragged_prompts(24, seed=2, longest=300)
    prompts += [[*prompt, 1, 2, 3] for prompt in prompts[:6]]
    wanted = None
    tight: dict[str, Any] = {"kv_memory": 70 * 16 * 512, "watermark": 0.0}
    swap = {**tight, "when_short": "swap", "host_kv_memory": 2**26}
    for options in (
        {"prefix_caching": False},
        tight,
        swap,
        {**swap, "when_short": "auto"},
        {"depth": 1},
        {"block_size": 32},
    ):
        with opened(tmp_path, dtype="float32", max_model_len=400, **options) as built:
            found = ask(built, prompts, greedy(OUTPUT))
            again = ask(built, prompts, greedy(OUTPUT))
            assert (found.preemptions > 0) == ("kv_memory" in options)
            assert (again.cached > 0) == ("prefix_caching" not in options)
            assert (found.blocks_in > 0) == ("host_kv_memory" in options)
        wanted = wanted or found.tokens
        assert found.tokens == wanted
        assert again.tokens == wanted


@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_the_padded_layout_gives_the_same_tokens(batching: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    prompts = ragged_prompts(12, seed=4, longest=150)
    with opened(tmp_path, dtype="float32") as built:
        wanted = ask(built, prompts, greedy(20)).tokens
    more = {"batching": batching, "layout": "padded", "prefill": "inline", "group_size": 4}
    with opened(tmp_path, dtype="float32", max_model_len=400, **more) as built:
        found = ask(built, prompts, greedy(20))
    assert found.tokens == wanted
    assert found.padded > 0


def test_draws_and_logprobs_do_not_depend_on_the_device_or_on_neighbours(tmp_path: Path) -> None:
    """Each way of sampling, mixed in one batch with greedy ones; against the CPU and against being alone."""
    saved("llama", tmp_path)
    prompts = ragged_prompts(14, seed=9, longest=120)
    ways: list[dict[str, Any]] = [
        {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}, {"repetition_penalty": 1.3},
        {"logprobs": 3}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}, {"logit_bias": {7: 3.0}},
        {"prompt_logprobs": 2, "temperature": 0.0},
    ]  # fmt: skip
    params = [
        SamplingParams(**{"temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "seed": 77 + number, **way})
        for number, way in enumerate(ways + ways[:4])
    ]
    with opened(tmp_path, dtype="float32", device="cpu") as built:
        wanted = ask(built, prompts, params)
    with opened(tmp_path, dtype="float32") as built:
        found = ask(built, prompts, params)
        alone = [ask(built, [prompt], [one]).tokens["0"] for prompt, one in zip(prompts, params, strict=True)]
    assert found.tokens == wanted.tokens
    assert alone == found.of(14)
    assert found.logprobs.keys() == wanted.logprobs.keys()
    for at, one in wanted.logprobs.items():
        assert found.logprobs[at].top_tokens == one.top_tokens
        assert found.logprobs[at].logprob == pytest.approx(one.logprob, abs=1e-3)
    assert found.prompt_logprobs.keys() == wanted.prompt_logprobs.keys() == {"9"}
    here, there = found.prompt_logprobs["9"][1], wanted.prompt_logprobs["9"][1]
    assert [one.logprob for one in here] == pytest.approx([one.logprob for one in there], abs=1e-3)


def test_damaged_weights_fail_their_requests_only(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with opened(tmp_path, dtype="float32", prefix_caching=False) as built:
        model = built.loop.executor.model  # type: ignore[attr-defined]
        model.embedding.values[7] = float("nan")
        for number, prompt in enumerate(([1, 2, 3], [1, 7, 3], [4, 5, 6])):
            built.loop.submit(Request(str(number), prompt, greedy(5), seed=1))
        ends = {}
        while not built.loop.idle:
            ends |= {end.id: end.error for end in built.loop.step().finished}
    assert ends["0"] == ends["2"] == ""
    assert "not finite" in ends["1"]


def test_random_traffic_with_the_integrity_check(tmp_path: Path) -> None:
    """Requests arrive, are aborted and preempted; each that ends by itself gives the tokens that it gives alone."""
    saved("llama", tmp_path)
    source = random.Random(1)
    known = ragged_prompts(40, seed=11, longest=250)
    outputs = [source.randint(1, 60) for _ in known]
    with opened(tmp_path, dtype="float32", max_model_len=400) as built:
        wanted = [ask(built, [prompt], greedy(most)).tokens["0"] for prompt, most in zip(known, outputs, strict=True)]
    until_s = time.monotonic() + TRAFFIC_S
    streams: dict[str, list[int]] = {}
    ended = aborted = preempted = arrived = 0
    swap = {"when_short": "swap", "host_kv_memory": 2**24, "watermark": 0.0}
    with opened(tmp_path, dtype="float32", max_model_len=400, kv_memory=150 * 16 * 512, **swap) as built:
        loop = built.loop
        while time.monotonic() < until_s or not loop.idle:
            while time.monotonic() < until_s and len(streams) < 60 and source.random() < 0.5:
                which = source.randrange(len(known))
                name = f"{which}/{arrived}"
                arrived += 1
                streams[name] = []
                loop.submit(Request(name, known[which], greedy(outputs[which]), seed=arrived))
            if streams and source.random() < 0.02:
                name = source.choice(list(streams))
                if loop.abort(name):
                    aborted += 1
            events = loop.step()  # checks every invariant
            preempted += len(events.preempted)
            for owner, token in zip(events.owners, events.tokens, strict=True):
                streams[owner].append(token)
            for end in events.finished:
                assert not end.error, end
                tokens = streams.pop(end.id)
                if end.reason.value != "abort":
                    assert tokens == wanted[int(end.id.split("/")[0])], end
                    ended += 1
    assert ended > 10 * TRAFFIC_S
    assert aborted
    assert preempted
