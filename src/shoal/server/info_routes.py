"""The endpoints that generate nothing: models, tokens, health, metrics, pages.

Knows a front as a FrontView, and the engine only as an EngineClient. Each handler is a few lines.
"""

import asyncio
import time
from typing import cast

import msgspec
from msgspec import UNSET

from shoal.obs.engines import join_engines
from shoal.server import openapi
from shoal.server.answers import DetokenizeAnswer, Health, ModelCard, ModelList, TokenizeAnswer, Version
from shoal.server.bodies import SMALL_BODY, read
from shoal.server.chat_body import chat_prompt, variables_of
from shoal.server.debug import ask_engines
from shoal.server.dialects.messages import CountTokensAnswer
from shoal.server.errors import BadField
from shoal.server.exchange import Exchange
from shoal.server.front_view import FrontView
from shoal.server.messages_body import CountTokensRequest, chat_of
from shoal.server.pages import load_pages
from shoal.server.prepare import no_model
from shoal.server.token_bodies import MOST_TEXTS, DetokenizeRequest, TokenizeRequest, lists_of
from shoal.server.tool_choice import tools_of
from shoal.server.workers import PYTHON, off_loop

MOST_TOKENIZED = 2**18  # tokens of one /tokenize or /detokenize, where the context is not longer
encode = msgspec.json.encode
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class InfoRoutes:
    """Handlers that need no engine, or only its info and metrics."""

    def __init__(self, front: FrontView) -> None:
        self.front = front
        self.created = int(time.time())
        self.pages = load_pages()
        self._description = b""

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
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        reservation = await self.front.gate.reserve_text(exchange.key, len(data))
        used = 0
        try:
            if body.messages is not None:
                ids = [await self._chat_ids(body, len(data), most)]
            else:
                ids = await preparer.text_ids(texts, body.add_special_tokens is not False, most)
            used = sum(map(len, ids))
        finally:
            reservation.settle(used)

        def encoded() -> bytes:
            written, names = preparer.need_tokenizer("prompt").backend.id_to_token, list[list[str]]()
            if body.return_token_strs:
                names = [[written(token) or "" for token in one] for one in ids]
            several = isinstance(body.prompt, list)
            answer = TokenizeAnswer(
                [len(one) for one in ids] if several else len(ids[0]),
                self._max_model_len(),
                [*ids] if several else [*ids[0]],
                UNSET if not names else [*names] if several else [*names[0]],
            )
            return encode(answer)

        await exchange.reply(200, await off_loop(used, encoded, PYTHON))

    async def _chat_ids(self, body: TokenizeRequest, size: int, most: int) -> list[int]:
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise BadField(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; give one of them",
            )
        tools = await off_loop(size, lambda: tools_of(body.tools, body.tool_choice, None), PYTHON, SMALL_BODY)
        opens = body.add_generation_prompt is not False
        prompt = await self.front.preparer.chat_prompt(
            body.messages or (), opens, variables_of(body), most, tools.shown, continues
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
        several = lists_of(body.tokens)
        lists = [cast("list[int]", body.tokens)] if several is None else several
        count = sum(map(len, lists))
        if count > MOST_TOKENIZED or len(lists) > MOST_TEXTS:
            what, most = (count, MOST_TOKENIZED) if count > MOST_TOKENIZED else (len(lists), MOST_TEXTS)
            raise BadField(
                "tokens", f"tokens has {what} {'ids' if what == count else 'lists'}, limit {most}; send fewer"
            )
        over = max((token for one in lists for token in one), default=0)
        if over >= 2**31 or over >= max(tokenizer.vocab_size, self._vocab_size()):
            raise BadField("tokens", f"token id {over} is not in the vocabulary")
        skip = bool(body.skip_special_tokens)
        texts = await off_loop(count, lambda: [tokenizer.decode(one, skip_special=skip) for one in lists])
        shown = texts[0] if several is None else texts
        size = sum(map(len, texts))
        await exchange.reply(200, await off_loop(size, lambda: encode(DetokenizeAnswer(shown, shown)), PYTHON))

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
        await exchange.reply(200, await asyncio.get_running_loop().run_in_executor(PYTHON, self._described))

    def _described(self) -> bytes:
        """The API's description, composed when it is first asked for: most servers never are. PYTHON has one thread, so
        that it is composed once."""
        if not self._description:
            self._description = encode(openapi.describe(self.front.settings, self.front.dialects))
        return self._description

    async def page(self, exchange: Exchange) -> None:
        page = self.pages[exchange.path]
        if exchange.headers.get(b"if-none-match") == page.tag:
            await exchange.start(304, list(page.headers()))
            await exchange.send({"type": "http.response.body", "body": b""})
        else:
            await exchange.reply(200, page.body, page.kind, page.headers())
