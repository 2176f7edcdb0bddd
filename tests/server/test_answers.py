"""Large answers: how many logprobs are allowed, that composing them is off the event loop, and their bytes."""

import asyncio
import json
import threading
from typing import Any

import httpx
import msgspec
import pytest

from shoal.core import turns
from shoal.core.job import EngineInfo
from shoal.server import answer_memory, logprobs, whole
from shoal.server.answer_memory import AnswerMemory
from shoal.server.answer_size import MOST_ENTRIES, MOST_EVENT_ENTRIES
from shoal.server.app import Front
from shoal.server.dialects.chat import ChatAnswer
from shoal.server.dialects.completions import CompletionAnswer
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import ask_async, chat, complete, error_of, events, front, listening, raw_request, run

LARGE = EngineInfo(epoch=0, max_model_len=131_072, vocab_size=422, kv_tokens=10**6, dtype="float32", device="cpu")


def talking(tokens: int = 10**6, tick_s: float | None = 0.0) -> FakeClient:
    """An engine with a long context that never ends an answer by itself."""
    client = FakeClient(lambda job, sample: [50] * min(job.params.max_tokens or tokens, tokens), tick_s=tick_s)
    client._info = LARGE
    return client


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_samples_times_tokens_times_logprobs_are_bounded() -> None:
    client = talking()
    error = error_of(complete(front(client), prompt="Once", max_tokens=400, n=128, logprobs=64, ignore_eos=True), 400)
    for number in ("3328000", "128", "400", "65", str(MOST_ENTRIES), "stream"):
        assert number in error["message"]
    assert error["param"] == "logprobs"
    error_of(chat(front(client), max_tokens=400, n=128, logprobs=True, top_logprobs=64), 400)
    error_of(complete(front(client), prompt=[[7] * 500] * 100, logprobs=64, echo=True, max_tokens=1), 400)
    assert not client.submitted


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 4096, "logprobs": 20},
        {"max_tokens": 131_000, "logprobs": 0},
        {"max_tokens": 400, "n": 128, "logprobs": 5},
        {"max_tokens": 4096, "best_of": 128},
        {"max_tokens": 4096, "n": 128},
        {"max_tokens": 400, "n": 128, "logprobs": 64, "stream": True},
        {"prompt": [[7] * 500] * 100, "max_tokens": 1, "logprobs": 5, "echo": True},
    ],
)
def test_ordinary_requests_are_not_refused(body: dict[str, Any]) -> None:
    client = talking(tokens=2)
    assert complete(front(client), **{"prompt": "Once", **body}).status_code == 200


def test_the_context_bounds_an_answer_too() -> None:
    assert complete(front(FakeClient()), prompt="x", max_tokens=10**6, logprobs=20).status_code == 200  # 512 tokens


