"""Errors as clients see them: OpenAI's shape, the right status, and no internal details.

Owns the table from exceptions to statuses. Knows nothing of routes or of how an answer is sent.
"""

import math
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches

import msgspec

from shoal.core.params import PARAMS
from shoal.errors import (
    BadParameter,
    BadRequest,
    DeadlinePassed,
    Draining,
    EngineDown,
    EngineError,
    Evicted,
    GrammarTimeout,
    LedgerDown,
    PromiseBroken,
    PromptTooLong,
    QueueFull,
    RateLimited,
    Rejected,
    ShoalError,
)

# kind of error → HTTP status, type, code; the first match counts
TABLE: tuple[tuple[type[ShoalError], int, str, str | None], ...] = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (BadRequest, 400, "invalid_request_error", None),
    (QueueFull, 429, "rate_limit_error", "queue_full"),
    (RateLimited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlinePassed, 503, "service_unavailable_error", "deadline_passed"),
    (PromiseBroken, 503, "service_unavailable_error", "promise_broken"),
    (Evicted, 503, "service_unavailable_error", "evicted"),
    (GrammarTimeout, 503, "service_unavailable_error", "grammar_timeout"),
    (Draining, 503, "service_unavailable_error", "draining"),
    (EngineDown, 503, "service_unavailable_error", "engine_down"),
    (LedgerDown, 503, "service_unavailable_error", "ledger_down"),
    (Rejected, 503, "service_unavailable_error", None),
)
# used where the engine gives none, so that clients do not retry at once
RETRY_S: dict[type[ShoalError], float] = {
    QueueFull: 1.0,
    RateLimited: 1.0,
    DeadlinePassed: 1.0,
    PromiseBroken: 1.0,
    Draining: 5.0,
    EngineDown: 5.0,
    LedgerDown: 5.0,
    Evicted: 1.0,
}
INTERNAL = "an internal error occurred; the server's log has details under this request's id"
MOST_MISSPELT = 64  # characters of an unknown field whose name is compared with known ones
SHOWN = 200  # characters of a client's value that a message quotes


class Detail(msgspec.Struct):
    """What went wrong. `param` is the field to change; `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(msgspec.Struct):
    """The body of every error."""

    error: Detail


class HttpError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = Detail(message, type, param, code)
        self.headers = headers

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))


class BadField(BadRequest):
    """A field of a request that cannot be used; `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def as_http(error: BaseException) -> HttpError | None:
    """The HTTP answer to an exception; None for an unexpected one."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, ShoalError) or isinstance(error, EngineError):
        return None
    for kind, status, type_, code in TABLE:
        if isinstance(error, kind):
            after_s = getattr(error, "retry_after_s", None)
            if after_s is None:
                after_s = RETRY_S.get(kind)
            headers = () if after_s is None else ((b"retry-after", b"%d" % max(1, math.ceil(after_s))),)
            return HttpError(status, str(error), type=type_, param=_param(error), code=code, headers=headers)
    return None


def internal() -> HttpError:
    """For an unexpected exception: reveals nothing, on purpose."""
    return HttpError(500, INTERNAL, type="server_error", code="internal_error")


def _param(error: ShoalError) -> str | None:
    given = getattr(error, "param", None)
    if isinstance(given, str):
        return given
    if isinstance(error, PromptTooLong):
        return "prompt"
    if isinstance(error, BadParameter):  # most messages begin with the name
        text = str(error)
        named = re.match(r"[a-z]+(_[a-z]+)*", text)
        if named and named[0] in PARAMS:
            return named[0]
        return "stop" if "stop string" in text else "prompt" if text.startswith("token id") else None
    return None


# ---- bodies that cannot be read -------------------------------------------------------------------------------------

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_NAMED = re.compile(r"Object (?P<how>contains unknown|missing required) field `(?P<name>[^`]*)`")
_PART_TYPE = re.compile(r"(messages|input)\[\d+\]\.(content|output)\[\d+\]\.type")


def bad_body(
    error: Exception,
    refused: dict[str, str],
    known: Callable[[str], Collection[str]] = lambda path: (),
    allowed: Callable[[str], Collection[str]] = lambda path: (),
) -> HttpError:
    """The answer to a body that cannot be read. `refused`: known but unsupported fields, and why they are refused;
    `known`: the fields of the object at a path; `allowed`: the values of the field at a path."""
    if isinstance(error, RecursionError):
        return HttpError(400, "the body is nested too deeply", code="bad_json")
    if not isinstance(error, msgspec.ValidationError):
        return HttpError(400, f"the body is not JSON in UTF-8: {error}", code="bad_json")
    what, param = str(error), ""
    path = _PATH.search(what)
    if path:
        what, param = what[: path.start()], path["path"]
    place = param
    named = _NAMED.match(what)
    if named:
        param = shorten(f"{param}.{named['name']}" if param else named["name"])
    top = re.split(r"[.\[]", param, maxsplit=1)[0]
    if top in refused:
        return HttpError(400, f"{top} {refused[top]}", param=top, code="unsupported_field")
    if param in refused:
        return HttpError(400, f"{param} {refused[param]}", param=param, code="unsupported_field")
    if named and named["how"].startswith("missing"):
        return HttpError(400, f"{param} is missing", param=param, code="missing_field")
    if named:
        hint = did_you_mean(named["name"], known(place))
        return HttpError(400, f"{param} is not a known field{hint}", param=param, code="unknown_field")
    hint = "; only parts of text are supported" if _PART_TYPE.fullmatch(param) else ""
    if what.startswith("Invalid enum value") and (values := allowed(place)):
        hint += f"; allowed: {', '.join(values)}"
    return HttpError(400, f"{param or 'the body'}: {shorten(what)}{hint}", param=param or None, code="bad_value")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """
    >>> did_you_mean("tempature", ["temperature", "top_p"]), did_you_mean("x", ["temperature"])
    ("; did you mean 'temperature'?", '; remove it')
    """
    close = get_close_matches(name.lower(), known, n=1) if len(name) <= MOST_MISSPELT else []
    return f"; did you mean {close[0]!r}?" if close else "; remove it"


def shorten(text: str) -> str:
    """A client's value for use in a message, shortened where it is long."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
