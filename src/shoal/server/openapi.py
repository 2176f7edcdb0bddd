"""The API's description: OpenAPI 3.1, generated from the structures that read requests and write answers.

Owns which statuses and kinds of content each path answers with. Knows no handlers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.core.params import PARAMS
from shoal.server import answers
from shoal.server.dialects.base import SSE, Dialect, Operation
from shoal.server.dialects.messages import CountTokensAnswer, MessagesError
from shoal.server.dialects.ollama import OllamaError
from shoal.server.errors import ErrorBody
from shoal.server.field_meanings import explain
from shoal.server.messages_body import CountTokensRequest
from shoal.server.ollama_routes import OllamaShow, OllamaShowRequest, OllamaTags, OllamaVersion
from shoal.server.python_samples import add_samples
from shoal.server.response_items import ROLES
from shoal.server.response_record import ResponseAnswer
from shoal.server.response_routes import DeletedResponse, InputItemList, InputTokensAnswer
from shoal.server.responses_body import InputTokensRequest
from shoal.server.server_routes import CacheReset, Load, ModelInfo, ServerInfo, TokenizerInfo
from shoal.server.settings import ServerSettings
from shoal.server.token_bodies import DetokenizeRequest, TokenizeRequest

Json = dict[str, Any]
PLACE = "#/components/schemas/{name}"
ERRORS = {
    400: "An invalid value; `param` names it. For a prompt that is too long the code is context_length_exceeded.",
    401: "The API key is missing or unknown.",
    403: "The API key may not do this: `priority` needs a key with that right.",
    404: "No such model, or no such path.",
    405: "The path does not support this method.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    421: "The server has no keys and does not answer to this host name.",
    429: "Too many requests are queued, or this key has exceeded its limits. Retry-After says when to retry.",
    431: "The headers are too large.",
    500: "An internal error. The server's log has details under the request's id.",
    503: "The engine is down, the server is shutting down or has no memory for the body, or the request timed out "
    "before its first token.",
}
ALWAYS = (401, 405, 421, 431, 500)
OF_BODIES = (400, 404, 408, 413, 415, 503)
APIS = {
    "/v1/messages": "Anthropic's API",
    "/v1/tokenize": "SGLang's API",
    "/v1/detokenize": "SGLang's API",
    "/v1/": "OpenAI's API",
    "/api/": "Ollama's API",
    **dict.fromkeys(("/generate", "/get_", "/model_info", "/health_generate", "/flush_cache"), "SGLang's API"),
}
INFO_ANSWERS = (
    answers.ModelList, answers.ModelCard, answers.TokenizeAnswer, answers.DetokenizeAnswer, answers.Health,
    answers.Version, Load, ServerInfo, ModelInfo, TokenizerInfo, CacheReset,
)  # fmt: skip


def describe(settings: ServerSettings, dialects: Sequence[Dialect]) -> Json:
    """The whole document."""
    operations = {dialect.path: dialect.operation for dialect in dialects}
    _, schemas = msgspec.json.schema_components(
        [
            *(one.request for one in operations.values()),
            TokenizeRequest,
            DetokenizeRequest,
            *(one.answer for one in operations.values()),
            *(one.chunk for one in operations.values()),
            *(one.error for one in operations.values()),
            CountTokensRequest,
            CountTokensAnswer,
            InputTokensRequest,
            InputTokensAnswer,
            DeletedResponse,
            InputItemList,
            OllamaShowRequest,
            OllamaShow,
            OllamaTags,
            OllamaVersion,
            *INFO_ANSWERS,
            ErrorBody,
        ],
        ref_template=PLACE,
    )
    for one in operations.values():
        _tighten_body(schemas[one.request.__name__]["properties"], one)
    _tighten(schemas)
    bodies: list[type[msgspec.Struct]] = [one.request for one in operations.values()]
    bodies += [TokenizeRequest, DetokenizeRequest, CountTokensRequest, InputTokensRequest, OllamaShowRequest]
    explain(schemas, [kind.__name__ for kind in bodies])
    keys: list[Json] = [{"key": []}] if settings.keys() else []
    paths = _paths(settings, operations)
    for path, methods in paths.items():
        for operation in methods.values():
            operation["tags"] = [_api_of(path)]
    add_samples(paths, bool(keys))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": settings.version, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": keys,
    }


ABOUT = (
    "OpenAI's API for one model, with a few additional fields. A field that is not listed is refused by name. "
    "Every answer carries X-Request-Id: the client's own, if it sent one."
)


def _tighten_body(properties: Json, operation: Operation) -> None:
    properties |= operation.overrides
    for name, param in PARAMS.items():
        if param.kind == "biases" and name in properties:
            properties[name]["anyOf"][0] |= {  # JSON has only strings for keys; these are token ids
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
                "additionalProperties": {"type": "number", "minimum": param.low, "maximum": param.high},
            }


def _tighten(schemas: Json) -> None:
    """Limits that are checked but that the types cannot express."""
    schemas["ChatMessage"]["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"properties": {"role": {"enum": ["assistant"]}}},
    ]
    schemas["GenerateRequest"]["anyOf"] = _exactly_one(text=["string", "array"], input_ids="array")
    schemas["TokenizeRequest"]["anyOf"] = _exactly_one(prompt=["string", "array"], messages="array")
    text, texts = {"type": "string"}, {"type": ["string", "array"]}
    schemas["InputItem"]["anyOf"] = [
        {"required": ["role", "content"], "properties": {
            "type": {"enum": ["message", None]}, "role": {"enum": list(ROLES)}, "content": texts}},
        {"required": ["type", "call_id", "name", "arguments"], "properties": {
            "type": {"enum": ["function_call"]}, "call_id": text, "name": text, "arguments": text}},
        {"required": ["type", "call_id", "output"], "properties": {
            "type": {"enum": ["function_call_output"]}, "call_id": text, "output": texts}},
        {"required": ["type"], "properties": {"type": {"enum": ["reasoning"]}}},
        {"required": ["id"], "properties": {"type": {"enum": ["item_reference", None]}, "id": {"type": "string"}}},
    ]  # fmt: skip
    for name in ("ResponsesRequest", "InputTokensRequest"):
        schemas[name]["anyOf"] = [
            {"required": ["input"], "properties": {"input": texts}},
            {"required": ["previous_response_id"], "properties": {"previous_response_id": text}},
        ]
    schemas["ContentPart"]["anyOf"] = [
        {"required": ["text"], "properties": {"text": {"type": "string"}}},
        {"required": ["refusal"], "properties": {"type": {"enum": ["refusal"]}, "refusal": {"type": "string"}}},
    ]
    shapes = {"json": ["object", "string"], "regex": "string", "choice": "array", "grammar": "string"}
    shapes |= {"json_object": "boolean", "structural_tag": ["object", "string"]}
    schemas["StructuredOutputs"]["anyOf"] = _exactly_one(**shapes)
    schemas["ResponseFormat"]["anyOf"] = [
        _format("text"),
        _format("json_object"),
        _format("json_object", schema="object"),
        _format("json_schema", json_schema="object"),
        _format("json_schema", schema="object"),
        _format("structural_tag", format="object"),
        _format("structural_tag", structures="array", triggers="array"),
    ]


def _format(kind: str, **types: str) -> Json:
    """A response_format that has these fields and no other."""
    others = ("json_schema", "schema", "format", "structures", "triggers", "at_least_one")
    nulls: Json = {name: {"type": "null"} for name in others}
    return {
        "required": [*types],
        "properties": {**nulls, "type": {"enum": [kind]}, **{name: {"type": one} for name, one in types.items()}},
    }


def _exactly_one(**types: Any) -> list[Json]:
    """Exactly one of these fields is set; the others are missing or null, and a switch may also be off."""
    is_set: Json = {name: {"enum": [True]} if kind == "boolean" else {"type": kind} for name, kind in types.items()}
    is_not: Json = {name: {"enum": [None, False] if kind == "boolean" else [None]} for name, kind in types.items()}
    return [{"required": [name], "properties": {**is_not, name: is_set[name]}} for name in types]


def _paths(settings: ServerSettings, operations: Mapping[str, Operation]) -> Json:
    return {
        **{path: _generation(one, settings) for path, one in operations.items()},
        **_stored_responses(settings),
        "/v1/models": _get("The model's names", answers.ModelList),
        "/v1/models/{model}": _get(
            "One of them",
            answers.ModelCard,
            404,
            parameters=[
                {
                    "name": "model",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1},
                    "example": settings.model,
                }
            ],
        ),
        **_tokens(settings),
        "/v1/messages/count_tokens": _post(
            "Tokens of a prompt, as Anthropic counts them",
            CountTokensRequest,
            CountTokensAnswer,
            {"model": settings.model, "messages": [{"role": "user", "content": "Hi"}]},
            429,
            503,
            error=MessagesError,
        ),
        "/api/tags": _get("The model's names, for Ollama's clients", OllamaTags, error=OllamaError),
        "/api/ps": _get("The same", OllamaTags, error=OllamaError),
        "/api/show": _post(
            "What a model can do",
            OllamaShowRequest,
            OllamaShow,
            {"model": settings.model},
            error=OllamaError,
        ),
        "/api/version": _get("A version for Ollama's clients", OllamaVersion, error=OllamaError),
        **_of_the_server(),
    }


def _api_of(path: str) -> str:
    """Whose API a path belongs to: the page groups them so."""
    for begin, name in APIS.items():
        if path.startswith(begin):
            return name
    return "The server"


def _tokens(settings: ServerSettings) -> Json:
    """From text to token ids and back, under both servers' names."""
    found: Json = {}
    for prefix in ("", "/v1"):
        example = {"model": settings.model, "prompt": "Once upon a time"}
        found[f"{prefix}/tokenize"] = _post(
            "Token ids of a prompt or of messages", TokenizeRequest, answers.TokenizeAnswer, example, 429, 503
        )
        found[f"{prefix}/detokenize"] = _post(
            "The text of token ids",
            DetokenizeRequest,
            answers.DetokenizeAnswer,
            {"model": settings.model, "tokens": [1, 2, 3]},
        )
    for name in ("tokenize", "detokenize"):
        found[f"/v1/{name}"]["post"]["operationId"] += "_v1"
    return found


