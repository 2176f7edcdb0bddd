"""What clients of other servers send without meaning anything by it: defaults, nulls, and fields of earlier answers."""

from functools import cache
from typing import Any

import pytest

from shoal.server.app import Front
from shoal.server.known_fields import DEFAULT_ONLY, IGNORED
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, chat, complete, error_of, events, front, tokenizer
from tests.server.test_chat import prompt_of
from tests.server.test_tools import Recorded


@cache
def shared() -> Front:
    """For tests of bodies: making one takes longer than asking it."""
    return front()


@pytest.mark.parametrize("name", DEFAULT_ONLY)
def test_a_default_is_accepted_and_anything_else_is_refused_by_name(name: str) -> None:
    default = DEFAULT_ONLY[name]
    other: Any = {bool: not default, float: 7.5, int: 7, list: ["x"]}.get(type(default), "x")
    for asked in (lambda **body: chat(shared(), **body), lambda **body: complete(shared(), prompt="x", **body)):
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


@pytest.mark.parametrize("name", IGNORED)
def test_fields_without_effect_are_named(name: str) -> None:
    answer = chat(shared(), **{name: "x"})
    assert answer.status_code == 200
    assert answer.headers["x-shoal-warning"] == f"ignored: {name}"
    assert "x-shoal-warning" not in chat(shared(), **{name: None}).headers


@pytest.mark.parametrize(
    ("body", "param", "meant"),
    [
        ({"tempature": 1}, "tempature", "temperature"),
        ({"max_token": 1}, "max_token", "max_tokens"),
        ({"Temperature": 1}, "Temperature", "temperature"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "include_usage",
        ),
        ({"response_format": {"type": "text", "shema": {}}}, "response_format.shema", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "stric": True}}},
            "response_format.json_schema.stric",
            "strict",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "regex"),
    ],
)
def test_an_unknown_field_at_any_depth_is_told_what_was_meant(body: dict[str, Any], param: str, meant: str) -> None:
    error = error_of(chat(shared(), **body), 400)
    assert error["param"] == param
    assert error["message"] == f"{param} is not a known field; did you mean {meant!r}?"


def test_an_unknown_field_like_no_other_is_to_be_removed() -> None:
    for name in ("zzz", "x" * 5000):
        error = error_of(chat(front(), **{name: 1}), 400)
        assert error["message"].endswith("is not a known field; remove it")
        assert len(error["message"]) < 300


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json", '"integer"'),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json", '"integer"'),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, "composed", "<a>"),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<a"],
                                 "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]}},
            "composed", "%json",
        ),
        ({"structured_outputs": {"structural_tag": {"format": TAG}}}, "composed", "<a>"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, "json", '"whitespace_pattern":" ?"'),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, "json", '"item_separator":", "'),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "json", '"additionalProperties":false',
        ),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", "::="),
        ({"json_schema": '{"type": "object"}'}, "json", "object"),
        ({"regex": "[ab]"}, "regex", "[ab]"),
        ({"ebnf": 'root ::= "a"'}, "grammar", "::="),
    ],
)  # fmt: skip
def test_every_name_of_a_constraint(body: dict[str, Any], kind: str, words: str) -> None:
    client = FakeClient()
    for asked in (chat, complete):
        answer = asked(front(client, grammars=Recorded()), **body, **({"prompt": "x"} if asked is complete else {}))
        assert answer.status_code == 200, answer.text
        grammar = client.submitted[-1].grammar
        assert grammar is not None
        assert grammar.kind == kind
        assert words in grammar.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "format": TAG}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": TAG, "triggers": ["a"]}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "tagg"}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs"),
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"regex": "a", "guided_regex": "a"}, "structured_outputs"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "structured_outputs"),
    ],
)
def test_constraints_that_cannot_be_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert error_of(chat(front(grammars=Recorded()), **body), 400)["param"] == param


SHARED_DEFAULTS: dict[str, Any] = {  # of vLLM's and SGLang's requests, for chats and completions
    "model": None, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None,
    "max_tokens": None, "n": 1, "seed": None, "stop": [], "stream": False, "stream_options": None, "temperature": 1.0,
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "user": None, "use_beam_search": False, "length_penalty": 1.0,
    "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None,
    "truncation_side": None, "prompt_logprobs": None, "logprob_token_ids": None, "allowed_token_ids": None,
    "bad_words": [], "watermarking": None, "response_format": None, "structured_outputs": None, "priority": 0,
    "request_id": None, "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_prompt_text": None, "cache_salt": None,
    "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None,
    "stream_interval": None, "logits_processors": None, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "guided_decoding_backend": None, "guided_whitespace_pattern": None,
    "return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0,
    "return_cached_tokens_details": False, "regex": None, "ebnf": None, "json_schema": None, "stop_regex": None,
    "no_stop_trim": False, "lora_path": None, "session_params": None, "custom_params": None,
    "custom_logit_processor": None, "images_config": None, "bootstrap_host": None, "bootstrap_port": None,
    "bootstrap_room": None, "routed_dp_rank": None, "disagg_prefill_dp_rank": None, "data_parallel_rank": None,
    "rid": None, "extra_key": None, "ngram_corpus_id": None, "custom_labels": None,
}  # fmt: skip
CHAT_DEFAULTS: dict[str, Any] = {  # … and OpenAI's
    "logprobs": False, "top_logprobs": None, "max_completion_tokens": None, "tools": None, "tool_choice": None,
    "reasoning_effort": None, "thinking_token_budget": None, "include_reasoning": True, "parallel_tool_calls": True,
    "echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
    "documents": None, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None,
    "mm_processor_kwargs": None, "return_mm_kwargs": True, "return_meta_info": False, "task": None,
    "separate_reasoning": True, "stream_reasoning": True, "max_dynamic_patch": None, "min_dynamic_patch": None,
    "use_audio_in_video": False, "input_ids": None, "audio": None, "modalities": ["text"], "metadata": None,
    "store": False, "service_tier": "auto", "prediction": None, "web_search_options": None, "verbosity": None,
    "safety_identifier": None, "prompt_cache_key": None, "functions": None, "function_call": None,
}  # fmt: skip
COMPLETION_DEFAULTS: dict[str, Any] = {
    "best_of": None, "echo": False, "logprobs": None, "suffix": None, "add_special_tokens": True, "prompt_embeds": None,
}  # fmt: skip


def test_all_fields_of_other_servers_at_their_defaults() -> None:
    answer = chat(shared(), **SHARED_DEFAULTS, **CHAT_DEFAULTS)
    assert answer.status_code == 200, answer.text
    done = complete(shared(), prompt="x", **SHARED_DEFAULTS, **COMPLETION_DEFAULTS)
    assert done.status_code == 200, done.text
    for body in (SHARED_DEFAULTS | CHAT_DEFAULTS, dict.fromkeys(SHARED_DEFAULTS | CHAT_DEFAULTS)):
        answer = chat(shared(), **body)
        assert answer.status_code == 200, answer.text
