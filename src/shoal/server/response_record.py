"""One response of /v1/responses while it is made: its fields, and what is stored of it at its end.

Owns the response's JSON. The fields that only repeat the body are turned into JSON once, at the beginning; a response
is stored without logprobs. Knows no HTTP and no events.

    {"id":…,"status":…,"output":[…],"usage":…,   tools, text, metadata, …   }
    └────────────── changes ────────────────┘└── echo: repeats the body ──┘
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal.output.outputs import Outputs
from shoal.output.parser import Parsed, calls_of, content_of, reasoning_of
from shoal.output.sample import Sample
from shoal.server.dialects.common import encode, reason_of
from shoal.server.errors import BadField, HttpError
from shoal.server.prepared import PreparedRequest
from shoal.server.response_items import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from shoal.server.response_store import PendingInput, ResponseStore, StoredResponse, StoreFailed
from shoal.server.responses_body import ResponsesRequest
from shoal.server.workers import PYTHON, SHORT, off_loop
from shoal.text.tokenizer import Tokenizer

NOT_STORED = "it was deleted, is too old, was not stored (`store` or the server's settings), or belongs to another key"
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputDetails(Struct):
    """Of the input tokens, how many were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Of the output tokens, how many are reasoning, as the tokenizer counts its text."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens of the input and the output."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete: max_output_tokens, timeout, or abort."""

    reason: str


class ResponseAnswer(Struct):
    """A response: POST /v1/responses when not streamed, and GET /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Any]  # OutputMessage, ReasoningItem, FunctionCallItem
    usage: ResponseUsage | None
    store: bool
    # what the body said
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    service_tier: Literal["default"] = "default"
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"


def echo_of(body: ResponsesRequest, prepared: PreparedRequest) -> bytes:
    """The fields that repeat the body, as JSON without the brackets around."""
    params, text, reasoning = prepared.jobs[0].params, body.text, body.reasoning
    fields = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}} | (msgspec.to_builtins(text) if text else {}),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
    }
    return encode(fields)[1:-1]


