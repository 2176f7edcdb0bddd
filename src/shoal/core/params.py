"""Sampling parameters: how the tokens of one request are chosen.

Owns the one declaration of each parameter: its name, type, range, neutral value and where it may come from. Request
bodies, the API's description, generation_config.json and the CLI's flags are derived from it. Knows nothing of logits.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from typing import Annotated, Any, Literal, get_type_hints

from shoal.errors import BadParameter

MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters of one of them
MAX_REGEXES = 4
MAX_ALLOWED = 2**12
MAX_COUNT = 2**31 - 1
INF = math.inf

Kind = Literal["number", "integer", "boolean", "biases", "strings", "token_ids"]


@dataclass(frozen=True)
class Param:
    """The declaration of one sampling parameter; its name, type and default are those of the field it annotates.

    It may come from a request's body, from a CLI flag and from the model's generation_config.json.
    """

    kind: Kind
    low: float = -INF
    high: float = INF
    above: str = ""  # not empty: `low` itself is refused, with this advice
    alias: int | None = None  # another value for the neutral one
    neutral: float | None = None  # what None becomes where the model recommends nothing
    from_model: tuple[float, float] | None = None  # range accepted from generation_config.json; None: not read there
    in_body: bool = True  # a field of every request body
    most: int = 256  # of a list, its entries
    passed: bool = True  # … copied from the body as it is; False: each API gives it its own meaning
    flag: str = ""  # help text of its CLI flag; "": no flag


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. None means the model's own default (generation_config.json), else the neutral value.

    >>> SamplingParams(temperature=0.7, stop="\\n").stop
    ('\\n',)
    """

    temperature: Annotated[
        float | None,
        Param(
            "number", 0, 100, neutral=1.0, from_model=(0, 100), flag="0 is greedy (default: the model's own, else 1)"
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Param(
            "number",
            0,
            1,
            above="for greedy decoding set temperature to 0",
            neutral=1.0,
            from_model=(0, 1),
            flag="keep the likeliest tokens that hold this much of the mass",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Param(
            "integer", 0, MAX_COUNT, alias=-1, neutral=0, from_model=(0, MAX_COUNT), flag="keep the k likeliest tokens"
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Param(
            "number",
            0,
            1,
            neutral=0.0,
            from_model=(0, 1),
            flag="keep tokens at least this likely, relative to the likeliest",
        ),
    ] = None
    repetition_penalty: Annotated[  # logits are divided by it
        float | None,
        Param(
            "number", 0.01, 10, neutral=1.0, from_model=(0.01, 10), flag="above 1: tokens seen before are less likely"
        ),
    ] = None
    presence_penalty: Annotated[
        float, Param("number", -2, 2, flag="subtracted from the logits of tokens in the output (default: 0)")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Param("number", -2, 2, flag="… once for each time that they occur in it (default: 0)")
    ] = 0.0
    logit_bias: Annotated[Mapping[int, float] | None, Param("biases", -100, 100)] = None
    # None: drawn once when the request is made
    seed: Annotated[int | None, Param("integer", -(2**63), 2**64 - 1)] = None
    n: Annotated[int, Param("integer", 1, MAX_SAMPLES, passed=False, flag="answers per prompt (default: 1)")] = 1
    # None: until the context is full
    max_tokens: Annotated[int | None, Param("integer", 1, MAX_COUNT, passed=False, flag="most output tokens")] = None
    # neither end tokens nor stop strings end the output earlier
    min_tokens: Annotated[int, Param("integer", 0, MAX_COUNT)] = 0
    stop: Annotated[str | Sequence[str], Param("strings", most=MAX_STOPS, flag="end before this text; repeatable")] = ()
    stop_regex: Annotated[str | Sequence[str], Param("strings", most=MAX_REGEXES)] = ()  # end after text that matches
    stop_token_ids: Annotated[Sequence[int], Param("token_ids", 0, MAX_COUNT)] = ()
    include_stop_str_in_output: Annotated[bool, Param("boolean")] = False
    ignore_eos: Annotated[bool, Param("boolean", flag="go on to --max-tokens")] = False
    skip_special_tokens: Annotated[bool, Param("boolean")] = True
    # only these tokens are drawn; None: all
    allowed_token_ids: Annotated[Sequence[int] | None, Param("token_ids", 0, MAX_COUNT, most=MAX_ALLOWED)] = None
    bad_words: Annotated[str | Sequence[str], Param("strings", most=256)] = ()  # texts that are not drawn
    # the tokens whose logprobs are reported, instead of the likeliest
    logprob_token_ids: Annotated[Sequence[int] | None, Param("token_ids", 0, MAX_COUNT, most=MAX_LOGPROBS)] = None
    # how many alternatives to report beside the chosen token
    logprobs: Annotated[int | None, Param("integer", 0, MAX_LOGPROBS, in_body=False)] = None
    prompt_logprobs: Annotated[int | None, Param("integer", 0, MAX_LOGPROBS, in_body=False)] = None

    def __post_init__(self) -> None:
        for name, default, check, param in _CHECKED:
            value = getattr(self, name)
            if value is default:
                continue
            checked = check(name, value, param)
            if checked is not value:
                object.__setattr__(self, name, checked)
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name) == ():
                raise BadParameter(f"{name} is empty; name at least one token, or leave it out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadParameter(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}; lower the first"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from names and values; an unknown name is refused."""
        for name in values:
            if name not in PARAMS:
                raise _unknown(name)
        return cls(**values)

    def resolved(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """A copy in which every None that has a default is filled in."""
        filled = {name: defaults.get(name, value) for name, value in NEUTRAL.items() if getattr(self, name) is None}
        return replace(self, **filled) if filled else self


def _unknown(name: str) -> BadParameter:
    close = get_close_matches(name, PARAMS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return BadParameter(f"unknown sampling parameter {name!r}{hint}; known: {', '.join(sorted(PARAMS))}")


def _refuse_unknown(made: Callable[..., None]) -> Callable[..., None]:
    """An __init__ that answers a misspelt name with the one that was meant."""

    @wraps(made)
    def init(self: SamplingParams, *args: Any, **values: Any) -> None:
        try:
            made(self, *args, **values)
        except TypeError:
            for name in values:
                if name not in PARAMS:
                    raise _unknown(name) from None
            raise

    return init


# ---- checks: each returns the value as it is kept


def _boolean(name: str, value: Any, param: Param) -> bool:
    if not isinstance(value, bool):
        raise BadParameter(f"{name} must be true or false, not {value!r}")
    return value


def _number(name: str, value: Any, param: Param) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadParameter(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = INF
    if not math.isfinite(number):
        raise BadParameter(f"{name} must be a finite number, not {value if isinstance(value, float) else 'that large'}")
    if not param.low <= number <= param.high:
        raise BadParameter(f"{name} must be between {param.low:g} and {param.high:g}, not {value!r}")
    if param.above and number == param.low:
        raise BadParameter(f"{name} must be above {param.low:g}; {param.above}")
    return value


def _integer(name: str, value: Any, param: Param) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"{name} must be a whole number, not {value!r}")
    if value == param.alias:
        return int(param.neutral or 0)
    if not param.low <= value <= param.high:
        bound = f"at least {param.low}" if value < param.low else f"at most {param.high}"
        raise BadParameter(f"{name} must be {bound}, not {value}")
    return value


def _biases(name: str, value: Any, param: Param) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise BadParameter(f"{name} must map token ids to numbers, not be {value!r}")
    biases = {_bias_key(name, key): bias for key, bias in value.items()}
    for token, bias in biases.items():
        _number(f"{name}[{token}]", bias, param)
    return biases


def _bias_key(name: str, key: Any) -> int:
    if isinstance(key, str) and key.strip().lstrip("-").isdecimal():
        return int(key)  # JSON has only string keys
    if isinstance(key, bool) or not isinstance(key, int):
        raise BadParameter(f"{name} keys are token ids, not {key!r}")
    return key


def _strings(name: str, value: Any, param: Param) -> tuple[str, ...]:
    texts = _as_tuple(name, (value,) if isinstance(value, str) else value)
    many, one = ("stop strings", "a stop string") if name == "stop" else (name, f"{name}: an entry")
    if len(texts) > param.most:
        raise BadParameter(f"{many}: at most {param.most}, not {len(texts)}; give fewer")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise BadParameter(f"{one} must be a string that is not empty, not {text!r}")
        if len(text) > MAX_STOP_LENGTH:
            raise BadParameter(f"{one} may have {MAX_STOP_LENGTH} characters, not {len(text)}; shorten it")
    return texts


def _token_ids(name: str, value: Any, param: Param) -> tuple[int, ...] | None:
    if value is None and DEFAULTS[name] is None:
        return None
    tokens = _as_tuple(name, value)
    if len(tokens) > param.most:
        raise BadParameter(f"{name} has {len(tokens)} token ids, limit {param.most}; give fewer")
    for token in tokens:
        _integer(name, token, param)
    return tokens


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """The values as a tuple; None stands for an empty list."""
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        raise BadParameter(f"{name} must be a list, not {value!r}")
    return tuple(value)


_CHECKS = {
    "boolean": _boolean,
    "number": _number,
    "integer": _integer,
    "biases": _biases,
    "strings": _strings,
    "token_ids": _token_ids,
}
# ---- derived from the declarations
PARAMS: dict[str, Param] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
NEUTRAL: dict[str, float] = {name: param.neutral for name, param in PARAMS.items() if param.neutral is not None}
SamplingParams.__init__ = _refuse_unknown(SamplingParams.__init__)  # type: ignore[method-assign]
_CHECKED = [(name, DEFAULTS[name], _CHECKS[param.kind], param) for name, param in PARAMS.items()]
