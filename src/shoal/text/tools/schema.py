"""The JSON schema of a tool's arguments, as the grammar needs it.

Owns which keywords are left out of a schema that is not strict: no grammar can hold text to them. Knows no tokens.
"""

from collections.abc import Mapping
from typing import Any

from shoal.errors import BadGrammar

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords that the grammar's compiler does not know, and that only narrow what fits.
UNCHECKED = frozenset(
    {
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    }
)
KNOWN_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    }
)
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas under any names
VALUES = ("enum", "const", "default", "examples", "example")  # values, which are no schemas
COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties", "unevaluatedProperties")
SHARED = ("$defs", "definitions")  # what the schema of a single property may refer to
WHOLE = frozenset(
    {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", "strict", *SHARED}
)  # keywords at the top of a schema that a format of single arguments can follow
SEPARATORS = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}  # as json.dumps has them


def prepared(schema: Mapping[str, Any] | None, strict: bool) -> tuple[dict[str, Any], list[str]]:
    """(the schema that the arguments are held to, the keywords it was relieved of).

    Arguments are an object. Where a schema names properties and is silent about others, others are not allowed: a
    function rarely takes them. Raises BadGrammar for a schema that is not one of objects.

    >>> prepared({"properties": {"x": {"type": "array", "uniqueItems": True}}}, strict=False)[1]
    ['uniqueItems']
    """
    given = dict(schema or NO_PARAMETERS)
    kind = given.setdefault("type", "object")
    if kind != "object":
        raise BadGrammar(f"arguments are an object, not {str(kind)[:40]!r}; set its type to 'object'")
    properties, required = given.get("properties", {}), given.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list) or not all(map(is_text, required)):
        raise BadGrammar("properties is an object of schemas, and required a list of their names; correct them")
    if "properties" not in given and not any(key in given for key in COMBINING):
        given["properties"] = {}
    if not any(key in given for key in COMBINING):
        given["additionalProperties"] = False
    dropped: list[str] = []
    if not strict:
        given = _relieved(given, dropped)
    return given, sorted(set(dropped))


def flat_properties(name: str, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], set[str], dict[str, Any]]:
    """(the properties of a tool's schema, those that are required, what they may refer to), for a format that writes
    arguments one by one. Raises BadGrammar for a schema that says more than these."""
    beyond = sorted(set(schema) - WHOLE)
    if beyond:
        raise BadGrammar(
            f"the schema of {name!r} has {', '.join(beyond)[:80]} at its top, which this model's form of calls cannot "
            "follow; use type, properties and required there"
        )
    required = set(schema.get("required") or ())
    properties: Mapping[str, Any] = schema.get("properties") or {}
    if required - set(properties):
        raise BadGrammar(f"the schema of {name!r} requires properties that it does not describe; describe them")
    return properties, required, {key: schema[key] for key in SHARED if key in schema}


def is_text(value: object) -> bool:
    return isinstance(value, str)


def _relieved(schema: Any, dropped: list[str]) -> Any:
    """Without the keywords that cannot be checked."""
    if isinstance(schema, list):
        return [_relieved(one, dropped) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in UNCHECKED:
            dropped.append(key)
        elif key == "format" and isinstance(value, str) and value not in KNOWN_FORMATS:
            dropped.append(f"format {value[:40]}")
        elif key in VALUES:
            kept[key] = value
        elif key in NAMED and isinstance(value, Mapping):
            kept[key] = {name: _relieved(one, dropped) for name, one in value.items()}
        else:
            kept[key] = _relieved(value, dropped)
    return kept
