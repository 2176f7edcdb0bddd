"""Streamed answers: one server-sent event per token, made of bytes that were written once.

Owns the events' bytes and the writer that sends them. This is the hot path of a front: per token only the text is
turned into JSON, the rest of the event was made when the request was accepted; the writer sends all that is pending in
one piece. A token without text to show (half a character, a possible stop string, an end token) makes no event, unless
token ids or logprobs were asked for. Knows no engine and no routes.

    data: {"id":…,"choices":[{"index":0,"text":   "…"   ,"logprobs":null,"finish_reason":null}]}
    └──────────────────── head ───────────────────┘ └text┘ └────────────────── tail ───────────────┘
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

import msgspec

from shoal.core.job import Ending, Refusal, Sink
from shoal.core.request import Logprobs
from shoal.output.sample import Sample
from shoal.server.compose import prompt_logprobs, reason_of, usage_of
from shoal.server.errors import HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames, chat_logprobs, completion_logprobs

log = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
# line ends of Unicode that JSON lets stand: many clients split a stream by them and find half an event
LINE_ENDS = ("\u0085", "\u2028", "\u2029")


def on_one_line(events: bytes) -> bytes:
    """The same events, such that only their own line feeds look like line ends.

    >>> on_one_line('{"text":"a\u2028b"}'.encode())
    b'{"text":"a\\\\u2028b"}'
    """
    for end in LINE_ENDS:
        events = events.replace(end.encode(), b"\\u%04x" % ord(end))
    return events


class Transport(Protocol):
    """As much of an asyncio transport as is needed to be rid of a client."""

    def abort(self) -> None: ...


class Lines:
    """The parts of one answer's events that stay the same."""

    __slots__ = ("end", "first", "head", "offset", "tail", "text_after", "text_before")

    def __init__(self, opening: bytes, index: int, chat: bool, usage: bool) -> None:
        start = b'%b,"choices":[{"index":%d,' % (opening, index)
        self.text_before, self.text_after = (b'"delta":{"content":', b"}") if chat else (b'"text":', b"")
        self.first = start  # what stands before delta or text
        self.end = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self.head = start + self.text_before
        self.tail = self.text_after + b',"logprobs":null,"finish_reason":null}' + self.end
        self.offset = 0  # where in the text the next token begins, for logprobs of completions

    def full(self, text: bytes, logprobs: bytes = b"null", more: bytes = b"") -> bytes:
        """An event with more than text."""
        return b'%b%b%b,"logprobs":%b,"finish_reason":null%b}%b' % (
            self.head, text, self.text_after, logprobs, more, self.end,
        )  # fmt: skip


class EventStream:
    """The events of one HTTP request, and the writer that sends them."""

    def __init__(self, call: Call, names: TokenNames, id: str, created: int, max_unsent_bytes: int) -> None:
        self.call = call
        self.names = names
        self.pending: list[bytes] = []
        self.room = max_unsent_bytes  # how much more may be pending
        self.max_unsent_bytes = max_unsent_bytes
        self.sending = False  # the writer is in send(), and waits there for a slow client
        self.transport: Transport | None = None
        prepared = call.prepared
        kind = "chat.completion.chunk" if prepared.chat else "text_completion"
        self.opening = b'data: {"id":%b,"object":"%b","created":%d,"model":%b' % (
            encode(id), kind.encode(), created, encode(prepared.model),
        )  # fmt: skip
        self.sinks = [StreamSink(self, number) for number in range(len(prepared.jobs))]

    # ---- events ---------------------------------------------------------------------------------------------------

    def add(self, event: bytes) -> None:
        self.pending.append(event)
        self.room -= len(event)

    def cut_off(self, why: str) -> None:
        """The client reads too slowly: end its jobs and its connection."""
        log.warning("a client was cut off: %s", why)
        self.call.leave()
        self.pending.clear()
        if self.transport is not None:
            self.transport.abort()

    def last(self, error: HttpError | None) -> None:
        """What ends a stream: an error or the usage, then [DONE]."""
        if error is not None:
            self.add(b"data: %b\n\n" % error.body())
        elif self.call.prepared.include_usage:
            self.add(b'%b,"choices":[],"usage":%b}\n\n' % (self.opening, encode(usage_of(self.call))))
        self.add(DONE)

    # ---- the writer -----------------------------------------------------------------------------------------------

    async def write(self, send: Send) -> None:
        """Send events as they come, until the call is over. Everything pending goes out as one piece."""
        call, pending = self.call, self.pending
        while not call.gone:
            if pending:
                await self._send(send, more=True)
            elif call.over:
                return
            else:
                await call.change()

    async def finish(self, send: Send, error: HttpError | None) -> None:
        if not self.call.gone:
            self.last(error)
            await self._send(send, more=False)

    async def _send(self, send: Send, more: bool) -> None:
        pending = self.pending
        body = pending[0] if len(pending) == 1 else b"".join(pending)
        pending.clear()
        if not body.isascii():
            body = on_one_line(body)
        self.room = self.max_unsent_bytes
        self.sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending = False


