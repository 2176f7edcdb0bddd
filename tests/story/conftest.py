"""Models are saved once for the whole session; one engine is shared by the tests that do not change its options."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from shoal import LLM
from tests.story.models import open_llm, reference, save_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def hf(model: Path) -> LlamaForCausalLM:
    return reference(model)


@pytest.fixture(scope="session")
def llm(model: Path) -> Iterator[LLM]:
    with open_llm(model, check=True) as opened:
        yield opened
