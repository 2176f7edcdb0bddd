"""Token rules: which tokens a sample may draw by their ids alone: allowed_token_ids, bad_words and min_tokens.

A Grammar of its own, around that of the request if it has one, so that masks, drafts and resumption work alike. Knows
token ids only. Raises nothing.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shoal.core.grammar import Grammar

TokenBits = npt.NDArray[np.uint32]
ALL = 0xFFFFFFFF
EMPTY = "allowed_token_ids, bad_words and min_tokens leave no token that may come next; allow more tokens"


class TokenSets:
    """What the samples of one job may draw. `bad`: sequences of tokens whose last may not follow the others.

    The first `least` tokens are none of `ends`.
    """

    __slots__ = ("_bits", "after", "allowed", "ends", "least", "longest", "never")

    def __init__(
        self,
        allowed: Sequence[int] | None = None,
        bad: Sequence[Sequence[int]] = (),
        ends: Iterable[int] = (),
        least: int = 0,
    ) -> None:
        self.allowed = None if allowed is None else frozenset(allowed)
        self.never = frozenset(one[0] for one in bad if len(one) == 1)
        # by the token before the last one, so that few are looked at: (all tokens before the last one, that one)
        self.after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for one in bad:
            if len(one) > 1:
                self.after.setdefault(one[-2], []).append((tuple(one[:-1]), one[-1]))
        self.longest = max((len(one) - 1 for one in bad), default=0)
        self.ends, self.least = frozenset(ends), least
        self._bits: TokenBits | None = None

    def bits(self, words: int) -> TokenBits:
        """What is allowed anywhere."""
        if self._bits is None or len(self._bits) != words:
            flags = np.full(words * 32, self.allowed is None, dtype=np.bool_)
            flags[list(self.allowed or ())] = True
            flags[[token for token in self.never if token < len(flags)]] = False
            self._bits = np.packbits(flags, bitorder="little").view(np.uint32)
        return self._bits

    def forbidden(self, tail: tuple[int, ...], count: int) -> frozenset[int]:
        """Tokens that may not come next, beside those that never may."""
        found = frozenset[int]()
        if tail and tail[-1] in self.after:
            found = frozenset(last for before, last in self.after[tail[-1]] if tail[-len(before) :] == before)
        return found | self.ends if count < self.least else found

    def next(self, tail: tuple[int, ...], token: int) -> tuple[int, ...]:
        """The latest tokens after one more."""
        return (*tail, token)[-self.longest :] if self.longest else ()


class TokenRules:
    """The state of one sample. A grammar decides by itself where the sample may end.

    >>> rules = TokenRules(TokenSets(allowed=(1, 2, 3), bad=((1, 2), (3,))))
    >>> line = np.zeros(1, dtype=np.uint32)
    >>> rules.fill(line); allowed = [bin(line[0])]
    >>> rules.accept(1); rules.fill(line); [*allowed, bin(line[0])]
    True
    ['0b110', '0b10']
    """

    __slots__ = ("_count", "_inner", "_sets", "_tail", "ended", "error")

    def __init__(self, sets: TokenSets, inner: Grammar | None = None, output: Sequence[int] = ()) -> None:
        self._sets, self._inner = sets, inner
        self._tail = tuple(output[-sets.longest :]) if sets.longest else ()  # the latest tokens
        self._count = len(output)
        self.ended, self.error = (inner.ended, inner.error) if inner is not None else (False, "")

    def accept(self, token: int) -> bool:
        if self._inner is not None:
            self._inner.accept(token)
            self._look(self._inner)
        self._tail = self._sets.next(self._tail, token)
        self._count += 1
        return not self.error

    def fill(self, line: TokenBits) -> None:
        if self._inner is None:
            line[:] = ALL
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
            lines[:] = ALL
        else:
            self._inner.fill_ahead(lines, tokens)
            self._look(self._inner)
        if self.ended or self.error:
            return
        tail, count = self._tail, self._count
        for number, line in enumerate(lines):
            self._restrict(line, tail, count)
            if number < len(tokens):
                tail, count = self._sets.next(tail, tokens[number]), count + 1
        if not lines[0].any():
            self.error = EMPTY

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _look(self, inner: Grammar) -> None:
        self.ended, self.error = inner.ended, self.error or inner.error

    def _fitting(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first, may come one after the other."""
        sets, tail, count = self._sets, self._tail, self._count
        for number, token in enumerate(tokens):
            if token in sets.never or (sets.allowed is not None and token not in sets.allowed):
                return number
            if token in sets.forbidden(tail, count):
                return number
            tail, count = sets.next(tail, token), count + 1
        return len(tokens)

    def _restrict(self, line: TokenBits, tail: tuple[int, ...], count: int) -> None:
        line &= self._sets.bits(len(line))
        for token in self._sets.forbidden(tail, count):
            if token // 32 < len(line):
                line[token // 32] &= np.uint32(ALL ^ (1 << token % 32))
