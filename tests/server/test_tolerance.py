"""What clients of other servers send without meaning anything by it: defaults, nulls, and fields of earlier answers."""

from typing import Any

import pytest

from shoal.server.bodies import DEFAULT_ONLY
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, chat, complete, error_of, events, front, tokenizer
from tests.server.test_chat import prompt_of
from tests.server.test_tools import Recorded


@pytest.mark.parametrize("name", DEFAULT_ONLY)
def test_a_default_is_accepted_and_anything_else_is_refused_by_name(name: str) -> None:
    default = DEFAULT_ONLY[name]
    other: Any = {bool: not default, float: 7.5, list: ["x"]}.get(type(default), "x")
    for asked in (lambda **body: chat(front(), **body), lambda **body: complete(front(), prompt="x", **body)):
        for value in (None, default):
            assert asked(**{name: value}).status_code == 200
        error = error_of(asked(**{name: other}), 400)
        assert error["param"] == name
        assert "not supported" in error["message"]


def test_fields_of_earlier_answers_come_back_and_roles_are_the_templates() -> None:
    message = {
        "role": "assistant", "content": [{"type": "text", "text": "Yes.", "cache_control": {"type": "ephemeral"}}],
        "refusal": None, "annotations": [], "reasoning": "Hm", "mood": "glad", "provider_specific_fields": {},
    }  # fmt: skip
    messages = [message, {"role": "narrator", "content": "Then", "name": "Bob"}]
    assert prompt_of(messages=messages).startswith("assistant: Yes.\nnarrator: Then\n")


def test_older_names_of_structured_outputs() -> None:
    for name, value, kind in (
        ("guided_json", {"type": "object"}, "json"), ("guided_regex", "a+", "regex"),
        ("guided_choice", ["a", "b"], "choice"), ("guided_grammar", 'start: "a"', "grammar"),
    ):  # fmt: skip
        client = FakeClient()
        assert chat(front(client, grammars=Recorded()), **{name: value}).status_code == 200
        grammar = client.submitted[0].grammar
        assert grammar is not None
        assert grammar.kind == kind
    error = error_of(chat(front(grammars=Recorded(bad="a+")), guided_regex="a+"), 400)
    assert error["param"] == "guided_regex"
    both = {"guided_regex": "a", "structured_outputs": {"regex": "a"}}
    assert error_of(chat(front(grammars=Recorded()), **both), 400)["param"] == "structured_outputs"


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2}])
def test_usage_in_every_chunk(more: dict[str, Any]) -> None:
    ids = tokenizer().encode("Once upon a time", add_special=False)
    app = front(FakeClient(lambda job, sample: [*ids, EOS]))
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    found = events(chat(app, stream=True, stream_options=options, **more))
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == (len(ids) + 1) * more.get("n", 1)
    assert len(set(counts)) > 4
    assert found[-1]["choices"] == []
    alone = events(chat(app, stream=True, stream_options={"continuous_usage_stats": True}, **more))
    assert all(one["usage"] for one in alone)
    assert alone[-1]["choices"]
    plain = events(chat(app, stream=True, stream_options={"include_usage": True}, **more))
    assert all(one["usage"] is None for one in plain[:-1])


def test_fields_without_effect_are_named() -> None:
    answer = chat(front(), request_id="x", verbosity="low", prompt_cache_retention="24h", rid="y")
    assert answer.status_code == 200
    for name in ("request_id", "verbosity", "prompt_cache_retention", "rid"):
        assert name in answer.headers["x-shoal-warning"]
