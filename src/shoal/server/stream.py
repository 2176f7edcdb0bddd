"""Streamed answers: one server-sent event per token, and the task that sends them.

Owns when events are sent and the limit on unsent bytes; their bytes are the dialect's. This is the hot path of a front:
all events that are pending go out in one write. A token without text to show (half a character, a possible stop string,
an end token) makes no event, unless token ids or logprobs were asked for. Knows no engine and no routes.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from shoal.core.job import Ending, Refusal, Sink
from shoal.core.request import Logprobs
from shoal.server.dialects.base import StreamWriter
from shoal.server.errors import HttpError
from shoal.server.jobs import Call

log = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
SEND_BYTES = 256 * 2**10  # from so many on, pending events go out in several writes
# Unicode line ends that JSON does not escape: many clients split a stream at them and get half an event
LINE_ENDS = ("\u0085", "\u2028", "\u2029")


def on_one_line(events: bytes) -> bytes:
    """The same events with Unicode line ends escaped, so that only line feeds end a line.

    >>> on_one_line('{"text":"a\u2028b"}'.encode())
    b'{"text":"a\\\\u2028b"}'
    """
    for end in LINE_ENDS:
        events = events.replace(end.encode(), b"\\u%04x" % ord(end))
    return events


class Transport(Protocol):
    """The part of an asyncio transport that is needed to disconnect a client."""

    def abort(self) -> None: ...


class EventStream:
    """The events of one HTTP request, and the task that sends them."""

    def __init__(self, call: Call, writer: StreamWriter, max_unsent_bytes: int) -> None:
        self.call = call
        self.writer = writer
        self.pending: list[bytes] = []
        self.budget = max_unsent_bytes  # how many more bytes may be pending
        self.max_unsent_bytes = max_unsent_bytes
        self.sending = False  # inside send(), waiting for a slow client
        self.transport: Transport | None = None
        self.sinks = [StreamSink(self, number) for number in range(len(call.prepared.jobs))]

    # ---- events -----------------------------------------------------------------------------------------------------

    def add(self, event: bytes) -> None:
        self.pending.append(event)
        self.budget -= len(event)

    def disconnect(self, why: str) -> None:
        """The client reads too slowly: abort its jobs and close its connection."""
        log.warning("a client was disconnected: %s", why)
        self.call.disconnected()
        self.pending.clear()
        if self.transport is not None:
            self.transport.abort()

    # ---- sending ----------------------------------------------------------------------------------------------------

    async def write(self, send: Send) -> None:
        """Send events as they come, until the call is over. All that are pending go out in one write, up to a limit."""
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
            self.add(self.writer.last(error))
            await self._send(send, more=False)

    async def _send(self, send: Send, more: bool) -> None:
        body = self._take_pending()
        self.budget += len(body)
        if not body.isascii():
            body = on_one_line(body)
        self.sending = True
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.sending = False

    def _take_pending(self) -> bytes:
        """All pending events; of very many, the first."""
        pending = self.pending
        if len(pending) == 1:
            return pending.pop()
        size, count = 0, 0
        for event in pending:
            size += len(event)
            count += 1
            if size > SEND_BYTES:
                break
        body = b"".join(pending[:count])
        del pending[:count]
        return body


class StreamSink(Sink):
    """One job of a streamed request: passes what happens to it through parser and dialect, as events."""

    def __init__(self, stream: EventStream, number: int) -> None:
        call, writer = stream.call, stream.writer
        self.stream = stream
        self.call = call
        self.number = number
        self.job_id = call.prepared.jobs[number].id
        self.samples = call.outputs.samples[number]
        self.choices = [writer.choice(number, sample) for sample in self.samples]
        self.shows_tokens = call.prepared.shows_tokens
        self.opened = [False] * len(self.samples)

    def refused(self, refusal: Refusal) -> None:
        self.call.refused(refusal)

    def accepted(self) -> None:
        if self.stream.writer.opens_on_accept:
            for sample in range(len(self.samples)):
                self._open(sample)
        self.call.accepted()

    def prompt_logprobs(self, values: list[Logprobs]) -> None:
        self.call.outputs.prompt_logprobs[self.number].extend(values)

    def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
        one, call = self.samples[sample], self.call
        if one.stopped:
            return
        if not call.first_token_s:
            call.first_token()
        try:
            if not self.opened[sample]:
                self._open(sample)
            if call.prepared.prompt_only:
                return
            before = len(one.tokens)
            parsed = one.parser.push(one.take(token, None))  # logprobs are sent at once and not kept
            if not self.shows_tokens:
                if parsed:
                    self.stream.add(self.choices[sample].delta(parsed))
            elif parsed or len(one.tokens) > before:
                tokens = one.tokens[before:]
                shown = [logprobs] if tokens and logprobs is not None else []
                self.stream.add(self.choices[sample].full_delta(parsed, tokens, shown))
        except Exception as error:  # must not reach the engine client, which serves other jobs too
            call.fail(error)
            return
        if one.stopped:
            call.client.finish_at(self.job_id, sample, len(one.tokens))

    def ended(self, sample: int, ending: Ending) -> None:
        one = self.samples[sample]
        try:
            if not self.opened[sample]:
                self._open(sample)
            rest = one.parser.finish(self.call.ended(one, ending))
            if self.call.error is None:
                self.stream.add(self.choices[sample].end(rest))
        except Exception as error:
            self.call.fail(error)

    def flush(self) -> None:
        stream = self.stream
        if stream.budget < 0 and stream.sending:
            stream.disconnect(f"{stream.max_unsent_bytes} bytes are unsent")
        elif stream.pending or self.call.over:
            self.call.wake()

    def _open(self, sample: int) -> None:
        self.opened[sample] = True
        opening = self.choices[sample].opening()
        if opening:
            self.stream.add(opening)
