"""The draft model's bookkeeping: what it computes, in which passes, and what it need not compute again.

The device is a fake whose blocks tell which tokens they hold; CheckedDrafter checks that at every call.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.core.params import SamplingParams
from shoal.core.plan import DRAFTED, FROM_DEVICE
from shoal.core.request import Request
from shoal.kv.manager import Holding
from tests.draft_fakes import CheckedDrafter, checked_drafter
from tests.fakes import FakeGrammar, make_request, oracle

SIZE = 4
ROWS = 8


def drafter(
    pass_tokens: int = 100, draft_tokens: int = 5, wrong: int = 0, longest: int = 200, on_device: bool = False
) -> CheckedDrafter:
    return checked_drafter(64, SIZE, ROWS, draft_tokens, longest, pass_tokens, wrong, on_device=on_device)


def running(
    id: str,
    prompt: Sequence[int],
    blocks: Sequence[int],
    row: int = 0,
    params: SamplingParams | None = None,
    **more: object,
) -> Request:
    """A request that runs on these blocks."""
    request = make_request(id, prompt, 60, params, **more)
    hold(request, blocks, row)
    return request


def hold(request: Request, blocks: Sequence[int], row: int = 0) -> None:
    request.holding = Holding(list(blocks), len(blocks) * SIZE, [], 0, "")
    request.row, request.generation = row, request.generation + 1


def passes(made: CheckedDrafter) -> list[list[tuple[int, int]]]:
    """(start, count) of each row of each pass since the last call of this."""
    found = [list(zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)) for plan in made.device.plans]
    made.device.plans.clear()
    return found


def answer(request: Request) -> list[int]:
    return oracle(request.tokens[: request.prompt_len], 60, frozenset(), request.seed, request.sample)


PROMPT = [1, 2, 3, 4, 5, 6]


def test_a_draft_is_what_the_draft_model_draws() -> None:
    made, request = drafter(), running("a", PROMPT, range(5), seed=3)
    found = made.propose({request: 4})[request]
    assert list(found.tokens) == answer(request)[:4]
    assert found.drafters == (("draft", 4),)
    assert found.confidence == pytest.approx([math.exp(-0.3)] * 4)
    assert passes(made) == [[(0, 6)], [(6, 1)], [(7, 1)], [(8, 1)]]
    assert [positions for positions, _, _ in made.passes] == [6, 1, 1, 1]
    assert all(seconds > 0 for _, _, seconds in made.passes)


def test_accepted_tokens_are_not_computed_again() -> None:
    made, request = drafter(), running("a", PROMPT, range(8), seed=3)
    drafted = list(made.propose({request: 4})[request].tokens)
    passes(made)
    request.tokens += [*drafted, answer(request)[4]]  # all four, and the token drawn after them
    assert made.behind(request) == 2  # the last draft token was never computed
    made.propose({request: 1})
    assert passes(made) == [[(9, 2)]]


def test_rejected_tokens_are_computed_again() -> None:
    made, request = drafter(), running("a", PROMPT, range(8), seed=3)
    drafted = list(made.propose({request: 4})[request].tokens)
    passes(made)
    request.tokens += [*drafted[:2], (drafted[2] + 1) % 50]
    assert made.behind(request) == 1
    made.propose({request: 2})
    assert passes(made) == [[(8, 1)], [(9, 1)]]


def test_a_rejected_token_makes_those_after_it_void_too() -> None:
    """Although some of them come all the same, in passes that it was not asked for."""
    made, request = drafter(), running("a", PROMPT, range(8), seed=3)
    drafted = list(made.propose({request: 5})[request].tokens)
    request.tokens += [drafted[0], (drafted[1] + 1) % 50, *drafted[2:]]
    assert made.behind(request) == 4
    made.propose({request: 2})


def test_tokens_that_came_without_it_are_computed_first_within_the_bound() -> None:
    made, request = drafter(pass_tokens=8), running("a", list(range(20)), range(8), seed=3)
    for behind in (20, 12):
        assert made.behind(request) == behind
        assert made.propose({request: 3}) == {}
    assert list(made.propose({request: 3})[request].tokens) == answer(request)[:3]
    assert passes(made) == [[(0, 8)], [(8, 8)], [(16, 4)], [(20, 1)], [(21, 1)]]


def test_rows_are_computed_together_and_the_nearest_first() -> None:
    made = drafter(pass_tokens=10)
    long, short = running("a", list(range(9)), range(4), 0), running("b", [7, 8], range(4, 8), 1)
    assert made.propose({long: 3, short: 2}).keys() == {short}
    assert passes(made) == [[(0, 2), (0, 8)], [(2, 1)]]
    assert made.propose({long: 3, short: 2}).keys() == {long, short}
    assert passes(made) == [[(8, 1), (1, 1)], [(9, 1), (2, 1)], [(10, 1)]]


def test_a_prefix_of_another_request_is_computed_once() -> None:
    made = drafter()
    one, two = running("a", [*range(8), 1], [0, 1, 2], 0, seed=1), running("b", [*range(8), 2], [0, 1, 3], 1, seed=2)
    assert made.propose({one: 2, two: 2}).keys() == {one}, "the other waits for its blocks"
    assert made.behind(two) == 1
    assert made.propose({one: 1, two: 1}).keys() == {one, two}
    assert (made.named, made.device.computed_tokens) == (8, 9 + 1 + 1 + 1)


def test_a_block_that_the_draft_model_did_not_compute_is_computed() -> None:
    """As from the prefix cache, after another request wrote other tokens there."""
    made, one = drafter(), running("a", list(range(9)), [0, 1, 2])
    made.propose({one: 1})
    other = running("b", list(range(20, 26)), [1, 5])
    made.ended(one, True)
    made.propose({other: 1})  # it got block 1, which nobody held any more
    made.ended(other, True)
    again = running("c", list(range(9)), [0, 1, 2])
    assert made.behind(again) == 5, "block 0 is as it was, block 1 is not"
    made.propose({again: 1})


def test_blocks_of_another_tenant_are_not_taken_for_its_own() -> None:
    made, one = drafter(), running("a", list(range(9)), [0, 1, 2], salt="x")
    made.propose({one: 1})
    assert made.behind(running("b", list(range(9)), [0, 1, 2], salt="x")) == 1
    assert made.behind(running("c", list(range(9)), [0, 1, 2], salt="y")) == 9


def test_a_request_that_comes_back_on_other_blocks_begins_again() -> None:
    made, request = drafter(), running("a", list(range(9)), [0, 1, 2], 3)
    made.propose({request: 3})
    hold(request, [7, 1, 9], row=5)  # block 1 holds the right tokens, and block 7 does not
    assert made.behind(request) == 9
    assert list(made.propose({request: 2})[request].tokens) == answer(request)[:2]
    hold(request, [7, 1, 4], row=2)
    assert made.behind(request) == 1


@pytest.mark.parametrize("held", [2, 3, 4])
def test_draft_tokens_beyond_its_blocks_go_to_spare_ones(held: int) -> None:
    made, request = drafter(draft_tokens=7), running("a", list(range(8)), range(held))
    assert list(made.propose({request: 7})[request].tokens) == answer(request)[:7]
    request.tokens += answer(request)[:7]
    request.holding.blocks[held:] = range(held, 5)  # only now does it get blocks for them
    assert made.behind(request) == max(1, 15 - min(held * SIZE, 14))
    assert list(made.propose({request: 7})[request].tokens) == answer(request)[7:14]


def test_it_ends_at_a_stop_token_and_at_its_longest_sequence() -> None:
    made, request = drafter(), running("a", PROMPT, range(8), seed=3)
    request.stop_ids = frozenset(answer(request)[2:3])
    first = list(made.propose({request: 5})[request].tokens)
    assert first == answer(request)[: answer(request).index(answer(request)[2])]
    short = drafter(longest=8)
    assert len(short.propose({running("b", PROMPT, range(8)): 5}).popitem()[1].tokens) == 3
    assert short.behind(running("c", list(range(8)), range(8))) == math.inf
    assert short.propose({running("d", list(range(8)), range(8)): 2}) == {}


def test_its_draws_have_the_parameters_of_the_request_without_penalties() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=9, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 2.0},
        prompt_logprobs=2, max_tokens=20, logprobs=5,
    )  # fmt: skip
    made, request = drafter(), running("a", PROMPT, range(5), seed=11, params=params)
    made.propose({request: 1})
    [start] = made.device.plans[0].starting
    assert (start.seed, start.sample, start.prompt_len) == (11, 0, 6)
    assert start.params == SamplingParams(
        temperature=0.7, top_k=9, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
        logit_bias={3: 2.0}, max_tokens=20, logprobs=0,
    )  # fmt: skip
    assert not start.needs_prompt_logprobs


# ---- drafts that stay on the device ---------------------------------------------------------------------------------


def test_its_passes_are_queued_and_its_tokens_stay() -> None:
    made, request = drafter(on_device=True), running("a", PROMPT, range(5), seed=3)
    found = made.propose({request: 3})[request]
    assert found.tokens == [DRAFTED, DRAFTED - 1, DRAFTED - 2]
    assert found.on_device
    assert len(made.device.results) == 3, "a result was waited for"
    assert [plan.tokens.tolist() for plan in made.device.plans] == [PROMPT, [FROM_DEVICE], [FROM_DEVICE]]
    assert [plan.kept for plan in made.device.plans] == [0, 1, 2]
    assert made.device.drafted == {(number, 0): token for number, token in enumerate(answer(request)[:3])}
    assert not made.passes
    made.settle()
    assert [positions for positions, _, _ in made.passes] == [6, 1, 1]
    made.settle()
    assert not made.passes, "its passes are told twice"


@pytest.mark.parametrize("right", range(5))
def test_what_was_accepted_on_the_device_is_not_computed_again(right: int) -> None:
    """Settled before or after the tokens are committed, or only by the next call."""
    for when in ("before", "after", "never"):
        made, request = drafter(on_device=True), running("a", PROMPT, range(8), seed=3)
        made.propose({request: 4})
        passes(made)
        if when == "before":
            made.settle()
        request.tokens += answer(request)[:right]
        request.tokens.append(answer(request)[4] if right == 4 else (answer(request)[right] + 1) % 50)
        if when == "after":
            made.settle()
        missing = 2 if right == 4 else 1  # the last draft token was never computed
        assert made.behind(request) == (missing if when != "never" else right + 1)
        made.propose({request: 1})


def test_rows_with_drafts_of_other_lengths_leave_the_passes_one_by_one() -> None:
    made = drafter(on_device=True)
    requests = [running(str(row), [row, 7], [row], row) for row in range(3)]
    found = made.propose({request: 1 + row for row, request in enumerate(requests)})
    assert [len(found[request].tokens) for request in requests] == [1, 2, 3]
    assert [plan.rows.tolist() for plan in made.device.plans] == [[0, 1, 2], [1, 2], [2]]
    made.settle()
    for row, request in enumerate(requests):
        request.tokens += answer(request)[: 1 + row]
        assert made.behind(request) == 1


def test_a_prompt_that_is_computed_first_is_not_waited_for_either() -> None:
    made, request = drafter(pass_tokens=8, on_device=True), running("a", list(range(20)), range(8), seed=3)
    assert made.propose({request: 3}) == {}
    assert [(plan.kept, plan.draws.tolist()) for plan in made.device.plans] == [(-1, [0])]
    assert len(made.device.results) == 1
    assert made.behind(request) == 12
    made.settle()
    assert len(made.passes) == 1


def test_a_draft_on_the_device_may_contain_an_end() -> None:
    """The draft model goes on after it: the model's own draws end the request."""
    made = drafter(on_device=True)
    request = running("a", PROMPT, range(8), seed=3, stop_ids=frozenset(range(50)))
    assert len(made.propose({request: 5})[request].tokens) == 5


