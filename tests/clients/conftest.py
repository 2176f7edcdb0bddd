"""A server for other people's clients: a random model, which can be held to anything by a grammar."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.installed import FOLDER
from tests.story.models import save_model
from tests.story_server.servers import SMALL, Server, running


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not FOLDER.is_dir():
        pytest.skip("no clients are installed; `make test-clients` does that")
    return save_model(tmp_path_factory.mktemp("clients") / "tiny", max_position_embeddings=32768)


@pytest.fixture(scope="package")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients-server")
    with running(folder, model, *SMALL, "--max-model-len", "8192", "--seed", "1") as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_left(server: Server) -> Iterator[None]:
    """Whatever a client did, the server is idle and healthy afterwards."""
    yield
    server.wait_until_idle()
    assert server.health() == 200
