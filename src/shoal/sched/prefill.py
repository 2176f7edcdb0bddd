"""Prefill: how many positions of a prompt to compute in this pass.

chunked   as many as the pass has room for, beside the running decodes, at most `chunk_tokens` of one prompt
"""

from typing import Protocol


class Prefill(Protocol):
    """How much of a prompt now."""

    def take(self, need: int, left: int) -> int:
        """Positions to compute of a prompt that needs `need`, when the pass has room for `left` more; 0 is not now."""


class Chunked:
    """A slice of the prompt per pass, so that no pass is much longer than another."""

    def __init__(self, chunk_tokens: int = 0) -> None:
        self.chunk_tokens = chunk_tokens  # 0: only the pass's budget limits it

    def take(self, need: int, left: int) -> int:
        most = min(need, left)
        return min(most, self.chunk_tokens) if self.chunk_tokens else most


PREFILL: dict[str, type[Prefill]] = {"chunked": Chunked}
