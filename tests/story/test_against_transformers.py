"""Whole runs against transformers: 64 greedy tokens of every family, in ragged batches of 1 to 33 requests.

Greedy equality is checked by teacher forcing: transformers reads prompt and answer in one forward pass, and every
answer token must be its first choice at that place.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import LLM, SamplingParams
from tests.models.test_families import MODELS, SIZES, saved
from tests.story.models import open_llm, reference, save_model

OUTPUT = 64


def ragged_prompts(count: int, seed: int) -> list[list[int]]:
    """Lengths from 1 to 700, the ends included, most of them short."""
    source = random.Random(seed)
    lengths = [1, 700, 2, 16, 17, 31, 33]
    lengths += [min(700, int(source.lognormvariate(3.5, 1.2)) + 1) for _ in range(count)]
    return [[source.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in lengths[:count]]


@torch.inference_mode()
def first_choices(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", kv_memory="8MiB", max_num_batched_tokens=200, check=True) as llm:
        for count in (1, 33):
            prompts = ragged_prompts(count, seed=count)
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                answer = output.outputs[0].token_ids
                assert len(answer) == OUTPUT
                assert answer == first_choices(model, prompt, answer), f"{name}, prompt of {len(prompt)}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(dtype: str, tmp_path: Path) -> None:
    """A 16-bit run picks tokens that a float32 model finds nearly as good as its own first choice."""
    model = saved("llama", tmp_path)
    prompts = ragged_prompts(5, seed=3)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), dtype=dtype, kv_memory="32MiB") as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            answer = output.outputs[0].token_ids
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            own = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
            assert (logits.max(dim=-1).values - own).max() < 0.15


@pytest.mark.filterwarnings("ignore")
def test_a_tied_config_beside_an_lm_head_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers uses the lm_head of the file, and says so."""
    save_model(tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    prompts, params = [[7, 8, 9], [20] * 12], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with open_llm(tmp_path) as llm:
        outputs = llm.generate(prompts, params)
    assert "ties lm_head to the embedding" in caplog.text
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert answer == first_choices(reference(tmp_path), prompt, answer)
