"""Real, trained models say what they are known to say."""

from functools import cache
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from shoal.errors import ModelNotFound
from shoal.files.source import find_model

STORIES = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260K"
GOLDEN = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" "
    "Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she"
)


@cache
def default_model_is_there() -> bool:
    try:
        find_model(None)
    except ModelNotFound:
        return False
    return True


@pytest.mark.skipif(not STORIES.exists(), reason="the stories260K model is not on this machine")
def test_stories260k_writes_the_golden_story() -> None:
    with LLM(str(STORIES), dtype="float32") as llm:
        one = llm.generate([1], SamplingParams(temperature=0, max_tokens=200))[0].outputs[0]
    assert one.text.startswith(GOLDEN)


@pytest.mark.skipif(not default_model_is_there(), reason="the default model is not installed")
def test_smollm2_knows_the_capital_of_france() -> None:
    with LLM(kv_memory="256MiB") as llm:
        chat = [{"role": "user", "content": "What is the capital of France?"}]
        one = llm.generate(chat, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert "Paris" in one.text
    assert one.finish_reason == "stop"
