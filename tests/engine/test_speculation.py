"""Speculation through the whole engine: every preset with a ragged layout, every drafter, one and two passes in flight.

Schedulers are made from a config, as the program makes them. Memory is tiny, so that requests are preempted; there are
aborts, stops, several samples, tenants and grammars. The oracle says what every request must get without any of it.
"""

import pytest

from shoal.config.engine import EngineConfig
from shoal.config.presets import PRESETS
from shoal.core.clock import VirtualClock
from shoal.core.params import SamplingParams
from shoal.core.request import Group, State
from shoal.engine.loop import EngineLoop
from shoal.errors import ImpossiblePair
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.sched.scheduler import Scheduler
from shoal.spec.make import make_drafter
from tests.draft_fakes import checked_drafter
from tests.effort import covering
from tests.engine.test_masks import Run, Watchful
from tests.fakes import VOCAB, FakeGrammar, make_request

RAGGED = sorted(name for name, preset in PRESETS.items() if preset.settings["layout"] == "ragged")
DRAFTERS = ["ngram", "suffix", "grammar", "grammar+suffix", "ngram+suffix", "draft", "grammar+suffix+draft"]
KINDS = [*((name, False) for name in DRAFTERS), ("draft", True), ("grammar+suffix+draft", True)]  # … on the device


class Slow(Watchful):
    """Passes take time, so that the policy knows what positions cost: here next to nothing."""

    def result(self):  # type: ignore[no-untyped-def]
        self.pass_s = lambda positions: 0.01 + 1e-5 * positions
        return super().result()


def scheduler_of(
    preset: str, speculate: str, blocks: int = 18, fails_at: int = -1, on_device: bool = False, **more: object
) -> Scheduler:
    config = EngineConfig.from_mapping(
        {
            "preset": preset,
            "speculate": speculate,
            "draft_layers": 1 if "draft" in speculate else None,
            "block_size": 4,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 48,
            "draft_tokens": 6,
            **more,
        }
    )
    limits = Limits(120, config.slots, config.pass_tokens, VOCAB)
    drafter = make_drafter(config.speculation) if config.speculation.on else None
    model = None
    if config.speculation.model:
        sizes = blocks, config.block_size, limits.rows, config.draft_tokens
        model = checked_drafter(*sizes, fails_at=fails_at, on_device=on_device)
    return make_scheduler(config, limits, blocks, drafter=drafter, model=model)


def drive(
    scheduler: Scheduler,
    depth: int,
    kind: type[Watchful] = Slow,
    bad: dict[int, str] | None = None,
    grammars: bool = True,
) -> Run:
    executor = kind(scheduler.kv.pool.total, scheduler.kv.block_size, bad)
    run = Run(EngineLoop(scheduler, executor, VirtualClock(), depth=depth, check=True), executor)
    for number in range(36):
        prompt = [number % 3, 4, 5] * 2 + [number % 7, number % 5] * (1 + number % 4)
        params = SamplingParams(
            max_tokens=6 + number % 24, min_tokens=number % 5, logprobs=1 if number % 6 == 1 else None
        )
        stop = frozenset({1, 2, 3, 40}) if number % 5 == 2 else frozenset()
        samples = 2 if number % 7 == 3 else 1
        group = Group(f"g{number}") if samples > 1 else None
        for sample in range(samples):
            grammar = FakeGrammar(number, 20) if number % 3 == 0 and grammars else None
            more = {"seed": number, "sample": sample, "stop_ids": stop, "group": group, "grammar": grammar}
            tenant = "ab"[number % 2]
            run.submit(make_request(f"r{number}.{sample}", prompt, params=params, tenant=tenant, salt=tenant, **more))
        run.turn()
        if number % 8 == 7:
            run.loop.abort(f"r{number - 1}.0")
    run.drain()
    if run.requests.keys() - run.ended.keys():
        run.turn()
    run.verify()
    return run


@pytest.mark.parametrize(("speculate", "on_device", "preset", "depth"), covering(KINDS, RAGGED, [1, 2]))
def test_every_request_gets_its_tokens(preset: str, speculate: str, on_device: bool, depth: int) -> None:
    run = drive(scheduler_of(preset, speculate, on_device=on_device), depth)
    for name in speculate.split("+"):  # a draft model is asked where the others find nothing
        assert run.accepted[name] > (10 if name != "draft" or speculate == "draft" else 0), "nothing was verified"
    if scheduler_of(preset, speculate).policies.memory.__class__.__name__ == "OnDemand":
        assert run.preemptions > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_every_order_and_budget_and_lane_goes_with_drafts(depth: int) -> None:
    tiers = '{"premium": {"ttft": 3, "itl": 1, "weight": 2}, "batch": {}}'
    for more in (
        {"order": "fair"},
        {"order": "sjf"},
        {"order": "priority"},
        {"order": "slo", "tiers": tiers},
        {"budget": "promise", "tiers": tiers},
        {"lane_tokens": 20},
        {"prefix_caching": False},
        {"memory": "predict"},
    ):
        run = drive(scheduler_of("shoal", "grammar+suffix", **more), depth)  # type: ignore[arg-type]
        assert run.accepted["suffix"] > 10, more


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", ["forward", "sample", "result"])
def test_a_pass_with_drafts_that_fails_is_tried_again(call: str, depth: int) -> None:
    run = drive(scheduler_of("shoal", "grammar+suffix"), depth, bad={9: call, 23: call, 24: call})
    assert run.accepted["suffix"] > 10


