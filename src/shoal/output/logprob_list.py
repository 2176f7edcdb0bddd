"""Logprobs kept for an answer that is written at its end, compactly.

Owns the arrays: 12 bytes per alternative and 24 per token, where the records themselves would take ten times as many.
Reads like a list of core's Logprobs. Knows no tokenizer and no API.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from shoal.core.request import Logprobs


class Columns:
    """The arrays of one list."""

    __slots__ = ("ends", "logprobs", "ranks", "tokens", "top_logprobs", "top_tokens")

    def __init__(self) -> None:
        self.tokens, self.logprobs, self.ranks = array("i"), array("d"), array("i")
        self.ends = array("q")  # where the alternatives of each token end
        self.top_tokens, self.top_logprobs = array("i"), array("d")


EMPTY = Columns()  # of all lists without logprobs, which are most of them: a call may have a thousand samples


class LogprobList(Sequence[Logprobs]):
    """A sequence of Logprobs, to which more can be added.

    >>> known = LogprobList([Logprobs(5, -0.5, 1, (5, 7), (-0.5, -1.0)), Logprobs(7, -2.0, 9, (), ())])
    >>> known[0].top_tokens, known[-1].rank, len(known), known.entries
    ((5, 7), 9, 2, 4)
    """

    __slots__ = ("_columns",)

    def __init__(self, values: Iterable[Logprobs] = ()) -> None:
        self._columns = EMPTY
        self.extend(values)

    @property
    def entries(self) -> int:
        """Tokens and alternatives."""
        return len(self._columns.tokens) + len(self._columns.top_tokens)

    def append(self, one: Logprobs) -> None:
        columns = self._columns
        if columns is EMPTY:
            columns = self._columns = Columns()
        columns.tokens.append(one.token)
        columns.logprobs.append(one.logprob)
        columns.ranks.append(one.rank)
        columns.top_tokens.extend(one.top_tokens)
        columns.top_logprobs.extend(one.top_logprobs)
        columns.ends.append(len(columns.top_tokens))

    def extend(self, values: Iterable[Logprobs]) -> None:
        for one in values:
            self.append(one)

    def cut(self, length: int) -> None:
        """Keep only the first `length`."""
        if length < len(self):
            columns = self._columns
            end = columns.ends[length - 1] if length else 0
            del columns.tokens[length:], columns.logprobs[length:], columns.ranks[length:], columns.ends[length:]
            del columns.top_tokens[end:], columns.top_logprobs[end:]

    def values(self, begin: int, end: int) -> list[float]:
        """The logprobs of tokens `begin` to `end`, without their alternatives."""
        return self._columns.logprobs[begin:end].tolist()

    def __len__(self) -> int:
        return len(self._columns.tokens)

    @overload
    def __getitem__(self, at: int) -> Logprobs: ...

    @overload
    def __getitem__(self, at: slice) -> list[Logprobs]: ...

    def __getitem__(self, at: int | slice) -> Logprobs | list[Logprobs]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        columns = self._columns
        begin, end = columns.ends[number - 1] if number else 0, columns.ends[number]
        return Logprobs(
            columns.tokens[number],
            columns.logprobs[number],
            columns.ranks[number],
            tuple(columns.top_tokens[begin:end]),
            tuple(columns.top_logprobs[begin:end]),
        )
