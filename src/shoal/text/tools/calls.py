"""The tools of a request and how they may be called.

Owns the records. The schemas in them have been checked and prepared by schema.py. Knows no format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """Which tools may be called, and how.

    >>> ToolUse((Tool("now", {"type": "object"}),), required=True).parallel
    False
    """

    tools: tuple[Tool, ...]
    required: bool = False  # the answer is a call from its first token on; else text may come first, or alone
    parallel: bool = False  # several calls may follow each other
