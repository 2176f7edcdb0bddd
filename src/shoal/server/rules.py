"""What fields of a request mean together: which may not be combined, and which wins.

Pure functions over the structures of openai.py. Knows no tokens, no tokenizer and no HTTP beyond the errors.
"""

from typing import Any

import msgspec

from shoal.core.job import GrammarSpec
from shoal.core.params import MAX_LOGPROBS, MAX_SAMPLES
from shoal.keys.api_key import ApiKey
from shoal.server.errors import BadField
from shoal.server.openai import Asked, ChatRequest, CompletionRequest

MOST_DEPTH = 64  # of values whose form the client chooses: schemas, tool calls, template variables


def samples(asked: CompletionRequest) -> tuple[int, int]:
    """(answers shown, answers sampled) for each prompt."""
    keep = 1 if asked.n is None else asked.n
    if asked.best_of is None or asked.best_of == keep:
        return keep, keep
    if not 1 <= asked.best_of <= MAX_SAMPLES:
        raise BadField("best_of", f"best_of must be between 1 and {MAX_SAMPLES}, not {asked.best_of}")
    if asked.best_of < keep:
        raise BadField("best_of", f"best_of is {asked.best_of}, less than n, which is {keep}; raise it")
    if asked.stream:
        raise BadField("best_of", "best_of above n cannot be streamed: the best is known only at the end")
    if keep < 1:
        raise BadField("n", f"n must be at least 1, not {keep}")
    return keep, asked.best_of


def include_usage(asked: Asked) -> bool:
    return asked.stream_options is not None and bool(asked.stream_options.include_usage)


def chat_logprobs(asked: ChatRequest) -> int | None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise BadField("top_logprobs", "top_logprobs has a meaning only with logprobs set to true")
    if asked.top_logprobs is not None and not 0 <= asked.top_logprobs <= MAX_LOGPROBS:
        raise BadField("top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {asked.top_logprobs}")
    return (asked.top_logprobs or 0) if asked.logprobs else None


def chat_max_tokens(asked: ChatRequest) -> int | None:
    new, old = asked.max_completion_tokens, asked.max_tokens
    if new is not None and new < 1:
        raise BadField("max_completion_tokens", f"max_completion_tokens must be at least 1, not {new}")
    if new is not None and old is not None and new != old:
        raise BadField(
            "max_completion_tokens", f"max_completion_tokens is {new} but max_tokens is {old}; give one of them"
        )
    return old if new is None else new


def grammar_of(asked: Asked) -> tuple[GrammarSpec | None, str]:
    """(what the answer must look like, the field that said so)."""
    format, outputs = asked.response_format, asked.structured_outputs
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


def tier_of(asked: Asked, key: ApiKey | None) -> str:
    """The tier's name: the key's own, or what was asked for where there are no keys."""
    if key is None:
        return asked.tier or ""
    if asked.tier is not None and not key.tier:
        raise BadField("tier", "tier cannot be chosen with this API key; leave it out, or ask for a key that has one")
    return key.tier


def tier_ignored(asked: Asked, key: ApiKey | None) -> list[str]:
    """["tier"] where another tier was asked for than the key has."""
    return ["tier"] if key is not None and asked.tier is not None and asked.tier != key.tier else []


def check_depth(value: dict[str, Any] | list[Any], param: str) -> None:
    """Refuse values that are nested too deeply: not everybody who gets to see them can stand that."""
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
