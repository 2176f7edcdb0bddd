"""How many logprobs one answer may have.

A whole answer is kept until its last token, so its samples times tokens times alternatives are bounded: before it
starts where max_tokens is given, else while it grows (answer_memory.py). A stream keeps nothing. Knows no HTTP beyond
the errors.
"""

from collections.abc import Sequence

from shoal.core.params import SamplingParams
from shoal.server.errors import BadField

MOST_ENTRIES = 2**19  # logprobs of one whole answer: those of its tokens and of their alternatives
MOST_EVENT_ENTRIES = 2**13  # … of an echoed prompt, which is one event of a stream
HOW = "lower n, max_tokens or logprobs, or send fewer prompts"


def check_logprobs(
    prompt_lengths: Sequence[int],
    params: SamplingParams,
    context: int | None,
    *,
    echo: bool,
    stream: bool,
    of_prompt: int | None = None,
) -> None:
    """Refuse a request for more logprobs than one answer may have. `context`: the model's length, if it is known;
    `of_prompt`: alternatives of each prompt token."""
    if of_prompt is not None and params.n * sum(prompt_lengths) * (1 + of_prompt) > MOST_ENTRIES:
        raise BadField(
            "prompt_logprobs",
            f"the answer would have the logprobs of {sum(prompt_lengths)} prompt tokens x {1 + of_prompt}, for each of "
            f"{params.n} samples, limit {MOST_ENTRIES}; lower prompt_logprobs or n, or send less",
        )
    if params.logprobs is None:
        return
    each = 1 + params.logprobs
    if stream and echo:
        _check_echo(prompt_lengths, each)
    if stream:
        return
    entries = sum(params.n * _tokens(length, params, context, echo) for length in prompt_lengths) * each
    if entries > MOST_ENTRIES:
        prompts = f"{len(prompt_lengths)} prompts x " if len(prompt_lengths) > 1 else ""
        echoed = " and the echoed prompt" if echo else ""
        raise BadField(
            "logprobs",
            f"the answer may have {entries} logprobs ({prompts}{params.n} samples x {params.max_tokens} tokens{echoed} "
            f"x {each}), limit {MOST_ENTRIES}; {HOW}, or stream it",
        )


def _check_echo(prompt_lengths: Sequence[int], each: int) -> None:
    """The logprobs of an echoed prompt are one event of a stream."""
    for tokens, most, where in (
        (max(prompt_lengths), MOST_EVENT_ENTRIES, "one event"),
        (sum(prompt_lengths), MOST_EVENT_ENTRIES * 8, "one stream"),
    ):
        if tokens * each > most:
            raise BadField(
                "echo",
                f"echo with logprobs asks for {tokens} prompt tokens x {each} logprobs in {where}, limit {most}; "
                "lower logprobs, send less, or do not stream",
            )


def _tokens(prompt: int, params: SamplingParams, context: int | None, echo: bool) -> int:
    """The tokens of one sample whose logprobs are shown; without max_tokens, those that are known."""
    output = params.max_tokens or 0
    if context is not None:
        output = min(output, max(0, context - prompt))
    return output + (prompt if echo else 0)
