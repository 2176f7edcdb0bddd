"""Whole answers: what is sent when a request is not streamed, and the usage that both ways report.

Knows a finished Call and the shapes of answers. Knows no HTTP and no engine.
"""

from msgspec import UNSET, UnsetType

from shoal.server import thoughts
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
from shoal.server.jobs import Call, Sample
from shoal.server.thoughts import Words

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "timeout": "timeout"}


def reason_of(sample: Sample) -> FinishReason:
    return REASONS.get(sample.reason or "", "abort")


def usage_of(call: Call) -> Usage:
    prompt, output = call.prompt_tokens, call.output_tokens
    return Usage(prompt, output, prompt + output, PromptDetails(call.cached_tokens))


def answer(call: Call, words: Words, id: str, created: int) -> CompletionAnswer | ChatAnswer:
    """The whole answer to a call that is over."""
    model = call.plan.model
    kept = [kept_of(call, number) for number in range(len(call.plan.jobs))]
    if call.plan.chat:
        chat = [_chat_choice(call, words, one, index) for index, one in enumerate(kept[0])]
        ids = call.plan.jobs[0].prompt if call.plan.token_ids else UNSET
        return ChatAnswer(id, "chat.completion", created, model, chat, usage_of(call), ids)
    choices = [
        _completion_choice(call, words, number, one, number * call.plan.keep + place)
        for number, samples in enumerate(kept)
        for place, one in enumerate(samples)
    ]
    return CompletionAnswer(id, "text_completion", created, model, choices, usage_of(call))


def kept_of(call: Call, number: int) -> list[Sample]:
    """The answers to a prompt that are shown: with best_of, the likeliest per token, the best first."""
    samples = call.samples[number]
    if call.plan.keep == len(samples):
        return samples
    return sorted(samples, key=lambda one: -thoughts.mean(one.thoughts))[: call.plan.keep]


def text_of(sample: Sample) -> str:
    return "" if sample.detok is None else sample.detok.text


def _chat_choice(call: Call, words: Words, sample: Sample, index: int) -> ChatChoice:
    logprobs: ChatLogprobs | None = None
    if call.plan.top is not None:
        logprobs = thoughts.chat(words, sample.thoughts, call.plan.top)
    message = AnswerMessage("assistant", text_of(sample))
    return ChatChoice(index, message, logprobs, reason_of(sample), sample.stop_reason, _ids(call, sample.tokens))


def _completion_choice(call: Call, words: Words, number: int, sample: Sample, index: int) -> CompletionChoice:
    echo = call.plan.echo[number] if call.plan.echo is not None else ""
    return CompletionChoice(
        index,
        echo + text_of(sample),
        completion_logprobs(call, words, number, sample),
        reason_of(sample),
        sample.stop_reason,
        _ids(call, sample.tokens),
        _ids(call, call.plan.jobs[number].prompt),
    )


def completion_logprobs(call: Call, words: Words, number: int, sample: Sample) -> LegacyLogprobs | None:
    plan = call.plan
    if plan.top is None:
        return None
    echo = "" if plan.echo is None else plan.echo[number]
    own = thoughts.legacy(words, sample.tokens, sample.thoughts, plan.top, len(echo), plan.skip_special)
    return own if plan.echo is None else thoughts.joined(prompt_logprobs(call, words, number), own)


def prompt_logprobs(call: Call, words: Words, number: int) -> LegacyLogprobs:
    plan = call.plan
    prompt, known = plan.jobs[number].prompt, call.prompt_thoughts[number]
    return thoughts.legacy(words, prompt, known, plan.top or 0, 0, plan.skip_special)


def _ids(call: Call, tokens: list[int]) -> list[int] | UnsetType:
    return tokens if call.plan.token_ids else UNSET
