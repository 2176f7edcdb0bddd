"""What OpenAI's two dialects have in common: usage, finish reasons and the frame of a chunk.

Owns the bytes around a chunk's text. They are made once per sample; per token only the text is turned into JSON.

    data: {"id":…,"choices":[{"index":0,"text":   "…"   ,"logprobs":null,"finish_reason":null}]}
    └──────────────────── head ───────────────────┘ └text┘ └────────────────── tail ───────────────┘
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shoal.output.parser import Parsed
from shoal.output.sample import Sample
from shoal.server.errors import HttpError
from shoal.server.jobs import Call
from shoal.server.prepared import PreparedRequest

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode

FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "function_call", "timeout", "abort"],
    Meta(description="timeout: its `timeout` passed, and the answer is incomplete; abort: the server stopped it."),
]
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "timeout": "timeout"}


class PromptDetails(Struct):
    """Of the prompt tokens, how many were found in the prefix cache."""

    cached_tokens: int


class Usage(Struct):
    """Tokens of prompts and answers. With best_of, those of dropped samples too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def reason_of(sample: Sample) -> FinishReason:
    return REASONS.get(sample.reason or "", "abort")


def usage_of(call: Call) -> Usage:
    outputs = call.outputs
    prompt, output = outputs.prompt_tokens, outputs.output_tokens
    return Usage(prompt, output, prompt + output, PromptDetails(outputs.cached_tokens))


def shown_ids(prepared: PreparedRequest, tokens: list[int]) -> list[int] | UnsetType:
    return tokens if prepared.token_ids else UNSET


def answer_pieces(answer: Struct, choices: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """The JSON of an answer, given without its choices, and of these."""
    head, tail = encode(answer).split(b'"choices":[]', 1)  # no text contains that: quotes in texts are escaped
    yield head + b'"choices":['
    for number, choice in enumerate(choices):
        if number:
            yield b","
        yield from choice
    yield b"]" + tail


def choice_pieces(choice: Struct, logprobs: Iterator[bytes] | None) -> Iterator[bytes]:
    """The JSON of a choice, given without its logprobs, and of these."""
    if logprobs is None:
        yield encode(choice)
        return
    head, tail = encode(choice).split(b'"logprobs":null', 1)
    yield head + b'"logprobs":'
    yield from logprobs
    yield tail


def filled(pieces: Iterator[bytes], place: bytes, values: Iterator[bytes]) -> Iterator[bytes]:
    """The same with values instead of the null at this place, which no text contains: quotes in texts are escaped."""
    for piece in pieces:
        head, found, tail = piece.partition(place)
        if not found:
            yield piece
            continue
        yield head + place.removesuffix(b"null")
        yield from values
        yield tail


class ChunkStream:
    """The beginning and the end that all chunks of one stream share."""

    def __init__(self, call: Call, kind: str, id: str, created: int) -> None:
        self.call = call
        self.envelope = b'data: {"id":%b,"object":"%b","created":%d,"model":%b' % (
            encode(id), kind.encode(), created, encode(call.prepared.model),
        )  # fmt: skip
        self.continuous = call.prepared.continuous_usage
        self.closing = b'],"usage":null}\n\n' if call.prepared.include_usage else b"]}\n\n"

    def close(self) -> bytes:
        """The end of a chunk: with the usage so far where that was asked for."""
        return b'],"usage":%b}\n\n' % encode(usage_of(self.call)) if self.continuous else self.closing

    def last(self, error: HttpError | None) -> bytes:
        """An error or the usage, then [DONE]."""
        if error is not None:
            return b"data: %b\n\n%b" % (error.body(), DONE)
        if self.call.prepared.include_usage:
            return b'%b,"choices":[],"usage":%b}\n\n%b' % (self.envelope, encode(usage_of(self.call)), DONE)
        return DONE


class ChunkFrame:
    """The chunks of one sample; `before` and `after` stand directly around the text."""

    __slots__ = ("after", "before", "envelope", "head", "sample", "stream", "tail")

    def __init__(self, stream: ChunkStream, sample: Sample, before: bytes, after: bytes) -> None:
        self.sample = sample
        self.envelope = stream.envelope
        self.stream = stream
        self.before, self.after = before, after
        self.head = self.start() + before
        self.tail = after + b',"logprobs":null,"finish_reason":null}' + stream.closing

    def start(self, more: bytes = b"") -> bytes:
        """All up to the choice's first own field; `more` are fields of the chunk itself."""
        return b'%b%b,"choices":[{"index":%d,' % (self.envelope, more, self.sample.index)

    def delta(self, parsed: Parsed) -> bytes:
        if isinstance(parsed, str) and not self.stream.continuous:
            return self.head + encode(parsed) + self.tail
        return self.full(parsed)

    def field(self, parsed: Parsed) -> bytes:
        """The choice's first own field, with what was added."""
        return self.before + encode(parsed if isinstance(parsed, str) else parsed.content) + self.after

    def full(self, parsed: Parsed, logprobs: bytes = b"null", more: bytes = b"") -> bytes:
        """A chunk with more than text; `more` are fields of the choice."""
        return b'%b%b,"logprobs":%b,"finish_reason":null%b}%b' % (
            self.start(), self.field(parsed), logprobs, more, self.stream.close(),
        )  # fmt: skip

    def last(self, text_field: bytes, token_ids: bool, reason: FinishReason | None = None) -> bytes:
        """The chunk that says why the sample ended."""
        sample, ids = self.sample, b',"token_ids":[]' if token_ids else b""
        why = (reason or reason_of(sample)).encode()
        return b'%b%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b%b}%b' % (
            self.start(), text_field, why, encode(sample.stop_reason), ids, self.stream.close(),
        )  # fmt: skip
