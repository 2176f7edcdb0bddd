"""Speculation on virtual time: the engine's own policy and drafter, an acceptance rate, and the costs of several
positions per row."""

import numpy as np
import pytest

from shoal.core.plan import StepPlan
from shoal.sched.speculation import Speculation
from shoal.sim.cost import Coin, CostModel, DeviceTimes, PassSize
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import ClosedArrivals, OpenArrivals, VirtualServer
from shoal.spec.synthetic import SyntheticDrafter
from shoal.workload.traces import TraceRequest
from tests.sim.made import COSTS, Seen, engine, trace


def pass_of(starts: list[int], counts: list[int], draws: list[int]) -> StepPlan:
    rows = np.arange(len(starts))
    none, lists = np.empty((0, 3), dtype=np.int64), (starts, counts, draws, [0] * sum(counts))
    return StepPlan(0, (), none, rows, rows, *(np.array(one, dtype=np.int64) for one in lists))


def run(
    requests: list[TraceRequest], speculate: str, costs: CostModel = COSTS, **more: object
) -> tuple[Seen, float, int]:
    loop = engine(costs, speculate=speculate, **more)  # type: ignore[arg-type]
    seen = Seen()
    end_s = VirtualServer([loop], seen, RequestMaker(300, 16)).run(OpenArrivals(requests))
    return seen, end_s, len(seen.passes)


def test_rows_that_verify_drafts_are_decodes_of_several_positions() -> None:
    size = PassSize.of(pass_of([10, 20], [4, 1], [4, 1]))
    assert (size.positions, size.rows, size.draws, size.pairs, size.prompts) == (5, 2, 5, 0, False)
    assert size.reads == 14 + 21
    size = PassSize.of(pass_of([10, 0, 7], [4, 8, 1], [4, 1, 1]))
    assert size.prompts
    assert size.pairs == 36, "of the prompt alone"
    costs = CostModel(DeviceTimes(((1, 0.010), (11, 0.020)), ((1, 9.0),), draw_s=0.001))
    assert costs.device_s(PassSize.of(pass_of([10], [6], [6]))) == pytest.approx(0.015 + 0.006)


def test_the_policy_and_the_drafter_are_the_engines_own() -> None:
    policy = engine(speculate="synthetic:0.7").scheduler.policies.drafts
    assert type(policy) is Speculation
    assert type(policy.drafter) is SyntheticDrafter


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chance", [0.05, 0.7, 1.0])
def test_every_answer_has_its_length(chance: float, depth: int) -> None:
    requests = trace(40, rate=4, outputs=60)
    seen, _, _ = run(requests, f"synthetic:{chance}", depth=depth)
    for number, one in enumerate(requests):
        assert len(seen.token_s[number]) == one.output
        assert seen.reasons[number] == "stop"


def test_memory_may_be_short() -> None:
    requests = trace(60, rate=40, longest=300)
    seen, _, _ = run(requests, "synthetic:0.8", blocks=60, max_preemptions=3)
    assert [len(seen.token_s[number]) for number in range(60)] == [one.output for one in requests]


def test_a_row_yields_what_the_acceptance_rate_says() -> None:
    """With k drafts that are each right with chance p, a pass yields 1 + p + … + p^k tokens."""
    constant = CostModel(DeviceTimes(((1, 0.010), (64, 0.0101)), ((1, 0.010),)))
    one = [TraceRequest(0.0, 10, 250)]
    passes = {chance: run(one, f"synthetic:{chance}", constant, draft_tokens=4)[2] for chance in (0.5, 0.9)}
    for chance, found in passes.items():
        yielded = sum(chance**place for place in range(5))
        assert found == pytest.approx(250 / yielded, rel=0.2)
    assert passes[0.9] < passes[0.5]


def test_drafts_pay_for_one_user_and_are_left_out_where_they_do_not() -> None:
    costly = CostModel(DeviceTimes(((1, 0.001), (101, 0.101)), ((1, 0.001), (101, 0.101))))  # every position 1 ms
    one = [TraceRequest(0.0, 10, 250)] * 8  # one user, one after the other
    spent = {}
    for name, costs in (("cheap", COSTS), ("costly", costly)):
        for speculate in ("off", "synthetic:0.8"):
            loop, seen = engine(costs, check=False, speculate=speculate), Seen()
            spent[name, speculate] = VirtualServer([loop], seen, RequestMaker(300, 16)).run(ClosedArrivals(one, 1))
    assert spent["cheap", "synthetic:0.8"] < 0.5 * spent["cheap", "off"]
    assert spent["costly", "synthetic:0.8"] < 1.2 * spent["costly", "off"], "they are tried, and no more"


def test_the_coin_is_the_same_for_the_same_request_and_position() -> None:
    seeds, positions = np.repeat(np.arange(50), 40), np.tile(np.arange(40), 50)
    tossed = Coin(0.3).tossed(seeds, positions)
    assert (tossed == Coin(0.3).tossed(seeds, positions)).all()
    assert tossed.mean() == pytest.approx(0.3, abs=0.04)
    assert not Coin(0.0).tossed(seeds, positions).any()
    assert Coin(1.0).tossed(seeds, positions).all()
