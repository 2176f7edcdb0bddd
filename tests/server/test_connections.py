"""Clients that go away, do not read, or send what they should not: over real sockets."""

import asyncio
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server import protocol
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import front, listening, raw_request, run

FOREVER = {"prompt": "x", "max_tokens": 10**6, "stream": True, "ignore_eos": True}


def endless() -> FakeClient:
    return FakeClient(lambda job, sample: [50] * min(job.params.max_tokens or 1, 10**6), tick_s=0.001)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def test_a_client_that_leaves_a_stream_ends_its_job() -> None:
    async def work() -> None:
        client = endless()
        app = front(client)
        async with listening(app) as port:
            async with connected(port) as (reader, writer):
                writer.write(raw_request("/v1/completions", FOREVER))
                await reader.readuntil(b"data: ")
                assert len(client.running) == 1
            await until(lambda: not client.running and not app.active)
            assert client.aborted == [client.submitted[0].id]
            assert not app.streams

    run(work)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_it_is_accepted_ends_its_jobs(stream: bool) -> None:
    async def work() -> None:
        client = FakeClient(tick_s=None)  # nothing ever happens
        app = front(client)
        async with listening(app) as port:
            async with connected(port) as (_, writer):
                writer.write(raw_request("/v1/completions", {"prompt": ["x", "y"], "stream": stream}))
                await until(lambda: len(client.running) == 2)
            await until(lambda: not client.running and not app.active)
            assert len(client.aborted) == 2

    run(work)


def test_a_client_that_leaves_an_answer_not_streamed_ends_its_job() -> None:
    async def work() -> None:
        client = endless()
        app = front(client)
        async with listening(app) as port:
            async with connected(port) as (_, writer):
                writer.write(raw_request("/v1/completions", {**FOREVER, "stream": False}))
                await until(lambda: bool(client.running))
            await until(lambda: not client.running and not app.active)

    run(work)


def test_a_client_that_does_not_read_is_disconnected_and_slows_no_other() -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 10**6, tick_s=0.0)
        app = front(client, slow_client_timeout_s=0.5, max_unsent_bytes=10**9)
        async with listening(app) as port:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(("127.0.0.1", port))
            slow.sendall(raw_request("/v1/completions", {**FOREVER, "logprobs": 5}))
            await until(lambda: any(stream.sending for stream in app.streams))
            async with connected(port) as (reader, writer):
                writer.write(raw_request("/v1/completions", {**FOREVER, "max_tokens": 50}, "connection: close"))
                assert (await reader.read()).count(b'"text":"P"') == 50  # while the other is stuck
            await until(lambda: not client.running and not app.active)
            assert client.submitted[0].id in client.aborted
            slow.close()

    run(work)


LONG = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "logprobs": 5}  # an answer of several 100 KB


