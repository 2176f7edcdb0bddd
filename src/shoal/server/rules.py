"""What fields of a request mean together: which may not be combined, and which wins.

Pure functions over the structures of openai.py. Knows no tokens, no tokenizer and no HTTP beyond the errors.
"""

from typing import Any

import msgspec

from shoal.core.job import GrammarSpec
from shoal.core.params import MAX_LOGPROBS, MAX_SAMPLES
from shoal.keys.api_key import ApiKey
from shoal.server.errors import BadField
from shoal.server.openai import ChatRequest, CompletionRequest, GenerationBody

MOST_DEPTH = 64  # of values whose form the client chooses: schemas, tool calls, template variables


def samples(body: CompletionRequest) -> tuple[int, int]:
    """(answers shown, answers sampled) for each prompt."""
    keep = 1 if body.n is None else body.n
    if body.best_of is None or body.best_of == keep:
        return keep, keep
    if not 1 <= body.best_of <= MAX_SAMPLES:
        raise BadField("best_of", f"best_of must be between 1 and {MAX_SAMPLES}, not {body.best_of}")
    if body.best_of < keep:
        raise BadField("best_of", f"best_of is {body.best_of}, less than n, which is {keep}; raise it")
    if body.stream:
        raise BadField("best_of", "best_of above n cannot be streamed: the best is known only at the end")
    if keep < 1:
        raise BadField("n", f"n must be at least 1, not {keep}")
    return keep, body.best_of


def include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def chat_top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs", "top_logprobs has a meaning only with logprobs set to true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {body.top_logprobs}")
    return (body.top_logprobs or 0) if body.logprobs else None


def chat_max_tokens(body: ChatRequest) -> int | None:
    new, old = body.max_completion_tokens, body.max_tokens
    if new is not None and new < 1:
        raise BadField("max_completion_tokens", f"max_completion_tokens must be at least 1, not {new}")
    if new is not None and old is not None and new != old:
        raise BadField(
            "max_completion_tokens", f"max_completion_tokens is {new} but max_tokens is {old}; give one of them"
        )
    return old if new is None else new


def grammar_of(body: GenerationBody) -> tuple[GrammarSpec | None, str]:
    """(what the answer must look like, the field that said so)."""
    format, outputs = body.response_format, body.structured_outputs
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
        raise BadField("structured_outputs", "structured_outputs and response_format both say how to answer; give one")
    given = [name for name in ("json", "regex", "choice", "grammar") if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise BadField("structured_outputs", "structured_outputs needs exactly one of json, regex, choice and grammar")
    param, value = f"structured_outputs.{given[0]}", getattr(outputs, given[0])
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


def check_depth(value: dict[str, Any] | list[Any], param: str) -> None:
    """Refuse values that are nested too deeply: they overflow some downstream parsers."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise BadField(param, f"{param} is nested more than {MOST_DEPTH} levels deep; make it flatter")


def _json(value: dict[str, Any] | list[Any], param: str) -> str:
    check_depth(value, param)
    return msgspec.json.encode(value).decode()
