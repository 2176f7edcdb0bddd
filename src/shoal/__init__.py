"""Shoal: an engine for large language models that rebuilds the batch at every forward pass.

    from shoal import LLM, SamplingParams

`import shoal` is quick: torch is loaded when LLM is first used.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "Chunk", "Completion", "EngineConfig", "GrammarSpec", "RequestOutput", "SamplingParams", "__version__"
]  # fmt: skip

if TYPE_CHECKING:
    from shoal.config.engine import EngineConfig
    from shoal.core.job import GrammarSpec
    from shoal.core.params import SamplingParams
    from shoal.llm import LLM, Chunk, Completion, RequestOutput

_HOMES = {"EngineConfig": "shoal.config.engine", "GrammarSpec": "shoal.core.job", "SamplingParams": "shoal.core.params"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "shoal.llm")), name)
