"""OpenAI's /v1/responses: items in, items out; each response can be stored, and followed by another.

Owns how a body and the responses before it become a chat, the answer's fields, and what of it is stored. The fields of
the body are in responses_body.py, the items in response_items.py, the events of a stream in response_events.py. Knows a
Call; no HTTP.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import msgspec
from msgspec import Struct

from shoal.errors import PromptTooLong
from shoal.keys.api_key import ApiKey
from shoal.output.outputs import Outputs
from shoal.output.parser import content_of, reasoning_of
from shoal.output.sample import Sample
from shoal.server.bodies import MOST_MESSAGES, SMALL_BODY, ChatMessage, read
from shoal.server.chat_body import prepare_chat
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import encode
from shoal.server.dialects.response_events import ResponseStream
from shoal.server.errors import BadField, HttpError, shorten
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames, token_pieces
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from shoal.server.response_background import BackgroundResponses
from shoal.server.response_items import InputItem, ResponseEvent, Source, messages_of, stored_items
from shoal.server.response_log import EventLog
from shoal.server.response_record import NOT_STORED, ResponseAnswer, ResponseRecord
from shoal.server.response_store import ResponseStore, StoredResponse
from shoal.server.responses_body import InputTokensRequest, ResponsesRequest, chat_of, check_body, own_names
from shoal.server.workers import PYTHON, off_loop

ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{24})i?[0-9]{1,6}")
MOST_REFERENCES = 64  # responses that the item references of one request are looked for in


class StoredOutput(Struct):
    """The part of a stored response that a later one needs."""

    output: list[InputItem]


read_items = msgspec.json.Decoder(list[InputItem]).decode
read_output = msgspec.json.Decoder(StoredOutput).decode


@dataclass(frozen=True, kw_only=True)
class PreparedResponse(PreparedRequest):
    """A request whose answer may be stored."""

    record: ResponseRecord
    background: bool

    running: BackgroundResponses

    @property
    def in_background(self) -> bool:
        return self.background

    async def at_begin(self, cancel: Callable[[], None]) -> bytes:
        begun = await self.record.begin()
        self.running.add(self.record, cancel)
        return begun

    async def at_stream_begin(self, cancel: Callable[[], None]) -> EventLog:
        await self.record.begin()
        log = await self.running.add_streamed(self.record, cancel)
        self.record.before_end = partial(self.running.save, self.record.id)
        return log

    async def at_end(self, outputs: Outputs) -> None:
        try:
            await self.record.end(outputs)
        finally:
            self.running.discard(self.record.id)

    async def at_failure(self, error: HttpError) -> None:
        try:
            await self.record.fail(error)
        finally:
            self.running.discard(self.record.id)


class Responses:
    """OpenAI's responses."""

    path = "/v1/responses"
    id_prefix = "resp_"
    operation = Operation(
        "Answer items with items, and store the response",
        ResponsesRequest,
        ResponseAnswer,
        ResponseEvent,
        {"input": "Say hello.", "max_output_tokens": 16},
        {},
        ends_with="then `response.completed`, `response.incomplete` or `response.failed`",
    )

    def __init__(self, preparer: Preparer, names: TokenNames, store: ResponseStore) -> None:
        self.preparer = preparer
        self.names = names
        self.store = store
        self.running = BackgroundResponses(store)

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedResponse:
        request = await read(ResponsesRequest, body)
        check_body(request)
        tenant = tenant_of(key)
        messages = await self.messages(request, tenant, len(body))
        try:
            prepared = await self._fitting(request, messages, len(body), id, key)
        except BadField as error:
            raise own_names(error) from None
        record = await off_loop(
            len(body), lambda: self._record(request, prepared, id, tenant), PYTHON, SMALL_BODY
        )  # fmt: skip
        own = {one.name: getattr(prepared, one.name) for one in fields(prepared)}
        if request.store and not record.stored:
            own["warnings"] = [*prepared.warnings, "store"]
        background = bool(request.background)
        if background and not record.stored:
            raise BadField("background", "background requires that the response is stored, which it is not here")
        return PreparedResponse(**own, record=record, background=background, running=self.running)

    def _record(self, request: ResponsesRequest, prepared: PreparedRequest, uid: str, tenant: str) -> ResponseRecord:
        pending = None
        if request.store is not False and self.store.keeps:
            pending = self.store.hold(encode(stored_items(items_of(request), uid)))
        return ResponseRecord(
            uid, int(time.time()), request, prepared, self.preparer.tokenizer, self.store, tenant, pending
        )

    # ---- from items to messages -------------------------------------------------------------------------------------

    async def messages(self, request: InputTokensRequest, tenant: str, size: int) -> list[ChatMessage]:
        """The whole conversation as a chat's messages."""
        earlier, earlier_size = await self._earlier(request, tenant)
        own = [(item, f"input[{number}]") for number, item in enumerate(items_of(request))]
        own = await self._without_references(own, tenant)
        developer = "developer" if self._knows_developer() else "system"

        def work() -> list[ChatMessage]:
            system = [InputItem("message", role="system", content=request.instructions)] if request.instructions else []
            return messages_of([*((one, "instructions") for one in system), *earlier, *own], developer)

        found = await off_loop(size + earlier_size, work, PYTHON, SMALL_BODY)
        if not found:
            raise BadField("input", "input has no items; give at least one")
        if len(found) > MOST_MESSAGES:
            raise BadField(
                "input", f"the conversation has {len(found)} messages, limit {MOST_MESSAGES}; begin a new one"
            )
        return found

    def _knows_developer(self) -> bool:
        tokenizer = self.preparer.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template and "developer" in tokenizer.renderer.plain.source

    async def _earlier(self, request: InputTokensRequest, tenant: str) -> tuple[list[Source], int]:
        """(the items of the responses before, how many bytes they have)."""
        id = request.previous_response_id
        if id is None:
            return [], 0
        most = self.preparer.settings.max_body_bytes
        found = await self.store.conversation(tenant, id, most)
        if found.missing is not None:
            raise HttpError(
                400,
                f"previous_response_id: there is no response {shorten(found.missing)!r}; {NOT_STORED}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if found.turns and not found.turns[-1].ended:
            raise BadField("previous_response_id", "the response before has not ended; wait for it, or cancel it")
        if found.cut and request.truncation != "auto":
            raise BadField(
                "previous_response_id",
                f"the conversation before has more than {most} bytes; begin a new one, or set truncation to 'auto'",
            )
        size = sum(len(turn.asked) + len(turn.answered) for turn in found.turns)

        def work() -> list[Source]:
            return [(item, "previous_response_id") for turn in found.turns for item in all_items(turn)]

        return await off_loop(size, work, PYTHON, SMALL_BODY), size

    async def _without_references(self, items: list[Source], tenant: str) -> list[Source]:
        """The items with those of stored responses in place of references to them."""
        wanted = {where: item.id or "" for item, where in items if item.kind == "item_reference"}
        if not wanted:
            return items
        uids = {found[1] for id in wanted.values() if (found := ITEM_ID.fullmatch(id))}
        if len(uids) > MOST_REFERENCES:
            raise BadField("input", f"input refers to items of {len(uids)} responses, limit {MOST_REFERENCES}")
        known: dict[str, InputItem] = {}
        for uid in uids:
            stored = await self.store.get(tenant, f"{self.id_prefix}{uid}")
            if stored is not None:
                known |= await off_loop(len(stored.asked) + len(stored.answered), partial(by_id, stored), PYTHON)
        for where, id in wanted.items():
            if id not in known:
                raise BadField(f"{where}.id", f"{where}: there is no item {shorten(id)!r}; {NOT_STORED}")
        return [(known[wanted[where]] if where in wanted else item, where) for item, where in items]

    async def _fitting(
        self, request: ResponsesRequest, messages: list[ChatMessage], size: int, id: str, key: ApiKey | None
    ) -> PreparedRequest:
        """Prepared; with truncation "auto", without the oldest messages where all of them do not fit."""

        async def attempt(kept: list[ChatMessage]) -> PreparedRequest:
            return await prepare_chat(self.preparer, chat_of(request, kept), size, id, key)

        try:
            return await attempt(messages)
        except PromptTooLong:
            head, turns = turns_of(messages) if request.truncation == "auto" else (0, [])
            if not turns:
                raise
        fits = await attempt([*messages[:head], *messages[turns[-1] :]])
        low, high = -1, len(turns) - 1  # the turn before which too little is left out, and one where enough is
        while high - low > 1:
            middle = (low + high) // 2
            try:
                fits, high = await attempt([*messages[:head], *messages[turns[middle] :]]), middle
            except PromptTooLong:
                low = middle
        return fits

    # ---- answers ----------------------------------------------------------------------------------------------------

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        record, top = record_of(call), call.prepared.top
        sample = call.outputs.samples[0][0]
        if top is None or b'"logprobs":[]' not in record.answered or not len(sample.logprobs):
            yield record.answered
            return
        head, tail = record.answered.split(b'"logprobs":[]', 1)  # the first one: output comes before the echoed fields
        yield head + b'"logprobs":'
        yield from token_pieces(self.names, sample.logprobs, top, first_of_content(self.names, call.prepared, sample))
        yield tail

    def stream(self, call: Call, id: str, created: int) -> ResponseStream:
        return ResponseStream(call, record_of(call), self.names)

    @staticmethod
    def error(error: HttpError) -> bytes:
        return error.body()


def record_of(call: Call) -> ResponseRecord:
    assert isinstance(call.prepared, PreparedResponse)
    return call.prepared.record


def tenant_of(key: ApiKey | None) -> str:
    return key.name if key is not None else ""


def items_of(request: InputTokensRequest) -> list[InputItem]:
    if isinstance(request.input, str):
        return [InputItem("message", role="user", content=request.input)]
    return request.input or []


def turns_of(messages: Sequence[ChatMessage]) -> tuple[int, list[int]]:
    """(how many of the system's messages come first, where a user's turn begins; not the first one)."""
    head = next((n for n, one in enumerate(messages) if one.role != "system"), len(messages))
    return head, [n for n in range(head + 1, len(messages)) if messages[n].role == "user"]


def all_items(turn: StoredResponse) -> list[InputItem]:
    return [*read_items(turn.asked), *read_output(turn.answered).output]


def by_id(turn: StoredResponse) -> dict[str, InputItem]:
    return {item.id: item for item in all_items(turn) if item.id is not None}


def first_of_content(names: TokenNames, prepared: PreparedRequest, sample: Sample) -> int:
    """The number of the first token whose text is content, and not reasoning."""
    if not reasoning_of(sample.parsed):
        return 0
    parser = prepared.make_parser()
    for number, token in enumerate(sample.tokens):
        if content_of(parser.push(names.text_of(token))):
            return number
    return len(sample.tokens)
