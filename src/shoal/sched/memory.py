"""Memory: for how many tokens a request must hold blocks before it may start.

ondemand   its known tokens; blocks for its output are taken when they are needed, and a few stay free for that
reserve    prompt and max_tokens: no request ever runs short, and blocks for tokens never generated are wasted
predict    prompt and a quantile of the output lengths seen before, by tenant and prompt length
"""

from typing import Protocol, Self

from shoal.core.request import Request
from shoal.sched.lengths import OutputLengths
from shoal.sched.setup import NoOptions, Setup


class Memory(Protocol):
    """How much KV to set aside when a request starts."""

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def tokens_to_hold(self, request: Request) -> int:
        """Positions to hold blocks for before it starts."""

    def spare(self, total_blocks: int, running: int) -> int:
        """Blocks that must stay free beyond that."""

    def learn(self, request: Request) -> None:
        """It has ended by itself: so long was its output."""


class OnDemand:
    """Blocks for the known tokens. A few blocks stay free so that running requests can grow: a share of all, and at
    least one for each of them, or the request that starts now would be the next victim. 0 keeps none.
    """

    def __init__(self, watermark: float = 0.01) -> None:
        self.watermark = watermark

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.watermark)

    def tokens_to_hold(self, request: Request) -> int:
        return len(request.tokens)

    def spare(self, total_blocks: int, running: int) -> int:
        return max(int(self.watermark * total_blocks), running) if self.watermark else 0

    def learn(self, request: Request) -> None:
        pass


class Reserve(NoOptions):
    """Blocks for the longest output it may have."""

    def tokens_to_hold(self, request: Request) -> int:
        return request.end

    def spare(self, total_blocks: int, running: int) -> int:
        return 0

    def learn(self, request: Request) -> None:
        pass


class Predict:
    """Blocks for an output as long as most have been; at first for the longest allowed."""

    def __init__(self, quantile: float = 0.9) -> None:
        self.quantile = quantile
        self._lengths = OutputLengths()

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.config.quantile)

    def predicted(self, request: Request) -> int:
        """Output tokens, at most max_tokens."""
        return self._lengths.quantile(request, self.quantile)

    def tokens_to_hold(self, request: Request) -> int:
        expected = request.prompt_len + self.predicted(request) - 1
        return min(request.end, max(expected, len(request.tokens)))

    def spare(self, total_blocks: int, running: int) -> int:
        return 0

    def learn(self, request: Request) -> None:
        self._lengths.learn(request)


MEMORY: dict[str, type[Memory]] = {"ondemand": OnDemand, "reserve": Reserve, "predict": Predict}