@pytest.mark.parametrize(
    "needs",
    [
        {"params": SamplingParams(repetition_penalty=1.1)},
        {"params": SamplingParams(presence_penalty=-0.2)},
        {"params": SamplingParams(frequency_penalty=0.1)},
        {"grammar": FakeGrammar(1, 20)},
    ],
    ids=["repetition", "presence", "frequency", "grammar"],
)
def test_where_the_host_needs_the_tokens_they_come(needs: dict[str, Any]) -> None:
    """Those of all requests of that call, with their probability if it is known."""
    made, other = drafter(on_device=True), running("b", [9, 9, 9], range(10, 15), 1)
    request = running("a", PROMPT, range(5), seed=3, **needs)
    found = made.propose({request: 2, other: 2})
    assert list(found[other].tokens) == answer(other)[:2]
    assert list(found[request].tokens) == answer(request)[:2]
    assert found[request].confidence == pytest.approx([math.exp(-0.3)] * 2)
    assert found[other].confidence == pytest.approx([0.6] * 2), "it was not asked how sure it is"
    assert not made.device.results
    assert made.propose({other: 2})[other].on_device


def test_a_pass_that_fails_on_the_device_ends_its_drafts(caplog: pytest.LogCaptureFixture) -> None:
    made, request = drafter(on_device=True), running("a", PROMPT, range(5), seed=3)
    made.device.fails_at = 1
    assert made.propose({request: 3})
    made.settle()
    assert "the draft model failed" in caplog.text
    assert made.behind(request) == math.inf
    assert made.propose({request: 3}) == {}
