"""Rules across the fields of a body: which cannot be combined, and which takes precedence.

Pure functions over the fields that all bodies share. Knows no tokens, no tokenizer and no HTTP beyond the errors.
"""

from typing import Any

import msgspec

from shoal.keys.api_key import ApiKey
from shoal.server.bodies import GenerationBody
from shoal.server.errors import BadField, HttpError
from shoal.server.known_fields import DEFAULT_ONLY, WHY

NESTED = (dict, list)
MOST_DEPTH = 64  # of free-form values: schemas, tool calls, template variables


def check_defaults(body: GenerationBody) -> None:
    """Refuse what is known from other servers and has no meaning here, unless it is the default."""
    for name, default in DEFAULT_ONLY.items():
        value = getattr(body, name)
        if value is not None and value != default:
            accepted = msgspec.json.encode(default).decode()
            raise BadField(name, f"{name} is not supported: {WHY[name]}; remove it, or set it to {accepted}")


def continuous_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.continuous_usage_stats)


def include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


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


def priority_ignored(body: GenerationBody, used: bool) -> list[str]:
    """["priority"] where the order of the engine's queue does not look at it."""
    return ["priority (the server's --order does not use it)"] if body.priority and not used else []


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


def as_json(value: dict[str, Any] | list[Any], param: str) -> str:
    check_depth(value, param)
    return msgspec.json.encode(value).decode()
