"""Logprobs in arrays: the same as in a list."""

import random

from shoal.core.request import Logprobs
from shoal.output.logprob_list import LogprobList


def some(count: int, seed: int = 1) -> list[Logprobs]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        tops = draw.randrange(4)
        tokens = tuple(draw.randrange(2**31) for _ in range(tops))
        logprobs = tuple(-draw.random() for _ in tokens)
        found.append(Logprobs(draw.randrange(2**31), -draw.random(), draw.randrange(200_000), tokens, logprobs))
    return found


def test_it_reads_like_a_list() -> None:
    plain = some(50)
    known = LogprobList(plain)
    assert list(known) == plain
    assert (known[0], known[-1], len(known)) == (plain[0], plain[-1], 50)
    for begin, end in ((0, 50), (3, 9), (49, 60), (7, 7)):
        assert known[begin:end] == plain[begin:end]
        assert known.values(begin, end) == [one.logprob for one in plain[begin:end]]
    assert known.entries == 50 + sum(len(one.top_tokens) for one in plain)


def test_it_can_be_cut_and_continued() -> None:
    plain = some(20)
    for length in (0, 1, 7, 20, 30):
        known = LogprobList(plain)
        known.cut(length)
        known.extend(some(3, seed=2))
        assert list(known) == plain[:length] + some(3, seed=2)
        assert known.entries == sum(1 + len(one.top_tokens) for one in known)
