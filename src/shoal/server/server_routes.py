"""Endpoints that vLLM's and SGLang's servers have for their operators: ping, load, what is served, the prefix cache.

Knows a front as a FrontView, and the engines only as an EngineClient. Each handler is a few lines.
"""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from shoal.core.job import EngineInfo
from shoal.server.debug import ask_engines, check_access
from shoal.server.exchange import Exchange
from shoal.server.front_view import FrontView
from shoal.text.tokenizer import Tokenizer


class Load(Struct):
    """GET /load: requests that run or wait in all engines."""

    server_load: int
    running: int
    waiting: int


class ServerInfo(Struct):
    """GET /server_info. What is known only from an engine is missing before the first one is up."""

    version: str
    model: str
    served_models: list[str]
    engines: list[int]  # numbers of those that are up
    max_model_len: int | UnsetType = UNSET
    vocab_size: int | UnsetType = UNSET
    kv_tokens: int | UnsetType = UNSET
    block_size: int | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    device: str | UnsetType = UNSET


class ModelInfo(Struct):
    """GET /model_info, as SGLang has it."""

    model_path: str  # the first of its names
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float]  # the model's own, where a request has none
    weight_version: str


class TokenizerInfo(Struct):
    """GET /tokenizer_info"""

    tokenizer_class: str
    vocab_size: int
    special_tokens: dict[str, str]  # by their roles
    added_tokens: dict[str, int]  # those that are never split
    model_max_length: int | None
    chat_template: str | None


class CacheReset(Struct):
    """POST /reset_prefix_cache: blocks that can no longer be hit. Those of running requests stay."""

    forgotten_blocks: int


class ServerRoutes:
    """The handlers."""

    def __init__(self, front: FrontView) -> None:
        self.front = front

    async def load(self, exchange: Exchange) -> None:
        loads = (await ask_engines(self.front.client, "load")).values()
        running, waiting = (sum(int(one[name]) for one in loads) for name in ("running", "waiting"))
        await exchange.reply_json(Load(running + waiting, running, waiting))

    async def server_info(self, exchange: Exchange) -> None:
        settings, client = self.front.settings, self.front.client
        up = [one.number for one in client.engines if one.up]
        info = ServerInfo(settings.version, settings.model, list(settings.models), up, **known_of(client.last_info))
        await exchange.reply_json(info)

    async def model_info(self, exchange: Exchange) -> None:
        name, defaults = self.front.settings.model, self.front.preparer.defaults
        await exchange.reply_json(ModelInfo(name, name, True, dict(defaults), "default"))

    async def tokenizer_info(self, exchange: Exchange) -> None:
        info = self.front.client.last_info
        tokenizer = self.front.preparer.need_tokenizer("tokenizer")
        await exchange.reply_json(described(tokenizer, None if info is None else info.max_model_len))

    async def reset_prefix_cache(self, exchange: Exchange) -> None:
        check_access(exchange)
        if b"origin" in exchange.headers:  # a page: of another site it cannot declare JSON
            await exchange.json_body()
        answers = await ask_engines(self.front.client, "reset_prefix_cache")
        await exchange.reply_json(CacheReset(sum(int(one["forgotten"]) for one in answers.values())))


def known_of(info: EngineInfo | None) -> dict[str, Any]:
    names = ("max_model_len", "vocab_size", "kv_tokens", "block_size", "dtype", "device")
    return {} if info is None else {name: getattr(info, name) for name in names}


def described(tokenizer: Tokenizer, max_model_len: int | None) -> TokenizerInfo:
    template = tokenizer.renderer.plain.source if tokenizer.has_chat_template else None
    added = {token.content: id for id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    special = {name: text for name, text in tokenizer.special.items() if text}
    return TokenizerInfo("PreTrainedTokenizerFast", tokenizer.vocab_size, special, added, max_model_len, template)