def _of_the_server() -> Json:
    """What operators and their programs ask."""
    return {
        "/health": _health(),
        "/ping": {**_health(), "post": {**_health()["get"], "operationId": "ping"}},
        "/version": _get("The server's version", answers.Version),
        "/load": _get("Requests that run or wait", Load),
        "/server_info": _get("What is served", ServerInfo),
        "/get_server_info": _get("The same", ServerInfo),
        "/model_info": _get("The model, as SGLang describes it", ModelInfo),
        "/get_model_info": _get("The same", ModelInfo),
        "/health_generate": _health(),
        "/flush_cache": _reset(),
        "/tokenizer_info": _get("The tokenizer and its chat template", TokenizerInfo, 400),
        "/reset_prefix_cache": _reset(),
        "/metrics": _get("Metrics for Prometheus", None, kind="text/plain"),
        "/openapi.json": _get("This document", None),
    }


def _stored_responses(settings: ServerSettings) -> Json:
    """The paths of what /v1/responses has stored."""
    id: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    options: list[Json] = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
    events: list[Json] = [
        {"name": "stream", "in": "query", "schema": {"enum": ["true", "false"]},
         "description": "true: the events of one that was made with `background` and `stream`, as they come"},
        {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0},
         "description": "with `stream`: the number of the last event that is not wanted"},
    ]  # fmt: skip
    found = _get("A stored response", ResponseAnswer, 400, 404, 503, parameters=[id, *events])
    gone = _get("Delete it", DeletedResponse, 404, 503, parameters=[id])["get"]
    items = _get("The items of its input", InputItemList, 400, 404, 503, parameters=[id, *options])
    cancel = _get("Cancel it, if it is made in the background", ResponseAnswer, 400, 404, 503, parameters=[id])["get"]
    return {
        "/v1/responses/{id}": {**found, "delete": gone},
        "/v1/responses/{id}/input_items": items,
        "/v1/responses/{id}/cancel": {"post": cancel},
        "/v1/responses/input_tokens": _post(
            "Tokens of an input",
            InputTokensRequest,
            InputTokensAnswer,
            {"model": settings.model, "input": "Say hello."},
            429,
            503,
        ),
    }


