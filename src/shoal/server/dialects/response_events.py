"""The events of a streamed /v1/responses, typed and numbered.

Owns their order and bytes. Items are opened and closed one after the other, and kept for the whole response at the end.

    response.created · in_progress
      output_item.added · content_part.added · output_text.delta … · output_text.done · content_part.done · …item.done
      output_item.added · function_call_arguments.delta … · function_call_arguments.done · output_item.done
    response.completed, incomplete or failed
"""

from collections.abc import Sequence
from typing import Any

from shoal.core.request import Logprobs
from shoal.output.parser import Parsed, ToolCall, content_of
from shoal.output.sample import Sample
from shoal.server.dialects.common import encode
from shoal.server.errors import HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames, chat_logprobs
from shoal.server.response_items import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from shoal.server.response_log import final_event
from shoal.server.response_record import ResponseRecord, status_of


class ResponseStream:
    """The events of one streamed response."""

    opens_on_accept = True

    def __init__(self, call: Call, record: ResponseRecord, names: TokenNames) -> None:
        self.call, self.record, self.names = call, record, names
        self.items: list[OutputItem] = []
        self.number = 0  # of the next event

    def choice(self, job: int, sample: Sample) -> "ResponseEvents":
        return ResponseEvents(self, sample)

    def event(self, kind: str, more: bytes) -> bytes:
        """`more`: its other fields, as JSON without the brackets around."""
        number, self.number = self.number, self.number + 1
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, number, more)

    def last(self, error: HttpError | None) -> bytes:
        record = self.record
        if record.answered:  # also one in the background that has failed, which is stored by now
            return final_event(record.status, self.number, record.answered)
        if error is not None:
            for item in self.items[-1:]:
                item.status = "incomplete"
            return self.event("response.failed", b'"response":' + record.written("failed", self.items, error=error))
        raise AssertionError("a response ends before its stream does")


class ResponseEvents:
    """Writes the items of a response one after the other: reasoning, text, calls."""

    def __init__(self, stream: ResponseStream, sample: Sample) -> None:
        self.stream, self.sample = stream, sample
        self.items = stream.items
        self.kind = ""  # of the item that is open: reasoning, text or call
        self.place = b""  # where its deltas belong, as JSON
        self.pieces: list[str] = []  # of its text

    def opening(self) -> bytes:
        response = b'"response":' + self.stream.record.written("in_progress")
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def delta(self, parsed: Parsed) -> bytes:
        if isinstance(parsed, str):
            return self._text("text", parsed)
        out = self._text("reasoning", parsed.reasoning) if parsed.reasoning else b""
        if parsed.content:
            out += self._text("text", parsed.content)
        for call in parsed.tool_calls:
            out += self._call(call)
        return out

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        top = self.stream.call.prepared.top
        if top is None or not logprobs or not content_of(parsed):
            return self.delta(parsed) if parsed else b""
        return self._text("text", content_of(parsed), encode(chat_logprobs(self.stream.names, logprobs, top).content))

    def end(self, parsed: Parsed) -> bytes:
        out = self.delta(parsed) if parsed else b""
        if not self.items:
            out += self._open("text")
        status, _ = status_of(self.sample)
        out += self._close("completed" if status == "completed" else "incomplete")
        self.stream.record.items = self.items
        return out

    # ---- items ------------------------------------------------------------------------------------------------------

    def _text(self, kind: str, text: str, logprobs: bytes = b"[]") -> bytes:
        opened = self._open(kind) if self.kind != kind else b""
        self.pieces.append(text)
        if kind == "reasoning":
            return opened + self._event("response.reasoning_text.delta", b'%b,"delta":%b' % (self.place, encode(text)))
        more = b'%b,"delta":%b,"logprobs":%b' % (self.place, encode(text), logprobs)
        return opened + self._event("response.output_text.delta", more)

    def _call(self, call: ToolCall) -> bytes:
        out = b""
        if call.name:
            out += self._close()
            item = FunctionCallItem(self._name("fc"), "in_progress", call.id, call.name, "")
            out += self._added(item, "call")
        if call.arguments:
            self.pieces.append(call.arguments)
            more = b'%b,"delta":%b' % (self.place, encode(call.arguments))
            out += self._event("response.function_call_arguments.delta", more)
        return out

    def _open(self, kind: str) -> bytes:
        """A message or reasoning, with its only part."""
        closed = self._close()
        item: OutputItem = OutputMessage(self._name("msg"), "in_progress", [])
        part: OutputText | ReasoningText = OutputText("")
        if kind == "reasoning":
            item, part = ReasoningItem(self._name("rs"), "in_progress", []), ReasoningText("")
        added = self._added(item, kind)
        self.place += b',"content_index":0'
        return closed + added + self._event("response.content_part.added", b'%b,"part":%b' % (self.place, encode(part)))

    def _added(self, item: OutputItem, kind: str) -> bytes:
        index = len(self.items)
        self.items.append(item)
        self.kind, self.pieces = kind, []
        self.place = b'"item_id":%b,"output_index":%d' % (encode(item.id), index)
        return self._event("response.output_item.added", b'"output_index":%d,"item":%b' % (index, encode(item)))

    def _close(self, status: ItemStatus = "completed") -> bytes:
        if not self.kind:
            return b""
        item, text, place = self.items[-1], "".join(self.pieces), self.place
        item.status, self.kind, self.pieces = status, "", []
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            more = b'%b,"name":%b,"arguments":%b' % (place, encode(item.name), encode(text))
            out = self._event("response.function_call_arguments.done", more)
        elif isinstance(item, ReasoningItem):
            item.content = [ReasoningText(text)]
            out = self._event("response.reasoning_text.done", b'%b,"text":%b' % (place, encode(text)))
            out += self._part_done(place, item.content[0])
        else:
            item.content = [OutputText(text)]
            out = self._event("response.output_text.done", b'%b,"text":%b,"logprobs":[]' % (place, encode(text)))
            out += self._part_done(place, item.content[0])
        index = len(self.items) - 1
        return out + self._event("response.output_item.done", b'"output_index":%d,"item":%b' % (index, encode(item)))

    def _part_done(self, place: bytes, part: Any) -> bytes:
        return self._event("response.content_part.done", b'%b,"part":%b' % (place, encode(part)))

    def _name(self, prefix: str) -> str:
        return f"{prefix}_{self.stream.record.uid}{len(self.items)}"

    def _event(self, kind: str, more: bytes) -> bytes:
        return self.stream.event(kind, more)
