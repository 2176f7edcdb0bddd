"""Request bodies: the fields that all generation requests share, chat messages, and reading JSON into them.

A field that no body declares is refused by name; known_fields.py lists those without effect. The fields of one API are
in its dialect. The ranges of sampling parameters are declared and checked in core/params.py. A large body is read in a
thread, after its values have been counted. Knows no engine.
"""

from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shoal.core.params import PARAMS
from shoal.server.errors import HttpError, bad_body
from shoal.server.field_names import allowed_at, known_at
from shoal.server.json_size import MOST_DIGITS, MOST_IDS, MOST_VALUES, field_at, measure
from shoal.server.known_fields import ABSENT, DEFAULT_ONLY, ELSEWHERE, IGNORED, NULL_ONLY, REFUSED
from shoal.server.workers import PYTHON, off_loop

MOST_BIASES = 1024
MOST_STOP_IDS = PARAMS["stop_token_ids"].most
MOST_SALT = 256  # characters
MOST_MESSAGES = 4096
SMALL_BODY = 16 * 2**10  # bytes; read on the event loop
ID_FIELDS = ("prompt", "tokens", "input_ids")  # fields that may be long lists of token ids


def _hint(**schema: Any) -> Meta:
    """Limits for the API's description. They are enforced, with better messages, by core/params.py."""
    return Meta(extra_json_schema=schema)


TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Nothing = Annotated[None, Meta(description="Refused by name.")]
# skipped, not decoded
Ignored = Annotated[msgspec.Raw | UnsetType, Meta(description="Ignored; the answer's X-Shoal-Warning header names it.")]


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """A JSON schema as OpenAI wraps it."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # always treated as true


class StructuralTag(Struct, forbid_unknown_fields=True):
    """The older form of a structural tag: text from `begin` to `end` holds JSON that fits the schema."""

    begin: str
    end: str
    schema: dict[str, Any] | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """text: anything; json_object: any JSON object; json_schema: JSON that fits the schema; structural_tag: text that
    is constrained between certain marks, as `format` says, or in the older form `structures` and `triggers`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None  # of json_object or json_schema, as some clients send it
    format: dict[str, Any] | None = None
    structures: Annotated[list[StructuralTag], Meta(min_length=1, max_length=256)] | None = None
    triggers: Annotated[list[str], Meta(min_length=1, max_length=64)] | None = None
    at_least_one: bool | None = None  # of the structures


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """What the answer must look like: exactly one of json, json_object, regex, choice, grammar and structural_tag."""

    json: dict[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    grammar: str | None = None  # Lark, as llguidance has it, or GBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: str | None = None  # a regex: what may stand between the parts of JSON
    disable_any_whitespace: bool | None = None  # nothing but single spaces, as Python's json.dumps has them
    disable_additional_properties: bool | None = None  # of the schema's outermost object, where it does not name them
    disable_fallback: bool | None = None  # without effect: there is one grammar engine


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: one more chunk at the end, with the usage; continuous_usage_stats: in every chunk, too."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect: nothing is added to hide the length of pieces


class ModelBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What every body may name first."""

    model: str | None = None


def limits(name: str) -> Meta:
    """The range of a sampling parameter, for the API's description."""
    param = PARAMS[name]
    low = param.low if param.alias is None else min(param.low, param.alias)
    return _hint(**{"exclusiveMinimum" if param.above else "minimum": low}, maximum=param.high)


def _type_of(name: str) -> Any:
    """The JSON that a sampling parameter is read from."""
    kinds: dict[str, Any] = {
        "boolean": bool,
        "number": Annotated[float, limits(name)],
        "integer": Annotated[int, limits(name)],
        "biases": Annotated[dict[TokenId, float], Meta(max_length=MOST_BIASES)],
        "strings": str | Annotated[list[str], _hint(maxItems=PARAMS[name].most)],
        "token_ids": Annotated[list[TokenId], Meta(max_length=PARAMS[name].most)],
    }
    return kinds[PARAMS[name].kind] | None


if TYPE_CHECKING:

    class SamplingBody(ModelBody, kw_only=True):
        """The sampling parameters of core/params.py that come with a body. Only these are read by name."""

        n: int | None = None
        max_tokens: int | None = None
        logprob_token_ids: list[int] | None = None
else:
    SamplingBody = msgspec.defstruct(
        "SamplingBody",
        [(name, _type_of(name), None) for name, param in PARAMS.items() if param.in_body],
        bases=(ModelBody,),
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _default_only(default: Any) -> Any:
    """A field that may only be null or its default."""
    if default is None:
        return Annotated[None, Meta(description="Only null.")]
    kind = list[Any] if isinstance(default, list) else type(default)
    return Annotated[kind, Meta(description="Only the default.", extra_json_schema={"enum": [default]})] | None


if TYPE_CHECKING:

    class TolerantBody(SamplingBody, kw_only=True):
        """The fields of known_fields.py. Only these are set by name."""

        metadata: Ignored = UNSET
        service_tier: Ignored = UNSET
else:
    TolerantBody = msgspec.defstruct(
        "TolerantBody",
        [
            *((name, _default_only(default), None) for name, default in DEFAULT_ONLY.items()),
            *((name, Ignored, UNSET) for name in IGNORED),
        ],
        bases=(SamplingBody,),
        kw_only=True,
        forbid_unknown_fields=True,
    )


class GenerationBody(TolerantBody, forbid_unknown_fields=True, kw_only=True):
    """The fields that all generation requests share. None always means: the default."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None  # older names of the fields of structured_outputs
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    guided_grammar: str | None = None
    timeout: Annotated[float, Meta(gt=0, le=1e6)] | None = None  # seconds, from arrival to the last token
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower goes first
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MOST_SALT)] | None = None
    tier: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in logprobs, tokens are written as token_id:5
    prompt_logprobs: Annotated[int, limits("prompt_logprobs")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] | None = None  # where tokens are left out; left by default
    add_special_tokens: bool | None = None  # of a prompt that is a text; true by default
    use_beam_search: bool | None = None  # the n likeliest answers, instead of n draws
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None  # of beams: above 1 favours long ones
    no_stop_trim: bool | None = None  # SGLang's name of include_stop_str_in_output
    request_id: RequestId | None = None  # in the answer, its header and the log; X-Request-Id takes precedence there
    rid: RequestId | None = None  # SGLang's name of it
    json_schema: dict[str, Any] | str | None = None  # SGLang's names of the fields of structured_outputs
    regex: str | None = None
    ebnf: str | None = None  # GBNF

    def job_fields(self) -> dict[str, Any]:
        """The fields of a Job that are taken from the body alone."""
        return {"priority": self.priority or 0, "timeout_s": self.timeout}

    def ignored(self) -> list[str]:
        """The fields that were sent and have no effect."""
        given = ((name, getattr(self, name)) for name in IGNORED)
        return [name for name, value in given if value is not UNSET and bytes(value) != b"null"]


def ignored_fields(body: Struct) -> list[str]:
    """The fields that were sent and have no effect, of any body."""
    return [name for name in body.__struct_fields__ if isinstance(getattr(body, name), msgspec.Raw)]


class TextPart(Struct):
    """A part of a message; only text is supported. Other fields of it, such as cache_control, have no effect."""

    type: Literal["text"]
    text: str
    # what a text part cannot carry must not be lost in silence
    image_url: Nothing = None
    input_audio: Nothing = None
    video_url: Nothing = None
    file: Nothing = None


class ChatMessage(Struct, kw_only=True):
    """One message. The model's chat template decides which roles there are, and which may follow each other. Fields
    that are not listed have no effect: clients send back all that an answer had."""

    role: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None  # of an earlier answer; rendered by the template
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # the older form of tool_calls
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its newer name
    # fields of an earlier answer that clients send back; not passed to the template
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None

    def plain(self) -> dict[str, Any]:
        """As text/template.py expects it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [{"type": part.type, "text": part.text} for part in content]
        calls = self.tool_calls
        if self.function_call is not None and not calls:
            calls = [{"type": "function", "function": self.function_call}]
        if content is None and self.role == "assistant" and not calls:
            content = ""
        role = "tool" if self.role == "function" else self.role
        message: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.reasoning is not None:
            message.setdefault("reasoning_content", self.reasoning)
        if calls:
            message["tool_calls"] = list(calls)
        return message


Body = TypeVar("Body", bound=Struct)


@cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


async def read(kind: type[Body], body: bytes) -> Body:
    """Read a request's body; an invalid one is an HttpError that names the field."""
    return await off_loop(len(body), lambda: _read(kind, body), PYTHON, SMALL_BODY)


def _read(kind: type[Body], body: bytes) -> Body:
    try:
        if len(body) > SMALL_BODY:
            _check_size(kind, body)
        read: Body = _decoder(kind).decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        lighter = _without_defaults(kind, body) if isinstance(error, msgspec.ValidationError) else None
        if lighter is not None:
            return _read(kind, lighter)
        absent = {name: f"is not supported here: {why}; remove it" for name, (_, why) in ABSENT.items()} | ELSEWHERE
        elsewhere = {name: why for name, why in absent.items() if name not in kind.__struct_fields__}
        refused = REFUSED | NULL_ONLY | elsewhere | getattr(kind, "refused", {})
        raise bad_body(error, refused, partial(known_at, kind), partial(allowed_at, kind)) from None
    return read


def _without_defaults(kind: type[Struct], body: bytes) -> bytes | None:
    """The same without fields that other bodies have and that are at their default; None where there is none."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    away = {
        name
        for name, (default, _) in ABSENT.items()
        if name in values and name not in kind.__struct_fields__ and values[name] in (None, default)
    }
    return msgspec.json.encode({name: values[name] for name in values if name not in away}) if away else None


def _check_size(kind: type[Struct], body: bytes) -> None:
    """Refuse more values than any real request has, before they become objects; token ids have a limit of their own."""
    size = measure(body, MOST_VALUES + MOST_IDS, MOST_VALUES)
    if size.long_number:
        raise HttpError(400, f"a number has {MOST_DIGITS} digits or more; send a shorter one", code="bad_value")
    if size.values <= MOST_VALUES:
        return
    for name in [one for one in ID_FIELDS if one in kind.__struct_fields__] if size.end == len(body) else []:
        ids = measure(bytes(_ids_decoder(name).decode(body).ids), MOST_IDS, MOST_VALUES)
        if ids.numbers <= MOST_IDS and size.values - ids.numbers <= MOST_VALUES:
            return
    where = field_at(body, measure(body, MOST_VALUES, MOST_VALUES).end, kind.__struct_fields__)
    most, what = (MOST_IDS, "token ids") if where in ID_FIELDS else (MOST_VALUES, "values")
    message = f"{where or 'the body'} has too many {what}, limit {most}; send fewer in one request"
    raise HttpError(400, message, param=where, code="too_many_values")


@cache
def _ids_decoder(name: str) -> msgspec.json.Decoder[Any]:
    """Finds the field of token ids in a body, without decoding it."""
    found = msgspec.defstruct("OnlyIds", [("ids", msgspec.Raw, msgspec.Raw(b"[]"))], rename={"ids": name})
    return msgspec.json.Decoder(found)
