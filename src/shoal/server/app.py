"""The front: all routes, and the path of a generation request from its body to its last event.

Owns the requests that are being answered. Knows no engine: it is given an EngineClient. One object per process, used on
one event loop.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from shoal.core.ports import EngineClient
from shoal.errors import Draining, EngineDown
from shoal.keys.ledger_client import Limiter, NoLimiter
from shoal.obs.spans import NoSpans, Spans, Walk
from shoal.server.answer_memory import AnswerMemory
from shoal.server.auth import BASIC, BEARER, Keys, sent_key
from shoal.server.beams import BeamClient
from shoal.server.body_memory import BodyMemory
from shoal.server.debug import Debug
from shoal.server.dialects.base import Dialect
from shoal.server.dialects.chat import Chat
from shoal.server.dialects.chat_batch import ChatBatch
from shoal.server.dialects.completions import Completions
from shoal.server.dialects.generate import Generate
from shoal.server.dialects.messages import Messages
from shoal.server.dialects.ollama import OllamaChat, OllamaGenerate
from shoal.server.dialects.responses import Responses
from shoal.server.errors import HttpError, as_http, internal
from shoal.server.exchange import Disconnected, Exchange, Receive, Scope, Send, Watcher
from shoal.server.field_names import known_at
from shoal.server.front_metrics import FrontCounters, NoCounters, NoOtherFronts, OtherFronts
from shoal.server.hosts import Hosts
from shoal.server.info_routes import InfoRoutes
from shoal.server.jobs import Call, CollectSink
from shoal.server.limits import KeyGate
from shoal.server.live import LiveHub, LiveRing
from shoal.server.live_routes import LiveRoutes
from shoal.server.logprobs import TokenNames
from shoal.server.ollama_routes import OllamaRoutes
from shoal.server.prepare import GrammarChecker, Preparer
from shoal.server.prepared import PreparedRequest
from shoal.server.protocol import TRANSPORT
from shoal.server.response_background import followed
from shoal.server.response_routes import ResponseRoutes, send_events
from shoal.server.response_store import NoStore, ResponseStore
from shoal.server.server_routes import ServerRoutes
from shoal.server.settings import ServerSettings
from shoal.server.stream import EventStream
from shoal.server.whole import send_whole
from shoal.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Handler = Callable[[Exchange], Awaitable[None]]
GONE = 499  # for the log: the client disconnected before the answer
DIALECTS = (
    Completions,
    Chat,
    ChatBatch,
    Generate,
    Messages,
    OllamaChat,
    OllamaGenerate,
)  # the APIs served, beside responses
SHOWN_PROMPT = 20_000  # characters of a body in the log, with --log-prompts


class Endpoint:
    """One path: its handler for each method. Any other method is a 405."""

    def __init__(
        self,
        front: "Front",
        route: str,
        open: bool = False,
        offers: bytes = BEARER,
        errors: Callable[[HttpError], bytes] = HttpError.body,
        any_kind: bool = False,
        **handlers: Handler,
    ) -> None:
        self.front = front
        self.route = route
        self.open = open  # requires no key
        self.offers = offers  # the authentication scheme named in a 401
        self.errors = errors  # how its API writes them
        self.any_kind = any_kind  # of body, where it is not a page that sends it
        self.handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["shoal.exchange"]
        exchange.route = self.route
        exchange.error_body, exchange.any_kind = self.errors, self.any_kind
        if not self.open:
            self.front.identify(exchange, self.offers)
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = self.handlers.get(method)
        if handler is None:
            allowed = ", ".join(self.handlers)
            raise HttpError(
                405,
                f"{self.route} accepts only {allowed}, not {exchange.method}",
                code="method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )
        await handler(exchange)


class Front:
    """An ASGI application. `draining` refuses new generation requests; `active` counts the unanswered ones."""

    def __init__(
        self,
        settings: ServerSettings,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        grammars: GrammarChecker | None,
        eos_ids: Collection[int],
        sampling_defaults: Mapping[str, Any],
        metrics: FrontCounters | None = None,
        spans: Spans | None = None,
        limiter: Limiter | None = None,
        store: ResponseStore | None = None,
    ) -> None:
        self.settings = settings
        self.client = client
        self.tokenizer = tokenizer
        self.metrics: FrontCounters = metrics or NoCounters()
        self.other_fronts: OtherFronts = NoOtherFronts()  # set where there are several fronts
        self.spans: Spans = spans or NoSpans()
        self.restart_engines: Callable[[], None] | None = None  # set where a supervisor can do it
        self.preparer = Preparer(settings, tokenizer, grammars, eos_ids, sampling_defaults, lambda: client.last_info)
        self.gate = KeyGate(limiter or NoLimiter(), self.metrics, lambda: client.last_info)
        names = TokenNames(tokenizer)
        self.responses = Responses(self.preparer, names, store or NoStore())
        self.dialects: Sequence[Dialect] = [
            *(dialect(self.preparer, names) for dialect in DIALECTS), self.responses
        ]  # fmt: skip
        self.keys = Keys(settings.keys)
        self.answer_memory = AnswerMemory(settings.max_answer_logprobs)
        self.hosts = Hosts(settings.host, settings.allowed_hosts)
        self.body_memory = BodyMemory(settings.max_body_memory_bytes)
        self.live = LiveHub(LiveRing(), client, lambda: {"model": settings.model, "version": settings.version})
        self.draining = False
        self.active = 0
        self.calls: set[Call] = set()
        self.streams: set[EventStream] = set()
        self._entry: Callable[[Scope, Receive, Send], Awaitable[None]] = self._answer
        if settings.allowed_origins:
            self._entry = CORSMiddleware(
                self._answer,
                allow_origins=settings.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", "x-shoal-warning", "retry-after"),
            )
        self.router = self._routes()
        if tokenizer is not None:
            _ = tokenizer.pieces  # built now, not during the first answer
        for dialect in self.dialects:
            known_at(dialect.operation.request, "")

    def _routes(self) -> Router:
        info, debug, ollama, server = InfoRoutes(self), Debug(self), OllamaRoutes(self), ServerRoutes(self)
        responses, live = ResponseRoutes(self, self.responses), LiveRoutes(self, self.live, info.page)
        paths: list[tuple[str, str, dict[str, Any]]] = [
            *(
                (one.path, one.path, {"POST": partial(self._generate, dialect=one), "errors": one.error})
                for one in self.dialects
            ),
            (
                "/v1/messages/count_tokens",
                "/v1/messages/count_tokens",
                {"POST": info.count_tokens, "errors": Messages.error},
            ),
            ("/v1/responses/input_tokens", "/v1/responses/input_tokens", {"POST": responses.input_tokens}),
            (
                "/v1/responses/{id}",
                "/v1/responses/{id}",
                {"GET": responses.retrieve, "DELETE": responses.delete},
            ),
            ("/v1/responses/{id}/cancel", "/v1/responses/{id}/cancel", {"POST": responses.cancel}),
            ("/v1/responses/{id}/input_items", "/v1/responses/{id}/input_items", {"GET": responses.input_items}),
            ("/api/tags", "/api/tags", {"GET": ollama.tags, "errors": OllamaChat.error}),
            ("/api/ps", "/api/ps", {"GET": ollama.tags, "errors": OllamaChat.error}),
            ("/api/show", "/api/show", {"POST": ollama.show, "errors": OllamaChat.error}),
            ("/api/version", "/api/version", {"GET": ollama.version, "errors": OllamaChat.error}),
            ("/v1/models", "/v1/models", {"GET": info.models}),
            ("/v1/models/{model:path}", "/v1/models/{model}", {"GET": info.model}),
            *((path, path, {"POST": info.tokenize}) for path in ("/tokenize", "/v1/tokenize")),
            *((path, path, {"POST": info.detokenize}) for path in ("/detokenize", "/v1/detokenize")),
            ("/version", "/version", {"GET": info.version}),
            ("/metrics", "/metrics", {"GET": info.metrics}),
            ("/live", "/live", {"GET": live.page, "offers": BASIC}),
            ("/live/events", "/live/events", {"GET": live.events, "offers": BASIC}),
            ("/debug/requests", "/debug/requests", {"GET": debug.requests}),
            ("/debug/passes", "/debug/passes", {"GET": debug.passes}),
            ("/admin/restart", "/admin/restart", {"POST": debug.restart}),
            ("/load", "/load", {"GET": server.load}),
            *((path, path, {"GET": server.server_info}) for path in ("/server_info", "/get_server_info")),
            *((path, path, {"GET": server.model_info}) for path in ("/model_info", "/get_model_info")),
            ("/tokenizer_info", "/tokenizer_info", {"GET": server.tokenizer_info}),
            *((path, path, {"POST": server.reset_prefix_cache}) for path in ("/reset_prefix_cache", "/flush_cache")),
            *((path, path, {"GET": info.health, "open": True}) for path in ("/health", "/health_generate")),
            ("/ping", "/ping", {"GET": info.health, "POST": info.health, "open": True}),
            ("/openapi.json", "/openapi.json", {"GET": info.openapi, "offers": BASIC}),
        ]
        page = {"GET": info.page, "offers": BASIC}  # the only way for a browser to send a key
        paths += [
            (path, "/static" if path.startswith("/static/") else path, page) for path in info.pages if path != "/live"
        ]
        ollama_prefix = "/api/"  # its users send JSON undeclared: the examples in its docs do
        routes = [
            Route(path, Endpoint(self, name, any_kind=path.startswith(ollama_prefix), **how))
            for path, name, how in paths
        ]
        return Router(routes, redirect_slashes=False, default=self._not_found)

    # ---- every request ----------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served here, not {scope['type']}")
        await self._entry(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.settings, self.body_memory)
        scope["shoal.exchange"] = exchange
        try:
            await self.router(scope, receive, send)
        except Disconnected:
            pass
        except Exception as error:
            if exchange.status:  # too late for a status: close the connection
                raise
            await self._reply_failure(exchange, error)
        finally:
            del scope["shoal.exchange"]  # no circle: see GC_THRESHOLDS
            exchange.release_body()
            exchange.status = exchange.status or GONE
            self.metrics.count(exchange.route, exchange.status)
            exchange.write_log()

    async def _reply_failure(self, exchange: Exchange, error: Exception) -> None:
        """A function of its own: an error kept in a frame of its own traceback would keep the request's body alive."""
        answer = as_http(error)
        if answer is None:
            fields = {"id": exchange.id, "route": exchange.route}
            log.error("a request failed", exc_info=error, extra={"fields": fields})
            answer = internal()
        await exchange.reply_error(answer)

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["shoal.exchange"]
        self.identify(exchange)  # without a key, not even a 404 is revealed
        raise HttpError(404, "no such path; /docs lists the API", code="not_found")

    def identify(self, exchange: Exchange, offers: bytes = BEARER) -> None:
        """Find the key of a request. Without keys anyone may ask, but not a page of another site (see hosts.py)."""
        exchange.key = self.keys.find(sent_key(exchange.headers), offers)
        if exchange.key is None:
            self.hosts.check(exchange.headers.get(b"host"))

    def tell(self) -> bytes:
        """This front's metrics, for another front."""
        return self.metrics.tell(self.active, self.client.engines)

    # ---- generation -------------------------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange, dialect: Dialect) -> None:
        if self.draining:
            raise Draining("the server is shutting down; use another one, or retry later")
        if not self.client.accepting:
            raise EngineDown(self.client.trouble)
        body = await exchange.json_body()
        if self.settings.log_prompts:
            exchange.facts["body"] = body[: SHOWN_PROMPT * 4].decode(errors="replace")[:SHOWN_PROMPT]
        self.active += 1
        watcher = Watcher(exchange.receive)
        call: Call | None = None
        try:
            prepared = await dialect.prepare(body, exchange.uid, exchange.key)
            del body
            exchange.release_body()
            exchange.rename(prepared.request_id)
            reservation = await self.gate.reserve_jobs(exchange.key, prepared.jobs)
            await asyncio.sleep(0)  # preparing many jobs has taken a while, and so does what follows
            if watcher.gone:  # from here to on_disconnect nothing is awaited
                reservation.settle(0)
                return
            client = self.client
            if prepared.length_penalty is not None:
                client = BeamClient(client, prepared.length_penalty)
            call = Call(client, prepared, self.tokenizer, self.preparer.eos, reservation)
            self.calls.add(call)
            if prepared.in_background and prepared.stream:
                await self._stream_in_background(exchange, call, dialect, watcher)
                return
            if prepared.in_background:
                await self._in_background(exchange, call)
                return
            watcher.on_disconnect = call.disconnected
            await (self._stream if prepared.stream else self._collect)(exchange, call, dialect)
        finally:
            self.active -= 1
            watcher.stop()
            if call is not None:
                self.calls.discard(call)
                if not call.over:
                    call.abort()
                call.settle()
                log_usage(exchange, call)
                self.spans.record(walk_of(exchange, call))
                call.error = None  # its traceback leads to this call: nothing but the garbage collector would free it

    async def _collect(self, exchange: Exchange, call: Call, dialect: Dialect) -> None:
        self.answer_memory.open(call)
        try:
            await call.submit([CollectSink(call, number) for number in range(len(call.prepared.jobs))])
            while not call.over:
                await call.change()
            if call.gone:
                return
            if call.error is not None:
                raise call.error
            await call.prepared.at_end(call.outputs)
            pieces = dialect.whole(call, dialect.id_prefix + exchange.name, int(time.time()))
            await send_whole(exchange, call, pieces, warning(call.prepared))
        finally:
            self.answer_memory.close(call)

    async def _in_background(self, exchange: Exchange, call: Call) -> None:
        """Answer at once, and go on; what comes of it is stored."""
        self.answer_memory.open(call)
        try:
            await call.submit([CollectSink(call, number) for number in range(len(call.prepared.jobs))])
            body = await call.prepared.at_begin(lambda: call.fail(cancelled()))
            await exchange.reply(200, body, headers=warning(call.prepared))
            while not call.over:
                await call.change()
            await self._end_in_background(exchange, call)
        finally:
            self.answer_memory.close(call)

    async def _end_in_background(self, exchange: Exchange, call: Call) -> HttpError | None:
        error = self._late_error(exchange, call)
        if error is not None:
            await call.prepared.at_failure(error)
        else:
            await call.prepared.at_end(call.outputs)
        return error

    async def _stream_in_background(self, exchange: Exchange, call: Call, dialect: Dialect, watcher: Watcher) -> None:
        """Keep the events; the client follows them, as others may do later, and can leave."""
        writer = dialect.stream(call, dialect.id_prefix + exchange.name, int(time.time()))
        stream = EventStream(call, writer, sys.maxsize)
        await call.submit(stream.sinks)
        events = await call.prepared.at_stream_begin(lambda: call.fail(cancelled()))
        following = asyncio.create_task(
            send_events(exchange, followed(events, -1), watcher, self, warning(call.prepared))
        )  # fmt: skip
        try:
            await stream.write(events.send)
            error = await self._end_in_background(exchange, call)
            await stream.finish(events.send, error)
        finally:
            events.end()
            stream.sinks.clear()  # they refer to the stream: nothing but the garbage collector would free it
            await following

    async def _stream(self, exchange: Exchange, call: Call, dialect: Dialect) -> None:
        writer = dialect.stream(call, dialect.id_prefix + exchange.name, int(time.time()))
        stream = EventStream(call, writer, self.settings.max_unsent_bytes)
        stream.transport = (exchange.scope.get("extensions") or {}).get(TRANSPORT)
        await call.submit(stream.sinks)
        while not call.decided:  # the status of the answer depends on it
            await call.change()
        if call.gone:
            return
        if call.error is not None:
            raise call.error
        self.streams.add(stream)
        try:
            await exchange.start(
                200,
                [
                    (b"content-type", f"{dialect.operation.stream_kind}; charset=utf-8".encode()),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),  # nginx would buffer events
                    *warning(call.prepared),
                ],
            )
            await stream.write(exchange.send)
            if not call.gone and call.error is None:
                await call.prepared.at_end(call.outputs)
            await stream.finish(exchange.send, self._late_error(exchange, call))
        finally:
            self.streams.discard(stream)
            stream.sinks.clear()  # they refer to the stream: nothing but the garbage collector would free it

    def _late_error(self, exchange: Exchange, call: Call) -> HttpError | None:
        """The error after an answer has begun; it is sent as an event."""
        if call.error is None:
            return None
        answer = as_http(call.error)
        if answer is None:
            log.error("a stream failed", exc_info=call.error, extra={"fields": {"id": exchange.id}})
            answer = internal()
        exchange.facts["error"] = answer.detail.code
        return answer

    def end_all(self) -> None:
        """End all requests with an error: as a status, or as an event where a stream has begun."""
        for call in list(self.calls):
            call.fail(Draining("the server stopped before the answer was complete; retry"))


