"""Checks of the fields that decide what an answer shows."""

import pytest

from tests.fields.registry import BOTH, CHAT, COMPLETIONS, FOUR, RESPONSES, checks
from tests.fields.server import GREEDY, FieldServer, encoded
from tests.story.models import BOS, backend


@checks(FOUR, "model")
def model(server: FieldServer, path: str) -> None:
    for name in ("tiny", "other-name"):
        assert server.ask(path, model=name)["model"] == name
    assert server.ask(path)["model"] == "tiny"
    assert server.post(path, model="unknown").status_code == 404


@checks(BOTH, "request_id", "rid")
def request_ids(server: FieldServer, path: str) -> None:
    for name in ("request_id", "rid"):
        answer = server.post(path, **{name: "mine-1"})
        assert answer.json()["id"].endswith("-mine-1")
        assert answer.headers["x-request-id"] == "mine-1"


@checks(BOTH, "return_token_ids")
def token_ids(server: FieldServer, path: str) -> None:
    answer = server.ask(path, **GREEDY, return_token_ids=True)
    choice = answer["choices"][0]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert backend().decode(choice["token_ids"]) == text
    prompt = choice["prompt_token_ids"] if path == COMPLETIONS else answer["prompt_token_ids"]
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    assert prompt[0] == BOS
    assert "token_ids" not in server.ask(path)["choices"][0]
    parts = [one["choices"][0].get("token_ids") or [] for one in server.events(path, **GREEDY, return_token_ids=True)]
    assert [token for part in parts for token in part] == choice["token_ids"]


@checks(COMPLETIONS, "logprobs")
def completion_logprobs(server: FieldServer, path: str) -> None:
    choice = server.choice(path, **GREEDY, logprobs=2)
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(choice["token_ids"])
    for token, written in zip(choice["token_ids"], shown["tokens"], strict=True):
        assert written.startswith("bytes:") or written == backend().decode([token])
    for token, own, tops in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert len(tops) == 2
        assert tops[token] == own == max(tops.values()), "the greedy token is the likeliest"
    assert server.choice(path)["logprobs"] is None


@checks(BOTH, "logprob_token_ids", "return_tokens_as_token_ids")
def certain_logprobs(server: FieldServer, path: str) -> None:
    """A token's logprob is the same whether it was asked for by its id or is the one that was drawn."""
    asked = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True}
    token = server.tokens(path, **GREEDY, max_tokens=1)[0]
    body = {**GREEDY, **asked, "max_tokens": 1, "logprob_token_ids": [token, 7], "return_tokens_as_token_ids": True}
    shown = server.choice(path, **body)["logprobs"]
    if path == COMPLETIONS:
        assert shown["tokens"] == [f"token_id:{token}"]
        found, own = shown["top_logprobs"][0], shown["token_logprobs"][0]
    else:
        (one,) = shown["content"]
        assert one["token"] == f"token_id:{token}"
        found, own = {each["token"]: each["logprob"] for each in one["top_logprobs"]}, one["logprob"]
    assert set(found) == {f"token_id:{token}", "token_id:7"}
    assert found[f"token_id:{token}"] == pytest.approx(own)
    assert found["token_id:7"] < own


@checks(BOTH, "prompt_logprobs")
def prompt_logprobs(server: FieldServer, path: str) -> None:
    """Those of a prompt's last token are what a shorter prompt gives it as an answer."""
    ids = encoded("Once upon a time")
    answer = server.ask(path, **({"prompt": ids} if path == COMPLETIONS else {}), prompt_logprobs=2, max_tokens=1)
    found = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == answer["usage"]["prompt_tokens"]
    for one in found[1:]:
        assert sorted(each["rank"] for each in one.values())[:2] == [1, 2]
    if path == COMPLETIONS:
        drawn = server.choice(path, prompt=ids[:-1], logprobs=1, logprob_token_ids=[ids[-1]], max_tokens=1, **GREEDY)
        (logprob,) = (
            value for name, value in drawn["logprobs"]["top_logprobs"][0].items() if name == backend().decode([ids[-1]])
        )
        assert found[-1][str(ids[-1])]["logprob"] == pytest.approx(logprob, abs=1e-4)


@checks(RESPONSES, "include", "top_logprobs")
def response_logprobs(server: FieldServer, path: str) -> None:
    def shown(**body: object) -> list[dict[str, object]]:
        return list(server.ask(path, **GREEDY, **body)["output"][0]["content"][0]["logprobs"])

    assert shown() == []
    asked = ["message.output_text.logprobs"]
    plain, more = shown(include=asked), shown(include=asked, top_logprobs=3)
    chat = server.choice(CHAT, **GREEDY, logprobs=True, top_logprobs=3)["logprobs"]["content"]
    assert [one["logprob"] for one in plain] == [one["logprob"] for one in more] == [one["logprob"] for one in chat]
    assert [one["top_logprobs"] for one in more] == [one["top_logprobs"] for one in chat]


@checks(RESPONSES, "metadata")
def metadata(server: FieldServer, path: str) -> None:
    assert server.ask(path, metadata={"a": "b"})["metadata"] == {"a": "b"}
    assert server.ask(path)["metadata"] == {}
