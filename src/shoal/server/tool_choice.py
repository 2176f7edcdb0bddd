"""The tools of a chat: their fields in a body, and which of them the answer may call.

Owns the rules of `tools`, `tool_choice`, `parallel_tool_calls` and their predecessors `functions` and `function_call`.
Pure functions over fields; a large body's are called in a thread. Knows no tokens and no format.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shoal.errors import BadGrammar
from shoal.server.errors import BadField, shorten
from shoal.server.rules import check_depth
from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.schema import prepared

MOST_TOOLS = 256
MOST_TOOLS_BYTES = 256 * 2**10  # of all of them, as JSON
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class FunctionBody(Struct):
    """A function that the model may call. Without `parameters` it takes none."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # refuse keywords that the grammar cannot check; else they are left out


class ToolBody(Struct):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionBody


class FunctionName(Struct):
    """The function to be called."""

    name: str


class AllowedTool(Struct):
    """One of the tools that may be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Struct):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MOST_TOOLS)]


class ToolChoiceBody(Struct):
    """A function that must be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


ToolList = Annotated[list[ToolBody], Meta(max_length=MOST_TOOLS)]
FunctionList = Annotated[list[FunctionBody], Meta(max_length=MOST_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | ToolChoiceBody
FunctionChoice = Literal["none", "auto"] | FunctionName


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> ToolBody:
    """A tool of another API, as a chat has it."""
    return ToolBody("function", FunctionBody(name, description, parameters, strict))


def choice_by_name(name: str | None) -> ToolChoiceBody:
    """A choice of another API, in whose body the name of the function stands in tool_choice itself."""
    if name is None:
        raise BadField("tool_choice.name", "tool_choice.name is missing: which function to call")
    return ToolChoiceBody("function", FunctionName(name))


@dataclass(frozen=True)
class ToolRequest:
    """What a chat says about tools. `use` is None where none may be called."""

    shown: list[dict[str, Any]] = field(default_factory=list)  # for the chat template
    use: ToolUse | None = None
    named: bool = False  # one function must be called
    legacy: bool = False  # as `functions`, and answered as `function_call`
    places: Mapping[str, str] = field(default_factory=dict)  # tool → the field of its schema
    warnings: list[str] = field(default_factory=list)  # what was left out of schemas


NO_TOOLS = ToolRequest()


def tools_of(
    tools: list[ToolBody] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    functions: list[FunctionBody] | None = None,
    function_choice: FunctionChoice | None = None,
) -> ToolRequest:
    """Check the tools of a body and find out which may be called."""
    legacy = bool(functions)
    if functions and tools:
        raise BadField("functions", "functions is the old name of tools; give one of them")
    if function_choice is not None and choice is not None:
        raise BadField("function_call", "function_call is the old name of tool_choice; give one of them")
    given = functions if functions else [tool.function for tool in tools or ()]
    field_name, what = ("function_call", "functions") if legacy else ("tool_choice", "tools")
    wanted = as_choice(function_choice) if function_choice is not None else choice
    if not given:
        if wanted not in (None, "none", "auto"):
            raise BadField(field_name, f"{field_name} requires {what}; give some, or leave it out")
        return NO_TOOLS
    places = {
        one.name: f"functions[{number}]" if legacy else f"tools[{number}].function" for number, one in enumerate(given)
    }
    check_functions(given, what, places)
    if wanted == "none":
        return NO_TOOLS
    chosen, required = chosen_of(given, wanted, field_name)
    named = isinstance(wanted, ToolChoiceBody) and wanted.type == "function"
    several = parallel is not False and not named and not legacy
    warnings: list[str] = []
    ready = tuple(tool_of(one, places[one.name], warnings) for one in chosen)
    return ToolRequest(
        shown=[{"type": "function", "function": shown(one)} for one in given],
        use=ToolUse(ready, required, several),
        named=named,
        legacy=legacy,
        places={name: f"{place}.parameters" for name, place in places.items()},
        warnings=warnings,
    )


def as_choice(function_choice: FunctionChoice) -> ToolChoice:
    if isinstance(function_choice, FunctionName):
        return ToolChoiceBody("function", function_choice)
    return function_choice


def check_functions(given: list[FunctionBody], what: str, places: Mapping[str, str]) -> None:
    size = 0
    for one in given:
        if not NAME.fullmatch(one.name):
            raise BadField(
                f"{places[one.name]}.name",
                f"{places[one.name]}.name has letters, digits and _ . : / -, at most 128 of them, not "
                f"{shorten(one.name)!r}; rename it",
            )
        check_depth(one.parameters or {}, f"{places[one.name]}.parameters")
        size += len(msgspec.json.encode(one))
    if len(places) < len(given):
        twice = next(one.name for one in given if sum(one.name == other.name for other in given) > 1)
        raise BadField(what, f"{what} has two functions named {twice!r}; rename one")
    if size > MOST_TOOLS_BYTES:
        raise BadField(what, f"{what} has {size} bytes, limit {MOST_TOOLS_BYTES}; send fewer, or shorter schemas")


def chosen_of(given: list[FunctionBody], wanted: ToolChoice | None, field_name: str) -> tuple[list[FunctionBody], bool]:
    """(the functions that may be called, whether one must be)."""
    if wanted is None or isinstance(wanted, str):
        return given, wanted == "required"
    names, mode = set[str](), "required"
    if wanted.type == "function":
        names |= {wanted.function.name} if wanted.function else set()
    elif wanted.allowed_tools is not None:
        names, mode = {one.function.name for one in wanted.allowed_tools.tools}, wanted.allowed_tools.mode
    known = {one.name for one in given}
    if not names:
        raise BadField(field_name, f"{field_name} of type {wanted.type!r} needs {wanted.type!r}, too: what to call")
    for name in sorted(names - known):
        raise BadField(field_name, f"{field_name} names {shorten(name)!r}, which is none of the functions given")
    return [one for one in given if one.name in names], mode == "required"


def tool_of(one: FunctionBody, place: str, warnings: list[str]) -> Tool:
    try:
        schema, dropped = prepared(one.parameters, bool(one.strict))
    except BadGrammar as error:
        raise BadField(f"{place}.parameters", f"{place}.parameters: {error}") from error
    if dropped:
        warnings.append(f"{place}: {' '.join(dropped)}".encode("ascii", "replace").decode())
    return Tool(one.name, schema)


def shown(one: FunctionBody) -> dict[str, Any]:
    """As chat templates expect it."""
    parameters = one.parameters or {"type": "object", "properties": {}}
    return {"name": one.name, "description": one.description or "", "parameters": parameters}