class ResponseRecord:
    """A response. `pending`: its input, where it is to be stored."""

    def __init__(
        self,
        uid: str,
        created: int,
        body: ResponsesRequest,
        prepared: PreparedRequest,
        tokenizer: Tokenizer | None,
        store: ResponseStore,
        tenant: str,
        pending: PendingInput | None,
    ) -> None:
        self.uid, self.id, self.created, self.model = uid, f"resp_{uid}", created, prepared.model
        self.items: Sequence[OutputItem] | None = None  # set by a stream, which has made them one by one
        self.answered = b""  # the whole response, once it has ended
        self.stored = pending is not None
        self.status: Status = "in_progress"
        self._echo = echo_of(body, prepared)
        self._tokenizer, self._store, self.tenant = tokenizer, store, tenant
        self._previous, self._pending = body.previous_response_id, pending
        self.cancelled = False  # its client said so
        self._is_begun = False  # it is made in the background, and stored already
        self.before_end: Callable[[], Awaitable[None]] | None = None  # called before one in the background has ended

    async def begin(self) -> bytes:
        """Store it before it is made, for the background; returns what its client is told. Raises StoreFailed."""
        assert self._pending is not None
        answered = self.written("in_progress")
        one = StoredResponse(self.id, self._previous, self._pending.data, answered, ended=False)
        if not await self._store.put(self.tenant, one):
            raise BadField("input", "input is too large to be stored, which background requires; send less")
        self._pending, self._is_begun = None, True
        return answered

    async def fail(self, error: HttpError) -> None:
        """It was made in the background, and has failed or was cancelled."""
        self.status = "cancelled" if self.cancelled else "failed"
        self.answered = self.written(self.status, error=None if self.cancelled else error)
        await self._finish()

    async def _finish(self) -> None:
        with suppress(StoreFailed):  # which was logged
            if self.before_end is not None:
                await self.before_end()
            self.stored = await self._store.finish(self.tenant, self.id, self.answered)

    async def end(self, outputs: Outputs) -> None:
        """Compose the response, and store it where it is to be."""
        sample = outputs.samples[0][0]
        self.status, incomplete = status_of(sample)
        items = self.items
        if items is None:
            items = await off_loop(len(sample.tokens), lambda: items_of(sample.parsed, self.uid, self.status), PYTHON)
        usage = await self._usage(outputs, items)
        if self._pending is not None:
            await self._keep(self._pending, usage, items, incomplete, len(sample.tokens))
            self._pending = None
        else:
            self.answered = await off_loop(
                len(sample.tokens), lambda: self.written(self.status, items, usage, incomplete=incomplete), PYTHON
            )
            if self._is_begun:
                await self._finish()

    async def _keep(
        self,
        pending: PendingInput,
        usage: ResponseUsage,
        items: Sequence[OutputItem],
        incomplete: IncompleteDetails | None,
        size: int,
    ) -> None:
        def compose() -> bytes:
            return self.written(self.status, items, usage, incomplete=incomplete)

        self.answered = await off_loop(size, compose, PYTHON)
        try:
            one = StoredResponse(self.id, self._previous, pending.data, self.answered)
            self.stored = await self._store.put(self.tenant, one)
        except StoreFailed:  # which was logged; an answer is worth more than its record
            self.stored = False
        if not self.stored:
            self.answered = await off_loop(size, compose, PYTHON)

    async def _usage(self, outputs: Outputs, items: Sequence[OutputItem]) -> ResponseUsage:
        text = "".join(part.text for one in items if isinstance(one, ReasoningItem) for part in one.content)
        tokenizer, count = self._tokenizer, 0
        if text and tokenizer is not None:
            count = len(await off_loop(len(text), lambda: tokenizer.encode(text, add_special=False), short=SHORT))
        prompt, output = outputs.prompt_tokens, outputs.output_tokens
        cached, details = InputDetails(outputs.cached_tokens), OutputDetails(min(count, output))
        return ResponseUsage(prompt, cached, output, details, prompt + output)

    def written(
        self,
        status: Status,
        items: Sequence[OutputItem] = (),
        usage: ResponseUsage | None = None,
        *,
        incomplete: IncompleteDetails | None = None,
        error: HttpError | None = None,
    ) -> bytes:
        """The response as JSON."""
        fields = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else failure_of(error),
            "incomplete_details": incomplete,
            "model": self.model,
            "output": items,
            "usage": usage,
            "store": self.stored,
        }
        return b"%b,%b}" % (encode(fields)[:-1], self._echo)


def failure_of(error: HttpError) -> ResponseFailure:
    return ResponseFailure("rate_limit_exceeded" if error.status == 429 else "server_error", error.detail.message)


def status_of(sample: Sample) -> tuple[Status, IncompleteDetails | None]:
    reason = reason_of(sample)
    if reason == "stop":
        return "completed", None
    return "incomplete", IncompleteDetails("max_output_tokens" if reason == "length" else reason)


def items_of(parsed: Parsed, uid: str, status: Status) -> list[OutputItem]:
    """The items of a whole answer; the last one may be incomplete."""
    found: list[OutputItem] = []

    def name(prefix: str) -> str:
        return f"{prefix}_{uid}{len(found)}"

    if reasoning_of(parsed):
        found.append(ReasoningItem(name("rs"), "completed", [ReasoningText(reasoning_of(parsed))]))
    if content_of(parsed) or not (found or calls_of(parsed)):
        found.append(OutputMessage(name("msg"), "completed", [OutputText(content_of(parsed))]))
    first = len(found)
    found += [
        FunctionCallItem(f"fc_{uid}{first + number}", "completed", call.id, call.name, call.arguments)
        for number, call in enumerate(calls_of(parsed))
    ]
    ended: ItemStatus = "completed" if status == "completed" else "incomplete"
    found[-1].status = ended
    return found
