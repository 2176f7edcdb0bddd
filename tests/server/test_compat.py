"""docs/api.md: it is the generated page, and every field in it is sent: taken, ignored, refused, at its default."""

from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from shoal.server.app import Front
from shoal.server.compat import BODIES, IGNORED, NOT_SERVED, REFUSES, Field, endpoints, fields_of, page
from shoal.server.known_fields import DEFAULT_ONLY, WHY
from shoal.server.other_servers import FIELDS
from tests.server.fronts import ask, front
from tests.server.test_tools import CITY, TOOLS, Recorded, says

CHAT = [{"role": "user", "content": "Hi"}]
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
TOOL = {"type": "function", "name": "weather", "parameters": CITY}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": {"messages": CHAT, "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/generate": {"text": "Hi"},
    "/generate sampling_params": {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
# a value of each field that is taken, for all paths or for one; a pair has what the field needs beside it first
SAMPLES: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(("stream", "echo", "store", "parallel_tool_calls", "include_reasoning"), True),
    **dict.fromkeys(("return_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim"), True),
    **dict.fromkeys(("include_stop_str_in_output", "add_special_tokens", "add_generation_prompt"), True),
    **{name: [5, 6, 7] for name in ("allowed_token_ids", "stop_token_ids")},
    **dict.fromkeys(("regex", "guided_regex", "stop_regex", "cache_salt", "request_id", "rid"), "[a-z]+"),
    **{name: ["zz"] for name in ("stop", "bad_words")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), 50),
    **dict.fromkeys(("guided_json", "json_schema"), CITY),
    "messages": CHAT, "prompt": "Hi", "tokens": [5], "input": "Hi", "model": "tiny", "n": 2, "best_of": 2, "seed": 5,
    "top_k": 5, "min_tokens": 2, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}, "priority": 0,
    "stream_options": ({"stream": True}, {"include_usage": True}), "logprobs": 2,
    "/v1/chat/completions logprobs": True, "top_logprobs": ({"logprobs": True}, 2), "prompt_logprobs": 1,
    "/v1/responses top_logprobs": 2,
    "logprob_token_ids": ({"logprobs": 1}, [5]), "/v1/chat/completions logprob_token_ids": ({"logprobs": True}, [5]),
    "return_tokens_as_token_ids": ({"logprobs": 1}, True),
    "/v1/chat/completions return_tokens_as_token_ids": ({"logprobs": True}, True),
    "use_beam_search": ({"max_tokens": 2}, True), "length_penalty": ({"max_tokens": 2, "use_beam_search": True}, 1.5),
    "truncate_prompt_tokens": 3, "truncation_side": ({"truncate_prompt_tokens": 3}, "right"),
    "response_format": FORM, "structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"', "ebnf": 'root ::= "a"', "tools": TOOLS, "tool_choice": ({"tools": TOOLS}, "auto"),
    "/v1/responses tools": [TOOL], "/v1/responses tool_choice": ({"tools": [TOOL]}, "auto"),
    "/v1/messages tools": [{"name": "weather", "input_schema": CITY}],
    "/v1/messages/count_tokens tools": [{"name": "weather", "input_schema": CITY}],
    "/v1/messages tool_choice": ({"tools": [{"name": "weather"}]}, {"type": "auto"}),
    "/v1/messages/count_tokens tool_choice": ({"tools": [{"name": "weather"}]}, {"type": "auto"}),
    "reasoning_effort": "low", "thinking_token_budget": 5, "chat_template_kwargs": {"mood": "glad"},
    "continue_final_message": (
        {"messages": [*CHAT, {"role": "assistant", "content": "He"}], "add_generation_prompt": False}, True,
    ),
    "/v1/chat/completions add_special_tokens": False,
    "background": False, "include": ["message.output_text.logprobs"], "instructions": "Be brief.",
    "max_tool_calls": 3, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "truncation": "auto",
    "system": "Be brief.", "stop_sequences": ["zz"], "thinking": {"type": "disabled"}, "output_config": {},
    "/tokenize tools": ({"prompt": None, "messages": CHAT}, TOOLS),
    "/tokenize continue_final_message": (
        {"prompt": None, "messages": [*CHAT, {"role": "assistant", "content": "He"}], "add_generation_prompt": False},
        True,
    ),
    "/tokenize messages": ({"prompt": None}, CHAT), "return_token_strs": True,
    "/tokenize tool_choice": ({"prompt": None, "messages": CHAT, "tools": TOOLS}, "none"),
    "text": "Hi", "/generate input_ids": ({"text": None}, [5, 6]), "sampling_params": {"max_new_tokens": 5},
    "return_logprob": True, "logprob_start_len": ({"return_logprob": True}, 0), "/generate top_logprobs_num": 2,
    "token_ids_logprob": ({"return_logprob": True}, [5]), "return_text_in_logprobs": ({"return_logprob": True}, True),
    "return_prompt_token_ids": True, "/generate sampling_params max_new_tokens": 5, "sampling_seed": 5,
    "min_new_tokens": 2, "structural_tag": {"format": {"type": "regex", "pattern": "a"}},
    "/v1/responses text": {},
}  # fmt: skip
TESTED_APART = {"previous_response_id"}  # it needs a stored response


