"""What every request meets: keys, ids, sizes, methods; and the endpoints that generate nothing."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.file import hashed
from tests.server.fake_client import FakeClient, until
from tests.server.fronts import ask, ask_async, complete, error_of, front, run, tokenizer

KEYS = (("alice", "sk-alice-key"), ("bob", "sk-bob-key"))
JSON = {"content-type": "application/json"}


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer sk-alice-ke", "Bearer sk-alice-keyy", "Basic sk-alice-key", "é"]
)
def test_without_a_known_key_there_is_a_401(header: str | None) -> None:
    app = front(api_keys=KEYS)
    headers = {} if header is None else {"authorization": header.encode()}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/version")):
        answer = ask(app, method, path, headers=headers)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_only_health_needs_no_key() -> None:
    app = front(api_keys=KEYS)
    assert ask(app, "GET", "/health").status_code == 200
    pages = ("/", "/docs", "/openapi.json", "/static/style.css")
    others = ("/metrics", "/v1/models", "/debug/requests", "/nowhere")
    for path in pages + others:
        error_of(ask(app, "GET", path), 401)


def test_a_browser_is_asked_for_the_key_and_sends_it_as_a_password() -> None:
    app = front(api_keys=KEYS)
    refused = ask(app, "GET", "/")
    assert refused.headers["www-authenticate"].startswith("Basic ")
    for path in ("/", "/docs", "/openapi.json", "/v1/models"):
        assert ask(app, "GET", path, auth=("anybody", "sk-alice-key")).status_code == 200, path
        error_of(ask(app, "GET", path, auth=("sk-alice-key", "")), 401)


def test_a_known_key_is_let_in_and_its_name_goes_to_the_engine() -> None:
    client = FakeClient()
    app = front(client, api_keys=KEYS)
    for name, key in KEYS:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "x", "cache_salt": "s"}
        assert ask(app, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
        assert client.submitted[-1].tenant == name
    assert client.submitted[0].salt != client.submitted[1].salt  # keys never share cached prefixes


def test_no_salt_that_a_client_asks_for_is_another_tenants() -> None:
    client = FakeClient()
    app = front(client, api_keys=KEYS)
    ask(app, "POST", "/v1/completions", json={"prompt": "x"}, headers={"authorization": "Bearer sk-alice-key"})
    alices = client.submitted[0].salt
    for guess in ("alice", "alice\n", "alice\0", "\0alice", alices):
        headers = {"authorization": "Bearer sk-bob-key"}
        answer = ask(app, "POST", "/v1/completions", json={"prompt": "x", "cache_salt": guess}, headers=headers)
        assert answer.status_code == 200
        assert client.submitted[-1].salt != alices


def test_keys_are_kept_only_as_hashes() -> None:
    app = front(api_keys=KEYS)
    assert "sk-alice-key" not in str(vars(app.keys)) + str(app.settings.keys())


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that an answer takes must not tell how far the search went."""
    compared: list[bytes] = []
    plain = hmac.compare_digest

    def watched(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return plain(known, given)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = tuple((f"key-{number}", f"sk-{number:08}") for number in range(9))
    app = front(api_keys=keys)
    for key in (keys[0][1], keys[4][1], keys[8][1], "sk-nobody-knows"):
        compared.clear()
        ask(app, "GET", "/version", headers={"authorization": f"Bearer {key}"})
        assert len(compared) == len(keys)


def test_new_keys_count_with_the_next_request() -> None:
    keys = list(hashed(KEYS))
    app = front(keys=lambda: tuple(keys))
    carol = {"authorization": "Bearer sk-carol-key"}
    error_of(ask(app, "GET", "/version", headers=carol), 401)
    keys[:] = hashed([("carol", "sk-carol-key")])
    assert ask(app, "GET", "/version", headers=carol).status_code == 200
    error_of(ask(app, "GET", "/version", headers={"authorization": "Bearer sk-alice-key"}), 401)


# ---- tiers ---------------------------------------------------------------------------------------------------------

TIERED = (
    ApiKey(name="gold", digest=digest_of("sk-gold-key"), tier="gold"),
    ApiKey(name="plain", digest=digest_of("sk-plain-key")),
)


@pytest.mark.parametrize(
    ("key", "asked", "tier", "warning"),
    [
        ("sk-gold-key", None, "gold", None),
        ("sk-gold-key", "gold", "gold", None),
        ("sk-gold-key", "other", "gold", "ignored: tier"),
        ("sk-plain-key", None, "", None),
    ],
)
def test_a_keys_tier_wins(key: str, asked: str | None, tier: str, warning: str | None) -> None:
    client = FakeClient()
    body = {"prompt": "x", "tier": asked}
    headers = {"authorization": f"Bearer {key}"}
    answer = ask(front(client, api_keys=TIERED), "POST", "/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert client.submitted[0].tier == tier
    assert answer.headers.get("x-shoal-warning") == warning


def test_a_key_without_a_tier_may_not_choose_one() -> None:
    headers = {"authorization": "Bearer sk-plain-key"}
    app = front(api_keys=TIERED)
    answer = ask(app, "POST", "/v1/completions", json={"prompt": "x", "tier": "gold"}, headers=headers)
    assert error_of(answer, 400)["param"] == "tier"


def test_without_keys_any_request_may_choose_a_tier() -> None:
    client = FakeClient()
    assert complete(front(client), prompt="x", tier="gold").status_code == 200
    assert client.submitted[0].tier == "gold"
    for bad in ("", "x" * 65, "a b", 5):
        assert error_of(complete(front(client), prompt="x", tier=bad), 400)["param"] == "tier"


# ---- ids, sizes, methods -------------------------------------------------------------------------------------------


def test_a_request_id_comes_back_and_a_bad_one_is_replaced() -> None:
    app = front()
    assert ask(app, "GET", "/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in (b"x" * 129, b"a b", b"\xff", b""):
        given = ask(app, "GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(given) == 24
    assert ask(app, "GET", "/nowhere", headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"


def test_a_request_id_of_the_client_does_not_name_its_jobs() -> None:
    client = FakeClient()
    for _ in range(2):
        ask(front(client), "POST", "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "same"})
    assert len({job.id for job in client.submitted}) == 2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_a_413(chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def work() -> None:
        body: Any = parts() if chunked else b" " * 2000
        answer = await ask_async(front(max_body_bytes=1024), "POST", "/v1/completions", content=body, headers=JSON)
        assert "1024" in error_of(answer, 413)["message"]
        assert answer.headers["connection"] == "close"

    run(work)


def test_a_body_as_large_as_allowed_is_taken() -> None:
    body = json.dumps({"prompt": "x"}).encode().ljust(1024)
    assert ask(front(max_body_bytes=1024), "POST", "/v1/completions", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_a_body_that_is_not_said_to_be_json_is_a_415(kind: str) -> None:
    answer = ask(front(), "POST", "/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": kind})
    assert "application/json" in error_of(answer, 415)["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"prompt":"\xff"}', b'{"prompt":"\\ud800"}']
)
def test_a_body_that_cannot_be_read_is_a_400(body: bytes) -> None:
    error_of(ask(front(), "POST", "/v1/completions", content=body, headers=JSON), 400)


def test_an_unknown_path_is_a_404_and_a_wrong_method_a_405() -> None:
    app = front()
    for path in (
        "/nowhere",
        "/v1",
        "/v1/completions/",
        "/static/nothing.js",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
    ):
        error_of(ask(app, "GET", path), 404)
    for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/health"), ("PUT", "/")):
        answer = ask(app, method, path)
        assert error_of(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] in ("GET", "POST")


def test_an_unexpected_exception_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeClient):
        def submit(self, job: Any, sink: Any) -> None:
            raise ZeroDivisionError("secret")

    for stream in (False, True):
        answer = complete(front(Broken()), prompt="x", stream=stream)
        error_of(answer, 500)
        assert "secret" not in answer.text
    assert "secret" in caplog.text  # the log has it


# ---- health, draining, metrics -------------------------------------------------------------------------------------


def test_health_follows_the_engine_and_draining() -> None:
    client = FakeClient()
    app = front(client)
    assert (ask(app, "GET", "/health").status_code, ask(app, "GET", "/health").json()) == (200, {"status": "ok"})
    app.draining = True
    assert (ask(app, "GET", "/health").status_code, ask(app, "GET", "/health").json()) == (503, {"status": "draining"})
    app.draining = False
    client.go_down()
    assert (ask(app, "GET", "/health").status_code, ask(app, "GET", "/health").json()) == (503, {"status": "down"})


def test_while_the_engine_is_down_or_the_server_drains_there_is_a_503_with_retry_after() -> None:
    client = FakeClient()
    app = front(client)
    app.draining = True
    answer = complete(app, prompt="x")
    assert error_of(answer, 503)["code"] == "draining"
    assert int(answer.headers["retry-after"]) > 0
    app.draining = False
    client.go_down()
    answer = complete(app, prompt="x")
    assert error_of(answer, 503)["code"] == "engine_down"
    assert int(answer.headers["retry-after"]) > 0
    assert ask(app, "POST", "/tokenize", json={"prompt": "x"}).status_code == 200  # needs no engine


def test_requests_wait_for_an_engine_that_is_restarted_and_health_says_so() -> None:
    async def work() -> None:
        client = FakeClient(tick_s=None)
        client.waits = True
        client.go_down()
        app = front(client)
        asking = asyncio.create_task(ask_async(app, "POST", "/v1/completions", json={"prompt": "x"}))
        await until(lambda: bool(client.running))
        assert (await ask_async(app, "GET", "/health")).status_code == 503
        models = (await ask_async(app, "GET", "/v1/models/tiny")).json()
        assert models["max_model_len"] == 512, "what was known of the engine stays known"
        too_long = await ask_async(app, "POST", "/v1/completions", json={"prompt": [5] * 600})
        assert error_of(too_long, 400)["code"] == "context_length_exceeded"
        app.draining = True
        refused = await ask_async(app, "POST", "/v1/completions", json={"prompt": "x"})
        assert error_of(refused, 503)["code"] == "draining"
        client.come_up()
        client.tick()
        assert (await asking).status_code == 200

    run(work)


def test_draining_lets_running_requests_finish() -> None:
    async def work() -> None:
        client = FakeClient(tick_s=None)
        app = front(client)
        asking = asyncio.create_task(ask_async(app, "POST", "/v1/completions", json={"prompt": "x"}))
        await until(lambda: bool(client.running))
        assert app.active == 1
        app.draining = True
        client.tick()
        assert (await asking).status_code == 200
        assert app.active == 0

    run(work)


class Counted:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def count(self, route: str, status: int) -> None:
        self.seen.append((route, status))

    def render(self, active: int, engines: Any, others: Sequence[bytes]) -> bytes:
        return f"own_active {active}\nown_up {sum(one.up for one in engines)}\n".encode() + b"".join(others)

    def tell(self, active: int, engines: Any) -> bytes:
        return b"told\n"


def test_metrics_are_the_engines_and_the_fronts() -> None:
    client, counted = FakeClient(), Counted()
    app = front(client, metrics=counted)
    answer = ask(app, "GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text == "shoal_requests_running 0\nown_active 0\nown_up 1\n"
    client.go_down()
    assert ask(app, "GET", "/metrics").text == "own_active 0\nown_up 0\n"


def test_every_answer_is_counted_by_route_and_status() -> None:
    counted = Counted()
    app = front(metrics=counted)
    complete(app, prompt="x")
    complete(app, prompt="x", zap=1)
    ask(app, "GET", "/v1/models/tiny")
    ask(app, "GET", "/some/path")
    assert counted.seen == [
        ("/v1/completions", 200), ("/v1/completions", 400), ("/v1/models/{model}", 200), ("unknown", 404)
    ]  # fmt: skip


# ---- models, tokens, version ---------------------------------------------------------------------------------------


def test_models_are_listed_by_all_their_names() -> None:
    app = front(models=("org/tiny", "b"))
    cards = ask(app, "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["org/tiny", "b"]
    assert ask(app, "GET", "/v1/models/org/tiny").json()["max_model_len"] == 512
    assert ask(app, "GET", "/v1/models/b").json()["root"] == "org/tiny"
    assert error_of(ask(app, "GET", "/v1/models/c"), 404)["code"] == "model_not_found"


def test_text_becomes_tokens_and_tokens_text() -> None:
    app = front()
    text = "Once upon a time é €"
    answer = ask(app, "POST", "/tokenize", json={"prompt": text, "model": "tiny"}).json()
    assert answer == {"count": len(answer["tokens"]), "max_model_len": 512, "tokens": tokenizer().encode(text)}
    assert ask(app, "POST", "/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == text
    messages = [{"role": "user", "content": "Hi"}]
    chat = ask(app, "POST", "/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert tokenizer().decode(chat["tokens"]) == "user: Hi\n"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": "x", "model": "zap"}, 404),
        ("/detokenize", {"tokens": [10**6]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/detokenize", {"tokens": ["x"]}, 400),
        ("/detokenize", {"tokens": [1], "zap": 1}, 400),
    ],
)
def test_what_cannot_be_tokenized_is_refused(path: str, body: Any, status: int) -> None:
    error_of(ask(front(), "POST", path, json=body), status)


def test_tokenizing_without_a_tokenizer_is_refused() -> None:
    app = front(without_tokenizer=True)
    error_of(ask(app, "POST", "/tokenize", json={"prompt": "x"}), 400)
    error_of(ask(app, "POST", "/detokenize", json={"tokens": [1]}), 400)


def test_the_version_is_reported() -> None:
    assert ask(front(version="1.2.3"), "GET", "/version").json() == {"version": "1.2.3"}


# ---- pages and browsers --------------------------------------------------------------------------------------------


def test_a_page_that_was_seen_is_not_sent_again() -> None:
    app = front()
    page = ask(app, "GET", "/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = ask(app, "GET", "/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_other_sites_may_call_only_where_they_are_allowed() -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in ask(front(), "GET", "/health", headers=asking).headers
    app = front(allowed_origins=("https://a.example",), api_keys=KEYS)
    allowed = ask(app, "OPTIONS", "/v1/completions", headers=asking)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = ask(app, "OPTIONS", "/v1/completions", headers={**asking, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    answer = ask(app, "GET", "/v1/models", headers={**asking, "authorization": "Bearer sk-bob-key"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


# ---- the log -------------------------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, answer: httpx.Response) -> dict[str, Any]:
    """What the log says about an answer."""
    for record in caplog.records:
        fields = getattr(record, "fields", {})
        if record.getMessage() == "request" and fields["id"] == answer.headers["x-request-id"]:
            return dict(fields)
    raise AssertionError("the request is not in the log")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_in_the_log_without_its_prompt(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.DEBUG)
    fields = logged(caplog, complete(front(), prompt="my secret words", stream=stream))
    assert fields["status"] == 200
    assert fields["route"] == "/v1/completions"
    assert fields["prompt_tokens"] == fields["output_tokens"] == len(tokenizer().encode("my secret words"))
    assert fields["total_s"] >= fields["ttft_s"] >= 0
    assert "secret" not in caplog.text
    assert all("secret" not in str(getattr(record, "fields", "")) for record in caplog.records)


def test_the_prompt_is_logged_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fields = logged(caplog, complete(front(log_prompts=True), prompt="my secret words"))
    assert "my secret words" in fields["body"]
