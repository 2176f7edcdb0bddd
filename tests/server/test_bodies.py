"""Bodies that would become millions of objects, and all bodies together: what is refused, and what is not."""

import asyncio
import gc
import json
from types import FrameType
from typing import Any

import httpx
import pytest

from shoal.core.job import EngineInfo
from shoal.server import workers
from shoal.server.bodies import read
from shoal.server.body_memory import SMALL, BodyMemory
from shoal.server.dialects.completions import CompletionRequest
from shoal.server.info_routes import MOST_TOKENIZED
from shoal.server.json_size import MOST_IDS, MOST_VALUES
from shoal.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import ask, error_of, front, listening, raw_request, run

JSON = {"content-type": "application/json"}
LARGE = EngineInfo(epoch=0, max_model_len=200_000, vocab_size=422, kv_tokens=10**6, dtype="float32", device="cpu")


def post(path: str, body: bytes) -> httpx.Response:
    return ask(front(), "POST", path, content=body, headers=JSON)


def chat_with(tool_calls: bytes) -> bytes:
    return b'{"messages":[{"role":"assistant","content":"x","tool_calls":%b}]}' % tool_calls


DEEP_LISTS = b'[{"a":[' + b",".join([b"[" * 60 + b"]" * 60] * 30_000) + b"]}]"
MANY = {
    "messages": ("/v1/chat/completions", chat_with(DEEP_LISTS)),
    "user": ("/v1/completions", b'{"prompt":"x","user":[' + b"[]," * 1_300_000 + b"[]]}"),
    "prompt": ("/v1/completions", b'{"prompt":[' + b"[]," * 1_300_000 + b"[]]}"),
    "stop": ("/v1/completions", b'{"prompt":"x","stop":[' + b'"",' * 1_300_000 + b'""]}'),
    "tools": ("/v1/chat/completions", b'{"tools":[' + b"{}," * 1_300_000 + b'{}],"messages":[]}'),
    "response_format": ("/v1/completions", b'{"prompt":"x","response_format":[' + b"1," * 10**6 + b"1]}"),
    "chat_template_kwargs": ("/tokenize", b'{"chat_template_kwargs":{"a":[' + b"1," * 10**6 + b"1]}}"),
    "tokens": ("/detokenize", b'{"tokens":[' + b"1," * 1_900_000 + b"1]}"),
}


@pytest.mark.parametrize("field", MANY)
def test_a_body_of_a_million_values_is_refused_by_its_field(field: str) -> None:
    error = error_of(post(*MANY[field]), 400)
    assert error["param"] == field
    assert error["code"] == "too_many_values"
    assert str(MOST_IDS if field in ("prompt", "tokens") else MOST_VALUES) in error["message"]


def test_many_unknown_fields_are_no_fault_of_the_prompt() -> None:
    body = {"prompt": "x", **{f"field{number}": 0 for number in range(100_000)}}
    error = error_of(post("/v1/completions", json.dumps(body).encode()), 400)
    assert error["param"] is None
    assert str(MOST_VALUES) in error["message"]


def test_a_number_of_a_million_digits_is_refused_before_it_is_read() -> None:
    for text in ("9" * 10**6, "0." + "9" * 10**6):
        body = json.dumps({"prompt": "1" * 20_000, "temperature": 0}).encode().replace(b"0}", text.encode() + b"}")
        assert "digits" in error_of(post("/v1/completions", body), 400)["message"]


