"""Token rules say of every token what a plain check of the whole output says, with drafts and when resumed, too."""

from collections.abc import Sequence

import numpy as np
import pytest

from shoal.core.job import Job, requests_of
from shoal.core.params import SamplingParams
from shoal.core.token_rules import EMPTY, TokenRules, TokenSets

VOCAB = 40
WORDS = -(-VOCAB // 32)
ENDS = (0, 1)


def allowed_after(
    output: Sequence[int], allowed: Sequence[int] | None, bad: Sequence[Sequence[int]], least: int
) -> set[int]:
    """By looking at all of the output for every token."""
    found = set()
    for token in range(VOCAB):
        text = [*output, token]
        ends_badly = any(text[-len(one) :] == list(one) for one in bad)
        too_early = token in ENDS and len(output) < least
        if (allowed is None or token in allowed) and not ends_badly and not too_early:
            found.add(token)
    return found


def tokens_of(line: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def filled(rules: TokenRules) -> set[int]:
    line = np.zeros(WORDS, dtype=np.uint32)
    rules.fill(line)
    return tokens_of(line)


CASES = [
    (None, ((3,),), 0),
    ((2, 3, 5, 39), (), 0),
    ((0, 2, 3, 5), ((2, 3), (3, 3, 2), (5,)), 3),
    (None, ((2, 3), (3, 3, 2), (2, 2, 2, 2), (0,)), 5),
]


@pytest.mark.parametrize(("allowed", "bad", "least"), CASES)
def test_every_line_is_what_the_whole_output_says(
    allowed: tuple[int, ...] | None, bad: tuple[tuple[int, ...], ...], least: int
) -> None:
    draw = np.random.default_rng(7)
    rules = TokenRules(TokenSets(allowed, bad, ENDS, least))
    output: list[int] = []
    for _ in range(40):
        may = allowed_after(output, allowed, bad, least)
        assert filled(rules) == may
        ahead = draw.choice([2, 3, 5], size=4).tolist()
        lines = np.zeros((5, WORDS), dtype=np.uint32)
        rules.fill_ahead(lines, ahead)
        for number, line in enumerate(lines):
            assert tokens_of(line) == allowed_after([*output, *ahead[:number]], allowed, bad, least)
        fits = next(
            (n for n, one in enumerate(ahead) if one not in allowed_after([*output, *ahead[:n]], allowed, bad, least)),
            4,
        )
        assert rules.allows(ahead) == fits
        token = int(draw.choice(sorted(may & {2, 3, 5}) or sorted(may)))
        assert rules.accept(token)
        output.append(token)
        resumed = TokenRules(TokenSets(allowed, bad, ENDS, least), output=output)
        assert filled(resumed) == allowed_after(output, allowed, bad, least)


class Alternating:
    """A grammar of 2 and 3 in turn, which ends after six tokens."""

    def __init__(self) -> None:
        self.ended, self.error, self.count = False, "", 0

    def _next(self, ahead: int) -> int:
        return 2 + (self.count + ahead) % 2

    def accept(self, token: int) -> bool:
        self.error = "" if token == self._next(0) else "not in turn"
        self.count += 1
        self.ended = self.count == 6
        return not self.error

    def fill(self, line: np.ndarray) -> None:
        line[:] = 0
        line[0] = 1 << self._next(0)

    def forced(self) -> list[int]:
        return [self._next(0), self._next(1)]

    def allows(self, tokens: Sequence[int]) -> int:
        return next((n for n, one in enumerate(tokens) if one != self._next(n)), len(tokens))

    def fill_ahead(self, lines: np.ndarray, tokens: Sequence[int]) -> None:
        lines[:] = 0
        for number, line in enumerate(lines):
            line[0] = 1 << self._next(number)


def test_a_grammar_is_followed_within_the_rules() -> None:
    rules = TokenRules(TokenSets(bad=((2, 3, 2, 3, 2),)), Alternating())
    for token in (2, 3, 2, 3):
        assert filled(rules) == {token}
        assert rules.accept(token)
    assert rules.forced() == []  # the grammar forces 2, which the rules forbid here
    assert rules.allows([2, 3]) == 0
    assert not rules.error
    assert filled(rules) == set()
    assert rules.error == EMPTY


def test_the_end_and_the_error_are_the_grammars() -> None:
    rules = TokenRules(TokenSets(bad=((9,),)), Alternating())
    for token in (2, 3, 2, 3, 2, 3):
        assert not rules.ended
        rules.accept(token)
    assert rules.ended
    wrong = TokenRules(TokenSets(bad=((9,),)), Alternating())
    assert not wrong.accept(3)
    assert wrong.error == "not in turn"


def test_requests_have_rules_only_where_their_parameters_ask_for_them() -> None:
    plain = Job(id="a", prompt=[1], params=SamplingParams(min_tokens=2), seed=0)
    assert requests_of(plain)[0].grammar is None
    for job in (
        Job(id="a", prompt=[1], params=SamplingParams(allowed_token_ids=[4]), seed=0),
        Job(id="a", prompt=[1], params=SamplingParams(), seed=0, bad_words=((4, 5),)),
    ):
        assert isinstance(requests_of(job)[0].grammar, TokenRules)
