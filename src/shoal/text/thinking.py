"""A limit on the tokens of reasoning: when it is spent, the reasoning is closed.

Owns the matcher that counts them; what the answer must look like is up to the grammar that it is put around. Knows
llguidance through grammar.py alone.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.job import ThinkingLimit
from shoal.text.matcher import Matcher, TokenBits

if TYPE_CHECKING:
    from llguidance import LLMatcher

WINDOW = 64  # bytes of the latest text in which marks are looked for


class ThinkingMatcher(Matcher):
    """Counts the tokens between the marks. `closing`: the tokens that close the reasoning."""

    __slots__ = ("_bytes_of", "_closing", "_count", "_left", "_limit", "_reasons", "_window")

    def __init__(
        self,
        matcher: "LLMatcher",
        ends: TokenBits,
        limit: ThinkingLimit,
        closing: Sequence[int],
        bytes_of: Callable[[int], bytes],
    ) -> None:
        super().__init__(matcher, ends)
        self._limit, self._closing, self._bytes_of = limit, tuple(closing), bytes_of
        self._reasons: bool | None = True if limit.begun else None  # None: not known yet
        self._count = 0
        self._window = b""
        self._left: tuple[int, ...] = ()  # of the closing tokens, those that are still to come
        self._spend()

    def accept(self, token: int) -> bool:
        accepted = super().accept(token)
        if accepted and self._reasons is not False:
            if self._left and self._left[0] == token:
                self._left = self._left[1:]
            self._follow(token)
        return accepted

    def fill(self, mask: TokenBits) -> None:
        super().fill(mask)
        if self._left and not self.error and not self.ended and self._reasons:
            place, bit = self._left[0] // 32, np.uint32(1) << np.uint32(self._left[0] % 32)
            if mask[place] & bit:  # not in the middle of a character
                mask[:] = 0
                mask[place] = bit

    def forced(self) -> list[int]:
        closing = self._left[: super().allows(self._left)] if self._reasons else ()
        return list(closing) or super().forced()

    def allows(self, tokens: Sequence[int]) -> int:
        if self._reasons is False:
            return super().allows(tokens)
        if self._left and not super().allows(self._left[:1]):
            return super().allows(tokens[:1])  # in the middle of a character
        if self._left:
            same = [one == other for one, other in zip(tokens, self._left, strict=False)]
            return super().allows(tokens[: same.index(False) if False in same else len(same)])
        return super().allows(tokens[: self._limit.tokens - self._count])

    def copy(self) -> "ThinkingMatcher":
        twin = ThinkingMatcher(self._matcher.deep_copy(), self._ends, self._limit, self._closing, self._bytes_of)
        twin.ended, twin.error = self.ended, self.error
        twin._reasons, twin._count, twin._window, twin._left = self._reasons, self._count, self._window, self._left
        return twin

    # ---- counting ---------------------------------------------------------------------------------------------------

    def _follow(self, token: int) -> None:
        self._window = (self._window + self._bytes_of(token))[-WINDOW:]
        if self._reasons is None:
            begins, opens = self._window.lstrip(), self._limit.opens.encode()
            if begins.startswith(opens):
                self._reasons = True
                self._spend()
            elif not opens.startswith(begins):
                self._reasons = False
            return
        self._count += 1
        if self._limit.closes.encode() in self._window:
            self._reasons, self._left = False, ()
        else:
            self._spend()

    def _spend(self) -> None:
        if self._reasons and not self._left and self._count >= self._limit.tokens:
            self._left = self._closing
