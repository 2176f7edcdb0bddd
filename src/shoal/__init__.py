"""Shoal: an engine for large language models that rebuilds the batch at every forward pass.

    from shoal import LLM, SamplingParams

`import shoal` is quick: torch is loaded when LLM is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "AsyncStream", "Chunk", "Completion", "CompletionStream", "EngineConfig", "EngineOptions",
    "GrammarSpec", "RequestMetrics", "RequestOutput", "SamplingParams", "ShoalError", "__version__", "errors",
]  # fmt: skip

if TYPE_CHECKING:
    from shoal import errors
    from shoal.config.engine import EngineConfig
    from shoal.config.keywords import EngineOptions
    from shoal.core.job import GrammarSpec
    from shoal.core.params import SamplingParams
    from shoal.errors import ShoalError
    from shoal.llm.async_llm import AsyncLLM, AsyncStream
    from shoal.llm.llm import LLM, CompletionStream
    from shoal.llm.records import Chunk, Completion, RequestMetrics, RequestOutput

_HOMES = {
    "LLM": "shoal.llm.llm",
    "CompletionStream": "shoal.llm.llm",
    "AsyncLLM": "shoal.llm.async_llm",
    "AsyncStream": "shoal.llm.async_llm",
    "Chunk": "shoal.llm.records",
    "Completion": "shoal.llm.records",
    "RequestMetrics": "shoal.llm.records",
    "RequestOutput": "shoal.llm.records",
    "EngineConfig": "shoal.config.engine",
    "EngineOptions": "shoal.config.keywords",
    "GrammarSpec": "shoal.core.job",
    "SamplingParams": "shoal.core.params",
    "ShoalError": "shoal.errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        from difflib import get_close_matches

        close = get_close_matches(name, __all__, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise AttributeError(f"module 'shoal' has no attribute {name!r}{hint}; it has {', '.join(__all__)}")
    import importlib

    if name == "errors":
        return importlib.import_module("shoal.errors")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
