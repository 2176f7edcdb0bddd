"""What Ollama's clients ask beside answers: which models there are, what they can do, and a version.

Owns those answers. Knows a front as a FrontView.
"""

from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from shoal.server.bodies import read
from shoal.server.dialects.ollama import name_of
from shoal.server.exchange import Exchange
from shoal.server.front_view import FrontView

# What clients compare with the version that a feature came with; they ask for no other meaning of it.
OLLAMA_VERSION = "0.12.0"


class OllamaDetails(Struct):
    """Of a model. What is not known is empty."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct):
    """A name under which the model is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Struct):
    """GET /api/tags and /api/ps"""

    models: list[OllamaModel]


class OllamaShowRequest(Struct, kw_only=True):
    """POST /api/show"""

    model: str | None = None
    name: str | None = None  # its older name
    verbose: bool | None = None


class OllamaShow(Struct):
    """What a model can do."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class OllamaVersion(Struct):
    """GET /api/version"""

    version: str


class OllamaRoutes:
    """Their handlers."""

    def __init__(self, front: FrontView) -> None:
        self.front = front
        self.began = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    async def tags(self, exchange: Exchange) -> None:
        names = self.front.settings.models
        models = [OllamaModel(name, name, self.began, 0, "", OllamaDetails()) for name in names]
        await exchange.reply_json(OllamaTags(models))

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply_json(OllamaVersion(OLLAMA_VERSION))

    async def show(self, exchange: Exchange) -> None:
        body = await read(OllamaShowRequest, await exchange.json_body())
        preparer = self.front.preparer
        preparer.check_model(name_of(body.model or body.name, self.front.settings.models))
        info = self.front.client.last_info
        length = {} if info is None else {"general.architecture": "shoal", "shoal.context_length": info.max_model_len}
        can: list[Literal["completion", "tools", "thinking"]] = ["completion"]
        if preparer.tokenizer is not None and preparer.tokenizer.has_chat_template:
            can.append("tools")
        if preparer.reasoning is not None:
            can.append("thinking")
        await exchange.reply_json(OllamaShow("", "", "", "", OllamaDetails(), length, can, self.began))
