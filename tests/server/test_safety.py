"""Every class of advisory known for servers like this one, tried against the front: one section for each.

Keys and their timing are in test_front.py, slow and vanishing clients in test_connections.py; what needs real processes
(sockets, folders, caches) is in tests/story_server/test_safety.py and test_keys.py.
"""

import ast
import asyncio
import gc
import json
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.core.job import Ending, Job, Refusal, Sink
from shoal.core.params import MAX_LOGPROBS, MAX_SAMPLES, MAX_STOP_LENGTH, MAX_STOPS
from shoal.errors import BadChat
from shoal.server.bodies import MOST_BIASES, MOST_MESSAGES, MOST_SALT, MOST_STOP_IDS
from shoal.server.rules import MOST_DEPTH
from shoal.text.grammar import COMPILE_LIMIT_S, MAX_TEXT_BYTES, Grammars
from shoal.text.template import ChatTemplate
from shoal.text.tokenizer import Tokenizer
from tests.server.fake_client import INFO, FakeClient
from tests.server.fronts import EOS, ask, ask_async, chat, complete, error_of, front, listening, run, tokenizer
from tests.test_arrows import FILES, imports, room_of

HI = [{"role": "user", "content": "Hi"}]


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), INFO.vocab_size, [EOS])


# ---- unsafe deserialisation ----------------------------------------------------------------------------------------

UNSAFE = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system"), ("os", "popen")}
UNSAFE_FLAGS = {"shell", "allow_pickle", "trust_remote_code"}


def unsafe_calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            how = node.func
            named = isinstance(how, ast.Name) and how.id in UNSAFE
            if isinstance(how, ast.Attribute) and isinstance(how.value, ast.Name):
                named = (how.value.id, how.attr) in UNSAFE_METHODS
            flags = {word.arg for word in node.keywords if isinstance(word.value, ast.Constant) and word.value.value}
            if named or flags & UNSAFE_FLAGS:
                yield f"{path}:{node.lineno}"


def test_nothing_in_the_source_runs_what_it_reads() -> None:
    assert not [place for path in FILES for place in unsafe_calls(path)]


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("eval('1')\ntorch.load('x')\nnp.load('x', allow_pickle=True)\nrun('x', shell=True)\nmodel.eval()\n")
    assert [int(place.rpartition(":")[2]) for place in unsafe_calls(bad)] == [1, 2, 3, 4]


