"""A browser, and a small server with the pages: shared by the tests of pages. They start when a test asks for them."""

import os
from collections.abc import Iterator

import pytest

from tests.server.chromium import Browser, Tab
from tests.server.page_server import FakeServer, ready


@pytest.fixture(scope="session")
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def fake(fake_server: FakeServer) -> FakeServer:
    fake_server.reset()
    return fake_server


@pytest.fixture
def base_url(request: pytest.FixtureRequest) -> str:
    given = os.environ.get("SHOAL_PAGES_URL", "").rstrip("/")
    return given or request.getfixturevalue("fake").url


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for all: each tab has a storage of its own."""
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser, base_url: str) -> Iterator[Tab]:
    tab = browser.open(f"{base_url}/")
    ready(tab)
    yield tab
    tab.close()
