"""Choosing one thing by name from a table.

Owns the one message for a name that is not known. Knows nothing of what is in the tables.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from shoal.errors import UnknownName

T = TypeVar("T")


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """Return table[name]; a name that is not there is refused with the known ones.

    >>> pick({"fcfs": 1, "fair": 2}, "fcfs", "order")
    1
    >>> pick({"fcfs": 1, "fair": 2}, "fcsf", "order")
    Traceback (most recent call last):
    shoal.errors.UnknownName: unknown order 'fcsf' (did you mean 'fcfs'?); known: fair, fcfs
    """
    if name in table:
        return table[name]
    close = get_close_matches(name, table, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UnknownName(f"unknown {what} {name!r}{hint}; known: {', '.join(sorted(table))}")
