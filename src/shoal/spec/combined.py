"""Several drafters as one: the first that proposes something for a request wins; a later one continues it if it agrees.

grammar    "street                           a key that the schema forces
suffix     "street ": "12 Long Road          begins with the same tokens, and goes on
combined   "street ": "12 Long Road          the first two are grammar's, the others suffix's
"""

from collections.abc import Mapping, Sequence

from shoal.core.drafts import Draft, Drafter
from shoal.core.request import Request


class Combined:
    """Asks all of them, in order."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self.ahead = all(drafter.ahead for drafter in drafters)
        self.by_chance = any(drafter.by_chance for drafter in drafters)
        self.names: Sequence[str] = tuple(name for drafter in drafters for name in drafter.names)

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        found: dict[Request, Draft] = {}
        for drafter in self._drafters:
            for request, draft in drafter.propose(wanted).items():
                before = found.get(request)
                found[request] = draft if before is None else joined(before, draft)
        return found

    def cost_s(self, rows: int, tokens: int) -> float:
        return sum(drafter.cost_s(rows, tokens) for drafter in self._drafters)

    def ended(self, request: Request, by_itself: bool) -> None:
        for drafter in self._drafters:
            drafter.ended(request, by_itself)


def joined(first: Draft, second: Draft) -> Draft:
    """The first, and what the second has beyond it if it begins with the same tokens.

    >>> joined(Draft([1, 2], [0.9, 0.9], (("a", 2),)), Draft([1, 2, 3], [0.5, 0.6, 0.7], (("b", 3),)))
    Draft(tokens=[1, 2, 3], confidence=[0.9, 0.9, 0.7], drafters=(('a', 2), ('b', 1)))
    """
    known = len(first.tokens)
    if len(second.tokens) <= known or list(second.tokens[:known]) != list(first.tokens):
        return first
    rest = [(name, count - covered) for name, count, covered in second.shares(known) if count > covered]
    return Draft(
        [*first.tokens, *second.tokens[known:]],
        [*first.confidence, *second.confidence[known:]],
        (*first.drafters, *rest),
    )
