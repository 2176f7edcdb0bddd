"""The answers of endpoints that generate nothing: models, tokens, health, version.

Owns field names and their order. Answers to generation requests are in dialects/. Knows no HTTP.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class ModelCard(Struct):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the first of its names
    max_model_len: int | None  # null while the engine is down


class ModelList(Struct):
    """GET /v1/models"""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Struct):
    """POST /tokenize; lists of each for a list of prompts."""

    count: int | list[int]
    max_model_len: int | None
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | UnsetType = UNSET  # as the vocabulary writes them, where asked for


class DetokenizeAnswer(Struct):
    """POST /detokenize; a list of texts for a list of lists."""

    prompt: str | list[str]
    text: str | list[str]  # the same, as SGLang calls it


class Health(Struct, omit_defaults=True):
    """GET /health"""

    status: Literal["ok", "down", "draining"]
    engines_down: list[int] = []  # numbers of engines that are down or being restarted, beside others that are up


class Version(Struct):
    """GET /version"""

    version: str