def unread(port: int, request: bytes, buffer: int = 2048) -> socket.socket:
    """A client that asks and does not read."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect(("127.0.0.1", port))
    made.sendall(request)
    return made


@pytest.mark.parametrize("headers", [(), ("connection: close",)])
def test_a_whole_answer_that_is_not_read_is_disconnected_too(headers: tuple[str, ...], caplog: Any) -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 2000, tick_s=0.0)
        app = front(client, slow_client_timeout_s=1.0)
        async with listening(app) as port:
            began_s = time.monotonic()  # before the answer, however late this thread is
            slow = unread(port, raw_request("/v1/completions", LONG, *headers))
            await until(lambda: len(client.submitted) == 1 and not app.active)
            await until(lambda: "a client was disconnected: it has read nothing for 1 s" in caplog.text, limit_s=60)
            assert time.monotonic() - began_s > 0.9
            await asyncio.sleep(0.1)
            with suppress(ConnectionError):
                while slow.recv(10**6):  # what the kernels held; then the end, and not the whole answer
                    pass
            slow.close()
        assert caplog.text.count("a client was disconnected") == 1

    run(work)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_whole_answer_over_tls_that_is_not_read_is_disconnected_too(tmp_path: Path, caplog: Any) -> None:
    made = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost"
    subprocess.run(made.split(), cwd=tmp_path, check=True, capture_output=True)
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")

    def ask(port: int) -> ssl.SSLSocket:
        trusting = ssl.create_default_context(cafile=cert)
        trusting.check_hostname = False
        slow = trusting.wrap_socket(unread(port, b""))
        slow.sendall(raw_request("/v1/completions", LONG))
        return slow

    async def work() -> None:
        app = front(FakeClient(lambda job, sample: [50] * 2000, tick_s=0.0), slow_client_timeout_s=1.0)
        async with listening(app, ssl_certfile=cert, ssl_keyfile=key) as port:
            slow = await asyncio.to_thread(ask, port)
            await until(lambda: "a client was disconnected: it has read nothing for 1 s" in caplog.text, limit_s=60)
            slow.close()

    run(work)


def test_a_whole_answer_that_is_read_slowly_but_steadily_is_not_disconnected(caplog: Any) -> None:
    """So slowly that the kernel takes nothing more from the server for longer than the limit."""

    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 2000, tick_s=0.0)
        app = front(client, slow_client_timeout_s=3.0)
        async with listening(app) as port:
            slow = unread(port, raw_request("/v1/completions", LONG, "connection: close"), 8192)
            slow.setblocking(False)
            loop, parts = asyncio.get_running_loop(), list[bytes]()
            while part := await loop.sock_recv(slow, 5_000):
                parts.append(part)
                await asyncio.sleep(0.1)
            slow.close()
        assert len(json.loads(body_of(b"".join(parts)))["choices"][0]["logprobs"]["tokens"]) == 2000
        assert len(parts) > 35, "it was read faster than the limit, and shows nothing"
        assert "disconnected" not in caplog.text

    run(work)


def test_a_connection_that_was_read_late_is_used_again(caplog: Any) -> None:
    """What was unread once is forgotten: a later answer has all its time."""

    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 2000, tick_s=0.0)
        app = front(client, slow_client_timeout_s=4.0)
        async with listening(app) as port, connected(port) as (reader, writer):
            for _ in range(3):
                writer.write(raw_request("/v1/completions", LONG))
                await until(lambda: bool(client.submitted) and not app.active)
                await asyncio.sleep(0.5)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                assert len(await reader.readexactly(length)) == length
                client.submitted.clear()
            await asyncio.sleep(4.5)  # longer than the limit, with nothing to read
            writer.write(raw_request("/v1/completions", {"prompt": "x", "max_tokens": 1}))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert "disconnected" not in caplog.text

    run(work)


def test_a_stuck_stream_may_not_pile_up_more_than_its_share() -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 10**6, tick_s=0.0)
        app = front(client, slow_client_timeout_s=10**6, max_unsent_bytes=50_000)
        async with listening(app) as port:
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(("127.0.0.1", port))
            slow.sendall(raw_request("/v1/completions", {**FOREVER, "logprobs": 5}))
            await until(lambda: bool(client.aborted))
            await until(lambda: not app.active)
            slow.close()

    run(work)


def test_a_client_that_reads_slowly_but_steadily_is_served() -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 2000, tick_s=0.0)
        app = front(client, slow_client_timeout_s=5)
        async with listening(app) as port, connected(port) as (reader, writer):
            writer.write(raw_request("/v1/completions", {**FOREVER, "logprobs": 5}, "connection: close"))
            text = b""
            while part := await reader.read(100_000):
                text += part
                await asyncio.sleep(0.005)
            assert b"[DONE]" in text
            assert not client.aborted

    run(work)


def test_a_connection_is_used_again() -> None:
    async def work() -> None:
        async with listening(front()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for stream in (False, True, False):
                answer = await http.post("/v1/completions", json={"prompt": "a b", "stream": stream})
                assert answer.status_code == 200
            assert (await http.head("/health")).status_code == 200

    run(work)


def test_a_head_without_end_is_refused() -> None:
    async def work() -> None:
        async with listening(front(max_head_bytes=4096)) as port, connected(port) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nx: ")
            for _ in range(100):
                writer.write(b"y" * 10_000)
                try:
                    await writer.drain()
                except ConnectionError:
                    break
            with suppress(ConnectionError):  # the refusal was lost with the connection; it ended, and that is the point
                assert b" 431 " in await reader.readline()

    run(work)


def test_a_client_that_never_finishes_its_request_is_disconnected() -> None:
    async def work() -> None:
        async with listening(front(slow_client_timeout_s=0.3)) as port:
            for start in (b"", b"GET /health HTTP/1.1\r\nhost:"):
                async with connected(port) as (reader, writer):
                    writer.write(start)
                    assert await ended(reader) == b""
            async with connected(port) as (reader, writer):
                writer.write(raw_request("/v1/completions", FOREVER)[:-5])
                assert (await ended(reader)).startswith(b"HTTP/1.1 408 ")

    run(work)


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_a_second_request_before_the_first_answer_ends_the_connection_after_it() -> None:
    async def work() -> None:
        client = FakeClient(tick_s=0.01)
        app = front(client)
        async with listening(app) as port, connected(port) as (reader, writer):
            one = raw_request("/v1/completions", {"prompt": "a b c"})
            writer.write(one + one)
            answers = await reader.read()
            assert answers.count(b"HTTP/1.1 200") == 1
            assert len(client.submitted) == 1

    run(work)


def test_a_client_that_pipelines_and_leaves_ends_its_job() -> None:
    async def work() -> None:
        client = endless()
        app = front(client)
        async with listening(app) as port:
            async with connected(port) as (_, writer):
                one = raw_request("/v1/completions", {**FOREVER, "stream": False})
                writer.write(one + one)
                await until(lambda: bool(client.running))
            await until(lambda: not client.running and not app.active)

    run(work)


def test_garbage_on_a_connection_harms_no_other() -> None:
    async def work() -> None:
        app = front()
        async with listening(app) as port:
            for garbage in (
                b"\x16\x03\x01\x02\x00",
                b"GET\r\n\r\n",
                b"\r\n\r\n\r\n",
                b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
            ):
                async with connected(port) as (_, writer):
                    writer.write(garbage)
                    await writer.drain()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                assert (await http.get("/health")).status_code == 200

    run(work)


def test_on_shutdown_answers_under_way_are_finished() -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 30, tick_s=0.01)
        app = front(client)
        async with httpx.AsyncClient() as http:
            async with listening(app) as port:
                url = f"http://127.0.0.1:{port}/v1/completions"
                asking = asyncio.create_task(http.post(url, json={"prompt": "x", "max_tokens": 30}))
                await until(lambda: bool(client.running))
            answer = await asking
            assert answer.json()["usage"]["completion_tokens"] == 30

    run(work)


def test_a_hundred_streams_with_random_leavers_leave_nothing_behind() -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 100, tick_s=0.001)
        app = front(client)

        async def one(port: int, number: int) -> int:
            async with connected(port) as (reader, writer):
                body: dict[str, Any] = {"prompt": f"{number}", "max_tokens": 100, "stream": number % 4 > 0}
                writer.write(raw_request("/v1/completions", body, "connection: close"))
                if number % 3 == 0:
                    await asyncio.sleep(number / 2000)
                    return 0
                text = await reader.read()
                return (
                    text.count(b'"text":"P"')
                    if body["stream"]
                    else json.loads(body_of(text))["usage"]["completion_tokens"]
                )

        async with listening(app) as port:
            counts = await asyncio.gather(*(one(port, number) for number in range(100)))
            assert set(counts) == {0, 100}
            await until(lambda: not client.running and not app.active)
        assert not app.streams

    run(work)


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def test_what_is_not_http_is_a_400_in_openais_shape() -> None:
    async def work() -> None:
        async with listening(front()) as port:
            chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            for garbage in (b"\x00\x01\r\n\r\n", chunked + b"transfer-encoding: chunked\r\n\r\nzz\r\n"):
                async with connected(port) as (reader, writer):
                    writer.write(garbage)
                    answer = await reader.read()
                    assert answer.startswith(b"HTTP/1.1 400 ")
                    assert json.loads(body_of(answer))["error"]["message"]

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_waiting_client_gets_an_error_when_the_server_stops(stream: bool) -> None:
    async def work() -> None:
        client = endless()
        app = front(client)
        async with listening(app) as port, httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/v1/completions"
            asking = asyncio.create_task(http.post(url, json={**FOREVER, "stream": stream}))
            await until(lambda: any(call.outputs.output_tokens for call in app.calls) and len(app.streams) == stream)
            app.end_all()
            answer = await asking
            assert not client.running
        if stream:
            assert '"code":"draining"' in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert answer.status_code == 503

    run(work)


# ---- clients that have finished sending ----------------------------------------------------------------------------


def ask_and_finish_sending(port: int, body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """The body of the answer to a client that shuts down its sending side right after its request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    connection.sock.shutdown(socket.SHUT_WR)
    answer = connection.getresponse()
    assert answer.status == 200
    text = answer.read()
    connection.close()
    return text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_has_finished_sending_still_gets_its_answer(stream: bool) -> None:
    async def work() -> None:
        client = FakeClient(lambda job, sample: [50] * 60, tick_s=0.01)
        app = front(client)
        async with listening(app) as port:
            body = {"prompt": "x", "max_tokens": 60, "stream": stream, "ignore_eos": True}
            text = await asyncio.to_thread(ask_and_finish_sending, port, body)
            assert text.count(b'"text":"P"') == 60 if stream else json.loads(text)["usage"]["completion_tokens"] == 60
            assert not client.aborted
            await until(lambda: not app.active)

    run(work)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_finishes_sending_and_leaves_later_ends_its_job(stream: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(protocol, "PROBE_S", 0.5)

    async def work() -> None:
        client = FakeClient(tick_s=None)  # nothing ever happens: only the server can find out
        app = front(client)
        async with listening(app) as port:
            made = unread(port, raw_request("/v1/completions", {**FOREVER, "stream": stream}))
            made.shutdown(socket.SHUT_WR)
            await until(lambda: bool(client.running))
            await asyncio.sleep(1)
            assert client.running, "it may still read its answer"
            made.close()
            await until(lambda: not client.running and not app.active)
            assert len(client.aborted) == 1

    run(work)


def test_a_client_that_finishes_sending_in_the_middle_of_its_body_is_gone() -> None:
    async def work() -> None:
        client = FakeClient()
        async with listening(front(client, slow_client_timeout_s=60)) as port, connected(port) as (reader, writer):
            writer.write(raw_request("/v1/completions", FOREVER)[:-5])
            writer.write_eof()
            assert await ended(reader) == b""
            assert not client.submitted

    run(work)


# ---- answers that come before the end of a body ---------------------------------------------------------------------


@pytest.mark.parametrize("why", ["too large", "no memory", "not HTTP"])
def test_a_client_that_is_still_sending_gets_its_answer_and_no_reset(why: str) -> None:
    async def work() -> None:
        app = front(FakeClient(), max_body_bytes=2**22, max_body_memory_bytes=2**20 if why == "no memory" else 2**25)
        size = 2**22 + 1 if why == "too large" else 2**22
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {size}\r\n\r\n" if why != "not HTTP" else "Transfer-Encoding: chunked\r\n\r\n"
        async with listening(app) as port, connected(port) as (reader, writer):
            writer.write(head.encode())
            for _ in range(62):  # not all of it, so that there is always more to come
                writer.write(b"x" * 2**16)
                await writer.drain()
                await asyncio.sleep(0.001)
            answer = await asyncio.wait_for(reader.read(), 30)
            assert int(answer.split()[1]) == {"too large": 413, "no memory": 503, "not HTTP": 400}[why]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]

    run(work)


