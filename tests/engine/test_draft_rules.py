"""Several tokens per row and pass: the busy load with drafts, and their rules broken on purpose."""

import pytest

from shoal.core.events import PassEvents
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Request, State
from shoal.sched.scheduler import Scheduler
from tests.engine.traffic import Run, busy
from tests.fakes import FakeExecutor, make_request, make_scheduler


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("when_short", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_busy_load_verifies_drafts(depth: int, when_short: str, batching: str) -> None:
    """So that random traffic is known to accept and to reject drafts, with and without passes planned on top."""
    config = {"batching": batching, "group_size": 6, "when_short": when_short, "host_blocks": 30, "order": "fair"}
    run = busy(depth=depth, drafts=4, **config)
    assert run.executor.accepted_drafts > 50
    assert run.executor.rejected_drafts > 50
    assert run.preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_drafts_make_fewer_passes_and_wrong_ones_change_no_token(depth: int) -> None:
    def passes(**config: object) -> tuple[int, dict[str, list[int]]]:
        run = Run(make_scheduler(blocks=200, max_num_batched_tokens=64, **config), depth)  # type: ignore[arg-type]
        for number in range(6):
            prompt, stop = [number, 7, 8, 9, 5], frozenset({40 + number})
            run.submit(make_request(f"r{number}", prompt, 24, seed=number, stop_ids=stop))
        run.drain()
        run.verify()
        return run.passes, run.told

    plain, drafted, misled = passes(), passes(drafts=4, wrong_drafts=0), passes(drafts=4, wrong_drafts=1)
    assert drafted[0] < 0.8 * plain[0]
    assert misled[0] <= plain[0] + depth
    assert plain[1] == drafted[1] == misled[1]


def test_drafts_take_only_what_is_left_and_preempt_no_request() -> None:
    scheduler = make_scheduler(blocks=6, block_size=4, max_num_batched_tokens=9, drafts=4, wrong_drafts=0, watermark=0)
    run = Run(scheduler, depth=1)
    run.submit(make_request("decoding", [1] * 4, 12, seed=2))
    assert run.begin()
    assert run.finish()
    run.submit(make_request("prompt", [2] * 20, 1, seed=3))
    assert run.begin()
    counts = dict(zip(scheduler.newest_ids, scheduler.flights[-1].plan.counts.tolist(), strict=True))
    assert counts["prompt"] == 8 if "prompt" in counts else counts["decoding"] > 1
    run.drain()
    run.verify()
    assert run.preemptions == 0


def test_nothing_is_drafted_past_max_tokens() -> None:
    run = Run(make_scheduler(drafts=4, wrong_drafts=0, max_num_batched_tokens=64), depth=2)
    run.submit(make_request("short", [1] * 3, 2, seed=1), make_request("long", [2] * 3, 9, seed=2))
    most: dict[str, int] = {}
    while not run.scheduler.idle:
        plan = run.scheduler.plan(run.now_s)
        if plan is not None:
            for id, draws in zip(run.scheduler.newest_ids, plan.draws.tolist(), strict=True):
                most[id] = max(most.get(id, 0), draws)
            run.executor.forward(plan)
            run.executor.sample(run.scheduler.masks())
        run.finish()
    assert most["short"] == 1, "its second token is its last"
    assert most["long"] > 2
    assert [len(run.told[id]) for id in ("short", "long")] == [2, 9]


class ForgetsRejections(Scheduler):
    """Breaks the rule: what was planned for rejected tokens counts as computed."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.committer._reject = lambda request, rejected, end, alive: end  # type: ignore[method-assign]


class CorrectsOnePass(Scheduler):
    """Breaks the rule: passes planned on top of rejected tokens are not corrected."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.committer._reject = self.reject  # type: ignore[method-assign]

    def reject(self, request: Request, rejected: int, end: int, alive: bool) -> int:
        if alive:
            request.planned -= rejected
        return end - rejected


class PublishesDrafts(Scheduler):
    """Breaks the rule: blocks are published as far as they were computed, rejected tokens included."""

    def commit(self, result: StepResult, now_s: float) -> PassEvents:
        flight = self.flights[0]
        events = super().commit(result, now_s)
        for request, end, draws in zip(flight.requests, flight.ends, flight.draws, strict=True):
            if draws > 1 and request.state is State.RUNNING:
                padded = request.tokens + [0] * (end - len(request.tokens))
                self.kv.publish(request.holding, padded, min(end, request.holding.capacity))
        return events


class CountsOnDrafts(FakeExecutor):
    """Breaks the rule: a pass starts where it was planned, whatever was rejected since."""

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        self.rejected_then[plan.step] = [0] * len(plan.rows)

    def _verify(self, *args: object) -> list[int]:
        drawn = super()._verify(*args)  # type: ignore[arg-type]
        self.rejected.update(dict.fromkeys(self.rejected, 0))
        return drawn


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("broken", [ForgetsRejections, CorrectsOnePass, PublishesDrafts])
def test_a_broken_rule_of_drafts_is_noticed(broken: type[Scheduler], depth: int) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        busy(kind=broken, depth=depth, drafts=4)


class Impatient(Scheduler):
    """Breaks the rule: passes are planned on top of drafts that were made from the committed tokens."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        waits = self.policies.drafts.waits
        self.policies.drafts.waits = (  # type: ignore[method-assign]
            lambda flights: waits(flights) and not any(flight.drafts for flight in flights)
        )


@pytest.mark.parametrize(
    ("broken", "depth"), [(ForgetsRejections, 1), (PublishesDrafts, 1), (PublishesDrafts, 2), (Impatient, 2)]
)
@pytest.mark.parametrize("speculate", ["ngram", "suffix"])
def test_a_broken_rule_of_real_drafters_is_noticed(broken: type[Scheduler], depth: int, speculate: str) -> None:
    busy(depth=depth, speculate=speculate)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        busy(kind=broken, depth=depth, speculate=speculate)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_device_that_counts_on_its_drafts_is_noticed(depth: int) -> None:
    with pytest.raises(AssertionError, match="another position"):
        busy(device=CountsOnDrafts, depth=depth, drafts=4)
