"""What LLM and AsyncLLM return. Owns the records; knows no engine."""

from dataclasses import dataclass

from shoal.core.request import Logprobs


@dataclass(frozen=True)
class RequestMetrics:
    """Counts and times of one sample; times are in seconds since it was submitted."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True)
class Completion:
    """One sample. finish_reason is stop, length, abort, rejected or error; stop_reason the stop string or token."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[Logprobs] | None
    metrics: RequestMetrics
    error: str = ""


@dataclass(frozen=True)
class RequestOutput:
    """All samples of one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass(frozen=True)
class Chunk:
    """The next piece of one sample; finish_reason is set on the last one."""

    prompt: int  # which prompt, counted from 0
    index: int  # which of its n samples
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str = ""
