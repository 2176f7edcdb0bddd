"""Which constraint a body puts on its answer, under whichever of its names.

Owns `response_format`, `structured_outputs`, vLLM's older `guided_…` and SGLang's `json_schema`, `regex` and `ebnf`: at
most one of them may be given. Pure functions over fields. Compiles nothing; knows no tokens.
"""

from typing import Any

import msgspec

from shoal.core.job import GrammarSpec
from shoal.server.bodies import GenerationBody, ResponseFormat, StructuredOutputs
from shoal.server.errors import BadField
from shoal.server.rules import as_json, check_depth

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GUIDED = ("json", "regex", "choice", "grammar")
SGLANG = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
OF_TAGS = ("format", "structures", "triggers", "at_least_one")


def is_constrained(body: GenerationBody) -> bool:
    """Whether any of the fields is given."""
    names = ("response_format", "structured_outputs", *SGLANG, *(f"guided_{name}" for name in GUIDED))
    return any(getattr(body, name) is not None for name in names)


def grammar_of(body: GenerationBody) -> tuple[GrammarSpec | None, str]:
    """(the constraint on the answer, the field it came from)."""
    outputs, prefix = _outputs(body)
    by_format = None if body.response_format is None else _of_format(body.response_format)
    if outputs is None:
        return by_format, "response_format"
    if by_format is not None:
        raise BadField(
            "structured_outputs", "structured_outputs and response_format both constrain the answer; give one"
        )
    given = [name for name in KINDS if getattr(outputs, name) not in (None, False)]
    if len(given) != 1:
        raise BadField("structured_outputs", f"structured_outputs needs exactly one of {', '.join(KINDS)}")
    kind, value = given[0], getattr(outputs, given[0])
    param = prefix.get(kind, f"structured_outputs.{kind}")
    if kind == "json_object":
        return _with_options(GrammarSpec("json_object"), outputs, param), param
    text = value if isinstance(value, str) else as_json(value, param)
    return _with_options(GrammarSpec(kind, text), outputs, param), param


def _outputs(body: GenerationBody) -> tuple[StructuredOutputs | None, dict[str, str]]:
    """(what was given as structured_outputs or under another name, the other names)."""
    older = {name: getattr(body, f"guided_{name}") for name in GUIDED}
    sglang = {kind: getattr(body, name) for name, kind in SGLANG.items()}
    ways = [
        (body.structured_outputs, dict[str, str]()),
        (_made(older), {name: f"guided_{name}" for name in GUIDED}),
        (_made(sglang), {kind: name for name, kind in SGLANG.items()}),
    ]
    given = [(outputs, names) for outputs, names in ways if outputs is not None]
    if len(given) > 1:
        raise BadField(
            "structured_outputs",
            "structured_outputs, guided_… and json_schema, regex or ebnf say the same; give one of them",
        )
    return given[0] if given else (None, {})


def _made(values: dict[str, Any]) -> StructuredOutputs | None:
    return StructuredOutputs(**values) if any(value is not None for value in values.values()) else None


def _of_format(format: ResponseFormat) -> GrammarSpec | None:
    if format.json_schema is not None and format.type != "json_schema":
        raise BadField("response_format.json_schema", "response_format.json_schema goes with type 'json_schema'")
    for name in OF_TAGS:
        if getattr(format, name) is not None and format.type != "structural_tag":
            raise BadField(f"response_format.{name}", f"response_format.{name} goes with type 'structural_tag'")
    if format.schema is not None and format.type not in ("json_object", "json_schema"):
        raise BadField("response_format.schema", "response_format.schema goes with type 'json_schema'")
    if format.type == "text":
        return None
    if format.type == "structural_tag":
        return _of_tags(format)
    if format.type == "json_schema" and format.json_schema is None and format.schema is None:
        raise BadField("response_format.json_schema", "response_format.json_schema is missing: the schema to follow")
    if format.json_schema is not None and format.schema is not None:
        raise BadField("response_format.schema", "response_format has two schemas; give json_schema alone")
    schema = format.schema if format.json_schema is None else format.json_schema.schema
    return GrammarSpec("json_object") if schema is None else GrammarSpec("json", as_json(schema, "response_format"))


def _of_tags(format: ResponseFormat) -> GrammarSpec:
    older = format.structures is not None or format.triggers is not None
    if older == (format.format is not None) or (older and (format.structures is None or format.triggers is None)):
        raise BadField(
            "response_format", "response_format of type 'structural_tag' needs format, or structures and triggers"
        )
    if not older:
        assert format.format is not None
        return GrammarSpec("structural_tag", as_json({"format": format.format}, "response_format.format"))
    given = {
        "structures": [msgspec.to_builtins(one) for one in format.structures or ()],
        "triggers": format.triggers,
        "at_least_one": format.at_least_one,
    }
    return GrammarSpec("structural_tag", as_json(given, "response_format.structures"))


def _with_options(spec: GrammarSpec, outputs: StructuredOutputs, param: str) -> GrammarSpec:
    """The same with the options of JSON, which llguidance reads from the schema."""
    options: dict[str, Any] = {}
    if outputs.whitespace_pattern is not None:
        options["whitespace_pattern"] = outputs.whitespace_pattern
    if outputs.disable_any_whitespace:
        options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if not options and not outputs.disable_additional_properties:
        return spec
    if spec.kind not in ("json", "json_object"):
        raise BadField("structured_outputs", "options of whitespace and properties go with json or json_object")
    schema: dict[str, Any] = {"type": "object"} if spec.kind == "json_object" else _read(spec.text, param)
    if outputs.disable_additional_properties:
        schema.setdefault("additionalProperties", False)
    if options:
        schema = {**schema, "x-guidance": options}
    check_depth(schema, param)
    return GrammarSpec("json", msgspec.json.encode(schema).decode())


def _read(text: str, param: str) -> dict[str, Any]:
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadField(param, f"{param} is not JSON: {error}; correct it") from error
    if not isinstance(schema, dict):
        raise BadField(param, f"{param} is a JSON schema, an object; give one")
    return schema
