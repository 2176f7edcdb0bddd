"""Logprobs kept for an answer that is written at its end, compactly.

Owns the arrays: 12 bytes per alternative and 24 per token, where the records themselves would take ten times as many.
Reads like a list of core's Logprobs. Knows no tokenizer and no API.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from shoal.core.request import Logprobs


class LogprobList(Sequence[Logprobs]):
    """A sequence of Logprobs, to which more can be added.

    >>> known = LogprobList([Logprobs(5, -0.5, 1, (5, 7), (-0.5, -1.0)), Logprobs(7, -2.0, 9, (), ())])
    >>> known[0].top_tokens, known[-1].rank, len(known), known.entries
    ((5, 7), 9, 2, 4)
    """

    __slots__ = ("_ends", "_logprobs", "_ranks", "_tokens", "_top_logprobs", "_top_tokens")

    def __init__(self, values: Iterable[Logprobs] = ()) -> None:
        self._tokens, self._logprobs, self._ranks = array("i"), array("d"), array("i")
        self._ends = array("q")  # where the alternatives of each token end
        self._top_tokens, self._top_logprobs = array("i"), array("d")
        self.extend(values)

    @property
    def entries(self) -> int:
        """Tokens and alternatives."""
        return len(self._tokens) + len(self._top_tokens)

    def append(self, one: Logprobs) -> None:
        self._tokens.append(one.token)
        self._logprobs.append(one.logprob)
        self._ranks.append(one.rank)
        self._top_tokens.extend(one.top_tokens)
        self._top_logprobs.extend(one.top_logprobs)
        self._ends.append(len(self._top_tokens))

    def extend(self, values: Iterable[Logprobs]) -> None:
        for one in values:
            self.append(one)

    def cut(self, length: int) -> None:
        """Keep only the first `length`."""
        if length < len(self):
            end = self._ends[length - 1] if length else 0
            del self._tokens[length:], self._logprobs[length:], self._ranks[length:], self._ends[length:]
            del self._top_tokens[end:], self._top_logprobs[end:]

    def values(self, begin: int, end: int) -> list[float]:
        """The logprobs of tokens `begin` to `end`, without their alternatives."""
        return self._logprobs[begin:end].tolist()

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> Logprobs: ...

    @overload
    def __getitem__(self, at: slice) -> list[Logprobs]: ...

    def __getitem__(self, at: int | slice) -> Logprobs | list[Logprobs]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        begin, end = self._ends[number - 1] if number else 0, self._ends[number]
        return Logprobs(
            self._tokens[number],
            self._logprobs[number],
            self._ranks[number],
            tuple(self._top_tokens[begin:end]),
            tuple(self._top_logprobs[begin:end]),
        )
