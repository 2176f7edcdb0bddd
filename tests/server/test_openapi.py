"""The API's description: complete, in itself consistent, and true of what is really answered."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from shoal.core.params import PARAMS, SamplingParams
from shoal.server.dialects.chat import ChatAnswer, ChatChunk, ChatRequest
from shoal.server.dialects.completions import CompletionAnswer, CompletionChunk, CompletionRequest
from shoal.server.field_meanings import REQUESTS, contained, meanings
from shoal.server.known_fields import IGNORED
from tests.server.fake_client import FakeClient
from tests.server.fronts import ask, chat, complete, events, front

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = [pytest.param(4, id="some"), pytest.param(20, id="many", marks=pytest.mark.slow)]
MORE = {"/generate": 10}  # until one is served
OPERATIONS = [
    ("/api/chat", "POST"), ("/api/generate", "POST"), ("/api/tags", "GET"), ("/api/ps", "GET"), ("/api/show", "POST"),
    ("/api/version", "GET"),
    ("/v1/completions", "POST"), ("/v1/chat/completions", "POST"), ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"), ("/v1/responses", "POST"), ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/{id}", "GET"), ("/v1/responses/{id}", "DELETE"), ("/v1/responses/{id}/cancel", "POST"),
    ("/v1/responses/{id}/input_items", "GET"), ("/tokenize", "POST"), ("/detokenize", "POST"),
    ("/v1/tokenize", "POST"), ("/v1/detokenize", "POST"), ("/get_model_info", "GET"), ("/get_server_info", "GET"),
    ("/generate", "POST"), ("/model_info", "GET"), ("/health_generate", "GET"), ("/flush_cache", "POST"),
    ("/v1/models", "GET"), ("/v1/models/{model}", "GET"), ("/health", "GET"), ("/version", "GET"), ("/metrics", "GET"),
    ("/openapi.json", "GET"), ("/v1/chat/completions/batch", "POST"), ("/ping", "GET"), ("/ping", "POST"),
    ("/load", "GET"), ("/server_info", "GET"), ("/tokenizer_info", "GET"), ("/reset_prefix_cache", "POST"),
]  # fmt: skip


class AnyGrammar:
    def check(self, spec: Any) -> None: ...


def document() -> dict[str, Any]:
    found: dict[str, Any] = ask(front(), "GET", "/openapi.json").json()
    return found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_reference_leads_somewhere() -> None:
    found = document()
    names = {reference.removeprefix("#/components/schemas/") for reference in references(found)}
    assert names <= set(found["components"]["schemas"])


def test_every_field_says_what_it_means_and_what_is_used_without_it() -> None:
    found = document()
    schemas = found["components"]["schemas"]
    for name, schema in schemas.items():
        for field, value in schema.get("properties", {}).items():
            assert value["description"].endswith("."), f"{name}.{field}"
    bodies = {
        reference.rpartition("/")[2]
        for path in found["paths"].values()
        for operation in path.values()
        for reference in references(operation.get("requestBody", {}))
    }
    assert len(bodies) > 10
    for name in contained(schemas, bodies):
        must = schemas[name].get("required", ())
        for field, value in schemas[name].get("properties", {}).items():
            known = field in must or value.get("default") is not None or value.get("x-no-effect")
            assert known or " Default: " in value["description"], f"{name}.{field}: {value['description']}"
    unused = set(meanings(REQUESTS)) & set(IGNORED) - {"metadata", "store", "verbosity"}
    assert not unused, "these have no effect"


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "presence_penalty", "n", "min_tokens", "skip_special_tokens"]
)
def test_the_default_in_words_is_the_default(field: str) -> None:
    """… of the sampling parameters, which are declared once with theirs."""
    param, default = PARAMS[field], getattr(SamplingParams(), field)
    words = document()["components"]["schemas"]["ChatRequest"]["properties"][field]["description"]
    if default is None:
        assert words.endswith(f" Default: the model's own, else {param.neutral:g}.")
    else:
        assert words.endswith(f" Default: {str(default).lower() if isinstance(default, bool) else f'{default:g}'}.")


def test_every_operation_has_a_program_in_python() -> None:
    for path, methods in document()["paths"].items():
        for method, operation in methods.items():
            (sample,) = operation["x-codeSamples"]
            assert sample["lang"] == "Python"
            compile(sample["source"], f"{method} {path}", "exec")
            assert "http://localhost:8000" in sample["source"]
            assert "SHOAL_API_KEY" not in sample["source"]


def test_every_operation_is_described_and_nothing_else() -> None:
    described = {(path, method.upper()) for path, how in document()["paths"].items() for method in how}
    assert described == set(OPERATIONS)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_every_field_is_described_and_no_other_is_allowed(kind: type[msgspec.Struct]) -> None:
    schema = document()["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == set(kind.__struct_fields__)
    assert set(IGNORED) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_keys_are_described_where_they_are_needed() -> None:
    assert document()["security"] == []
    headers = {"authorization": "Bearer sk-12345678"}
    keyed = ask(front(api_keys=(("a", "sk-12345678"),)), "GET", "/openapi.json", headers=headers).json()
    assert keyed["security"] == [{"key": []}]
    assert keyed["paths"]["/health"]["get"]["security"] == []


def same(given: Any, kind: Any) -> None:
    """Read strictly into the described structure, nothing of it is lost."""
    read = json.loads(msgspec.json.encode(msgspec.json.decode(json.dumps(given), type=kind)))
    assert without_nulls(read) == without_nulls(given)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"return_token_ids": True}, {"echo": True, "logprobs": 1}])
def test_events_written_by_hand_are_the_described_structures(more: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for event in events(complete(front(), prompt="Once upon", **options, **more)):
        same(event, CompletionChunk)
    if "echo" in more:
        return
    more = {"logprobs": True, "top_logprobs": 2} if "logprobs" in more else more
    for event in events(chat(front(), **options, **more)):
        same(event, ChatChunk)


def test_whole_answers_are_the_described_structures() -> None:
    same(complete(front(), prompt="Once", logprobs=2, return_token_ids=True).json(), CompletionAnswer)
    same(chat(front(), logprobs=True, top_logprobs=2, return_token_ids=True).json(), ChatAnswer)


@pytest.fixture(scope="module")
def schema() -> Any:
    load_all_checks()
    return schemathesis.openapi.from_asgi(
        "/openapi.json", front(FakeClient(), grammars=AnyGrammar(), allowed_hosts=("testserver",))
    )


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
@pytest.mark.parametrize("count", EXAMPLES)
def test_generated_requests_get_answers_that_are_described(schema: Any, count: int, path: str, method: str) -> None:
    operation = schema[path][method]
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if method == "POST" else [])]

    @settings(
        max_examples=max(count, MORE.get(path, 0)),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]))
    def work(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and case.meta.generation.mode == GenerationMode.POSITIVE:
            case.body.pop("model", None)
            had = case.body.pop("previous_response_id", None) is not None
            if had or path == "/v1/responses/input_tokens":
                case.body["input"] = "Hi"
            if path == "/generate":  # most generated prompts are refused for what they hold
                case.body.pop("input_ids", None)
                case.body["text"] = "Hi"
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    statuses: set[int] = set()
    work()
    refused = 403 if path in ("/reset_prefix_cache", "/flush_cache") else 200  # not from this machine
    assert {200, refused} & statuses or "{" in path, "some of it must have been served"
