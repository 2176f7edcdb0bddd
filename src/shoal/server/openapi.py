"""The API's description: OpenAPI 3.1, made from the very structures that read requests and write answers.

Owns which statuses and kinds of content each path answers with. Knows no handlers.
"""

from typing import Any

import msgspec

from shoal.server import answers
from shoal.server.errors import ErrorBody
from shoal.server.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from shoal.server.settings import ServerSettings

Json = dict[str, Any]
PLACE = "#/components/schemas/{name}"
ERRORS = {
    400: "A value that cannot be used; `param` names it. For an over-long prompt the code is context_length_exceeded.",
    401: "An API key is needed, or this one is not known.",
    404: "No such model, or no such path.",
    405: "Not this method.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests wait, or this key has asked for too much. Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "A fault of the server. Its log tells more, under the request's id.",
    503: "The engine is down, the server is about to stop, or the request waited longer than it was willing to.",
}
ALWAYS = (401, 405, 431, 500)
OF_BODIES = (400, 404, 408, 413, 415)
PROMPT: Json = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
        },
    ],
    "description": "A text, several texts, the token ids of one prompt, or those of several.",
}
TYPES: tuple[type, ...] = (
    CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest,
    answers.CompletionAnswer, answers.ChatAnswer, answers.CompletionChunk, answers.ChatChunk,
    answers.ModelList, answers.ModelCard, answers.TokenizeAnswer, answers.DetokenizeAnswer, answers.Health,
    answers.Version, ErrorBody,
)  # fmt: skip


def describe(settings: ServerSettings) -> Json:
    """The whole document."""
    _, schemas = msgspec.json.schema_components(TYPES, ref_template=PLACE)
    schemas["CompletionRequest"]["properties"]["prompt"] = PROMPT
    _tighten(schemas)
    keys: list[Json] = [{"key": []}] if settings.keys() else []
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": settings.version, "description": ABOUT},
        "paths": _paths(settings),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": keys,
    }


ABOUT = (
    "OpenAI's API for one model, and a few fields beyond it. A field that is not listed is refused by name. "
    "Every answer carries X-Request-Id, the client's own if it sent one."
)


def _tighten(schemas: Json) -> None:
    """What the types cannot say, and is checked all the same."""
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["logit_bias"]["anyOf"][0] |= {  # JSON has only text for keys; these are token ids
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    schemas["ChatMessage"]["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"properties": {"role": {"enum": ["assistant"]}}},
    ]
    schemas["TokenizeRequest"]["anyOf"] = _exactly_one(prompt="string", messages="array")
    shapes = {"json": ["object", "string"], "regex": "string", "choice": "array", "grammar": "string"}
    schemas["StructuredOutputs"]["anyOf"] = _exactly_one(**shapes)
    schemas["ResponseFormat"]["anyOf"] = [
        {"properties": {"type": {"enum": ["text", "json_object"]}, "json_schema": {"type": "null"}}},
        {
            "required": ["json_schema"],
            "properties": {"type": {"enum": ["json_schema"]}, "json_schema": {"type": "object"}},
        },
    ]


def _exactly_one(**types: Any) -> list[Json]:
    """One of these fields is there, the others are missing or null."""
    return [
        {
            "required": [name],
            "properties": {other: {"type": kind if other == name else "null"} for other, kind in types.items()},
        }
        for name in types
    ]


def _paths(settings: ServerSettings) -> Json:
    streamed = "; with stream, one event per token, then `data: [DONE]`"
    return {
        "/v1/completions": _post(
            "Continue a prompt",
            CompletionRequest,
            answers.CompletionAnswer,
            settings,
            streamed,
            answers.CompletionChunk,
        ),
        "/v1/chat/completions": _post(
            "Answer a chat", ChatRequest, answers.ChatAnswer, settings, streamed, answers.ChatChunk
        ),
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
        "/tokenize": _post("Token ids of a prompt or of messages", TokenizeRequest, answers.TokenizeAnswer, settings),
        "/detokenize": _post("The text of token ids", DetokenizeRequest, answers.DetokenizeAnswer, settings),
        "/health": _health(),
        "/version": _get("The server's version", answers.Version),
        "/metrics": _get("Metrics for Prometheus", None, kind="text/plain"),
        "/openapi.json": _get("This document", None),
    }


def _ref(kind: type) -> Json:
    return {"$ref": PLACE.format(name=kind.__name__)}


def _errors(*statuses: int) -> Json:
    found: Json = {}
    for status in sorted({*statuses, *ALWAYS}):
        found[str(status)] = {
            "description": ERRORS[status],
            "content": {"application/json": {"schema": _ref(ErrorBody)}},
        }
        if status in (429, 503):
            found[str(status)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return found


def _post(
    summary: str,
    asked: type,
    answer: type,
    settings: ServerSettings,
    streamed: str = "",
    chunk: type | None = None,
) -> Json:
    content: Json = {"application/json": {"schema": _ref(answer)}}
    if chunk is not None:
        about = f"Events `data: {{…}}` with a {chunk.__name__} each; an error after the start is such an event too."
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content["text/event-stream"] = {"schema": {**event, "description": about}}  # of each event
    good = {
        "description": f"The answer{streamed}",
        "content": content,
        "headers": {"X-Request-Id": {"schema": {"type": "string"}}},
    }
    refusals = (429, 503) if chunk is not None else ()
    return {
        "post": {
            "summary": summary,
            "operationId": asked.__name__.removesuffix("Request").lower(),
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _ref(asked), "example": _example(asked, settings)}},
            },
            "responses": {"200": good, **_errors(*OF_BODIES, *refusals)},
        }
    }


def _example(asked: type, settings: ServerSettings) -> Json:
    about: dict[type, Json] = {
        CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 16},
        ChatRequest: {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
        TokenizeRequest: {"prompt": "Once upon a time"},
        DetokenizeRequest: {"tokens": [1, 2, 3]},
    }
    return {"model": settings.model, **about[asked]}


def _get(
    summary: str, answer: type | None, *errors: int, kind: str = "application/json", open: bool = False, **more: Any
) -> Json:
    schema: Json = _ref(answer) if answer is not None else {"type": "string"} if kind != "application/json" else {}
    responses = {"200": {"description": "The answer", "content": {kind: {"schema": schema}}}, **_errors(*errors)}
    found: Json = {"summary": summary, "responses": responses, **more}
    if open:
        found["security"] = []
    return {"get": found}


def _health() -> Json:
    path = _get("Whether requests are taken", answers.Health, open=True)
    path["get"]["responses"]["503"] = {
        "description": "The engine is down, or the server is about to stop.",
        "content": {"application/json": {"schema": _ref(answers.Health)}},
    }
    return path
