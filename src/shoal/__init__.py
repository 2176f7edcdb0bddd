"""Shoal: an engine for large language models that rebuilds the batch at every forward pass.

    from shoal import LLM, SamplingParams

`import shoal` is quick: torch is loaded when LLM is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "Chunk", "Completion", "EngineConfig", "GrammarSpec", "RequestOutput", "SamplingParams",
    "__version__",
]  # fmt: skip

if TYPE_CHECKING:
    from shoal.config.engine import EngineConfig
    from shoal.core.job import GrammarSpec
    from shoal.core.params import SamplingParams
    from shoal.llm.async_llm import AsyncLLM
    from shoal.llm.llm import LLM
    from shoal.llm.records import Chunk, Completion, RequestOutput

_HOMES = {
    "LLM": "shoal.llm.llm",
    "AsyncLLM": "shoal.llm.async_llm",
    "Chunk": "shoal.llm.records",
    "Completion": "shoal.llm.records",
    "RequestOutput": "shoal.llm.records",
    "EngineConfig": "shoal.config.engine",
    "GrammarSpec": "shoal.core.job",
    "SamplingParams": "shoal.core.params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
