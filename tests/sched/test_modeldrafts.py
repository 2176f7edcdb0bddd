"""Drafts that a model computes: asked for where its passes pay, and not where they do not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from shoal.core.drafts import Draft
from shoal.core.request import Request
from shoal.sched.modeldrafts import LIKELY, NEAR, SHARE, ModelDrafts
from tests.fakes import make_request

PASS_S = 0.010
ALL = 99


@dataclass
class Model:
    """A draft model whose passes take so long, and what it is asked for."""

    step_s: float = 0.002
    position_s: float = 0.0001
    missing: dict[str, float] = field(default_factory=dict)  # positions that it has not computed, by request
    passes: Sequence[tuple[int, int, float]] = ()
    late: Sequence[tuple[int, int, float]] | None = None  # passes under way, if its tokens stay on the device
    asked: list[int] = field(default_factory=list)
    ahead = by_chance = False
    names: Sequence[str] = ("draft",)

    def behind(self, request: Request) -> float:
        return self.missing.get(request.id, 1)

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Draft]:
        self.asked.append(sum(wanted.values()))
        first = int(sum(self.behind(request) for request in wanted))
        sizes = [first, *([len(wanted)] * (max(wanted.values()) - 1))]
        self.passes = [(size, 0, self.step_s + self.position_s * size) for size in sizes]
        if self.late is not None:
            self.late, self.passes = self.passes, ()
        self.missing = {}
        return {request: Draft([1] * most, [0.5] * most, (("draft", most),)) for request, most in wanted.items()}

    def settle(self) -> None:
        self.passes = self.late or ()
        self.late = None if self.late is None else ()

    def cost_s(self, rows: int, tokens: int) -> float:
        return 0.0

    def ended(self, request: Request, by_itself: bool) -> None:
        pass


@dataclass
class FlatCosts:
    """Passes of so many rows, in which every further position takes so long."""

    rows: int = 1
    position_s: float = 0.0001
    known: bool = True

    @property
    def base_s(self) -> float:
        return PASS_S + self.position_s * self.rows

    @property
    def token_s(self) -> float:
        return self.base_s / self.rows

    def rate(self, tokens: int, gained: float, more_s: float = 0.0) -> float:
        with_s = self.base_s + self.position_s * tokens + more_s
        return (self.rows + gained) * self.base_s / (self.rows * with_s)


def candidates(count: int = 1, most: int = 8) -> dict[Request, int]:
    return {make_request(f"r{number}", [1, 2, 3], 400): most for number in range(count)}


def turn(models: ModelDrafts, wanted: dict[Request, int], costs: FlatCosts, right: int) -> Mapping[Request, int]:
    """Choose, ask, and learn that so many of the first tokens of each draft were right."""
    chosen = models.choose(wanted, costs, 1000)
    if chosen:
        for request, draft in models.propose(chosen).items():
            models.learn(request, draft, min(right, len(draft.tokens)), len(draft.tokens))
        models.committed()
    return chosen


def test_it_is_asked_before_anything_is_known_and_learns_what_it_takes() -> None:
    models, wanted = ModelDrafts(Model()), candidates()
    assert models.choose(wanted, FlatCosts(known=False), 100) == dict.fromkeys(wanted, 4)
    assert models.choose(wanted, FlatCosts(), 100) == dict.fromkeys(wanted, 4)
    models.propose(dict.fromkeys(wanted, 4))
    assert models.spent_s == pytest.approx(4 * 0.0021)
    models.committed()
    assert models.spent_s == 0


def test_what_drafts_on_the_device_took_is_learned_when_they_have_come_back() -> None:
    models, wanted = ModelDrafts(Model(late=())), candidates()
    models.propose(dict.fromkeys(wanted, 4))
    assert models.asked
    assert not models.times.known
    for _ in range(2):
        models.settle()
        assert models.spent_s == pytest.approx(4 * 0.0021), "and once only"
    assert models.times.known
    models.committed()
    assert (models.asked, models.spent_s) == (False, 0)


@pytest.mark.parametrize(("right", "least", "most"), [(ALL, 6, 8), (2, 1, 4)])
def test_the_better_it_is_the_more_is_asked_of_it(right: int, least: int, most: int) -> None:
    models, wanted = ModelDrafts(Model()), candidates()
    for _ in range(60):
        chosen = turn(models, wanted, FlatCosts(), right)
    assert least <= next(iter(chosen.values())) <= most


@pytest.mark.parametrize(("step_s", "right"), [(0.002, 0), (0.012, ALL)])
def test_it_is_not_asked_where_it_does_not_pay(step_s: float, right: int) -> None:
    """Its tokens are wrong; or its passes take longer than those of the model."""
    model = Model(step_s)
    models, wanted, costs = ModelDrafts(model), candidates(), FlatCosts()
    for _ in range(50):
        turn(models, wanted, costs, right)
    model.asked.clear()
    for _ in range(4000):
        turn(models, wanted, costs, right)
    spent_s = sum(model.asked) * (step_s + 0.0001)
    assert spent_s <= 1.1 * SHARE * 4000 * costs.base_s
    assert bool(model.asked) == (right == 0), "texts change; but a model that is too slow stays so"
    assert not models.worth_waiting(wanted, costs, 8)


def test_it_fades_where_positions_are_dear_and_comes_back() -> None:
    models, wanted = ModelDrafts(Model()), candidates(32)
    for _ in range(30):
        turn(models, wanted, FlatCosts(32), ALL)
    assert turn(models, wanted, FlatCosts(32), ALL)
    assert models.worth_waiting(wanted, FlatCosts(32), 8)
    dear = FlatCosts(32, position_s=0.02)
    assert not models.choose(wanted, dear, 1000)
    assert not models.worth_waiting(wanted, dear, 8)
    assert turn(models, wanted, FlatCosts(32), ALL)


def test_it_is_asked_again_when_its_tokens_become_right() -> None:
    models, wanted = ModelDrafts(Model()), candidates()
    for _ in range(300):
        turn(models, wanted, FlatCosts(), 0)
    assert sum(bool(turn(models, wanted, FlatCosts(), ALL)) for _ in range(4000)) > 2000


def test_what_it_must_compute_first_has_to_be_worth_it() -> None:
    model = Model(position_s=0.001)
    models = ModelDrafts(model)
    near, far, never = candidates(3)
    for _ in range(30):
        turn(models, {near: 8}, FlatCosts(), ALL)
        model.missing = {"r0": 40}  # so that it knows what positions take
    model.missing = {"r0": NEAR, "r1": 3000, "r2": math.inf}
    wanted = dict.fromkeys((near, far, never), 8)
    assert models.choose(wanted, FlatCosts(3), 1000).keys() == {near}
    far.tokens += [1] * 3000  # it has got many tokens, and is expected to get as many again
    far.allow(10_000)
    far.planned = len(far.tokens) - 1
    assert LIKELY < 3000
    assert models.choose(wanted, FlatCosts(3), 1000).keys() == {near, far}
    far.allow(3010)  # it ends soon
    assert models.choose(wanted, FlatCosts(3), 1000).keys() == {near}


def test_a_wait_in_vain_is_not_repeated_at_once() -> None:
    models, wanted = ModelDrafts(Model()), candidates()
    for _ in range(30):
        turn(models, wanted, FlatCosts(), ALL)
    assert models.worth_waiting(wanted, FlatCosts(), 8)
    models.in_vain()
    waits = [models.worth_waiting(wanted, FlatCosts(), 8) for _ in range(40)]
    assert not any(waits[:16])
    assert all(waits[16:])


def test_a_pass_without_room_for_a_token_of_each_has_none() -> None:
    assert not ModelDrafts(Model()).choose(candidates(5), FlatCosts(5), 4)


def test_drafts_of_others_say_nothing_of_it() -> None:
    models, [request] = ModelDrafts(Model()), candidates()
    before = models._rate(request)
    models.learn(request, Draft([1, 2], [0.5, 0.5], (("suffix", 2),)), 0, 2)
    assert models._rate(request) == before
    models.learn(request, Draft([1, 2], [0.5, 0.5], (("draft", 2),)), 1, 1)  # the second is not known yet
    assert models._rate(request) > before