def _ref(kind: type) -> Json:
    return {"$ref": PLACE.format(name=kind.__name__)}


def _errors(*statuses: int, error: type[msgspec.Struct] = ErrorBody) -> Json:
    found: Json = {}
    for status in sorted({*statuses, *ALWAYS}):
        found[str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": _ref(error)}},
        }
        if status in (429, 503):
            found[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return found


def _generation(operation: Operation, settings: ServerSettings) -> Json:
    """A path that generates: it can stream, and it can be refused for load."""
    example = {"model": settings.model, **operation.example}
    request, answer, error = operation.request, operation.answer, operation.error
    path = _post(operation.summary, request, answer, example, 403, 429, 503, error=error)
    good, chunk = path["post"]["responses"]["200"], operation.chunk.__name__
    good["description"] += f"; with stream, one event per token, {operation.ends_with}"
    if operation.also_lists:
        one = good["content"]["application/json"]["schema"]
        good["content"]["application/json"]["schema"] = {"anyOf": [one, {"type": "array", "items": one}]}
    about = f"A {chunk} each; an error after the start is also sent as one."
    event: Json = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    if operation.stream_kind != SSE:
        event = {}
    good["content"][operation.stream_kind] = {"schema": {**event, "description": about}}  # of each event
    return path


def _post(
    summary: str, request: type, answer: type, example: Json, *errors: int, error: type[msgspec.Struct] = ErrorBody
) -> Json:
    good = {
        "description": "The answer",
        "content": {"application/json": {"schema": _ref(answer)}},
        "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
    }
    return {
        "post": {
            "summary": summary,
            "operationId": request.__name__.removesuffix("Request").lower(),
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(request), "example": example}},
            },
            "responses": {"200": good, **_errors(*OF_BODIES, *errors, error=error)},
        }
    }


def _get(
    summary: str,
    answer: type | None,
    *errors: int,
    kind: str = "application/json",
    open: bool = False,
    error: type[msgspec.Struct] = ErrorBody,
    **more: Any,
) -> Json:
    schema: Json = _ref(answer) if answer is not None else {"type": "string"} if kind != "application/json" else {}
    responses = {
        "200": {"description": "The answer", "content": {kind: {"schema": schema}}},
        **_errors(*errors, error=error),
    }
    found: Json = {"summary": summary, "responses": responses, **more}
    if open:
        found["security"] = []
    return {"get": found}


def _reset() -> Json:
    path = _get("Forget cached prefixes, for operators", CacheReset, 403, 408, 413, 415)
    return {"post": path["get"]}


def _health() -> Json:
    path = _get("Whether requests are accepted", answers.Health, open=True)
    path["get"]["responses"]["503"] = {
        "description": "The engine is down, or the server is shutting down.",
        "content": {"application/json": {"schema": _ref(answers.Health)}},
    }
    return path