def test_a_client_that_waits_to_be_invited_and_then_sends_nonsense(caplog: pytest.LogCaptureFixture) -> None:
    """By the time the body is asked for, the connection is at its end."""

    async def work() -> None:
        head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += "Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with listening(front(FakeClient())) as port, connected(port) as (reader, writer):
            writer.write(head.encode() + b"nonsense\r\n")
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.split()[1] == b"400"
            assert answer.count(b"HTTP/1.1") == 1

    run(work)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_large_head_that_is_not_http_gets_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with listening(front(FakeClient(), max_head_bytes=1000)) as port, connected(port) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 2000 + b"\r\nb\x00ad header\r\n")
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.count(b"HTTP/1.1") == 1

    run(work)
    assert not [record for record in caplog.records if record.exc_info]


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 2**16)
        await writer.drain()
        await asyncio.sleep(0.01)


def test_the_rest_of_a_body_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.2)

    async def work() -> None:
        app = front(FakeClient(), max_body_bytes=2**20)
        head = f"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {2**40}\r\n\r\n"
        async with listening(app) as port, connected(port) as (reader, writer):
            writer.write(head.encode())
            assert b" 413 " in await asyncio.wait_for(reader.read(), 30)
            with pytest.raises(ConnectionError):
                await send_for_ever(writer)

    run(work)
