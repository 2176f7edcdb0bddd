"""How much of a large set of cases the plain run (`-m "not slow"`) takes; `make test-all` takes all of it.

Owns the choice for parametrized tests and for hypothesis. Knows nothing of what is tested.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

Thing = TypeVar("Thing")
plain = False  # set by conftest before any test is collected


def examples(some: int, of: int, suppress: Iterable[HealthCheck] = (HealthCheck.too_slow,)) -> settings:
    """Settings for hypothesis: `some` examples in the plain run, all of them where slow tests run too."""
    return settings(max_examples=some if plain else of, deadline=None, suppress_health_check=list(suppress))


def share(things: Sequence[Thing], number: int, of: int) -> Sequence[Thing]:
    """In the plain run one thing in so many, and others for another number; else all of them."""
    return things[number % of :: of] if plain else things


def covering(*axes: Sequence[object], ways: int = 2) -> list[ParameterSet]:
    """Every combination of the axes, for parametrize. In the plain run are just enough of them that each value of an
    axis meets each value of every other (with ways=3: each pair of values every third); the rest is slow.

    An entry of an axis is a value, a tuple of values for as many arguments, or a pytest.param.
    """
    cases = list(itertools.product(*axes))
    numbered = list(itertools.product(*(range(len(axis)) for axis in axes)))
    kept = set(_cover(numbered, ways))
    return [
        _param(case, () if number in kept else (pytest.mark.slow,))
        for case, number in zip(cases, numbered, strict=True)
    ]


def _cover(cases: Sequence[tuple[int, ...]], ways: int) -> list[tuple[int, ...]]:
    """Greedily the case with the most new meetings, until all have been."""
    places = list(itertools.combinations(range(len(cases[0])), min(ways, len(cases[0])))) if cases else []
    meetings = {case: {(at, *(case[place] for place in at)) for at in places} for case in cases}
    found = []
    while meetings:
        best = max(meetings, key=lambda case: len(meetings[case]))  # the first of equals: the same in every worker
        seen = meetings.pop(best)
        if not seen:
            break
        found.append(best)
        for case in list(meetings):
            meetings[case] -= seen
            if not meetings[case]:
                del meetings[case]
    return found


def _param(case: Iterable[object], marks: Sequence[pytest.MarkDecorator]) -> ParameterSet:
    values: list[object] = []
    names: list[str] = []
    for entry in case:
        if isinstance(entry, ParameterSet):
            values += entry.values
            names.append(str(entry.id))
            marks = [*marks, *entry.marks]  # type: ignore[list-item]
        else:
            several = entry if isinstance(entry, tuple) else (entry,)
            values += several
            names += map(str, several)
    return pytest.param(*values, id="-".join(names), marks=marks)
