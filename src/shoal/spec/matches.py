"""Matches: how sure a drafter is of what followed an earlier occurrence of the same tokens.

The longer the match, the likelier the next token follows again; and a token that did makes the match longer by one.
Owns the first estimate, which the policy of drafts corrects by what is accepted (sched/speculation.py).
"""

from collections.abc import Sequence

LONGEST = 16  # a longer match is no surer

# by the length of the match, from 0
CONFIDENCE = (0.0, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.83, 0.86, 0.88, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95)
DOUBT = 0.6  # what is left of it where different tokens followed before

_BY_LENGTH = CONFIDENCE + (CONFIDENCE[-1],) * 512


def confidence(length: int, tokens: int, branches: bool = False) -> Sequence[float]:
    """For each of so many tokens that followed a match of this length.

    >>> confidence(3, 2)
    (0.55, 0.65)
    """
    start = min(length, LONGEST)
    sure = _BY_LENGTH[start : start + tokens]
    return (DOUBT * sure[0], *sure[1:]) if branches else sure
