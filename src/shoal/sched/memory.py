"""Memory: how much room a request needs before it may start.

ondemand   its known tokens; blocks for its output are taken when they are needed, and a few stay free for that
reserve    prompt and max_tokens: nobody ever runs short, and what is not said was held in vain
predict    prompt and a quantile of the output lengths seen before, by tenant and prompt length
"""

import math
from collections import OrderedDict, deque
from typing import Protocol

from shoal.core.request import Request


class Memory(Protocol):
    """How much KV to set aside when a request starts."""

    def room(self, request: Request) -> int:
        """Positions to hold blocks for before it starts."""

    def spare(self, total_blocks: int, running: int) -> int:
        """Blocks that must stay free beyond that."""

    def learn(self, request: Request) -> None:
        """It has ended by itself: so long was its output."""


class OnDemand:
    """Start with room for what is known, and keep a few blocks free so that those who run can grow."""

    def __init__(self, watermark: float = 0.01) -> None:
        self.watermark = watermark

    def room(self, request: Request) -> int:
        return len(request.tokens)

    def spare(self, total_blocks: int, running: int) -> int:
        return int(self.watermark * total_blocks) if running else 0

    def learn(self, request: Request) -> None:
        pass


class Reserve:
    """Room for the longest answer it may give."""

    def room(self, request: Request) -> int:
        return request.end

    def spare(self, total_blocks: int, running: int) -> int:
        return 0

    def learn(self, request: Request) -> None:
        pass


class Predict:
    """Room for an answer as long as most have been, starting with the longest allowed."""

    ENOUGH = 16  # answers seen before they are believed
    REMEMBERED = 256
    MOST_KINDS = 4096  # tenants come and go; those not seen for longest are forgotten

    def __init__(self, quantile: float = 0.9) -> None:
        self.quantile = quantile
        self._seen: OrderedDict[tuple[str, int], deque[int]] = OrderedDict()

    def predicted(self, request: Request) -> int:
        """Output tokens, at most max_tokens."""
        seen = self._seen.get(_kind(request), ())
        if len(seen) < self.ENOUGH:
            return request.max_tokens
        place = min(len(seen) - 1, math.ceil(self.quantile * len(seen)) - 1)
        return min(request.max_tokens, sorted(seen)[max(place, 0)])

    def room(self, request: Request) -> int:
        expected = request.prompt_len + self.predicted(request) - 1
        return min(request.end, max(expected, len(request.tokens)))

    def spare(self, total_blocks: int, running: int) -> int:
        return 0

    def learn(self, request: Request) -> None:
        kind = _kind(request)
        self._seen.setdefault(kind, deque(maxlen=self.REMEMBERED)).append(request.outputs)
        self._seen.move_to_end(kind)
        if len(self._seen) > self.MOST_KINDS:
            self._seen.popitem(last=False)


def _kind(request: Request) -> tuple[str, int]:
    """Requests whose outputs are likely alike: same tenant, prompt length within a factor of two."""
    return request.tenant, request.prompt_len.bit_length()


MEMORY: dict[str, type[Memory]] = {"ondemand": OnDemand, "reserve": Reserve, "predict": Predict}
