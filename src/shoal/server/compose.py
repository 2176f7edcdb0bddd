"""Whole answers: what is sent when a request is not streamed, and the usage that both ways report.

Knows a finished Call and the shapes of answers. Knows no HTTP and no engine.
"""

from msgspec import UNSET, UnsetType

from shoal.output.parser import content_of
from shoal.output.sample import Sample
from shoal.server.answers import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    CompletionAnswer,
    CompletionChoice,
    FinishReason,
    LegacyLogprobs,
    PromptDetails,
    Usage,
)
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames, chat_logprobs, completion_logprobs, concatenate, mean_logprob

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "timeout": "timeout"}


def reason_of(sample: Sample) -> FinishReason:
    return REASONS.get(sample.reason or "", "abort")


def usage_of(call: Call) -> Usage:
    prompt, output = call.outputs.prompt_tokens, call.outputs.output_tokens
    return Usage(prompt, output, prompt + output, PromptDetails(call.outputs.cached_tokens))


def answer(call: Call, names: TokenNames, id: str, created: int) -> CompletionAnswer | ChatAnswer:
    """The whole answer to a call that is over."""
    model = call.prepared.model
    kept = [kept_of(call, number) for number in range(len(call.prepared.jobs))]
    if call.prepared.chat:
        chat = [_chat_choice(call, names, one, index) for index, one in enumerate(kept[0])]
        ids = call.prepared.jobs[0].prompt if call.prepared.token_ids else UNSET
        return ChatAnswer(id, "chat.completion", created, model, chat, usage_of(call), ids)
    choices = [
        _completion_choice(call, names, number, one, number * call.prepared.keep + place)
        for number, samples in enumerate(kept)
        for place, one in enumerate(samples)
    ]
    return CompletionAnswer(id, "text_completion", created, model, choices, usage_of(call))


def kept_of(call: Call, number: int) -> list[Sample]:
    """The answers to a prompt that are shown: with best_of, the likeliest per token, the best first."""
    samples = call.outputs.samples[number]
    if call.prepared.keep == len(samples):
        return samples
    return sorted(samples, key=lambda one: -mean_logprob(one.logprobs))[: call.prepared.keep]


def text_of(sample: Sample) -> str:
    return content_of(sample.parsed)


def _chat_choice(call: Call, names: TokenNames, sample: Sample, index: int) -> ChatChoice:
    logprobs: ChatLogprobs | None = None
    if call.prepared.top is not None:
        logprobs = chat_logprobs(names, sample.logprobs, call.prepared.top)
    message = AnswerMessage("assistant", text_of(sample))
    return ChatChoice(index, message, logprobs, reason_of(sample), sample.stop_reason, _ids(call, sample.tokens))


def _completion_choice(call: Call, names: TokenNames, number: int, sample: Sample, index: int) -> CompletionChoice:
    echo = call.prepared.echo[number] if call.prepared.echo is not None else ""
    return CompletionChoice(
        index,
        echo + text_of(sample),
        logprobs_of(call, names, number, sample),
        reason_of(sample),
        sample.stop_reason,
        _ids(call, sample.tokens),
        _ids(call, call.prepared.jobs[number].prompt),
    )


def logprobs_of(call: Call, names: TokenNames, number: int, sample: Sample) -> LegacyLogprobs | None:
    prepared = call.prepared
    if prepared.top is None:
        return None
    echo = "" if prepared.echo is None else prepared.echo[number]
    own = completion_logprobs(names, sample.tokens, sample.logprobs, prepared.top, len(echo), prepared.skip_special)
    return own if prepared.echo is None else concatenate(prompt_logprobs(call, names, number), own)


def prompt_logprobs(call: Call, names: TokenNames, number: int) -> LegacyLogprobs:
    prepared = call.prepared
    prompt, known = prepared.jobs[number].prompt, call.outputs.prompt_logprobs[number]
    return completion_logprobs(names, prompt, known, prepared.top or 0, 0, prepared.skip_special)


def _ids(call: Call, tokens: list[int]) -> list[int] | UnsetType:
    return tokens if call.prepared.token_ids else UNSET
