"""Fifty tools for the tests: nested, enums, arrays, oneOf, unicode, references, and thirty at once.

Texts and lists have limits, so that a random model ends its calls.
"""

from typing import Any

Json = dict[str, Any]
TEXT = {"type": "string", "maxLength": 6}


def thing(required: list[str] | None = None, **properties: Any) -> Json:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def schemas() -> list[Json]:
    """The parameters of fifty tools."""
    found: list[Json] = [
        thing(city=TEXT),
        thing(unit={"enum": ["°C", "°F", "日本", 'a"b\\c', "line\nfeed"]}),
        thing(names={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}),
        thing(x={"type": "integer", "minimum": -9, "maximum": 99}, y={"type": "boolean"}),
        thing([], a=TEXT, b={"type": "boolean"}, c={"type": "null"}),
        thing(inner=thing(deeper=thing(deepest={"enum": [1, 2, 3]}))),
        thing(either={"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}),
        thing(
            shape={
                "oneOf": [
                    thing(kind={"const": "circle"}, radius={"type": "integer", "minimum": 0, "maximum": 9}),
                    thing(kind={"const": "square"}, side={"enum": [1.5, 2.5]}),
                ]
            }
        ),
        thing(any={"anyOf": [{"type": "integer", "maximum": 5, "minimum": 0}, {"type": "null"}]}),
        thing(**{"größe": {"enum": ["klein", "groß"]}, "with space": {"type": "boolean"}, "日": {"const": "本"}}),
        thing(day={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"}),
        thing(when={"type": "string", "format": "date"}),
        thing(rows={"type": "array", "items": thing(id={"enum": [1, 2]}, ok={"type": "boolean"}), "maxItems": 2}),
        {
            "$defs": {"leaf": {"enum": ["l", "m"]}},
            **thing(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
        },
        thing(several={"type": ["boolean", "null"]}),
        {"type": "object"},
    ]
    for number in range(len(found), 50):
        fields = {f"field_{place}": found[(number + place) % 6]["properties"] for place in range(1 + number % 3)}
        found.append(thing(**{name: thing(**dict(list(inner.items())[:2])) for name, inner in fields.items()}))
    return found


def tools() -> list[Json]:
    return [
        {"type": "function", "function": {"name": f"tool_{number}", "description": "Does it.", "parameters": schema}}
        for number, schema in enumerate(schemas())
    ]