@cache
def app() -> Front:
    return front(says("Yes."), grammars=Recorded())


def send(path: str, **more: Any) -> httpx.Response:
    """`path`: may name a field of its body, too, whose own fields these are."""
    path, _, inner = path.partition(" ")
    return ask(app(), "POST", path, json={**LEAST[path], **({inner: more} if inner else more)})


def sample(path: str, name: str) -> dict[str, Any]:
    value = SAMPLES.get(f"{path} {name}", SAMPLES.get(name))
    return {**value[0], name: value[1]} if isinstance(value, tuple) else {name: value}


def other_than(one: Field) -> Any:
    """A value of the same kind as its default, but another."""
    default = next((value for value in (*one.defaults, DEFAULT_ONLY.get(one.name)) if value is not None), None)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else ["x"] if isinstance(default, list) else "x"


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_accepted_as_null_and_at_its_default(path: str) -> None:
    for one in fields_of(path):
        values = [*one.defaults, None] if one.defaults else []  # a required one has no default
        for value in values:
            answer = send(path, **({} if one.name in LEAST[path] and value is None else {one.name: value}))
            assert answer.status_code == 200, (one.name, value, answer.text)


def check_refused(path: str, one: Field) -> None:
    answer = send(path, **{one.name: other_than(one)})
    assert answer.status_code == 400, (one.name, answer.text)
    error = answer.json()["error"]
    assert error["param"].removeprefix("sampling_params.").split(".")[0] == one.name
    assert one.note.split(";")[0] in error["message"], (one.name, error)


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_is_treated_as_the_page_says(path: str) -> None:
    for one in fields_of(path):
        if one.status == REFUSES:
            check_refused(path, one)
        elif one.status == IGNORED:
            warning = send(path, **{one.name: {"user_id": "u"}}).headers["x-shoal-warning"]
            assert one.name in warning.removeprefix("ignored: ").split(", ")
        elif one.name not in TESTED_APART:
            value = sample(path, one.name)
            assert value[one.name] is not None, f"{one.name} has no sample"
            answer = send(path, **value)
            assert answer.status_code == 200, (one.name, answer.text)
            assert one.name not in answer.headers.get("x-shoal-warning", "").split(", "), one.name


def test_endpoints_are_there_or_not_as_the_page_says() -> None:
    for one, _, status, _ in endpoints():
        method, path = one.split()
        answer = ask(app(), method, path.replace("{model}", "tiny").replace("{id}", "resp_1"))
        unknown = answer.status_code == 404 and "no such path" in answer.text
        assert unknown == (status == REFUSES), (one, answer.text)
    absent = {one.split()[1] for one, _, status, _ in endpoints() if status == REFUSES}
    assert {path for paths in NOT_SERVED.values() for path in paths} == absent


def test_every_field_that_is_refused_has_a_reason() -> None:
    assert set(WHY) == set(DEFAULT_ONLY)
    assert set(BODIES) == set(FIELDS) == set(LEAST)


def test_the_page_is_the_generated_one() -> None:
    committed = Path(__file__).parents[2] / "docs" / "api.md"
    assert committed.read_text() == page(), "run: python -m shoal.server.compat > docs/api.md"
