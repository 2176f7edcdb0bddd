"""The matcher of one sample: where it stands in its grammar, and which tokens may come next.

Owns the use of one LLMatcher of llguidance, which grammar.py compiles. Knows nothing of requests or logits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

TokenBits = npt.NDArray[np.uint32]
ERROR_CHARACTERS = 400  # of llguidance's own message


class Matcher:
    """Where one sample stands in its grammar; the engine's Grammar port.

    End tokens are allowed where the grammar may end, and only there. `ended` is set as soon as nothing else can follow,
    so that no further pass is needed for an end token.
    """

    __slots__ = ("_ends", "_matcher", "ended", "error")

    def __init__(self, matcher: "LLMatcher", ends: TokenBits) -> None:
        self._matcher = matcher
        self._ends = ends  # the bits of the end tokens
        self.ended = False
        self.error = ""

    def accept(self, token: int) -> bool:
        """The sample's next token. False: it was not allowed, and the sample cannot continue."""
        matcher = self._matcher
        if self.error:
            pass
        elif self.ended:
            self.error = "" if self._is_end(token) else f"token {token} came after the end of the grammar"
        elif self._is_end(token):
            self.ended = matcher.is_accepting()
            self.error = "" if self.ended else f"end token {token} came in the middle of the grammar"
        elif matcher.consume_token(token) and not matcher.is_error():
            self.ended = matcher.is_stopped()
        else:
            self.error = f"token {token} does not follow the grammar: {shortened(matcher.get_error())}"
        return not self.error

    def fill(self, mask: TokenBits) -> None:
        """Set the bit of every token that may come next, clear all others."""
        if self.error or self.ended:
            mask[:] = 0 if self.error else self._ends
            return
        assert mask.flags.c_contiguous, "llguidance writes to contiguous memory"
        try:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except Exception as error:
            self.error = f"the grammar could not be followed: {shortened(str(error))}"
        if self._matcher.is_error():  # llguidance then allows an end token, but the answer would be incomplete
            self.error = f"the grammar is too complex to follow: {shortened(self._matcher.get_error())}"
        if self.error:
            mask[:] = 0
        elif (mask & self._ends).any() and not self._matcher.is_accepting():
            mask &= ~self._ends  # llguidance uses a special token where a grammar contains its text literally
            if not mask.any():
                self.error = "the grammar asks for the text of an end token; write it without that text"

    def forced(self) -> list[int]:
        """The tokens that come next where there is no choice, as they are usually spelled. Bytes whose token depends on
        what follows them are left out."""
        if self.error or self.ended:
            return []
        try:
            return self._matcher.compute_ff_tokens()
        except Exception:  # a mask will tell what is wrong
            return []

    def allows(self, tokens: Sequence[int]) -> int:
        """How many of these, from the first, may come next, one after the other; no end tokens."""
        if self.error or self.ended:
            return 0
        ends = next((place for place, token in enumerate(tokens) if self._is_end(token)), len(tokens))
        try:
            return self._matcher.validate_tokens(list(tokens[:ends])) if ends else 0
        except Exception:  # a mask will tell what is wrong
            return 0

    def fill_ahead(self, lines: TokenBits, tokens: Sequence[int]) -> None:
        """Line i as fill() would set it after the first i of these tokens. On a copy: an error beyond the first line is
        that of tokens which may never come."""
        self.fill(lines[0])
        if self.error:
            lines[1:] = 0
            return
        ahead = self.copy()
        for token, line in zip(tokens, lines[1:], strict=True):
            ahead.accept(token)
            ahead.fill(line)

    def copy(self) -> "Matcher":
        """Another in the same state."""
        twin = Matcher(self._matcher.deep_copy(), self._ends)
        twin.ended, twin.error = self.ended, self.error
        return twin

    def _is_end(self, token: int) -> bool:
        return bool(self._ends[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def shortened(message: str) -> str:
    """llguidance's message without its trimmings, on one mask.

    >>> shortened("lexer error: too many states\\n<non-verbose/>")
    'lexer error: too many states'
    """
    words = " ".join(message.replace("<non-verbose/>", "").split())
    return words if len(words) <= ERROR_CHARACTERS else words[:ERROR_CHARACTERS] + " …"
