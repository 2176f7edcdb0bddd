"""A tiny model, and a copy of it that a test may damage."""

from pathlib import Path

import pytest

from tests.story.models import copy, save_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return copy(model, tmp_path / "copy")
