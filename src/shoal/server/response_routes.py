"""What is done with stored responses: retrieve, follow, delete, list input items; and counting the tokens of an input.

Owns these answers. A response is found by its id and its key alone. Knows a front as a FrontView.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from shoal.server.bodies import read
from shoal.server.chat_body import chat_prompt
from shoal.server.dialects.responses import Responses, tenant_of
from shoal.server.errors import BadField, HttpError, shorten
from shoal.server.exchange import Exchange, Header, Watcher
from shoal.server.front_view import FrontView
from shoal.server.response_record import NOT_STORED
from shoal.server.response_store import StoredResponse
from shoal.server.responses_body import InputTokensRequest, chat_of, own_names
from shoal.server.workers import PYTHON, off_loop

MOST_TOKENS = 2**18  # counted at once, where the context is not longer
MOST_LISTED = 100
LISTED = 20  # items, where no limit is given


class DeletedResponse(Struct):
    """DELETE /v1/responses/{id}"""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(Struct):
    """GET /v1/responses/{id}/input_items"""

    object: Literal["list"]
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensAnswer(Struct):
    """POST /v1/responses/input_tokens"""

    object: Literal["response.input_tokens"]
    input_tokens: int


class HowMade(Struct):
    """The part of a stored response that says how it was made."""

    background: bool = False


MadeInBackground = msgspec.json.Decoder(HowMade)


class ResponseRoutes:
    """Their handlers."""

    def __init__(self, front: FrontView, dialect: Responses) -> None:
        self.front, self.dialect, self.store = front, dialect, dialect.store

    async def retrieve(self, exchange: Exchange) -> None:
        found, query = await self._find(exchange), query_of(exchange)
        if query.get("stream", "false").lower() != "true":
            if "starting_after" in query:
                raise BadField("starting_after", "starting_after requires stream to be true")
            await exchange.reply(200, found.answered)
            return
        after, running, tenant = starting_after(query), self.dialect.running, tenant_of(exchange.key)
        if not await running.has_events(tenant, found.id):
            raise BadField(
                "stream",
                "stream: the events of a response are kept only where it was made with background and stream; leave it "
                "out",
            )
        watcher = Watcher(exchange.receive)
        try:
            await send_events(exchange, running.follow(tenant, found.id, after), watcher, self.front)
        finally:
            watcher.stop()

    async def delete(self, exchange: Exchange) -> None:
        id = id_of(exchange)
        if not await self.store.delete(tenant_of(exchange.key), id):
            raise no_response(id)
        await exchange.reply_json(DeletedResponse(id, "response", True))

    async def cancel(self, exchange: Exchange) -> None:
        found, tenant = await self._find(exchange), tenant_of(exchange.key)
        if found.ended and not is_of_background(found):
            raise HttpError(
                400,
                "only a response made in the background can be cancelled; to cancel a running answer, close its "
                "connection",
                code="not_cancellable",
            )
        if not found.ended:
            await self.dialect.running.cancel(tenant, found.id)
            found = await self._find(exchange)
        await exchange.reply(200, found.answered)

    async def input_items(self, exchange: Exchange) -> None:
        query = query_of(exchange)
        order, after, most = query.get("order", "desc"), query.get("after"), limit_of(query)
        if order not in ("asc", "desc"):
            raise BadField("order", f"order must be asc or desc, not {shorten(order)!r}")
        found = await self._find(exchange)

        def work() -> bytes:
            items: list[dict[str, Any]] = msgspec.json.decode(found.asked)
            if order == "desc":
                items.reverse()
            ids = [item["id"] for item in items]
            if after is not None and after not in ids:
                raise BadField("after", f"after: the response has no input item {shorten(after)!r}")
            first = 0 if after is None else ids.index(after) + 1
            page = items[first : first + most]
            begin, end = (page[0]["id"], page[-1]["id"]) if page else (None, None)
            return msgspec.json.encode(InputItemList("list", page, begin, end, first + most < len(items)))

        await exchange.reply(200, await off_loop(len(found.asked), work, PYTHON))

    async def input_tokens(self, exchange: Exchange) -> None:
        data = await exchange.json_body()
        body = await read(InputTokensRequest, data)
        preparer = self.front.preparer
        preparer.check_model(body.model)
        if body.input is None and body.previous_response_id is None:
            raise BadField("input", "input is missing")
        reservation = await self.front.gate.reserve_text(exchange.key, len(data))
        used = 0
        try:
            messages = await self.dialect.messages(body, tenant_of(exchange.key), len(data))
            info = self.front.client.last_info
            most = max(MOST_TOKENS, 0 if info is None else info.max_model_len)
            used = len((await chat_prompt(preparer, chat_of(body, messages), len(data), most)).ids)
        except BadField as error:
            raise own_names(error) from None
        finally:
            reservation.settle(used)
        await exchange.reply_json(InputTokensAnswer("response.input_tokens", used))

    async def _find(self, exchange: Exchange) -> StoredResponse:
        id = id_of(exchange)
        found = await self.dialect.running.find(tenant_of(exchange.key), id)
        if found is None:
            raise no_response(id)
        return found


async def send_events(
    exchange: Exchange, events: AsyncIterator[bytes], watcher: Watcher, front: FrontView, headers: Sequence[Header] = ()
) -> None:
    """Send events as they come, while the client is there. b"": there is none yet, and the server may end."""
    kind = (b"content-type", b"text/event-stream; charset=utf-8")
    await exchange.start(200, [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *headers])
    if exchange.method == "HEAD":  # has no body, and its connection is used again
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        return

    async def send_all() -> None:
        async for body in events:
            if body:
                await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
            elif front.draining:
                break
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    sending = asyncio.create_task(send_all())
    try:
        await asyncio.wait((sending, watcher.task), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
    finally:
        sending.cancel()


def starting_after(query: dict[str, str]) -> int:
    """The number of the last event that is not wanted; -1: all are."""
    text = query.get("starting_after", "")
    if not text:
        return -1
    if not text.isdecimal() or not text.isascii():
        raise BadField("starting_after", f"starting_after is the number of an event, not {shorten(text)!r}")
    return int(text[:9])


def is_of_background(found: StoredResponse) -> bool:
    return MadeInBackground.decode(found.answered).background


def id_of(exchange: Exchange) -> str:
    return str(exchange.scope["path_params"]["id"])


def no_response(id: str) -> HttpError:
    return HttpError(404, f"there is no response {shorten(id)!r}; {NOT_STORED}", code="response_not_found")


def query_of(exchange: Exchange) -> dict[str, str]:
    """The last value of each parameter."""
    text = bytes(exchange.scope.get("query_string") or b"").decode("latin-1")
    try:
        return {name: values[-1] for name, values in parse_qs(text, max_num_fields=64).items()}
    except ValueError:
        raise HttpError(400, "the query has too many parameters; send fewer", code="bad_value") from None


def limit_of(query: dict[str, str]) -> int:
    text = query.get("limit", str(LISTED))
    if not text.isdecimal() or not text.isascii() or not 1 <= int(text[:9]) <= MOST_LISTED:
        raise BadField("limit", f"limit must be between 1 and {MOST_LISTED}, not {shorten(text)!r}")
    return int(text)
