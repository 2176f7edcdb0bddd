"""How the tokens of one request are to be chosen.

Owns the sampling parameters, their limits and their messages. Knows nothing of logits or of how they are drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.errors import BadParameter

MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters of one of them
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. None means the model's own default (generation_config.json), else the neutral value.

    >>> SamplingParams(temperature=0.7, stop="\\n").stop
    ('\\n',)
    """

    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # 0 keeps all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: drawn once when the request is made
    n: int = 1
    max_tokens: int | None = None  # None: until the context is full
    min_tokens: int = 0  # neither end tokens nor stop strings end it before
    stop: str | Sequence[str] = ()  # None is taken for none of them
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many alternatives to report beside the chosen token
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise BadParameter(f"logit_bias must map token ids to numbers, not be {self.logit_bias!r}")
            object.__setattr__(self, "logit_bias", {_token_id(k): v for k, v in self.logit_bias.items()})
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise BadParameter(f"{name} must be true or false, not {getattr(self, name)!r}")
        _check_numbers(self)
        _check_counts(self)
        _check_stops(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Build from names and values; a name that is not known is refused."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise BadParameter(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(known))}")
        return cls(**values)

    def resolved(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """A copy in which every None that has a default is filled in."""
        filled = {name: defaults.get(name, value) for name, value in NEUTRAL.items() if getattr(self, name) is None}
        return replace(self, **filled) if filled else self


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    """A tuple of what was given; None is none of them."""
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        raise BadParameter(f"{name} must be a list, not {value!r}")
    return tuple(value)


def _token_id(value: Any) -> int:
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        return int(value)  # JSON has only string keys
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"logit_bias keys are token ids, not {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadParameter(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadParameter(f"{name} must be a finite number, not {value if isinstance(value, float) else 'that large'}")
    return number


def _between(name: str, value: Any, low: float, high: float) -> None:
    if not low <= _number(name, value) <= high:
        raise BadParameter(f"{name} must be between {low:g} and {high:g}, not {value!r}")


def _check_numbers(p: SamplingParams) -> None:
    if p.temperature is not None:
        _between("temperature", p.temperature, 0, 100)
    if p.top_p is not None:
        _between("top_p", p.top_p, 0, 1)
        if p.top_p == 0:
            raise BadParameter("top_p must be above 0; for greedy decoding set temperature to 0")
    if p.min_p is not None:
        _between("min_p", p.min_p, 0, 1)
    if p.repetition_penalty is not None:
        _between("repetition_penalty", p.repetition_penalty, 0.01, 10)  # scores are divided by it
    _between("presence_penalty", p.presence_penalty, -2, 2)
    _between("frequency_penalty", p.frequency_penalty, -2, 2)
    for token, bias in (p.logit_bias or {}).items():
        _between(f"logit_bias[{token}]", bias, -100, 100)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        bound = f"at least {low}" if value < low else f"at most {high}"
        raise BadParameter(f"{name} must be {bound}, not {value}")


def _check_counts(p: SamplingParams) -> None:
    if p.max_tokens is not None:
        _whole("max_tokens", p.max_tokens, 1, 2**31 - 1)
    _whole("min_tokens", p.min_tokens, 0, 2**31 - 1)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise BadParameter(f"min_tokens {p.min_tokens} is more than max_tokens {p.max_tokens}; lower the first")
    if p.top_k is not None:
        if p.top_k == -1:
            object.__setattr__(p, "top_k", 0)  # another usual way to say "all"
        _whole("top_k", p.top_k, 0, 2**31 - 1)
    _whole("n", p.n, 1, MAX_SAMPLES)
    if p.seed is not None:
        _whole("seed", p.seed, -(2**63), 2**64 - 1)
    if p.logprobs is not None:
        _whole("logprobs", p.logprobs, 0, MAX_LOGPROBS)
    if p.prompt_logprobs is not None:
        _whole("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS)


def _check_stops(p: SamplingParams) -> None:
    if len(p.stop) > MAX_STOPS:
        raise BadParameter(f"at most {MAX_STOPS} stop strings, not {len(p.stop)}")
    for text in p.stop:
        if not isinstance(text, str) or not text:
            raise BadParameter(f"a stop string must be a string that is not empty, not {text!r}")
        if len(text) > MAX_STOP_LENGTH:
            raise BadParameter(f"a stop string may have {MAX_STOP_LENGTH} characters, not {len(text)}; shorten it")
    for token in p.stop_token_ids:
        _whole("stop_token_ids", token, 0, 2**31 - 1)
