"""synthetic: drafts that mean nothing, accepted by chance with a given probability. For benchmarks only.

The runner tosses a coin for each draft token instead of comparing it (`synthetic` in its own room); everything else is
the real path. So a benchmark shows what a drafter of that quality would gain, whatever the text.
"""

from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft
from shoal.core.request import Request


class SyntheticDrafter:
    """Proposes the request's last token again and again."""

    ahead = False
    by_chance = True
    names: Sequence[str] = ("synthetic",)

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        sure = self.probability
        return {
            request: Draft(request.tokens[-1:] * most, (sure,) * most, (("synthetic", most),))
            for request, most in wanted.items()
            if most > 0
        }

    def cost_s(self, rows: int, tokens: int) -> float:
        return 1e-6 * rows

    def ended(self, request: Request, by_itself: bool) -> None:
        pass
