"""Endpoints of vLLM's and SGLang's servers: tokens with all fields, what is served, the cache, batches of chats."""

import asyncio
from typing import Any

import httpx
import pytest

from shoal.keys.api_key import ApiKey, digest_of
from shoal.server.app import Front
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, ask, error_of, front, tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
FISH = {"type": "function", "function": {"name": "count_fish", "parameters": {"type": "object", "properties": {}}}}
ADMIN, PLAIN = "sk-admin-0123456789", "sk-plain-0123456789"


def keyed(client: FakeClient | None = None) -> Front:
    keys = [ApiKey(name="boss", digest=digest_of(ADMIN), admin=True), ApiKey(name="user", digest=digest_of(PLAIN))]
    return front(client, api_keys=keys)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def tokenize(**body: Any) -> httpx.Response:
    return ask(front(), "POST", "/tokenize", json=body)


# ---- tokens


def test_tokens_as_the_vocabulary_writes_them() -> None:
    found = tokenize(prompt="a büro", return_token_strs=True).json()
    names = [tokenizer().backend.id_to_token(token) for token in found["tokens"]]
    assert found["token_strs"] == names
    assert "token_strs" not in tokenize(prompt="a").json()


def test_messages_with_their_fields() -> None:
    def text(**body: Any) -> str:
        answer = tokenize(messages=CHAT, **body)
        assert answer.status_code == 200, answer.text
        return tokenizer().decode(answer.json()["tokens"])

    assert text().endswith("assistant: Well, \nassistant: ")
    assert text(add_generation_prompt=False).endswith("Well, \n")
    assert text(continue_final_message=True).endswith("assistant: Well, ")
    assert "count_fish" in text(tools=[FISH])
    assert "count_fish" not in text()
    both = tokenize(messages=CHAT, continue_final_message=True, add_generation_prompt=True)
    assert error_of(both, 400)["param"] == "continue_final_message"
    assert error_of(tokenize(messages=CHAT, chat_template="x"), 400)["param"] == "chat_template"
    assert tokenize(messages=CHAT, chat_template=None, mm_processor_kwargs=None).status_code == 200


def test_an_unknown_field_is_told_what_was_meant_here_too() -> None:
    assert "'return_token_strs'" in error_of(tokenize(prompt="a", return_tokens_strs=True), 400)["message"]


# ---- what is served


def test_ping_is_open_and_says_what_health_says() -> None:
    client = FakeClient()
    app = front(client, api_keys=(("a", PLAIN),))
    for method in ("GET", "POST"):
        assert ask(app, method, "/ping").status_code == 200
    client.go_down()
    assert ask(app, "GET", "/ping").status_code == 503


def test_load_counts_running_and_waiting_requests() -> None:
    assert ask(front(), "GET", "/load").json() == {"server_load": 2, "running": 0, "waiting": 2}


def test_server_and_tokenizer_are_described() -> None:
    info = ask(front(), "GET", "/server_info").json()
    assert info["model"] == "tiny"
    assert info["served_models"] == ["tiny", "other-name"]
    assert info["max_model_len"] == 512
    assert info["engines"] == [0]
    found = ask(front(), "GET", "/tokenizer_info").json()
    assert found["vocab_size"] == tokenizer().vocab_size
    assert "messages" in found["chat_template"]
    assert found["added_tokens"]["</s>"] == EOS
    assert error_of(ask(front(without_tokenizer=True), "GET", "/tokenizer_info"), 400)
    for path in ("/load", "/server_info", "/tokenizer_info"):
        assert ask(keyed(), "GET", path).status_code == 401
        assert ask(keyed(), "GET", path, headers=bearer(PLAIN)).status_code == 200


