"""Bad requests: always a 4xx in OpenAI's shape that names the field, and a server that is well afterwards."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.story_server.asks import ASKED, STORY
from tests.story_server.servers import Server, assert_error_shape, connect, raw_request

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": STORY, "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": ASKED, "max_tokens": 2}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module", autouse=True)
def _well_afterwards(tiny: Server) -> Iterator[None]:
    restarts = tiny.engine_pids()
    yield
    tiny.wait_until_idle()
    assert tiny.health() == 200
    assert tiny.complete(max_tokens=2).status_code == 200
    assert tiny.engine_pids() == restarts, "the engine did not have to be started again"


# ---- bad values -----------------------------------------------------------------------------------------------------

BOTH: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", 1000),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 2),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", 10**9),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("max_tokens", 10**30),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logit_bias", {"fish": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "much"}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", [1, 2]),
    ("logit_bias", {str(i): 1.0 for i in range(100_000)}),
    ("stop", [""]),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {"a": 1}),
    ("stop", ["x"] * 100_000),
    ("seed", "x"),
    ("seed", 1.5),
    ("seed", 2**80),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("top_k", -5),
    ("top_k", 1.5),
    ("min_p", 2),
    ("min_p", -0.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("min_tokens", -1),
    ("min_tokens", 3),  # more than max_tokens
    ("ignore_eos", "no"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", [5] * 100_000),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", "no"),
    ("priority", "high"),
    ("priority", 1.5),
    ("priority", 10**30),
    ("cache_salt", 5),
    ("return_token_ids", "yes"),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", "soon"),
    ("model", 5),
    ("structured_outputs", "json"),
    ("temprature", 1),
    ("", 1),
]
ONLY_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [5, "a"]),
    ("prompt", [5.5]),
    ("prompt", [-1]),
    ("prompt", [10**9]),
    ("prompt", [True]),
    ("prompt", [[5], ["a"]]),
    ("prompt", [[5], 5]),
    ("prompt", ["a", ["b"]]),
    ("prompt", [[[5]]]),
    ("prompt", ["a"] * 100_000),
    ("suffix", "the end"),
    ("logprobs", -1),
    ("logprobs", 10**6),
    ("logprobs", True),
    ("echo", "yes"),
    ("best_of", 0),
    ("best_of", 10**9),
    ("tools", []),
]
ONLY_CHAT: list[tuple[str, Any]] = [
    ("messages", None),
    ("messages", []),
    ("messages", "hello"),
    ("messages", ["hello"]),
    ("messages", [{}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"content": "hello"}]),
    ("messages", [{"role": 5, "content": "hello"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
    ("messages", [{"role": "user", "content": ["hello"]}]),
    ("messages", [{"role": "user", "content": [{"type": "video", "video": "x"}]}]),
    ("logprobs", 5),
    ("top_logprobs", 5),
    ("top_logprobs", 10**6),
    ("max_completion_tokens", -1),
    ("response_format", "json"),
    ("prompt", "hello"),
    ("tools", [{"type": "hammer"}]),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("tools", "hammer"),
    ("tool_choice", "required"),
    ("functions", [{"nome": "f"}]),
]
CASES = [
    *(("/v1/completions", name, value) for name, value in BOTH + ONLY_COMPLETION),
    *(("/v1/chat/completions", name, value) for name, value in BOTH + ONLY_CHAT),
]


def case_name(value: Any) -> str:
    return str(value)[:40]


@pytest.mark.parametrize(("path", "name", "value"), CASES, ids=case_name)
def test_a_bad_value_is_a_400_that_names_it(tiny: Server, path: str, name: str, value: Any) -> None:
    answer = tiny.post(path, {**PATHS[path], name: value})
    assert answer.status_code == 400, answer.text[:500]
    error = assert_error_shape(answer)
    assert name in error["message"] or error["param"] == name, error
    assert len(error["message"]) < 2000, "a huge value is not sent back"


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [5e-324, 1e-200, 1e-45, 1e-38, 1e-20])
def test_a_number_that_is_almost_nothing_does_no_harm(tiny: Server, name: str, value: float) -> None:
    answer = tiny.complete(prompt="fish", max_tokens=4, ignore_eos=True, **{name: value})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
def test_a_missing_field_is_a_400_that_names_it(tiny: Server, path: str, name: str) -> None:
    answer = tiny.post(path, {"model": "tiny"})
    assert answer.status_code == 400
    assert name in assert_error_shape(answer)["message"]


def test_the_openai_client_raises_what_it_should(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=ASKED, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(BadRequestError, match="tool_choice"):
        client.chat.completions.create(model="tiny", messages=ASKED, tool_choice="required")
    with pytest.raises(BadRequestError, match="temprature"):
        client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"temprature": 1})


@pytest.mark.parametrize("prompt", [[5] * 3000, "fish and chips " * 2000], ids=["ids", "text"])
def test_an_over_long_prompt_is_a_400_with_the_numbers(tiny: Server, client: OpenAI, prompt: Any) -> None:
    count = len(prompt)
    if isinstance(prompt, str):
        count = tiny.post("/tokenize", {"prompt": prompt}).json()["count"]
    with pytest.raises(BadRequestError, match=str(count)) as caught:
        client.completions.create(model="tiny", prompt=prompt)
    assert "2048" in caught.value.message


def test_an_over_long_chat_is_a_400_with_the_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="2048"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "fish " * 4000}])


def test_one_bad_prompt_among_good_ones_fails_the_request_as_a_whole(tiny: Server) -> None:
    answer = tiny.complete(prompt=[[5, 6], [5] * 5000], max_tokens=4)
    assert answer.status_code == 400
    assert "5000" in assert_error_shape(answer)["message"]
    tiny.wait_until_idle()


# ---- bodies that are no requests ------------------------------------------------------------------------------------

GOOD = json.dumps(COMPLETION)


def with_value(name: str, raw: str) -> bytes:
    """A good request with one more field whose value is written as it stands, JSON or not."""
    return f'{GOOD[:-1]}, "{name}": {raw}}}'.encode()


BODIES: dict[str, bytes] = {
    "empty": b"",
    "brace": b"{",
    "null": b"null",
    "list": b"[]",
    "text": b'"hello"',
    "number": b"5",
    "no-json": b"model=tiny&prompt=hello",
    "no-utf8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "utf-16": GOOD.encode("utf-16"),
    "overlong-utf8": b'{"model": "tiny", "prompt": "\xc0\xaf"}',
    "surrogate-bytes": b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    "lone-surrogate": b'{"model": "tiny", "prompt": "a\\ud800b", "max_tokens": 2}',
    "lone-surrogate-in-key": b'{"model": "tiny", "prompt": "a", "\\udfff": 2}',
    "raw-nul": b'{"model": "tiny", "prompt": "a\x00b"}',
    "trailing": GOOD.encode() + b"}",
    "two": GOOD.encode() * 2,
    "nan": with_value("temperature", "NaN"),
    "infinity": with_value("temperature", "-Infinity"),
    "huge-exponent": with_value("temperature", "1e999"),
    "huge-int": with_value("seed", "9" * 400),
    "longest-int": with_value("seed", "9" * 100_000),
    "huge-int-max-tokens": with_value("max_tokens", "9" * 400),
    "deep-list": b"[" * 200_000,
    "deep-object": b'{"a":' * 100_000,
    "deep-prompt": with_value("prompt", "[" * 100_000 + "]" * 100_000),
    "deep-closed": with_value("structured_outputs", '{"json":' * 50_000 + "1" + "}" * 50_000),
    "deep-schema": with_value("structured_outputs", '{"json": ' + '{"items":' * 3000 + "{}" + "}" * 3000 + "}"),
    "deep-unknown": with_value("unknown", "[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_request_is_a_4xx(tiny: Server, path: str, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = tiny.http.post(f"{tiny.url}{path}", content=BODIES[name], headers=headers, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert_error_shape(answer)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", ["empty", "null", "list", "no-utf8", "deep-list", "deep-object", "no-json"])
def test_the_tokenizer_endpoints_stand_the_same(tiny: Server, path: str, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = tiny.http.post(f"{tiny.url}{path}", content=BODIES[name], headers=headers, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text[:500]
    assert_error_shape(answer)


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "\U0010ffff", "\ufeff", "\r\n", "<|user|>", "</s>", "\u200b" * 50], ids=repr
)
def test_odd_characters_are_text_like_any_other(tiny: Server, text: str) -> None:
    answer = tiny.complete(prompt=text)
    assert answer.status_code == 200, answer.text
    spoken = tiny.post("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]})
    assert spoken.status_code == 200, spoken.text
    assert tiny.complete(stop=text).status_code == 200


# ---- methods, paths, types, raw HTTP --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_wrong_method_is_a_405(tiny: Server, method: str, path: str) -> None:
    answer = tiny.http.request(method, f"{tiny.url}{path}")
    assert answer.status_code == 405
    assert_error_shape(answer)
    assert "POST" in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/version", "/metrics"])
def test_posting_to_a_page_is_a_405(tiny: Server, path: str) -> None:
    answer = tiny.http.post(f"{tiny.url}{path}", json={})
    assert answer.status_code == 405
    assert_error_shape(answer)


@pytest.mark.parametrize("path", ["/v1/nothing", "/v2/completions", "/%00", "/..%2f..%2fetc"])
def test_an_unknown_path_is_a_404(tiny: Server, path: str) -> None:
    answer = tiny.http.post(f"{tiny.url}{path}", json=COMPLETION)
    assert answer.status_code in (400, 404, 405)
    assert_error_shape(answer)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "image/png"]
)
def test_a_wrong_content_type_is_a_4xx(tiny: Server, kind: str) -> None:
    answer = tiny.http.post(f"{tiny.url}/v1/completions", content=GOOD, headers={"Content-Type": kind})
    assert 400 <= answer.status_code < 500
    assert_error_shape(answer)


def test_a_charset_is_no_wrong_content_type(tiny: Server) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert tiny.http.post(f"{tiny.url}/v1/completions", content=GOOD, headers=headers).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "nonsense"])
def test_a_compressed_body_is_a_4xx(tiny: Server, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = tiny.http.post(f"{tiny.url}/v1/completions", content=b"\x1f\x8b\x08garbage", headers=headers)
    assert 400 <= answer.status_code < 500
    assert_error_shape(answer)


def status_of(reply: bytes) -> int:
    assert reply.startswith(b"HTTP/1.1 "), reply[:100]
    return int(reply.split(b" ", 2)[1])


def read_all(made: socket.socket) -> bytes:
    parts = []
    try:
        while part := made.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass  # what came before it is the answer
    return b"".join(parts)


RAW: dict[str, bytes] = {
    "noise": b"\x00\x01\x02\xff garbage\r\n\r\n",
    "bad-length": raw_request("/v1/completions", b"{}", **{"Content-Length": "-5"}),
    "word-length": raw_request("/v1/completions", b"{}", **{"Content-Length": "many"}),
    "bad-version": b"POST /v1/completions HTTP/9.9\r\nHost: x\r\n\r\n",
    "big-header": raw_request("/v1/completions", b"{}", **{"X-Big": "x" * 1_000_000}),
    "bad-chunk": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("name", RAW)
def test_bad_http_is_answered_or_hung_up_on(tiny: Server, name: str) -> None:
    with connect(tiny) as made:
        try:
            made.sendall(RAW[name])
        except (BrokenPipeError, ConnectionResetError):
            return
        reply = read_all(made)
    assert not reply or 400 <= status_of(reply) < 500, reply[:200]


def test_a_client_that_hangs_up_in_its_request_leaves_nothing(tiny: Server) -> None:
    whole = raw_request("/v1/completions", GOOD.encode())
    for cut in (10, len(whole) // 2, len(whole) - 1):
        with connect(tiny) as made:
            made.sendall(whole[:cut])
    tiny.wait_until_idle()


# ---- large bodies ---------------------------------------------------------------------------------------------------


def test_a_body_announced_as_huge_is_a_413(tiny: Server) -> None:
    with connect(tiny) as made:
        made.sendall(raw_request("/v1/completions", b"{", **{"Content-Length": str(10**10)}))
        reply = read_all(made)
    assert status_of(reply) == 413
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"]


def test_a_huge_body_that_is_not_announced_is_a_413(tiny: Server) -> None:
    head = raw_request("/v1/completions", b"", **{"Content-Length": "", "Transfer-Encoding": "chunked"})
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    with connect(tiny) as made:
        try:
            made.sendall(head)
            for _ in range(600):
                made.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server answered and hung up: what it should do
        else:
            pytest.fail("600 MiB were taken")
        reply = read_all(made)
    assert not reply or status_of(reply) == 413
