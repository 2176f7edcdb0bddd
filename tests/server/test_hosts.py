"""The Host header of a server without keys: a page of another site must not reach it by DNS rebinding."""

import asyncio

import pytest

from tests.server.fronts import ask, error_of, front, listening, run

OWN = ["front", "front:8000", "FRONT.", "localhost", "localhost:8000", "app.localhost", "127.0.0.1:8000", "127.9.9.9"]
OWN += ["[::1]", "[::1]:8000", "192.168.0.7:80", "[fe80::1]"]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "frontier",
    "",
    "[x]",
]


def status(host: str, path: str = "/v1/models", **how: object) -> int:
    return ask(front(**how), "GET", path, headers={"host": host}).status_code  # type: ignore[arg-type]


@pytest.mark.parametrize("host", OWN)
def test_a_server_answers_to_its_own_names_and_to_addresses(host: str) -> None:
    assert status(host) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_is_refused_with_what_to_change(host: str) -> None:
    answer = ask(front(), "GET", "/v1/models", headers={"host": host})
    error = error_of(answer, 421)
    assert "--allowed-hosts" in error["message"]
    assert error["code"] == "host_not_allowed"


@pytest.mark.parametrize("path", ["/", "/docs", "/metrics", "/debug/requests", "/nothing"])
def test_nothing_but_health_is_shown_under_a_foreign_name(path: str) -> None:
    assert status("evil.example", path) == 421
    assert status("evil.example", "/health") == 200  # what a load balancer asks, under any name


def test_names_can_be_allowed() -> None:
    assert status("llm.example:8000", allowed_hosts=("llm.example",)) == 200
    assert status("evil.example", allowed_hosts=("llm.example",)) == 421
    assert status("evil.example", allowed_hosts=("*",)) == 200


def test_with_keys_the_host_is_not_checked() -> None:
    answer = ask(
        front(api_keys=[("alice", "sk-12345678")]),
        "GET",
        "/v1/models",
        headers={"host": "evil.example", "authorization": "Bearer sk-12345678"},
    )
    assert answer.status_code == 200


def test_a_request_without_a_host_comes_from_no_browser_and_is_answered() -> None:
    async def work() -> None:
        async with listening(front()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/models HTTP/1.0\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    run(work)
