"""Rules across the fields of a body: which cannot be combined, and which takes precedence.

Pure functions over the fields that all bodies share. Knows no tokens, no tokenizer and no HTTP beyond the errors.
"""

from typing import Any

import msgspec

from shoal.core.job import GrammarSpec
from shoal.keys.api_key import ApiKey
from shoal.server.bodies import DEFAULT_ONLY, GenerationBody, StructuredOutputs
from shoal.server.errors import BadField, HttpError

NESTED = (dict, list)
MOST_DEPTH = 64  # of free-form values: schemas, tool calls, template variables


def check_defaults(body: GenerationBody) -> None:
    """Refuse what is known from other servers and has no meaning here, unless it is the default."""
    for name, default in DEFAULT_ONLY.items():
        value = getattr(body, name)
        if value is not None and value != default:
            raise BadField(
                name, f"{name} is not supported; remove it, or set it to {msgspec.json.encode(default).decode()}"
            )


def continuous_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


def include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def grammar_of(body: GenerationBody) -> tuple[GrammarSpec | None, str]:
    """(the constraint on the answer, the field it came from)."""
    format, outputs, prefix = body.response_format, body.structured_outputs, "structured_outputs."
    older = {name: getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    if any(value is not None for value in older.values()):
        if outputs is not None:
            raise BadField("structured_outputs", "structured_outputs and guided_… say the same; give one of them")
        outputs, prefix = StructuredOutputs(**older), "guided_"
    by_format: GrammarSpec | None = None
    if format is not None:
        if (format.json_schema is not None) != (format.type == "json_schema"):
            raise BadField("response_format.json_schema", "response_format.json_schema goes with type 'json_schema'")
        if format.type == "json_object":
            by_format = GrammarSpec("json_object")
        elif format.json_schema is not None:
            by_format = GrammarSpec("json", _json(format.json_schema.schema, "response_format"))
    if outputs is None:
        return by_format, "response_format"
    if by_format is not None:
        raise BadField(
            "structured_outputs", "structured_outputs and response_format both constrain the answer; give one"
        )
    given = [name for name in ("json", "regex", "choice", "grammar") if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise BadField("structured_outputs", "structured_outputs needs exactly one of json, regex, choice and grammar")
    param, value = f"{prefix}{given[0]}", getattr(outputs, given[0])
    return GrammarSpec(given[0], value if isinstance(value, str) else _json(value, param)), param


def tier_of(body: GenerationBody, key: ApiKey | None) -> str:
    """The tier's name: the key's own, or the requested one where there are no keys."""
    if key is None:
        return body.tier or ""
    if body.tier is not None and not key.tier:
        raise BadField("tier", "tier cannot be chosen with this API key; leave it out, or ask for a key that has one")
    return key.tier


def tier_ignored(body: GenerationBody, key: ApiKey | None) -> list[str]:
    """["tier"] where the requested tier is not the key's."""
    return ["tier"] if key is not None and body.tier is not None and body.tier != key.tier else []


def check_priority(body: GenerationBody, key: ApiKey | None) -> None:
    """Refuse a priority that the key may not set. A server without keys takes any."""
    if body.priority and key is not None and not key.may_set_priority:
        raise HttpError(
            403,
            "priority cannot be set with this API key; leave it out, or use a key with 'may_set_priority: true' in the "
            "key file",
            type="permission_error",
            param="priority",
            code="priority_not_allowed",
        )


def check_depth(value: dict[str, Any] | list[Any], param: str) -> None:
    """Refuse deeply nested values: they overflow some downstream parsers."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if type(inner) in NESTED
        ]
        if not level:
            return
    raise BadField(param, f"{param} is nested more than {MOST_DEPTH} levels deep; make it flatter")


def _json(value: dict[str, Any] | list[Any], param: str) -> str:
    check_depth(value, param)
    return msgspec.json.encode(value).decode()