def test_the_prefix_cache_is_reset_by_operators_alone() -> None:
    client = FakeClient()
    app = keyed(client)
    assert ask(app, "POST", "/reset_prefix_cache").status_code == 401
    assert error_of(ask(app, "POST", "/reset_prefix_cache", headers=bearer(PLAIN)), 403)["code"] == "not_admin"
    assert "reset_prefix_cache" not in client.asked
    answer = ask(app, "POST", "/reset_prefix_cache", headers=bearer(ADMIN))
    assert answer.json() == {"forgotten_blocks": 7}
    assert client.asked == ["reset_prefix_cache"]
    assert ask(app, "GET", "/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 405


def test_no_page_of_another_site_resets_the_prefix_cache() -> None:
    async def from_here(**headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=front(), client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as http:
            return await http.post("/reset_prefix_cache", headers=headers)

    assert asyncio.run(from_here()).status_code == 200
    assert asyncio.run(from_here(origin="https://evil.example")).status_code == 415
    assert ask(front(), "POST", "/reset_prefix_cache", headers={"x-forwarded-for": "1.2.3.4"}).status_code == 403


# ---- batches of chats


def batch(app: Front, *texts: str, **body: Any) -> httpx.Response:
    messages = [[{"role": "user", "content": text}] for text in texts]
    return ask(app, "POST", "/v1/chat/completions/batch", json={"messages": messages, **body})


def test_every_conversation_has_its_answer() -> None:
    client = FakeClient()
    answer = batch(front(client), "one", "two", "three", max_tokens=100, logprobs=True).json()
    assert [job.prompt for job in client.submitted] == [
        tokenizer().encode(f"user: {text}\nassistant: ", add_special=False) for text in ("one", "two", "three")
    ]
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    texts = [one["message"]["content"] for one in answer["choices"]]
    assert texts == [f"user: {text}\nassistant: " for text in ("one", "two", "three")]  # the fake model repeats
    assert all(one["logprobs"]["content"] for one in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(len(job.prompt) for job in client.submitted)
    assert len({job.id for job in client.submitted}) == 3


@pytest.mark.parametrize(
    "body", [{"stream": True}, {"n": 2}, {"tools": [FISH]}, {"echo": True}, {"prompt_logprobs": 1}]
)
def test_what_a_batch_cannot_have_is_refused_by_name(body: dict[str, Any]) -> None:
    assert error_of(batch(front(), "one", **body), 400)["param"] == next(iter(body))


def test_conversations_are_lists_and_not_too_many() -> None:
    single = ask(front(), "POST", "/v1/chat/completions/batch", json={"messages": CHAT})
    assert error_of(single, 400)["param"].startswith("messages")
    assert error_of(batch(front()), 400)["param"] == "messages"
    assert error_of(batch(front(), *["x"] * 257), 400)["param"] == "messages"
    long = error_of(batch(front(), "short", "long " * 1000), 400)
    assert "messages[1]" in long["message"]


# ---- SGLang's names


def test_the_same_under_sglangs_names() -> None:
    def get(path: str) -> Any:
        return ask(front(), "GET", path).json()

    assert get("/get_server_info") == get("/server_info")
    assert get("/health_generate") == get("/health")
    info = get("/get_model_info")
    assert info == get("/model_info")
    assert (info["model_path"], info["is_generation"]) == ("tiny", True)
    client = FakeClient()
    assert ask(keyed(client), "POST", "/flush_cache", headers=bearer(PLAIN)).status_code == 403
    assert ask(keyed(client), "POST", "/flush_cache", headers=bearer(ADMIN)).json() == {"forgotten_blocks": 7}
    found = ask(front(), "POST", "/v1/tokenize", json={"prompt": ["a fish", ""]}).json()
    assert found["tokens"] == [tokenizer().encode("a fish"), tokenizer().encode("")]
    assert found["count"] == [len(one) for one in found["tokens"]]
    back = ask(front(), "POST", "/v1/detokenize", json={"tokens": found["tokens"], "skip_special_tokens": True}).json()
    assert back == {"prompt": ["a fish", ""], "text": ["a fish", ""]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": []}),
        ("/tokenize", {"prompt": ["x"] * 1025}),
        ("/tokenize", {"prompt": ["x" * 2**18, "y" * 2**18]}),
        ("/detokenize", {"tokens": [5, [6]]}),
        ("/detokenize", {"tokens": [[5], [10**6]]}),
        ("/detokenize", {"tokens": [[5]] * 1025}),
        ("/detokenize", {"tokens": [[5] * 2**17, [6] * 2**17, [7]]}),
    ],
)
def test_lists_that_are_too_long_or_mixed_are_refused(path: str, body: dict[str, Any]) -> None:
    assert error_of(ask(front(), "POST", path, json=body), 400)["param"] == next(iter(body))
