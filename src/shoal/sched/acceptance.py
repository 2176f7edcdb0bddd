"""Acceptance: how likely draft tokens are right, from what drafters say and from what was accepted so far.

A drafter's confidence is a first estimate. What came of tokens with about the same confidence corrects it, for all
requests together; and what came of a request's own drafts, compared with that, says how much more or less predictable
its text is than others. Owns these counts. Knows drafts; knows no passes and no costs.
"""

from collections.abc import Sequence

from shoal.core.drafts import Draft

LEVELS = 20  # of confidence
STRENGTH = 8.0  # tokens that a drafter's own estimate counts for
MEMORY = 400  # tokens of one level that are remembered, about
OWN_STRENGTH = 5.0  # tokens that "as predictable as others" counts for
OWN_MEMORY = 0.95  # what is left of a request's past after one token
SUREST = 0.98
LEAST = 0.02  # a chance below this is none


class Predictable:
    """How predictable one request's text is, compared with others: tokens that were right, and expected to be."""

    __slots__ = ("expected", "right")

    def __init__(self) -> None:
        self.right = self.expected = 0.0

    @property
    def lift(self) -> float:
        return (self.right + OWN_STRENGTH) / (self.expected + OWN_STRENGTH)

    def learn(self, expected: float, right: bool) -> None:
        self.right = OWN_MEMORY * self.right + right
        self.expected = OWN_MEMORY * self.expected + expected


class Acceptance:
    """
    >>> acceptance, own = Acceptance(), Predictable()
    >>> draft = Draft([1, 2], [0.5, 0.5], (("suffix", 2),))
    >>> acceptance.chances(draft, own)
    [0.5, 0.25]
    >>> for _ in range(9):
    ...     acceptance.learn(draft, 2, own)
    >>> [round(chance, 1) for chance in acceptance.chances(draft, own)]
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        self._levels: dict[str, list[list[float]]] = {}  # drafter → by level: tokens, and how many were right

    def chances(self, draft: Draft, own: Predictable) -> list[float]:
        """Of each token: that it and all before it are right; as far as that is not hopeless."""
        found: list[float] = []
        chance, lift, place = 1.0, own.lift, 0
        for name, count in draft.drafters:
            levels = self._of(name)
            for sure in draft.confidence[place : place + count]:
                tokens, right = levels[int(sure * LEVELS)]
                chance *= min(SUREST, lift * (STRENGTH * sure + right) / (STRENGTH + tokens))
                if chance < LEAST:
                    return found
                found.append(chance)
            place += count
        return found

    def learn(self, draft: Draft, accepted: int, own: Predictable, known: int | None = None) -> None:
        """So many of its first tokens were right. The one after them was wrong, if that many are known at all."""
        place, known = 0, len(draft.tokens) if known is None else known
        for name, count in draft.drafters:
            levels = self._of(name)
            for sure in draft.confidence[place : place + count]:
                if place > accepted or place >= known:
                    return
                level, right = levels[int(sure * LEVELS)], place < accepted
                own.learn(min(SUREST, (STRENGTH * sure + level[1]) / (STRENGTH + level[0])), right)
                level[0] += 1
                level[1] += right
                if level[0] >= MEMORY:
                    level[0] /= 2
                    level[1] /= 2
                place += 1

    def _of(self, name: str) -> list[list[float]]:
        if name not in self._levels:
            self._levels[name] = [[0.0, 0.0] for _ in range(LEVELS + 1)]
        return self._levels[name]


def agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the first tokens of both are the same.

    >>> agreeing([1, 2, 3], [1, 2, 4, 3])
    2
    """
    count = 0
    for one, other in zip(draft, tokens, strict=False):
        if one != other:
            break
        count += 1
    return count
