"""How long answers are: what was seen, by tenant and prompt length, so that the next can be guessed.

Owns the memory of output lengths and its limits. Used to set memory aside (memory.py) and to find short work
(ordering.py). Knows nothing of blocks or queues.
"""

import math
from collections import OrderedDict, deque

from shoal.core.request import Request

ENOUGH = 16  # answers seen before they are believed
REMEMBERED = 256  # of each kind
MOST_KINDS = 4096  # tenants come and go; those not seen for longest are forgotten


class OutputLengths:
    """Quantiles of the outputs of requests that are likely alike."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], deque[int]] = OrderedDict()

    def quantile(self, request: Request, q: float) -> int:
        """Output tokens that a share `q` of requests like this did not exceed; max_tokens while too few are known."""
        seen = self._seen.get(kind_of(request), ())
        if len(seen) < ENOUGH:
            return request.max_tokens
        index = min(len(seen) - 1, math.ceil(q * len(seen)) - 1)
        return min(request.max_tokens, sorted(seen)[max(index, 0)])

    def learn(self, request: Request) -> None:
        """It has ended by itself: so long was its output."""
        kind = kind_of(request)
        self._seen.setdefault(kind, deque(maxlen=REMEMBERED)).append(request.outputs)
        self._seen.move_to_end(kind)
        if len(self._seen) > MOST_KINDS:
            self._seen.popitem(last=False)


def kind_of(request: Request) -> tuple[str, int]:
    """Requests whose outputs are likely alike: same tenant, prompt length within a factor of two."""
    return request.tenant, request.prompt_len.bit_length()