class StreamSink(Sink):
    """One job of a streamed request: turns what the engine tells into events."""

    def __init__(self, stream: EventStream, number: int) -> None:
        call, prepared = stream.call, stream.call.prepared
        self.stream = stream
        self.call = call
        self.number = number
        self.job_id = prepared.jobs[number].id
        self.samples = call.outputs.samples[number]
        self.lines = [Lines(stream.opening, one.index, prepared.chat, prepared.include_usage) for one in self.samples]
        self.every_token = prepared.token_ids or prepared.top is not None
        self.opened = [False] * len(self.samples)

    def refused(self, refusal: Refusal) -> None:
        self.call.refused(refusal)

    def accepted(self) -> None:
        if self.call.prepared.chat:
            for sample in self.samples:
                self._open(sample)
        self.call.accepted()

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        self.call.outputs.prompt_logprobs[self.number] += values

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        one = self.samples[sample]
        if one.stopped:
            return
        try:
            if not self.opened[sample]:
                self._open(one)
            before = len(one.tokens)
            text = self.call.token(one, token, logprobs)
            lines = self.lines[sample]
            if not self.every_token:
                if text:
                    self.stream.add(lines.head + encode(text) + lines.tail)
            elif text or len(one.tokens) > before:
                self._add_full(one, lines, text, one.tokens[before:], one.logprobs[before:])
        except Exception as error:  # must not reach the engine client: it has other jobs to tell
            self.call.fail(error)
            return
        if one.stopped:
            self.call.client.finish_at(self.job_id, sample, len(one.tokens))

    def ended(self, sample: int, ending: Ending) -> None:
        one, lines = self.samples[sample], self.lines[sample]
        try:
            if not self.opened[sample]:
                self._open(one)
            rest = self.call.ended(one, ending)
            if self.call.error is None:
                self.stream.add(self._end_event(one, lines, rest))
        except Exception as error:
            self.call.fail(error)

    def flush(self) -> None:
        stream = self.stream
        if stream.room < 0 and stream.sending:
            stream.cut_off(f"{stream.max_unsent_bytes} bytes wait for it")
        elif stream.pending or self.call.over:
            self.call.wake()

    # ---- rarer events ---------------------------------------------------------------------------------------------

    def _open(self, one: Sample) -> None:
        """What stands before the first token: the role, the prompt."""
        self.opened[one.number] = True
        prepared, lines, stream = self.call.prepared, self.lines[one.number], self.stream
        ids = b',"prompt_token_ids":%b' % encode(prepared.jobs[self.number].prompt) if prepared.token_ids else b""
        if prepared.chat:
            start = lines.first if not ids else lines.first.replace(b',"choices":', ids + b',"choices":', 1)
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            stream.add(start + role + lines.end)
        elif prepared.echo is not None or ids:
            text = prepared.echo[self.number] if prepared.echo is not None else ""
            stream.add(lines.full(encode(text), self._echo_logprobs(lines), ids))

    def _echo_logprobs(self, lines: Lines) -> bytes:
        prepared = self.call.prepared
        if prepared.echo is None or prepared.top is None:
            return b"null"
        lines.offset = len(prepared.echo[self.number])
        return encode(prompt_logprobs(self.call, self.stream.names, self.number))

    def _add_full(self, one: Sample, lines: Lines, text: str, tokens: list[int], known: list[Logprobs]) -> None:
        prepared, names = self.call.prepared, self.stream.names
        logprobs = b"null"
        if prepared.top is not None and known:
            if prepared.chat:
                logprobs = encode(chat_logprobs(names, known, prepared.top))
            else:
                logprobs = encode(
                    completion_logprobs(names, tokens, known, prepared.top, lines.offset, prepared.skip_special)
                )
                lines.offset += sum(names.length_of(token, prepared.skip_special) for token in tokens)
        more = b',"token_ids":%b' % encode(tokens) if prepared.token_ids else b""
        self.stream.add(lines.full(encode(text), logprobs, more))

    def _end_event(self, one: Sample, lines: Lines, rest: str) -> bytes:
        """The last piece of one answer: what was held back, and why it ended."""
        said = (
            b'"delta":{}'
            if self.call.prepared.chat and not rest
            else (lines.text_before + encode(rest) + lines.text_after)
        )
        ids = b',"token_ids":[]' if self.call.prepared.token_ids else b""
        return b'%b%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b%b}%b' % (
            lines.first, said, reason_of(one).encode(), encode(one.stop_reason), ids, lines.end,
        )  # fmt: skip
