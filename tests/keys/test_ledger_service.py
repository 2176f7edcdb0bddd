"""The ledger over its real socket: several fronts, one that dies, a service that is away, a socket that is removed."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shoal.core.clock import VirtualClock
from shoal.errors import BadConfig, BadParameter, LedgerDown, RateLimited
from shoal.keys import ledger_client, ledger_service
from shoal.keys.ledger import Demand
from shoal.keys.ledger_client import LedgerClient, OpenReservation
from shoal.keys.ledger_service import LedgerService
from shoal.keys.limits import TenantLimits

LIMITS = {"free": TenantLimits(), "one": TenantLimits(max_concurrent=1), "slow": TenantLimits(None, 100)}
SMALL = Demand(10, 1, 10)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def service(tmp_path: Path, clock: VirtualClock) -> Iterator[LedgerService]:
    made = LedgerService(tmp_path, LIMITS.__getitem__, clock)
    made.start()
    yield made
    made.stop()


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[LedgerClient]:
    client = LedgerClient(folder, LIMITS.__getitem__)
    try:
        yield client
    finally:
        await client.close()


def accepts(address: Path) -> bool:
    """Whether connections are accepted there: a socket's file is there a little earlier."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(address)) == 0


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await work()

    asyncio.run(whole())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


def test_limits_hold_over_all_fronts_together(service: LedgerService, tmp_path: Path) -> None:
    async def work() -> None:
        async with connected(tmp_path) as first, connected(tmp_path) as second:
            held = await first.reserve("one", SMALL)
            with pytest.raises(RateLimited, match="may have 1 at once") as refused:
                await second.reserve("one", SMALL)
            assert refused.value.retry_after_s == 1.0
            with pytest.raises(BadParameter, match="is 2, but this key may have 1 requests at once"):
                await second.reserve("one", Demand(10, 2, 20))
            held.settle(15)
            held.settle(15)
            await until(lambda: len(service.ledger) == 0)
            await second.reserve("one", SMALL)

    run(work)


def test_a_key_without_limits_needs_no_ledger(tmp_path: Path) -> None:
    async def work() -> None:
        async with connected(tmp_path) as client:
            reservation = await client.reserve("free", SMALL)
            reservation.follow(lambda: 5)
            reservation.settle(20)

    run(work)


def test_running_calls_are_reported_together_and_a_front_that_dies_pays_for_what_it_reported(
    service: LedgerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_client, "REPORT_S", 0.01)

    async def work() -> None:
        async with connected(tmp_path) as doomed:
            reservation = await doomed.reserve("slow", Demand(10, 1, 500))
            assert isinstance(reservation, OpenReservation)
            reservation.follow(lambda: 300)
            await until(lambda: service.ledger._accounts["slow"].used == 300)
        await until(lambda: not service.ledger._accounts["slow"].calls)
        async with connected(tmp_path) as other:
            with pytest.raises(RateLimited) as refused:
                await other.reserve("slow", SMALL)
            assert refused.value.retry_after_s == pytest.approx((300 + 20 - 100) * 60 / 100)

    run(work)


def test_a_tenant_that_owes_nothing_is_forgotten(
    service: LedgerService, tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_service, "SWEEP_S", 0.01)

    async def work() -> None:
        async with connected(tmp_path) as client:
            (await client.reserve("slow", SMALL)).settle(20)
            await until(lambda: bool(service.ledger._accounts) and not service.ledger._accounts["slow"].calls)
            clock.advance(3600.0)
            await until(lambda: len(service.ledger) == 0)

    run(work)


def test_without_an_answer_it_is_a_503_with_a_time_to_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger_client, "ANSWER_S", 0.2)
    heard: list[bytes] = []

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while line := await reader.readline():
                heard.append(line)

    async def work() -> None:
        async with connected(tmp_path) as client:
            with pytest.raises(LedgerDown) as refused:
                await client.reserve("one", SMALL)
            assert refused.value.retry_after_s == ledger_client.RETRY_S
            server = await asyncio.start_unix_server(deaf, tmp_path / ledger_service.ADDRESS)
            await client._connect()  # the time limit is for the answer here
            with pytest.raises(LedgerDown):
                await client.reserve("one", SMALL)
            await until(lambda: len(heard) == 2)
            assert heard[1] == b'{"settle": ["2", 0]}\n', "in case that it was only slow"
            server.close()

    run(work)
    assert "no answer within 0.2 s" in caplog.text


def test_a_connection_that_breaks_is_made_again(service: LedgerService, tmp_path: Path) -> None:
    async def work() -> None:
        async with connected(tmp_path) as client:
            held = await client.reserve("one", SMALL)
            assert client._writer is not None
            client._writer.write(b"this is not JSON\n")  # the service closes the connection
            await until(lambda: client._writer is None)
            held.settle(20)  # the ledger has settled it
            await client.reserve("one", SMALL)

    run(work)


def test_a_socket_that_was_removed_comes_back(
    service: LedgerService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_service, "SWEEP_S", 0.01)

    async def work() -> None:
        async with connected(tmp_path) as old, connected(tmp_path) as new:
            held = await old.reserve("one", SMALL)
            service.path.unlink()
            await until(lambda: accepts(service.path))
            with pytest.raises(RateLimited):
                await new.reserve("one", SMALL)
            held.settle(20)
            await until(lambda: len(service.ledger) == 0)
            await new.reserve("one", SMALL)

    run(work)


def test_a_folder_that_can_hold_no_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="TMPDIR"):
        LedgerService(tmp_path / ("x" * 60) / ("x" * 60), LIMITS.__getitem__).start()