def test_a_long_prompt_of_token_ids_is_taken() -> None:
    client = FakeClient(lambda job, sample: [5])
    client._info = LARGE
    ids = [300 + number % 100 for number in range(131_072)]
    answer = ask(front(client), "POST", "/v1/completions", json={"prompt": ids, "max_tokens": 1, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert client.submitted[0].prompt == ids


def test_several_prompts_of_many_ids_are_taken_but_no_other_field_of_as_many_numbers() -> None:
    prompts = [[7] * 1000] * 300
    body = {"prompt": prompts, "logit_bias": {"1": 1}}
    read_back = asyncio.run(read(CompletionRequest, json.dumps(body).encode()))
    assert read_back.prompt == prompts
    body = {"prompt": prompts, "stop_token_ids": [7] * (MOST_VALUES + 1)}
    answer = post("/v1/completions", json.dumps(body).encode())
    assert error_of(answer, 400)["code"] == "too_many_values"


@pytest.mark.parametrize("name", ["user", "metadata", "store", "service_tier", "prompt_cache_key"])
def test_an_ignored_field_is_not_decoded(name: str) -> None:
    body = b'{"prompt":"x","max_tokens":1,"%b":[%b1]}' % (name.encode(), b"[]," * 20_000)
    answer = post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert name in answer.headers["x-shoal-warning"]
    made = asyncio.run(read(CompletionRequest, body))
    assert len(getattr(made, name)) == 60_003  # as it came, and no list


# ---- all bodies together -------------------------------------------------------------------------------------------


def test_memory_for_bodies_is_bounded_and_small_ones_have_their_own() -> None:
    memory = BodyMemory(2**20)
    assert memory.resize(0, 600_000)
    assert not memory.resize(0, 600_000)
    assert memory.resize(0, SMALL)
    assert memory.resize(SMALL, SMALL + 1), "it has become a large one"
    assert memory.used == 600_000 + SMALL + 1
    assert not memory.resize(SMALL + 1, 600_000)
    assert memory.used == 600_000 + SMALL + 1, "nothing has changed"
    assert memory.resize(600_000, 0)
    assert memory.resize(SMALL + 1, 0)
    assert memory.used == 0


def test_unfinished_bodies_are_refused_beyond_the_memory_for_them_and_small_ones_are_not() -> None:
    async def work() -> None:
        app = front(FakeClient(), max_body_memory_bytes=2**20, slow_client_timeout_s=60)
        body = json.dumps({"prompt": "x" * 400_000}).encode()
        async with listening(app) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            writers = []
            for _ in range(2):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(raw_request("/v1/completions", body)[:-1])
                writers.append(writer)
            await until(lambda: app.body_memory.used >= 2 * len(body) - 2)
            answer = await http.post("/v1/completions", content=body, headers=JSON)
            error = error_of(answer, 503)
            assert error["code"] == "body_memory"
            assert "--max-body-memory" in error["message"]
            assert answer.headers["retry-after"] == "1"
            small: Any = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert small.status_code == 200
            for writer in writers:
                writer.close()
            await until(lambda: app.body_memory.used == 0)
            answer = await http.post("/v1/completions", content=body, headers=JSON)
            assert error_of(answer, 400)["code"] == "context_length_exceeded"
            await until(lambda: app.body_memory.used == 0)

    run(work)


# ---- texts that are too long -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["a", " ", "Ж"])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **more: Any) -> Any:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", never)
    text = letter * 1_900_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": ["", text]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = error_of(post(path, json.dumps(body, ensure_ascii=False).encode()), 400)
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"]
        assert "512" in error["message"]


def test_tokenizing_has_a_limit_of_its_own() -> None:
    assert post("/tokenize", json.dumps({"prompt": "a b" * 10_000}).encode()).status_code == 200  # beyond the context
    error = error_of(post("/tokenize", json.dumps({"prompt": "\x04" * 600_000}).encode()), 400)
    assert str(MOST_TOKENIZED) in error["message"]
    ids = json.dumps({"tokens": [7] * (MOST_TOKENIZED + 1)}).encode()
    assert str(MOST_TOKENIZED) in error_of(post("/detokenize", ids), 400)["message"]


def test_few_texts_are_tokenized_at_a_time() -> None:
    assert workers.TOKENIZE._max_workers <= 2
    assert workers.PYTHON._max_workers == 1


# ---- what is left of a request ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{"prompt": "a" * 100_000}, {"prompt": "x", "max_tokens": -1}, {"unknown": 1}, {}])
def test_a_refused_request_leaves_no_body_to_the_garbage_collector(body: dict[str, Any]) -> None:
    """Full collections are rare in a front; an error that keeps its own traceback would keep the body until then."""
    left: list[str] = []

    async def work() -> None:
        async with listening(front()) as port, httpx.AsyncClient() as http:
            gc.freeze()  # what is there already is of no interest, and going through it takes a second
            gc.disable()
            try:
                answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                error_of(answer, 400)
                await http.get(f"http://127.0.0.1:{port}/health")  # the connection goes on to another request
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                left.extend(one.f_code.co_name for one in gc.garbage if isinstance(one, FrameType))
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
                gc.unfreeze()

    run(work)
    assert not {"_generate", "_answer", "read"} & set(left)


@pytest.mark.parametrize("count", [65_537, 70_000, 80_000])
def test_fields_after_many_token_ids_are_not_blamed_for_them(count: int) -> None:
    body = {"prompt": [300] * count, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    assert asyncio.run(read(CompletionRequest, json.dumps(body).encode())).stream
