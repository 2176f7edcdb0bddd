"""The endpoints that generate nothing: models, tokens, health, metrics, pages.

Knows a front as a FrontView, and the engine only as an EngineClient. Each handler is a few lines.
"""

import asyncio
import time

import msgspec

from shoal.obs.engines import join_engines
from shoal.server import openapi
from shoal.server.answers import DetokenizeAnswer, Health, ModelCard, ModelList, TokenizeAnswer, Version
from shoal.server.bodies import SMALL_BODY, read
from shoal.server.chat_body import chat_prompt
from shoal.server.debug import ask_engines
from shoal.server.dialects.messages import CountTokensAnswer, CountTokensRequest, chat_of
from shoal.server.errors import BadField
from shoal.server.exchange import Exchange
from shoal.server.front_view import FrontView
from shoal.server.pages import load_pages
from shoal.server.prepare import no_model
from shoal.server.token_bodies import DetokenizeRequest, TokenizeRequest
from shoal.server.tool_choice import tools_of
from shoal.server.workers import PYTHON, off_loop

MOST_TOKENIZED = 2**18  # tokens of one /tokenize or /detokenize, where the context is not longer
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class InfoRoutes:
    """Handlers that need no engine, or only its info and metrics."""

    def __init__(self, front: FrontView) -> None:
        self.front = front
        self.created = int(time.time())
        self.pages = load_pages()
        self.description = msgspec.json.encode(openapi.describe(front.settings, front.dialects))

    # ---- models -----------------------------------------------------------------------------------------------------

    def _card(self, name: str) -> ModelCard:
        return ModelCard(name, "model", self.created, "shoal", self.front.settings.model, self._max_model_len())

    def _max_model_len(self) -> int | None:
        info = self.front.client.last_info
        return None if info is None else info.max_model_len

    async def models(self, exchange: Exchange) -> None:
        await exchange.reply_json(ModelList("list", [self._card(name) for name in self.front.settings.models]))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model"]
        if name not in self.front.settings.models:
            raise no_model(name, self.front.settings)
        await exchange.reply_json(self._card(name))

    # ---- tokens -----------------------------------------------------------------------------------------------------

    async def tokenize(self, exchange: Exchange) -> None:
        data = await exchange.json_body()
        body = await read(TokenizeRequest, data)
        preparer = self.front.preparer
        preparer.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadField("prompt", "give either prompt or messages")
        most = max(MOST_TOKENIZED, self._max_model_len() or 0)
        reservation = await self.front.gate.reserve_text(exchange.key, len(data))
        used = 0
        try:
            if body.messages is not None:
                ids = await self._chat_ids(body, len(data), most)
            else:
                ids = await preparer.text_ids(body.prompt or "", body.add_special_tokens is not False, most)
            used = len(ids)
        finally:
            reservation.settle(used)
        answer = TokenizeAnswer(len(ids), self._max_model_len(), ids)

        def encoded() -> bytes:
            if body.return_token_strs:
                written = preparer.need_tokenizer("prompt").backend.id_to_token
                answer.token_strs = [written(token) or "" for token in ids]
            return msgspec.json.encode(answer)

        await exchange.reply(200, await off_loop(len(ids), encoded, PYTHON))

    async def _chat_ids(self, body: TokenizeRequest, size: int, most: int) -> list[int]:
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise BadField(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; give one of them",
            )
        tools = await off_loop(size, lambda: tools_of(body.tools, None, None), PYTHON, SMALL_BODY)
        opens = body.add_generation_prompt is not False
        prompt = await self.front.preparer.chat_prompt(
            body.messages or (), opens, body.chat_template_kwargs, most, tools.shown, continues
        )
        return prompt.ids

    async def count_tokens(self, exchange: Exchange) -> None:
        data = await exchange.json_body()
        body = await read(CountTokensRequest, data)
        preparer = self.front.preparer
        preparer.check_model(body.model)
        request = await off_loop(len(data), lambda: chat_of(body), PYTHON, SMALL_BODY)
        most = max(MOST_TOKENIZED, self._max_model_len() or 0)
        reservation = await self.front.gate.reserve_text(exchange.key, len(data))
        used = 0
        try:
            prompt = await chat_prompt(preparer, request, len(data), most)
            used = len(prompt.ids)
        finally:
            reservation.settle(used)
        await exchange.reply_json(CountTokensAnswer(used))

    async def detokenize(self, exchange: Exchange) -> None:
        body = await read(DetokenizeRequest, await exchange.json_body())
        self.front.preparer.check_model(body.model)
        tokenizer = self.front.preparer.need_tokenizer("tokens")
        if len(body.tokens) > MOST_TOKENIZED:
            raise BadField("tokens", f"tokens has {len(body.tokens)} ids, limit {MOST_TOKENIZED}; send fewer")
        over = max(body.tokens, default=0)
        if over >= 2**31 or over >= max(tokenizer.vocab_size, self._vocab_size()):
            raise BadField("tokens", f"token id {over} is not in the vocabulary")
        skip = bool(body.skip_special_tokens)
        text = await off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special=skip))
        answer = await off_loop(len(text), lambda: msgspec.json.encode(DetokenizeAnswer(text)), PYTHON)
        await exchange.reply(200, answer)

    def _vocab_size(self) -> int:
        info = self.front.client.last_info
        return 0 if info is None else info.vocab_size

    # ---- status -----------------------------------------------------------------------------------------------------

    async def health(self, exchange: Exchange) -> None:
        if self.front.draining:
            await exchange.reply_json(Health("draining"), 503)
        elif self.front.client.info is None:
            await exchange.reply_json(Health("down"), 503)
        else:
            await exchange.reply_json(Health("ok", [one.number for one in self.front.client.engines if not one.up]))

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json(Version(self.front.settings.version))

    async def metrics(self, exchange: Exchange) -> None:
        engine, others = await asyncio.gather(self._engine_metrics(), self.front.other_fronts.ask())
        fronts = self.front.metrics.render(self.front.active, self.front.client.engines, others)
        await exchange.reply(200, engine + fronts, PROMETHEUS)

    async def _engine_metrics(self) -> bytes:
        answers = await ask_engines(self.front.client, "metrics")
        if len(self.front.client.engines) == 1:
            return "".join(answers.values()).encode()
        return join_engines(answers).encode()

    # ---- pages ------------------------------------------------------------------------------------------------------

    async def openapi(self, exchange: Exchange) -> None:
        await exchange.reply(200, self.description)

    async def page(self, exchange: Exchange) -> None:
        page = self.pages[exchange.path]
        if exchange.headers.get(b"if-none-match") == page.tag:
            await exchange.start(304, list(page.headers()))
            await exchange.send({"type": "http.response.body", "body": b""})
        else:
            await exchange.reply(200, page.body, page.kind, page.headers())
