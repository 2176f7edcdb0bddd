"""What the plain run takes of a large set of cases: each meeting of values at least once, and the rest is slow."""

import itertools

import pytest

from tests.effort import covering

AXES = (["a", "b", "c"], [(1, 2), (3, 4)], [pytest.param(True, id="on"), pytest.param(False, id="off")], range(4))
VALUES = ("abc", [(1, 2), (3, 4)], [True, False], range(4))  # the same, without names


@pytest.mark.parametrize(("ways", "most"), [(1, 4), (2, 14), (3, 30), (4, 48), (9, 48)])
def test_every_meeting_of_values_is_in_the_plain_run(ways: int, most: int) -> None:
    cases = covering(*AXES, ways=ways)
    assert [case.values for case in cases] == [
        (letter, *pair, switch, number) for letter, pair, switch, number in itertools.product(*VALUES)
    ]
    assert cases[0].id == "a-1-2-on-0"
    plain = [(case.values[0], case.values[1:3], *case.values[3:]) for case in cases if not case.marks]
    assert len(plain) <= most
    for places in itertools.combinations(range(4), min(ways, 4)):
        met = {tuple(case[place] for place in places) for case in plain}
        assert len(met) == len({tuple(case[place] for place in places) for case in itertools.product(*VALUES)})


def test_no_values_give_no_cases() -> None:
    assert covering([1, 2], []) == []