def test_the_same_traffic_gives_the_same_plans() -> None:
    """The policy has no clock and no chance in it."""
    calls = [drive(scheduler_of("shoal", "grammar+suffix"), 2).executor.calls for _ in range(2)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("more", [{}, {"prefix_caching": False}])
def test_a_draft_model_drafts_from_valid_kv_only(more: dict[str, object], on_device: bool, depth: int) -> None:
    """Each of its calls is checked: see draft_fakes. Blocks come from the prefix cache and from other requests, and
    drafts are rejected, while the draft model computes a few positions at a time. (Swapping: see test_draft_rules.)"""
    scheduler = scheduler_of("shoal", "draft", on_device=on_device, **more)  # type: ignore[arg-type]
    run = drive(scheduler, depth, grammars=not on_device)
    drafter = scheduler.policies.drafts.models._drafter  # type: ignore[attr-defined]
    assert run.preemptions > 0
    assert run.accepted["draft"] > 50
    assert run.executor.rejected_drafts > 20
    assert drafter.reused > 1000
    assert drafter.named > 50 or more.get("prefix_caching") is False, "no block was computed for another request"
    assert not drafter._lives, "a request that has ended is not forgotten"
    assert drafter.stayed == (len(drafter.device.plans) if on_device else 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_draft_model_that_fails_is_not_asked_again(
    on_device: bool, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = scheduler_of("shoal", "draft", fails_at=20, on_device=on_device)
    run = drive(scheduler, depth, grammars=not on_device)
    drafter = scheduler.policies.drafts.models._drafter  # type: ignore[attr-defined]
    assert "the draft model failed" in caplog.text
    assert 21 <= len(drafter.device.plans) <= (21 + 5 if on_device else 21), "more than what was queued"
    assert run.accepted["draft"] > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", ["forward", "sample", "result"])
def test_a_pass_that_fails_with_drafts_on_the_device_is_tried_again(call: str, depth: int) -> None:
    scheduler = scheduler_of("shoal", "draft", on_device=True)
    run = drive(scheduler, depth, bad={9: call, 23: call, 24: call}, grammars=False)
    assert run.accepted["draft"] > 10


@pytest.mark.parametrize("speculate", ["off", "suffix"])
def test_drafts_are_not_the_reason_for_a_preemption(speculate: str) -> None:
    """Requests that fit to their ends, with one block each to spare, are never preempted."""
    scheduler = scheduler_of("shoal", speculate, blocks=4 * 11, watermark=0.0, prefix_caching=False)
    executor = Slow(scheduler.kv.pool.total, scheduler.kv.block_size)
    run = Run(EngineLoop(scheduler, executor, VirtualClock(), depth=1, check=True), executor)
    for number in range(4):
        run.submit(make_request(f"r{number}", [number, 7, 8, 9], 40, seed=number))
    run.drain()
    run.verify()
    assert run.preemptions == 0
    assert speculate == "off" or run.accepted["suffix"] > 20


def test_a_drafted_request_that_is_aborted_leaves_nothing() -> None:
    scheduler = scheduler_of("shoal", "suffix", blocks=60)
    executor = Slow(scheduler.kv.pool.total, scheduler.kv.block_size)
    run = Run(EngineLoop(scheduler, executor, VirtualClock(), depth=2, check=True), executor)
    run.submit(make_request("a", [1, 2, 3] * 6, 60, seed=1))
    run.submit(make_request("b", [4, 5, 6] * 6, 60, seed=2))
    while not any(flight.drafts for flight in scheduler.flights) and run.requests["a"].outputs < 50:
        plan = scheduler.plan(0.0)
        if plan is not None:
            executor.forward(plan)
            executor.sample(scheduler.masks())
        if not any(flight.drafts for flight in scheduler.flights):
            scheduler.commit(executor.result(), 0.0)
    assert scheduler.abort("a")
    events = scheduler.commit(executor.result(), 0.0)
    scheduler.check()
    assert "a" not in events.owners
    assert scheduler.requests["b"].state is State.RUNNING
    policy = scheduler.policies.drafts
    assert policy.counts(run.requests["a"]) == (0, 0)


@pytest.mark.parametrize("layout", ["padded", "shrink"])
def test_rectangles_are_refused(layout: str) -> None:
    with pytest.raises(ImpossiblePair, match=f"layout={layout} with speculate=suffix.*use layout=ragged"):
        EngineConfig(layout=layout, speculate="suffix")
    EngineConfig(layout=layout, speculate="off")


def test_padded_presets_are_refused_with_drafts() -> None:
    for name in PRESETS.keys() - set(RAGGED):
        with pytest.raises(ImpossiblePair, match="speculate=ngram"):
            EngineConfig.from_mapping({"preset": name, "speculate": "ngram"})
