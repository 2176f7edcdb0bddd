"""Prompts: of the right length, and equal exactly where the trace has equal prefixes."""

import random

import pytest

from shoal.workload.prompts import make_prompts
from shoal.workload.traces import TraceRequest, fit, read_trace
from tests.workload.real import MOONCAKE, needs

VOCAB = 32_000


def shared(a: list[int], b: list[int]) -> int:
    """Leading tokens that two prompts have in common."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tree(count: int, seed: int = 0) -> list[TraceRequest]:
    """Requests like Mooncake's: each continues a prefix of an earlier one, or starts a new one."""
    source, fresh = random.Random(seed), iter(range(10**6))
    found: list[TraceRequest] = []
    for _ in range(count):
        known: tuple[int, ...] = source.choice(found).prefix if found and source.random() < 0.7 else ()
        ids = known[: source.randint(0, len(known))]
        ids += tuple(next(fresh) for _ in range(source.randint(1, 9)))
        found.append(TraceRequest(0, len(ids) * 512 - source.randrange(512), 1, ids, 512))
    return found


def repeated_shares(requests: list[TraceRequest], prompts: list[list[int]]) -> tuple[float, float]:
    """The share of whole blocks that occurred before: by ids, and by the tokens up to their ends."""
    by_id, by_tokens, total = set(), set(), 0
    for request, prompt in zip(requests, prompts, strict=True):
        for place, id in enumerate(request.prefix, start=1):
            if (end := round(place * request.prefix_block)) <= len(prompt):
                by_id.add(id)
                by_tokens.add(hash(tuple(prompt[:end])))
                total += 1
    return 1 - len(by_id) / total, 1 - len(by_tokens) / total


def test_lengths_range_and_seed() -> None:
    requests = [TraceRequest(0, length, 1) for length in (1, 7, 500)]
    prompts = make_prompts(requests, 50, seed=3)
    assert [len(prompt) for prompt in prompts] == [1, 7, 500]
    assert {id for prompt in prompts for id in prompt} == set(range(50))
    assert prompts == make_prompts(requests, 50, seed=3)
    assert prompts != make_prompts(requests, 50, seed=4)


def test_without_prefixes_nothing_is_shared() -> None:
    prompts = make_prompts([TraceRequest(0, 40, 1)] * 20, VOCAB)
    assert max(shared(a, b) for a in prompts for b in prompts if a is not b) <= 1


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.05, 0.037, 0.01, 2.5])
@pytest.mark.parametrize("cap", [None, 40])
def test_equal_ids_are_equal_tokens_and_others_differ(scale: float, cap: int | None) -> None:
    """Also where a scaled block is no whole number of tokens, and where the cap divides one."""
    fitted = fit(tree(40), scale=scale, max_prompt=cap).requests
    prompts = make_prompts(fitted, VOCAB)
    assert [len(prompt) for prompt in prompts] == [one.prompt for one in fitted]
    for a, prompt_a in zip(fitted, prompts, strict=True):
        for b, prompt_b in zip(fitted, prompts, strict=True):
            if a is not b:
                same = shared(list(a.prefix), list(b.prefix))
                expected = min(round(same * a.prefix_block), a.prompt, b.prompt)
                by_chance = 1 if scale >= 0.1 else 2  # the next random tokens may be equal, once in 32,000
                assert expected <= shared(prompt_a, prompt_b) <= expected + by_chance


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.037])
def test_the_share_of_repeated_blocks_follows_from_the_ids(scale: float) -> None:
    requests = fit(tree(60), scale=scale).requests
    ids, tokens = repeated_shares(requests, make_prompts(requests, VOCAB))
    assert tokens == ids
    assert ids > 0.2


def test_a_tail_beyond_the_blocks_is_unique() -> None:
    requests = [TraceRequest(0, 600, 1, (1,), 512), TraceRequest(0, 700, 1, (1,), 512)]
    one, other = make_prompts(requests, VOCAB)
    assert (len(one), len(other)) == (600, 700)
    assert 512 <= shared(one, other) <= 513


def test_ids_beyond_the_prompt_are_cut() -> None:
    requests = [TraceRequest(0, 5, 1, (1, 2, 3), 512), TraceRequest(0, 600, 1, (1, 2), 512)]
    short, long = make_prompts(requests, VOCAB)
    assert short == long[:5]


def test_blocks_smaller_than_a_token_do_not_break_anything() -> None:
    requests = fit(tree(20), scale=0.0005).requests
    assert [len(prompt) for prompt in make_prompts(requests, VOCAB)] == [one.prompt for one in requests]


@needs(MOONCAKE)
def test_the_real_mooncake_prefixes_survive_scaling() -> None:
    requests = fit(read_trace(MOONCAKE, 2000), scale=0.02).requests
    ids, tokens = repeated_shares(requests, make_prompts(requests, VOCAB))
    assert tokens == ids
    assert ids > 0.2