class Trap:
    """Unpickling this would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "caught"))


@pytest.mark.parametrize("kind", ["application/json", "application/octet-stream", "application/x-python-pickle"])
def test_a_pickle_is_no_request(tmp_path: Path, kind: str) -> None:
    trap = tmp_path / "trap"
    body = pickle.dumps(Trap(trap))
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = ask(front(), "POST", path, content=body, headers={"content-type": kind})
        assert answer.status_code in (400, 415)
    assert not trap.exists()


# ---- unbounded fields ----------------------------------------------------------------------------------------------

# field → the largest value that is taken, the smallest that is not
CAPS: dict[str, tuple[Any, Any]] = {
    "n": (MAX_SAMPLES, MAX_SAMPLES + 1),
    "best_of": (MAX_SAMPLES, MAX_SAMPLES + 1),
    "logprobs": (MAX_LOGPROBS, MAX_LOGPROBS + 1),
    "stop": (["s"] * MAX_STOPS, ["s"] * (MAX_STOPS + 1)),
    "stop (length)": ("s" * MAX_STOP_LENGTH, "s" * (MAX_STOP_LENGTH + 1)),
    "stop_token_ids": ([5] * MOST_STOP_IDS, [5] * (MOST_STOP_IDS + 1)),
    "logit_bias": (
        {str(token): 1 for token in range(MOST_BIASES)},
        {str(token): 1 for token in range(MOST_BIASES + 1)},
    ),
    "cache_salt": ("s" * MOST_SALT, "s" * (MOST_SALT + 1)),
}


@pytest.mark.parametrize("name", CAPS)
def test_a_field_is_taken_up_to_its_cap_and_refused_beyond(name: str) -> None:
    field = name.partition(" ")[0]
    most, more = CAPS[name]
    assert complete(front(), prompt="x", **{field: most}).status_code == 200
    client = FakeClient()
    assert error_of(complete(front(client), prompt="x", **{field: more}), 400)["param"] == field
    assert not client.submitted, "it never reached the engine"


def test_the_caps_of_a_chat() -> None:
    for field in ({"top_logprobs": MAX_LOGPROBS + 1, "logprobs": True}, {"n": MAX_SAMPLES + 1}):
        assert chat(front(), **field).status_code == 400
    many = [{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)
    assert error_of(chat(front(), messages=many), 400)["param"] == "messages"


def test_prompts_times_samples_are_bounded_too() -> None:
    client = FakeClient()
    error = error_of(complete(front(client), prompt=["x"] * 9, n=MAX_SAMPLES), 400)
    assert "1024" in error["message"]
    assert not client.submitted


def test_stop_strings_cost_little_however_many_answers_look_for_them() -> None:
    stops = [f"{number:02}" * (MAX_STOP_LENGTH // 2) for number in range(MAX_STOPS)]
    began_s = time.process_time()
    answer = complete(front(), prompt=["x"] * 8, n=MAX_SAMPLES, stop=stops, max_tokens=1)
    assert answer.status_code == 200
    assert time.process_time() - began_s < 10


class AnyGrammar:
    def check(self, spec: Any) -> None: ...


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


DEEP: dict[str, Callable[[Any], dict[str, Any]]] = {
    "response_format": lambda value: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}
    },
    "structured_outputs.json": lambda value: {"structured_outputs": {"json": value}},
    "chat_template_kwargs": lambda value: {"chat_template_kwargs": value},
    "messages[0].tool_calls": lambda value: {
        "messages": [{"role": "assistant", "content": "x", "tool_calls": [value]}],
    },
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_too_deeply_is_refused_by_name(name: str) -> None:
    inside = 1 if name.endswith("tool_calls") else 0  # the list around it is a level, too
    assert chat(front(grammars=AnyGrammar()), **DEEP[name](nested(MOST_DEPTH - inside))).status_code == 200
    for depth in (MOST_DEPTH + 1 - inside, 500):
        error = error_of(chat(front(grammars=AnyGrammar()), **DEEP[name](nested(depth))), 400)
        assert error["param"] == name
        assert str(MOST_DEPTH) in error["message"]


@pytest.mark.parametrize("depth", [100_000, 1_000_000])
@pytest.mark.parametrize("field", ["prompt", "metadata", "logit_bias", "unknown"])
def test_a_body_that_is_nested_without_end_is_a_400(field: str, depth: int) -> None:
    body = b'{"prompt": "x", "%s": %s1%s}' % (field.encode(), b"[" * depth, b"]" * depth)
    answer = ask(front(), "POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(answer, 400)


# ---- templates and regexes that never end --------------------------------------------------------------------------


@pytest.mark.parametrize("field", [{"chat_template": "{{ 7 * 7 }}"}, {"chat_template": ""}])
def test_a_request_cannot_bring_a_template(field: dict[str, str]) -> None:
    client = FakeClient()
    error = error_of(chat(front(client), **field), 400)
    assert error["param"] == "chat_template"
    assert "--chat-template" in error["message"]
    assert not client.submitted


OWN = ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "self", "a.b", "a-b", ""]


@pytest.mark.parametrize("name", OWN)
def test_template_variables_cannot_replace_the_servers(name: str) -> None:
    assert error_of(chat(front(), chat_template_kwargs={name: "x"}), 400)["param"] == "chat_template_kwargs"


def said_to(client: FakeClient) -> str:
    return tokenizer().decode(client.submitted[-1].prompt, skip_special=False)


def test_a_template_in_a_message_or_a_variable_is_text() -> None:
    client = FakeClient()
    code = "{{ 7 * 7 }}{% for i in range(99999) %}{% endfor %}"
    assert chat(front(client), messages=[{"role": "user", "content": code}]).status_code == 200
    assert code in said_to(client)
    assert chat(front(client), chat_template_kwargs={"chat_template": code, "mood": code}).status_code == 200
    assert code in said_to(client)
    assert "49" not in said_to(client)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.__class__.__base__.__subclasses__()[0] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_the_models_own_template_runs_in_a_sandbox(source: str) -> None:
    with pytest.raises(BadChat):
        ChatTemplate(source).render(HI, {})


EVIL_REGEXES = ["(a+)+b", "(a|aa)+$", "(x{1,1000}){1,1000}", "((a{0,99}){0,99}){0,99}", "(.*a){30}", "[ab]*a[ab]{900}"]


@pytest.mark.parametrize("regex", EVIL_REGEXES)
def test_a_regex_is_refused_or_followed_but_never_waited_for(regex: str) -> None:
    async def work() -> None:
        app = front(grammars=grammars())
        body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"regex": regex}}
        async with Watch() as watch:
            answer = await ask_async(app, "POST", "/v1/completions", json=body)
        assert answer.status_code in (200, 400), answer.text
        assert watch.took_s < COMPILE_LIMIT_S + 5
        assert watch.worst_s < 1, "the event loop went on"

    run(work)


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_grammar_has_a_size(kind: str) -> None:
    size = MAX_TEXT_BYTES + 1
    huge: dict[str, Any] = {
        "json": {"type": "object", "description": "x" * size},
        "regex": "x" * size,
        "choice": ["x" * size],
        "grammar": f'start: "{"x" * size}"',
    }
    answer = complete(front(grammars=grammars()), prompt="x", structured_outputs={kind: huge[kind]})
    assert error_of(answer, 400)["param"] == f"structured_outputs.{kind}"


NAMES = [" - at `$.a` ", "`", "[", ".", "$", "Object contains unknown field `", "\\u0000", "a" * 50]


@pytest.mark.parametrize("piece", NAMES)
def test_the_words_of_a_refusal_cost_little_whatever_a_field_is_called(piece: str) -> None:
    name = piece * (2**20 // len(piece))
    body = f'{{"prompt": "x", "{name}": 1}}'.encode()
    began_s = time.process_time()
    answer = ask(front(), "POST", "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert time.process_time() - began_s < 5
    assert len(error_of(answer, 400)["message"]) < 2000


# ---- requests made on behalf of others (SSRF) ----------------------------------------------------------------------

CLIENTS = {"urllib.request", "http.client", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "websockets", "grpc"}
SERVING = {"server", "engine", "text", "sched", "kv", "core", "keys", "processes", "runner", "models"}


def test_nothing_that_serves_can_fetch_a_url() -> None:
    for path in FILES:
        if room_of(path).split(".")[0] in SERVING:
            found = {name for _, name in imports(path) if any(f"{name}.".startswith(f"{one}.") for one in CLIENTS)}
            assert not found, f"{path} imports {found}"


@pytest.fixture
def lure() -> Iterator[tuple[str, socket.socket]]:
    """A URL, and the socket on which a fetch of it would arrive."""
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        waiting.setblocking(False)
        yield f"http://127.0.0.1:{waiting.getsockname()[1]}/", waiting


PARTS: list[Callable[[str], dict[str, Any]]] = [
    lambda url: {"type": "image_url", "image_url": {"url": url}},
    lambda url: {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    lambda url: {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
    lambda url: {"type": "video_url", "video_url": {"url": url}},
    lambda url: {"type": "file", "file": {"file_data": url}},
    lambda url: {"type": "image", "image": url},
    lambda url: {"type": "text", "text": "x", "image_url": url},
]


@pytest.mark.parametrize("number", range(len(PARTS)))
def test_a_url_in_a_message_is_refused_by_name_and_never_fetched(lure: tuple[str, socket.socket], number: int) -> None:
    url, waiting = lure
    part = PARTS[number](url)
    error = error_of(chat(front(), messages=[{"role": "user", "content": [part]}]), 400)
    assert (part["type"] if part["type"] != "text" else "image_url") in error["message"] + str(error["param"])
    with pytest.raises(BlockingIOError):
        waiting.accept()


@pytest.mark.parametrize("word", ["$ref", "$schema", "$id", "$dynamicRef"])
def test_a_schema_is_never_fetched(lure: tuple[str, socket.socket], word: str) -> None:
    url, waiting = lure
    schema = {"type": "object", "properties": {"a": {word: f"{url}schema.json"}}}
    answer = complete(front(grammars=grammars()), prompt="x", structured_outputs={"json": schema})
    assert answer.status_code in (200, 400)
    with pytest.raises(BlockingIOError):
        waiting.accept()


# ---- what errors tell ----------------------------------------------------------------------------------------------

SECRET = "/home/somebody/models/secret.bin"


class Broken(FakeClient):
    """An engine client that fails in the middle of things."""

    def submit(self, job: Job, sink: Sink) -> None:
        raise FileNotFoundError(2, "No such file or directory", SECRET)

    async def ask(self, what: str, engine: int | None = None) -> Any:
        raise RuntimeError(f"{SECRET} is gone")


def refusing() -> FakeClient:
    client = FakeClient()
    client.refusal = Refusal("FileNotFoundError", f"[Errno 2] No such file: {SECRET}")
    return client


def failing() -> FakeClient:
    client = FakeClient()
    client.failure = Ending("error", error=f"RuntimeError: {SECRET}")
    return client


class BrokenGrammars:
    def check(self, spec: Any) -> None:
        raise OSError(f"cannot map {SECRET}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [Broken, refusing, failing])
def test_an_exceptions_text_never_reaches_a_client(make: Callable[[], FakeClient], stream: bool) -> None:
    answer = complete(front(make()), prompt="x", stream=stream)
    assert "internal_error" in answer.text
    assert "secret" not in answer.text
    assert "No such file" not in answer.text


def test_nor_from_the_endpoints_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    app = front(Broken(), grammars=BrokenGrammars())
    for answer in (
        ask(app, "GET", "/metrics"),
        ask(app, "GET", "/debug/requests"),
        complete(app, prompt="x", structured_outputs={"regex": "a"}),
    ):
        error_of(answer, 500)
        assert "secret" not in answer.text

    def encode(*given: Any) -> list[int]:
        raise OSError(SECRET)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    for path, body in (("/tokenize", {"prompt": "x"}), ("/v1/completions", {"prompt": "x"})):
        answer = ask(app, "POST", path, json=body)
        error_of(answer, 500)
        assert "secret" not in answer.text


def test_a_template_that_breaks_does_not_show_what_it_saw() -> None:
    with pytest.raises(BadChat) as caught:
        ChatTemplate("{{ [1].index(thing) }}").render(HI, {"thing": Path(SECRET)})
    assert "secret" not in str(caught.value)


# ---- header bombs --------------------------------------------------------------------------------------------------

HEADS = {
    "one large header": b"x-a: " + b"y" * 200_000 + b"\r\n",
    "many small headers": b"".join(b"x-%d: y\r\n" % number for number in range(5_000)),
    "many equal headers": b"x: y\r\n" * 10_000,
    "a few too many": b"".join(b"x-%d: y\r\n" % number for number in range(130)),
    "a large name": b"x" * 200_000 + b": y\r\n",
    "folded lines": b"x: y\r\n" + b" y\r\n" * 50_000,
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("pieces", [1, 50])
def test_a_header_bomb_is_refused_and_harms_no_other(name: str, pieces: int) -> None:
    async def work() -> None:
        app = front()
        async with listening(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + HEADS[name] + b"\r\n"
            size = -(-len(head) // pieces)
            try:
                for start in range(0, len(head), size):
                    writer.write(head[start : start + size])
                    await writer.drain()
                answer = await reader.read()
            except ConnectionError:  # it hung up on us: as good an answer
                answer = b""
            assert not answer or answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")), answer[:200]
            writer.close()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                assert (await http.get("/v1/models")).status_code == 200

    run(work)


def test_a_long_url_is_refused() -> None:
    async def work() -> None:
        async with listening(front()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/models?" + b"q" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            try:
                answer = await reader.read()
            except ConnectionError:  # it hung up on us: as good an answer
                answer = b""
            assert not answer or answer.startswith(b"HTTP/1.1 431 "), answer[:200]
            writer.close()

    run(work)


def test_as_many_headers_as_clients_really_send_are_fine() -> None:
    headers = {f"x-{number}": "v" * 200 for number in range(60)}

    async def work() -> None:
        async with listening(front()) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/v1/models", headers=headers)).status_code == 200

    run(work)


# ---- long texts and the event loop ---------------------------------------------------------------------------------


class Watch:
    """What something took, and for how long at most the event loop did nothing else. CPU time: of this process, and of
    the loop's thread alone; a busy machine makes neither longer. No garbage is collected meanwhile: in a
    process that has loaded all tests, that takes long."""

    async def __aenter__(self) -> "Watch":
        gc.disable()
        self.worst_s = 0.0
        self.began_s = time.process_time()
        self.task = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def _tick(self) -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0.005)
            self.worst_s = max(self.worst_s, time.thread_time() - before_s)

    async def __aexit__(self, *how: object) -> None:
        self.took_s = time.process_time() - self.began_s
        await asyncio.sleep(0.01)  # so that the last wait is counted
        self.task.cancel()
        gc.enable()


WORDS = "Once upon a time there was a little fish. "
LONG = WORDS * (3_000_000 // len(WORDS))
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt": ("/v1/completions", {"prompt": LONG}),
    "many prompts": ("/v1/completions", {"prompt": [WORDS * 70] * 1000}),
    "a message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "a part of a message": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
    ),
    "a template variable": ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"mood": LONG}}),
    "text to be tokenized": ("/tokenize", {"prompt": LONG}),
}


@pytest.mark.parametrize("name", ASKED)
def test_long_text_is_tokenized_beside_the_event_loop(name: str) -> None:
    path, body = ASKED[name]
    content = json.dumps(body).encode()

    async def work() -> None:
        app = front()
        await ask_async(app, "GET", "/health")  # whatever is loaded with the first request
        async with Watch() as watch:
            headers = {"content-type": "application/json"}
            answer = await ask_async(app, "POST", path, content=content, headers=headers)
        assert answer.status_code in (200, 400), answer.text
        assert watch.worst_s < max(0.2, watch.took_s / 4), f"{watch.worst_s:.2f} s of {watch.took_s:.2f} s"

    run(work)
