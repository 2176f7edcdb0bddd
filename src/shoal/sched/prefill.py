"""Prefill: how many positions of a prompt to compute in this pass.

chunked     as many as fit into the pass, beside the running decodes
inline      the whole prompt in one pass, beside the running decodes, which take as long as it does
exclusive   the whole prompt in a pass without decodes, which pause
disaggregated  as chunked; prompts are computed by other engines than answers (disagg/), and both kinds do both in need

A cap of `chunk_tokens` on one prompt's share of a pass goes with chunked and exclusive.
"""

from typing import Protocol, Self

from shoal.sched.setup import Setup


class Prefill(Protocol):
    """How much of a prompt now."""

    alone: bool  # decodes pause while a prompt is computed

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def take(self, need: int, left: int, first: bool) -> int:
        """Positions to compute of a prompt that needs `need`, when at most `left` more fit into the pass; 0: not now.

        `first`: no other prompt is in this pass yet.
        """


def whole(need: int, left: int, first: bool) -> int:
    """All of it or nothing; one prompt a pass may be larger than the budget, or it could never run."""
    return need if need <= left or first else 0


class Chunks:
    """What the prefill policies share: an upper limit on one prompt's share of a pass."""

    alone = False

    def __init__(self, chunk_tokens: int = 0) -> None:
        self.chunk_tokens = chunk_tokens  # 0: only the pass's budget limits it

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.chunk_tokens)


class Chunked(Chunks):
    """A slice of the prompt per pass, so that no pass is much longer than another."""

    def take(self, need: int, left: int, first: bool) -> int:
        most = min(need, left)
        return min(most, self.chunk_tokens) if self.chunk_tokens else most


class Inline(Chunks):
    """The whole prompt at once, beside the running decodes."""

    def take(self, need: int, left: int, first: bool) -> int:
        return whole(need, left, first)


class Exclusive(Chunks):
    """Prompts in passes of their own."""

    alone = True

    def take(self, need: int, left: int, first: bool) -> int:
        if self.chunk_tokens:
            return min(need, left, self.chunk_tokens)
        return whole(need, left, first)


class Disaggregated(Chunked):
    """Chunked, in each engine. So a decode engine computes what did not come, beside its decodes."""


PREFILL: dict[str, type[Prefill]] = {
    "chunked": Chunked,
    "inline": Inline,
    "exclusive": Exclusive,
    "disaggregated": Disaggregated,
}