def cancelled() -> HttpError:
    return HttpError(409, "the response was cancelled", code="cancelled")


def warning(prepared: PreparedRequest) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"x-shoal-warning", f"ignored: {', '.join(prepared.warnings)}".encode()),) if prepared.warnings else ()


def log_usage(exchange: Exchange, call: Call) -> None:
    """The fields of a generation request in the log; never its text."""
    exchange.facts |= {
        "prompt_tokens": call.outputs.prompt_tokens,
        "cached_tokens": call.outputs.cached_tokens,
        "output_tokens": call.outputs.output_tokens,
        "queue_s": round(call.outputs.queue_s, 6),
        "stream": call.prepared.stream,
    }
    if call.first_token_s:
        exchange.facts["ttft_s"] = round(call.first_token_s - exchange.began_s, 6)
    if call.gone:
        exchange.facts["gone"] = True


def walk_of(exchange: Exchange, call: Call) -> Walk:
    """Where its time went; what is unknown when a client disconnects early is left out."""
    since_1970_s = time.time() - time.monotonic()
    error = call.error or sys.exception()
    return Walk(
        name=exchange.route,
        began_s=exchange.began_s + since_1970_s,
        asked_s=call.began_s + since_1970_s,
        queue_s=call.outputs.queue_s,
        first_token_s=call.first_token_s + since_1970_s if call.first_token_s else None,
        ended_s=time.time(),
        error="ClientGone" if call.gone else type(error).__name__ if error is not None else "",
        facts={
            "shoal.request_id": exchange.id,
            "gen_ai.request.model": call.prepared.model,
            "gen_ai.usage.input_tokens": call.outputs.prompt_tokens,
            "gen_ai.usage.output_tokens": call.outputs.output_tokens,
            "shoal.cached_tokens": call.outputs.cached_tokens,
            "shoal.stream": call.prepared.stream,
        },
        parent=exchange.headers.get(b"traceparent", b"").decode("latin-1"),
    )
