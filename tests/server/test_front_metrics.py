"""Fronts that report each other's numbers: over real sockets, with some that are dead, stuck or broken."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.obs.metrics import FrontMetrics
from shoal.server import front_metrics
from shoal.server.app import Front
from shoal.server.front_metrics import SocketFronts
from tests.server.fronts import ask_async, front, run


@asynccontextmanager
async def joined(folder: Path, *numbers: int) -> AsyncIterator[list[Front]]:
    """Fronts that find each other in this folder."""
    async with AsyncExitStack() as stack:
        fronts = []
        for name in (f"front-{number}" for number in numbers):
            app = front(metrics=FrontMetrics(name))
            app.other_fronts = known = SocketFronts(folder, name, app.tell)
            await stack.enter_async_context(known.open())
            fronts.append(app)
        yield fronts


async def scraped(app: Front) -> dict[str, float]:
    """Front → /health requests that it answered, as this front reports it."""
    answer = await ask_async(app, "GET", "/metrics")
    assert answer.status_code == 200
    return {
        sample.labels["front"]: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == "shoal_http_requests_total" and sample.labels["route"] == "/health"
    }


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No front is left out because it was late."""
    monkeypatch.setattr(front_metrics, "WAIT_S", 60.0)


def test_any_front_reports_the_numbers_of_all(tmp_path: Path, patient: None) -> None:
    async def work() -> None:
        async with joined(tmp_path, 0, 1, 2) as fronts:
            for number, app in enumerate(fronts):
                for _ in range(number + 1):
                    await ask_async(app, "GET", "/health")
            for app in fronts:
                assert await scraped(app) == {"front-0": 1, "front-1": 2, "front-2": 3}

    run(work)


def test_a_front_that_is_gone_is_left_out_and_one_that_comes_back_is_there_again(tmp_path: Path, patient: None) -> None:
    async def work() -> None:
        async with joined(tmp_path, 0) as [here]:
            await ask_async(here, "GET", "/health")
            async with joined(tmp_path, 1) as [gone]:
                await ask_async(gone, "GET", "/health")
                assert await scraped(here) == {"front-0": 1, "front-1": 1}
            (tmp_path / "front-1.front").touch()  # the file of a front that was killed
            assert await scraped(here) == {"front-0": 1}
            async with joined(tmp_path, 1) as [again]:
                await ask_async(again, "GET", "/health")
                assert await scraped(here) == {"front-0": 1, "front-1": 1}

    run(work)


def test_a_front_that_is_stuck_or_broken_holds_no_scrape_up(tmp_path: Path) -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'{"name": "front-1",')
            await ended.wait()
            writer.close()

        async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b" " * 2 * front_metrics.MOST_BYTES)
            writer.close()

        async with joined(tmp_path, 0) as [app]:
            await ask_async(app, "GET", "/health")
            servers = [
                await asyncio.start_unix_server(serve, tmp_path / f"front-{number}.front")
                for number, serve in enumerate((stuck, broken), 1)
            ]
            began_s = time.monotonic()
            assert await scraped(app) == {"front-0": 1}
            assert time.monotonic() - began_s < front_metrics.WAIT_S + 30, "it does not wait for a stuck front"
            ended.set()
            for server in servers:
                server.close()

    run(work)


def test_a_front_without_room_for_its_socket_serves_all_the_same(tmp_path: Path) -> None:
    async def work() -> None:
        async with joined(tmp_path / ("long" * 40), 0) as [app]:
            await ask_async(app, "GET", "/health")
            assert await scraped(app) == {"front-0": 1}

    run(work)