def test_an_echoed_prompt_with_many_logprobs_is_not_streamed() -> None:
    body = {"prompt": [7] * (MOST_EVENT_ENTRIES // 10), "max_tokens": 1, "echo": True, "stream": True}
    assert events(complete(front(talking(tokens=1)), logprobs=9, **body))
    error = error_of(complete(front(talking(tokens=1)), logprobs=11, **body), 400)
    assert error["param"] == "echo"
    assert str(MOST_EVENT_ENTRIES) in error["message"]


def test_without_max_tokens_an_answer_is_bounded_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_memory, "MOST_ENTRIES", 60)
    client = talking()
    app = front(client)
    error = error_of(chat(app, logprobs=True, top_logprobs=5), 400)
    assert "max_tokens" in error["message"]
    assert client.aborted
    assert app.answer_memory.used == 0
    assert chat(front(talking(tokens=10)), logprobs=True, top_logprobs=5).status_code == 200


# ---- all answers together --------------------------------------------------------------------------------------------


def test_the_largest_answer_is_given_up_when_memory_is_short() -> None:
    async def work() -> None:
        client = talking(tick_s=None)
        app = front(client, max_answer_logprobs=700)

        async def ask(top: int) -> httpx.Response:
            return await ask_async(
                app, "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 500, "logprobs": top}
            )

        large, small = asyncio.create_task(ask(9)), asyncio.create_task(ask(0))
        await until(lambda: len(client.running) == 2)
        for _ in range(50):
            client.tick()
        assert app.answer_memory.used == 50 * 10 + 50 * 1
        error = error_of(await ask(9), 503)
        assert "stream" in error["message"]
        for _ in range(450):
            client.tick()
        answer = await large
        assert error_of(answer, 503)["message"]
        assert answer.headers["retry-after"] == "1"
        assert (await small).status_code == 200
        assert app.answer_memory.used == 0

    run(work)


def test_a_small_answer_survives_a_large_one() -> None:
    class Stub:
        prepared: Any = None
        error: Any = None

        def fail(self, error: Exception) -> None:
            self.error = error

    memory = AnswerMemory(1000)
    large, small = Stub(), Stub()
    memory._held = {large: 0, small: 0}  # type: ignore[dict-item]
    memory.add(large, 990)  # type: ignore[arg-type]
    memory.add(small, 20)  # type: ignore[arg-type]
    assert large.error is not None
    assert small.error is None
    assert memory.used == 20


def test_a_stream_keeps_no_logprobs() -> None:
    async def work() -> None:
        client = talking(tick_s=None)
        app = front(client)
        body = {"prompt": "x", "max_tokens": 50, "logprobs": 5, "stream": True}
        asking = asyncio.create_task(ask_async(app, "POST", "/v1/completions", json=body))
        await until(lambda: bool(client.running))
        for _ in range(50):
            client.tick()
        assert [len(call.outputs.samples[0][0].logprobs) for call in app.calls] == [0]
        shown = [event["choices"][0]["logprobs"] for event in events(await asking)]
        assert sum(len(one["tokens"]) for one in shown if one) == 50

    run(work)


# ---- many jobs -------------------------------------------------------------------------------------------------------


def test_many_jobs_are_submitted_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", -1.0)  # every step is long

    async def work() -> None:
        client, seen = FakeClient(tick_s=None), list[int]()
        app = front(client)
        asking = asyncio.create_task(ask_async(app, "POST", "/v1/completions", json={"prompt": ["x"] * 200}))
        while len(client.submitted) < 200:
            seen.append(len(client.submitted))
            await asyncio.sleep(0)
        assert set(range(200)) <= set(seen), "others had a turn after each of them"
        app.end_all()
        error_of(await asking, 503)
        assert len(client.aborted) == 200

    run(work)


def test_a_client_that_leaves_while_its_jobs_are_submitted_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", -1.0)

    async def work() -> None:
        client = FakeClient(tick_s=None)
        app = front(client)
        asking = asyncio.create_task(ask_async(app, "POST", "/v1/completions", json={"prompt": ["x"] * 200}))
        while len(client.submitted) < 20:
            await asyncio.sleep(0)
        for call in app.calls:
            call.disconnected()
        await asyncio.gather(asking, return_exceptions=True)  # there is no answer
        assert len(client.submitted) < 200
        assert not client.running

    run(work)


# ---- in pieces -------------------------------------------------------------------------------------------------------

ASKS: list[dict[str, Any]] = [
    {"prompt": "Once upon", "logprobs": 3},
    {"prompt": "Once upon", "logprobs": 0, "n": 3},
    {"prompt": ["Once", "upon a time"], "logprobs": 2, "echo": True, "n": 2},
    {"prompt": ["Once", "upon a time"], "logprobs": 0, "echo": True},
    {"prompt": "Once upon a time", "best_of": 3, "n": 2},
    {"prompt": 'a "logprobs":null and "choices":[] b', "echo": True, "logprobs": 1, "return_token_ids": True},
]


@pytest.mark.parametrize("entries", [1, 7, 1024])
@pytest.mark.parametrize("body", ASKS)
def test_the_pieces_of_an_answer_are_its_structure(body: dict[str, Any], entries: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(logprobs, "PIECE_ENTRIES", entries)
    answer = complete(front(), max_tokens=9, **body)
    assert answer.status_code == 200, answer.text
    assert msgspec.json.encode(msgspec.json.decode(answer.content, type=CompletionAnswer)) == answer.content


@pytest.mark.parametrize("entries", [1, 7, 1024])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "n": 2}])
def test_the_pieces_of_a_chat_are_its_structure(more: dict[str, Any], entries: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(logprobs, "PIECE_ENTRIES", entries)
    answer = chat(front(), max_tokens=9, **more)
    assert msgspec.json.encode(msgspec.json.decode(answer.content, type=ChatAnswer)) == answer.content


def over_socket(app: Front, body: dict[str, Any]) -> httpx.Response:
    found: list[httpx.Response] = []

    async def work() -> None:
        async with listening(app) as port, httpx.AsyncClient(timeout=60) as http:
            found.append(await http.post(f"http://127.0.0.1:{port}/v1/completions", json=body))

    run(work)
    return found[0]


def test_a_large_answer_is_composed_off_the_event_loop_and_sent_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    take = whole.take

    def noting(pieces: Any) -> Any:
        threads.add(threading.current_thread().name)
        return take(pieces)

    monkeypatch.setattr(whole, "take", noting)
    body = {"prompt": "x", "max_tokens": 1000, "logprobs": 30, "n": 4, "ignore_eos": True}
    answer = over_socket(front(talking()), body)
    assert answer.headers["transfer-encoding"] == "chunked"
    assert len(answer.content) > 2 * whole.WHOLE_BYTES
    assert msgspec.json.encode(msgspec.json.decode(answer.content, type=CompletionAnswer)) == answer.content
    assert [len(one["logprobs"]["tokens"]) for one in answer.json()["choices"]] == [1000] * 4
    assert all(name.startswith("front-python") for name in threads)
    small = over_socket(front(talking()), {"prompt": "x", "max_tokens": 10, "logprobs": 3})
    assert int(small.headers["content-length"]) == len(small.content)


def test_a_large_answer_over_http_1_0_has_a_length() -> None:
    async def work() -> None:
        body = {"prompt": "x", "max_tokens": 1000, "logprobs": 30, "n": 4, "ignore_eos": True}
        async with listening(front(talking())) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
            writer.write(raw_request("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
            assert b"content-length: %d" % len(text) in head.lower()
            assert len(json.loads(text)["choices"]) == 4
            writer.close()

    run(work)


def test_a_client_that_does_not_read_stops_the_composing() -> None:
    async def work() -> None:
        client = talking()
        app = front(client, slow_client_timeout_s=1.0)
        body = {"prompt": "x", "max_tokens": 1000, "logprobs": 60, "n": 8, "ignore_eos": True}
        async with listening(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2048)
            writer.write(raw_request("/v1/completions", body))
            await until(lambda: bool(client.submitted) and not app.active, limit_s=60)
            assert app.answer_memory.used == 0
            writer.close()

    run(work)
