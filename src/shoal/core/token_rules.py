"""Token rules: which tokens a sample may draw by their ids alone: allowed_token_ids, bad_words and min_tokens.

A Grammar of its own, around that of the request if it has one, so that masks, drafts and resumption work alike. Knows
token ids only. Raises nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shoal.core.grammar import Grammar

TokenBits = npt.NDArray[np.uint32]
EMPTY = "allowed_token_ids, bad_words and min_tokens leave no token that may come next; allow more tokens"


class TokenRules:
    """The state of one sample. `bad`: sequences of tokens whose last may not follow the others.

    The first `least` tokens are none of `ends`, which a grammar would decide.

    >>> rules = TokenRules(None, allowed=(1, 2, 3), bad=((1, 2), (3,)))
    >>> line = np.zeros(1, dtype=np.uint32)
    >>> rules.fill(line); allowed = [bin(line[0])]
    >>> rules.accept(1); rules.fill(line); [*allowed, bin(line[0])]
    True
    ['0b110', '0b10']
    """

    __slots__ = (
        "_allowed",
        "_bad",
        "_bits",
        "_count",
        "_ends",
        "_inner",
        "_least",
        "_longest",
        "_never",
        "_tail",
        "ended",
        "error",
    )

    def __init__(
        self,
        inner: Grammar | None,
        *,
        allowed: Sequence[int] | None = None,
        bad: Sequence[Sequence[int]] = (),
        ends: Sequence[int] = (),
        least: int = 0,
        output: Sequence[int] = (),
    ) -> None:
        self._inner = inner
        self._allowed = None if allowed is None else frozenset(allowed)
        self._never = frozenset(one[0] for one in bad if len(one) == 1)
        self._bad = [(tuple(one[:-1]), one[-1]) for one in bad if len(one) > 1]
        self._ends = frozenset(ends)
        self._least = least if inner is None else 0
        self._longest = max((len(before) for before, _ in self._bad), default=0)
        self._tail: tuple[int, ...] = tuple(output[-self._longest :]) if self._longest else ()  # the latest tokens
        self._count = len(output)
        self._bits: TokenBits | None = None  # of what is allowed anywhere
        self.ended, self.error = (inner.ended, inner.error) if inner is not None else (False, "")

    def accept(self, token: int) -> bool:
        if self._inner is not None:
            self._inner.accept(token)
            self._look(self._inner)
        self._tail = self._next(self._tail, token)
        self._count += 1
        return not self.error

    def fill(self, line: TokenBits) -> None:
        if self._inner is None:
            line[:] = 0xFFFFFFFF
        else:
            self._inner.fill(line)
            self._look(self._inner)
        if self.ended or self.error:
            return
        self._restrict(line, self._tail, self._count)
        if not line.any():
            self.error = EMPTY

    def forced(self) -> Sequence[int]:
        forced = self._inner.forced() if self._inner is not None else ()
        return forced[: self._fitting(forced)]

    def allows(self, tokens: Sequence[int]) -> int:
        most = len(tokens) if self._inner is None else self._inner.allows(tokens)
        return self._fitting(tokens[:most])

    def fill_ahead(self, lines: TokenBits, tokens: Sequence[int]) -> None:
        if self._inner is None:
            lines[:] = 0xFFFFFFFF
        else:
            self._inner.fill_ahead(lines, tokens)
            self._look(self._inner)
        tail, count = self._tail, self._count
        for number, line in enumerate(lines):
            if not self.ended and not self.error:
                self._restrict(line, tail, count)
            if number < len(tokens):
                tail, count = self._next(tail, tokens[number]), count + 1
        if not self.ended and not self.error and not lines[0].any():
            self.error = EMPTY

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _look(self, inner: Grammar) -> None:
        self.ended, self.error = inner.ended, self.error or inner.error

    def _next(self, tail: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*tail, token)[-self._longest :] if self._longest else ()

    def _forbidden(self, tail: tuple[int, ...], count: int) -> set[int]:
        """Tokens that may not come next, beside those that never may."""
        found = {last for before, last in self._bad if tail[-len(before) :] == before}
        return found | self._ends if count < self._least else found

    def _fitting(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first, may come one after the other."""
        tail, count = self._tail, self._count
        for number, token in enumerate(tokens):
            if token in self._never or (self._allowed is not None and token not in self._allowed):
                return number
            if token in self._forbidden(tail, count):
                return number
            tail, count = self._next(tail, token), count + 1
        return len(tokens)

    def _restrict(self, line: TokenBits, tail: tuple[int, ...], count: int) -> None:
        if self._bits is None:
            self._bits = np.zeros_like(line) if self._allowed is not None else np.full_like(line, 0xFFFFFFFF)
            for token in self._allowed or ():
                self._bits[token // 32] |= np.uint32(1 << token % 32)
            _clear(self._bits, self._never)
        line &= self._bits
        _clear(line, self._forbidden(tail, count))


def _clear(line: TokenBits, tokens: frozenset[int] | set[int]) -> None:
    for token in tokens:
        if token // 32 < len(line):
            line[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
