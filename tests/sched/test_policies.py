"""Promises, lanes, headroom and what happens when memory is short, on a virtual clock."""

import random
from collections.abc import Callable

import pytest

from shoal.core.request import Reason, Request, State
from shoal.core.tiers import DEFAULT, Tiers
from shoal.errors import BadConfig, BadParameter, UnknownName
from shoal.obs.metrics import EngineMetrics
from shoal.sched.preempt import How
from shoal.sched.queue import PATIENCE
from shoal.sched.scheduler import Scheduler
from shoal.sched.steptime import StepModel
from tests.effort import covering
from tests.fakes import make_request, make_scheduler
from tests.virtual import Costs, Sim, scripted

TIERS: dict[str, dict[str, object]] = {
    "premium": {"ttft": 0.3, "itl": 0.04, "weight": 3},
    "standard": {"ttft": 2.0, "weight": 2},
    "batch": {},
}
ROOMY: dict[str, object] = {
    "blocks": 4000, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 32, "max_num_batched_tokens": 256,
}  # fmt: skip


def made(**config: object) -> Scheduler:
    return make_scheduler(**{**ROOMY, **config})  # type: ignore[arg-type]


def chat(count: int, rate: float, seed: int = 0, **more: object) -> list[tuple[float, Request]]:
    """Requests with lengths as chats have them, one by one."""
    chance = random.Random(seed)
    now_s, found = 0.0, []
    for number in range(count):
        now_s += chance.expovariate(rate)
        prompt = min(400, max(4, int(chance.lognormvariate(4.2, 1.0))))
        output = min(200, max(2, int(chance.lognormvariate(3.8, 0.9))))
        found.append((now_s, scripted(f"r{number}", prompt, output, 200, **more)))
    return found


# ---- reading tiers ------------------------------------------------------------------------------------------------


def test_tiers_are_ranked_as_they_are_listed_and_a_request_without_one_is_standard() -> None:
    tiers = Tiers.read(DEFAULT)
    assert [(tier.name, tier.rank) for tier in tiers] == [("premium", 0), ("standard", 1), ("batch", 2)]
    assert tiers.of("").name == "standard"
    assert Tiers.read({"a": {}, "b": {}}).of("").name == "b"
    with pytest.raises(BadParameter, match="known tiers: premium, standard, batch"):
        tiers.of("gold")
    with pytest.raises(BadParameter, match="--tiers"):
        Tiers().of("gold")


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({}, "1 to 16"),
        ([1], "table"),
        ({"a": 5}, "table of values"),
        ({"a": {"ttft": 0}}, "above 0"),
        ({"a": {"itl": float("nan")}}, "above 0"),
        ({"a": {"ttft": "soon"}}, "above 0"),
        ({"a": {"weight": 1e9}}, "between"),
        ({"a": {"longest": 1.5}}, "whole"),
        ({"a": {"reject_late": 1}}, "true or false"),
        ({"a": {"reject_late": True}}, "ttft"),
    ],
)
def test_a_tier_that_means_nothing_is_refused(table: object, match: str) -> None:
    with pytest.raises(BadConfig, match=match):
        Tiers.read(table)  # type: ignore[arg-type]


def test_a_value_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="did you mean 'ttft'"):
        Tiers.read({"a": {"tfft": 1}})


# ---- how long passes take -----------------------------------------------------------------------------------------


def test_the_step_model_finds_what_the_passes_cost() -> None:
    chance, model = random.Random(1), StepModel()
    for _ in range(300):
        tokens, read = chance.choice([8, 16, 32, 200, 500]), chance.randrange(100, 5000)
        model.learn(tokens, read, (0.01 + 0.0004 * tokens + 2e-6 * read) * chance.uniform(0.95, 1.05))
    constant, per_token, per_read = model.coefficients
    assert constant == pytest.approx(0.01, rel=0.15)
    assert per_token == pytest.approx(0.0004, rel=0.1)
    assert per_read == pytest.approx(2e-6, rel=0.3)


def test_many_decodes_do_not_wash_out_what_a_prompt_costs() -> None:
    model = StepModel()
    for tokens in (512, 256, 512, 128, 300):
        model.learn(tokens, tokens, 0.01 + 0.001 * tokens)
    for _ in range(5000):
        model.learn(8, 800, 0.018)
    assert model.tokens_within(0.11, 800) == pytest.approx(100, abs=12)


def test_it_follows_a_machine_that_gets_slower() -> None:
    model = StepModel()
    for slower in (1.0, 3.0):
        for number in range(200):
            tokens = (8, 64, 256)[number % 3]
            model.learn(tokens, 100, slower * (0.01 + 0.001 * tokens))
    assert model.seconds(128, 100) == pytest.approx(3 * 0.138, rel=0.1)


def test_a_quota_of_half_a_core_is_no_surprise() -> None:
    """Linux stops the process for the rest of a period when its quota is used up: most passes take their CPU time, and
    some 50 ms more. The model predicts what they take on average, at any time."""
    model, now_s, left_s = StepModel(), 0.0, 0.05

    def take(cpu_s: float) -> float:
        """Seconds until so much CPU time was given: 50 ms in each period of 100 ms."""
        nonlocal now_s, left_s
        begun_s = now_s
        while cpu_s > left_s:
            cpu_s -= left_s
            now_s, left_s = 0.1 * (int((now_s + left_s) / 0.1 + 1e-9) + 1), 0.05
        now_s, left_s = now_s + cpu_s, left_s - cpu_s
        return now_s - begun_s

    ratios = []
    for number in range(1, 600):
        tokens = 128 if number % 12 == 0 else 8
        model.learn(tokens, 100, take(0.002 + 0.001 * tokens), prompts=tokens > 8)
        if number > 100:
            ratios.append((model.seconds(8, 100) / 0.020, model.seconds(128, 100) / 0.260))
    for one in zip(*ratios, strict=True):
        assert min(one) > 0.5
        assert max(one) < 2.0
        assert sum(one) / len(one) == pytest.approx(1.0, abs=0.15)
    assert model.miss < 1.5


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_times_that_mean_nothing_are_not_learned(seconds: float) -> None:
    model = StepModel()
    model.learn(5, 5, seconds)
    assert model.passes == 0
    assert model.coefficients == (0.0, 0.0, 0.0)


def test_noise_gives_no_negative_costs() -> None:
    chance = random.Random(3)
    for seed in range(50):
        model = StepModel()
        for _ in range(3 + seed % 20):
            model.learn(chance.randrange(1, 600), chance.randrange(10_000), chance.uniform(1e-4, 1.0))
        assert min(model.coefficients) >= 0
        assert model.tokens_within(0.5, 100) >= 0


# ---- slo ----------------------------------------------------------------------------------------------------------


def starts(sim: Sim) -> list[str]:
    return [one.id for events in sim.records for one in events.admitted if not one.resumed]


def test_a_higher_tier_goes_first_and_a_lower_one_after_every_weight_of_them() -> None:
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=1)
    waiting = [scripted(f"b{number}", 4, 1, tier="batch") for number in range(4)]
    waiting += [scripted(f"p{number}", 4, 1, tier="premium") for number in range(8)]
    order = starts(Sim(scheduler, check=True).run((0.0, one) for one in waiting))
    assert order == ["p0", "p1", "p2", "b0", "p3", "p4", "p5", "b1", "p6", "p7", "b2", "b3"]


def test_three_tiers_share_by_their_weights_all_the_way_down() -> None:
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=1)
    waiting = [scripted(f"{tier[0]}{number}", 4, 1, tier=tier) for tier in TIERS for number in range(30)]
    order = "".join(id[0] for id in starts(Sim(scheduler).run((0.0, one) for one in waiting)))
    assert order.startswith("ppps" + "ppps" + "pppb" + "ppps" + "ppps" + "pppb")


def test_within_a_tier_the_least_slack_goes_first() -> None:
    """A long prompt must start earlier to speak in time."""
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=1)
    for tokens in range(1, 40):
        scheduler.policies.steps.learn(tokens * 6, 0, 0.010 + 0.0005 * tokens * 6)
    sim = Sim(scheduler)
    short, long = scripted("short", 8, 1, tier="standard"), scripted("long", 2000, 1, tier="standard")
    first = scripted("first", 8, 20, tier="standard")
    sim.run([(0.0, first), (0.01, short), (0.02, long)])
    assert starts(sim) == ["first", "long", "short"]


def test_a_premium_request_never_waits_behind_the_queue_of_a_lower_tier() -> None:
    """However long that queue is: what it waits for is who runs, and one lower request for `weight` of its own."""
    for queue in (20, 200):
        scheduler = made(order="slo", tiers=TIERS, max_num_seqs=4)
        lower = [(0.0, scripted(f"b{number}", 16, 40, tier="batch")) for number in range(queue)]
        premium = [(1.0 + 0.5 * number, scripted(f"p{number}", 16, 4, tier="premium")) for number in range(5)]
        sim = Sim(scheduler, check=queue == 20).run(lower + premium)
        assert max(sim.seen[f"p{number}"].ttft_s for number in range(5)) <= 0.3
        for number in range(5):
            arrived = next(at for at, one in enumerate(sim.records) if f"p{number}" in one.arrived)
            began = next(at for at, one in enumerate(sim.records) if f"p{number}" in [a.id for a in one.admitted])
            let_past = [a.id for one in sim.records[arrived:began] for a in one.admitted if a.id.startswith("b")]
            assert len(let_past) <= 1, f"{let_past} of the batch tier went before p{number}"
        assert len(starts(sim)) == queue + 5


def test_a_promise_that_would_break_takes_the_place_of_a_lower_tier() -> None:
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=2)
    sim = Sim(scheduler, check=True)
    batch = [(0.0, scripted(f"b{number}", 16, 300, 300, tier="batch")) for number in range(2)]
    sim.run([*batch, (1.0, scripted("p", 16, 5, tier="premium"))])
    assert sim.seen["p"].ttft_s <= 0.3
    lost = [one.id for events in sim.records for one in events.preempted]
    assert len(lost) == 1
    assert all(len(sim.seen[id].token_s) == 300 for id in ("b0", "b1")), "who gave way did not come back"


def test_a_request_that_can_wait_preempts_no_other() -> None:
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=2)
    sim = Sim(scheduler)
    batch = [(0.0, scripted(f"b{number}", 16, 60, tier="batch")) for number in range(2)]
    sim.run([*batch, (0.5, scripted("s", 16, 5, tier="standard"))])
    assert sim.preemptions == 0
    assert sim.seen["s"].ttft_s <= 2.0


@pytest.mark.parametrize("order", ["slo", "fair", "priority", "sjf"])
def test_a_giant_prompt_does_not_fill_the_passes_of_requests_ahead_of_it(order: str) -> None:
    """Its chunks leave room in each pass for a newcomer of a higher tier, a less served tenant, a shorter job …"""
    scheduler = made(order=order, tiers=TIERS, max_num_seqs=8)
    sim = Sim(scheduler, check=True)
    giant = scripted("giant", 4000, 3, tier="batch", priority=9, tenant="large")
    small = [(0.3 + 0.2 * number, scripted(f"p{number}", 40, 3, tier="premium", tenant="small")) for number in range(5)]
    sim.run([(0.0, giant), *small])
    assert sim.seen["giant"].ttft_s > 1.2, "its prompt is over before the others come: this test says nothing"
    pass_s = 0.010 + 256 * 0.0005
    # the pass under way and its own; under fair, who comes stands level with who is there, and may have to let him past
    most = 3 if order == "fair" else 2
    assert max(sim.seen[f"p{number}"].ttft_s for number in range(5)) <= most * pass_s
    full = [one.computed_tokens for one in sim.records if "giant" in one.scheduled_ids and one.committed_s < 1.2]
    assert min(full) == 256, "what the newcomers do not need is the giant's"


def test_a_giant_prompt_ends_under_an_endless_stream_of_requests_ahead_of_it() -> None:
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=32)
    sim = Sim(scheduler)
    stream = [(0.01 * number, scripted(f"p{number}", 250, 1, tier="premium")) for number in range(800)]
    sim.run([*stream[:5], (0.05, scripted("giant", 2000, 2, tier="batch")), *stream[5:]])
    passes = [one for one in sim.records if "giant" in one.scheduled_ids]
    quarter = 256 // 4
    assert len(passes) <= 2000 // quarter + 2
    assert sim.seen["giant"].token_s[-1] < stream[-1][0]


def test_headroom_under_fair_is_for_tenants_with_less_than_their_part() -> None:
    scheduler = made(order="fair", max_num_seqs=8, headroom=0.13)
    sim = Sim(scheduler, check=True)
    flood = [(0.0, scripted(f"f{number}", 16, 100, tenant="flood")) for number in range(30)]
    calm = [(0.5 + 0.3 * number, scripted(f"c{number}", 16, 60, tenant="calm")) for number in range(3)]
    sim.run([*flood, *calm])
    flooding = [sum(id[0] == "f" for id in one.scheduled_ids) for one in sim.records]
    assert max(flooding) == 7, "one of the eight places is kept"
    assert sim.seen["c0"].ttft_s <= 0.1, "nothing of its tenant ran"


def test_no_request_is_preempted_for_its_own_tier() -> None:
    scheduler = made(order="slo", tiers=TIERS, max_num_seqs=2)
    sim = Sim(scheduler).run((0.0, scripted(f"p{number}", 16, 200, tier="premium")) for number in range(6))
    assert sim.preemptions == 0


def test_a_lower_tier_that_does_not_fit_lets_higher_ones_past_but_not_for_ever() -> None:
    """A batch request that needs nearly all blocks, and an endless stream of small premium ones."""
    scheduler = made(order="slo", tiers=TIERS, blocks=40, max_num_seqs=8, watermark=0.0)
    sim = Sim(scheduler, check=True)
    stream = [(0.1 + 0.05 * number, scripted(f"p{number}", 30, 20, tier="premium")) for number in range(600)]
    sim.run([*stream[:3], (0.22, scripted("giant", 600, 5, tier="batch")), *stream[3:]])
    waited_passes = sum(1 for events in sim.records if events.committed_s <= sim.seen["giant"].token_s[0])
    assert sim.seen["giant"].token_s[0] < sim.seen["p599"].arrived_s, "it starved"
    # PATIENCE of them pass it, one every 50 ms; then everybody who runs ends, and its prompt is computed
    assert waited_passes <= PATIENCE * 0.05 / 0.010 + 60


STREAMS: dict[str, tuple[float, float, Callable[[int], Request]]] = {  # one every so many seconds, until when, who
    "fcfs": (0.01, 4.0, lambda n: scripted(f"s{n}", 16, 4)),
    "priority": (0.01, 20.0, lambda n: scripted(f"s{n}", 16, 4, priority=-5)),
    "sjf": (0.002, 7.0, lambda n: scripted(f"s{n}", 2, 1, 1)),
    "fair": (0.01, 4.0, lambda n: scripted(f"s{n}", 16, 4, tenant=f"t{n % 7}")),
    "slo": (0.01, 5.0, lambda n: scripted(f"s{n}", 16, 4, tier="premium")),
}


@pytest.mark.parametrize("order", STREAMS)
@pytest.mark.parametrize("when_short", ["recompute", "swap"])
def test_no_request_starves_under_an_endless_stream_of_the_favoured(order: str, when_short: str) -> None:
    """The patient one speaks, and ends, although far more than can be served keep coming."""

    def scheduler() -> Scheduler:
        age = 200.0 if order == "sjf" else 0.5  # tokens' worth of work a second; seconds a step of priority
        return made(
            order=order, tiers=TIERS, max_num_seqs=4, blocks=24, age_s=age, when_short=when_short, host_blocks=64
        )

    def stream() -> list[tuple[float, Request]]:
        every_s, until_s, make = STREAMS[order]
        return [(every_s * number, make(number)) for number in range(round(until_s / every_s))]

    sim = Sim(scheduler())
    arrived_s = 0.4
    patient = scripted("patient", 60, 30, tier="batch", priority=5, tenant="patient")
    everybody = sorted([*stream(), (arrived_s, patient)], key=lambda one: one[0])
    sim.run(everybody)
    seen = sim.seen["patient"]
    longest_s = max(one.committed_s - one.planned_s for one in sim.records if one.scheduled_ids)
    one_of_them_s = 5 * longest_s  # a pass for the prompt and four for the answer
    start_s, again_s = bound_on_waiting(order, sim.scheduler, patient, stream, one_of_them_s)
    assert seen.token_s, "it never spoke"
    assert seen.ttft_s <= start_s + 2 * longest_s
    # a gap holds one pass, or giving way: waiting again, fetching or computing anew what it had
    assert max(seen.gaps_s) <= again_s + 3 * longest_s
    assert patient.preemptions <= sim.scheduler.tables.max_preemptions
    own_s = (patient.preemptions + 1) * 2 * longest_s + 30 * longest_s
    assert seen.token_s[-1] - arrived_s <= start_s + patient.preemptions * again_s + own_s
    assert seen.token_s[-1] < everybody[-1][0], "the stream ended before it: this test says nothing"
    assert max(one.waiting for one in sim.records) > len(everybody) / 10, "they could all be served: it says nothing"


def bound_on_waiting(
    order: str,
    scheduler: Scheduler,
    patient: Request,
    stream: Callable[[], list[tuple[float, Request]]],
    one_of_them_s: float,
) -> tuple[float, float]:
    """Seconds that it may wait for its first start, and after it gave way."""
    slots = scheduler.limits.max_num_seqs
    if order in ("fcfs", "priority", "sjf"):
        # all that can be ahead of it by their keys, served without it: then there is room
        policy = scheduler.policies.order
        came = stream()
        for number, (at_s, one) in enumerate(came):
            one.arrived_s, one.order = at_s, number
            policy.arrived(one)
        ahead = {one.id for _, one in came if policy.key(one)[0] < policy.key(patient)[0]}
        alone = Sim(made(order="fcfs", max_num_seqs=slots, blocks=24))
        alone.run([(at_s, one) for at_s, one in stream() if one.id in ahead])
        wait_s = max(alone.now_s - patient.arrived_s, 0.0) + one_of_them_s
        return wait_s, wait_s
    if order == "fair":  # whoever runs ends, and each other tenant may be served as much as one request costs
        wait_s = one_of_them_s * (1 + 7)
        return wait_s, wait_s
    weight = scheduler.policies.tiers.of("premium").weight
    wait_s = one_of_them_s * (1 + weight)  # whoever runs ends, `weight` of the higher tier pass, then it is its turn
    return wait_s, wait_s


def promises_not_kept(sim: Sim) -> int:
    metrics = EngineMetrics()
    for events in sim.records:
        metrics.take(events)
    return metrics.promises["premium", "ttft", "no"]


def test_refused_at_once_when_the_promise_cannot_be_kept() -> None:
    tiers = {"premium": {"ttft": 0.3, "reject_late": True}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers, max_model_len=3000)
    warm = [(0.05 * number, scripted(f"w{number}", 40 + 9 * number, 3, tier="batch")) for number in range(20)]
    giant, small = scripted("giant", 2500, 3, tier="premium"), scripted("small", 100, 3, tier="premium")
    sim = Sim(scheduler).run([*warm, (3.0, giant), (3.0, small)])
    assert sim.seen["giant"].refused == "PromiseBroken"
    assert sim.seen["small"].ttft_s <= 0.3
    refusal = next(one for events in sim.records for one in events.rejected)
    assert refusal.retry_after_s is not None
    assert refusal.retry_after_s >= 1.25
    assert "2500 tokens takes" in refusal.message
    assert promises_not_kept(sim) == 1


def test_refused_in_the_queue_as_soon_as_it_is_too_late_to_start() -> None:
    tiers = {"premium": {"ttft": 0.3, "reject_late": True}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers, max_num_seqs=1)
    sim = Sim(scheduler).run(
        [(0.0, scripted("runs", 16, 100, tier="premium")), (0.1, scripted("late", 16, 3, tier="premium"))]
    )
    assert sim.seen["late"].refused == "PromiseBroken"
    assert sim.seen["late"].reason is Reason.REJECTED
    told = next(events.committed_s for events in sim.records if events.rejected)
    assert told < 0.5
    assert promises_not_kept(sim) == 1


def test_a_promise_counts_from_the_arrival_at_the_front() -> None:
    tiers = {"premium": {"ttft": 0.3, "reject_late": True}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers)
    warm = [(0.05 * number, scripted(f"w{number}", 40, 3, tier="batch")) for number in range(20)]
    early, late = scripted("early", 16, 3, tier="premium"), scripted("late", 16, 3, tier="premium")
    early.waited_s, late.waited_s = 0.1, 0.3
    sim = Sim(scheduler).run([*warm, (3.0, early), (3.0, late)])
    assert sim.seen["early"].ttft_s <= 0.2
    assert sim.seen["late"].refused == "PromiseBroken"
    refusal = next(one for events in sim.records for one in events.rejected)
    assert "even if it starts now after a wait of 0.3 s" in refusal.message


# ---- budget by promise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itl_s", [0.03, 0.06, 0.12])
def test_the_budget_keeps_the_tightest_promise_and_is_as_large_as_that_allows(itl_s: float) -> None:
    tiers: dict[str, dict[str, object]] = {"premium": {"ttft": 9.0, "itl": itl_s}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers, budget="promise")
    sim = Sim(scheduler, Costs(0.010, 0.0005))
    speaker = scripted("speaker", 16, 900, tier="premium")
    warm = [(0.0, scripted(f"w{number}", 30 * number + 5, 2, tier="batch")) for number in range(9)]
    giants = [(6.0 + number, scripted(f"g{number}", 1500, 2, tier="batch")) for number in range(4)]
    sim.run([*warm, (2.0, speaker), *giants])
    assert max(sim.seen["speaker"].gaps_s) <= itl_s
    beside = [
        one for one in sim.records if "speaker" in one.scheduled_ids and any(g[0] == "g" for g in one.scheduled_ids)
    ]
    largest = max(one.computed_tokens for one in beside)
    assert largest >= 0.8 * (itl_s - 0.010) / 0.0005 or largest >= 256, "smaller than it could be"


def test_the_budget_keeps_the_promise_where_the_model_is_wrong() -> None:
    """Late chunks of a giant cost twice what early ones do, and no pass like that was seen before."""
    tiers: dict[str, dict[str, object]] = {"premium": {"ttft": 9.0, "itl": 0.1}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers, budget="promise")
    sim = Sim(scheduler, Costs(0.010, 0.0005, pair_s=0.0005 / 1500))
    speaker = scripted("speaker", 16, 900, tier="premium")
    giants = [(0.5 + 5.0 * number, scripted(f"g{number}", 1500, 2, tier="batch")) for number in range(4)]
    sim.run([(0.0, speaker), *giants])
    assert max(sim.seen["speaker"].gaps_s) <= 0.1
    beside = [one.committed_s - one.planned_s for one in sim.records if any(g[0] == "g" for g in one.scheduled_ids)]
    assert sum(beside) / len(beside) >= 0.06, "far smaller than it could be"


def test_without_promises_the_budget_is_the_fixed_one() -> None:
    sim = Sim(made(budget="promise")).run((0.0, scripted(f"r{number}", 500, 20)) for number in range(8))
    assert max(one.computed_tokens for one in sim.records) == 256


# ---- lanes and headroom -------------------------------------------------------------------------------------------


def test_long_ones_run_in_passes_of_their_own_at_their_share() -> None:
    scheduler = made(lane_tokens=100, long_share=0.25)
    sim = Sim(scheduler, check=True)
    short = [(0.0, scripted(f"s{number}", 20, 60)) for number in range(8)]
    long = [(0.0, scripted(f"l{number}", 1000, 30)) for number in range(2)]
    sim.run([*short, *long])
    kinds = []
    for one in sim.records:
        names = {id[0] for id in one.scheduled_ids}
        assert len(names) <= 1, f"{names} share a pass"
        kinds += names
    both = kinds[: len(kinds) - kinds[::-1].index("s")]
    assert both.count("l") / len(both) == pytest.approx(0.25, abs=0.05)
    assert all(len(sim.seen[id].token_s) == 30 for id in ("l0", "l1"))


def test_a_short_one_that_grows_changes_its_lane() -> None:
    sim = Sim(made(lane_tokens=50), check=True)
    sim.run([(0.0, scripted("grows", 40, 40)), (0.0, scripted("stays", 10, 20)), (0.0, scripted("long", 300, 40))])
    shared = [set(one.scheduled_ids) for one in sim.records]
    assert {"grows", "stays"} in shared
    assert {"grows", "long"} in shared
    assert {"stays", "long"} not in shared


def test_a_tier_with_a_cap_shares_passes_only_with_short_ones_while_it_is_there() -> None:
    tiers: dict[str, dict[str, object]] = {"premium": {"ttft": 1.0, "longest": 100}, "batch": {}}
    sim = Sim(made(order="slo", tiers=tiers), check=True)
    long = [(0.0, scripted(f"l{number}", 500, 200, tier="batch")) for number in range(2)]
    short = [(0.0, scripted("b", 20, 200, tier="batch"))]
    sim.run([*long, *short, (1.0, scripted("p", 20, 30, tier="premium"))])
    begun, ended = sim.seen["p"].arrived_s, sim.seen["p"].token_s[-1]
    during = [set(one.scheduled_ids) for one in sim.records if begun <= one.planned_s < ended and one.scheduled_ids]
    assert all(not ({"p", "b"} & names and {"l0", "l1"} & names) for names in during)
    assert {"p", "b"} in during
    assert any({"l0", "l1"} & names for names in during), "the long ones stood still"
    before = [set(one.scheduled_ids) for one in sim.records if one.committed_s < begun]
    assert {"l0", "l1", "b"} in before, "without premium all share"


def test_headroom_keeps_slots_for_the_highest_tier() -> None:
    tiers: dict[str, dict[str, object]] = {"premium": {"ttft": 1.0}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers, max_num_seqs=8, headroom=0.25)
    sim = Sim(scheduler, check=True)
    batch = [(0.0, scripted(f"b{number}", 16, 100, tier="batch")) for number in range(20)]
    sim.run([*batch, (0.5, scripted("p", 16, 5, tier="premium"))])
    assert sim.preemptions == 0
    assert sim.seen["p"].ttft_s <= 0.1
    rows = [sum(id[0] == "b" for id in one.scheduled_ids) for one in sim.records]
    assert max(rows) == 6


def test_headroom_keeps_slots_and_blocks_for_short_requests() -> None:
    scheduler = made(max_num_seqs=8, blocks=100, headroom=0.25, headroom_tokens=20)
    sim = Sim(scheduler, check=True)
    long = [(0.0, scripted(f"l{number}", 150, 100)) for number in range(12)]
    sim.run([*long, (0.5, scripted("short", 16, 5))])
    assert sim.seen["short"].ttft_s <= 0.1
    assert sim.seen["l8"].ttft_s > 1.0, "there was no need to wait, so this test says nothing"


def test_headroom_starves_no_request() -> None:
    """Premium ones fill every place, again and again; the one slot that batch may use is never free."""
    tiers: dict[str, dict[str, object]] = {"premium": {"ttft": 9.0, "weight": 2}, "batch": {}}
    scheduler = made(order="slo", tiers=tiers, max_num_seqs=4, headroom=0.5)
    sim = Sim(scheduler)
    stream = [(0.01 * number, scripted(f"p{number}", 8, 10, tier="premium")) for number in range(1000)]
    sim.run([*stream[:10], (0.1, scripted("b", 8, 10, tier="batch")), *stream[10:]])
    assert sim.seen["b"].token_s[-1] < 10.0


def test_headroom_keeps_no_request_out_of_an_empty_engine() -> None:
    scheduler = made(max_num_seqs=2, blocks=20, headroom=0.5)
    sim = Sim(scheduler).run([(0.0, scripted("large", 250, 10))])
    assert len(sim.seen["large"].token_s) == 10


# ---- when memory is short -----------------------------------------------------------------------------------------


def half_of_what_it_would_use(**config: object) -> Sim:
    free = Sim(made(**config)).run(chat(150, 12.0))
    return Sim(made(**{**config, "blocks": free.peak_blocks // 2})).run(chat(150, 12.0))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("config", "most"),
    [
        ({"when_short": "recompute"}, 0.15),
        ({"when_short": "auto", "host_blocks": 4000}, 0.05),
        ({"when_short": "auto", "host_blocks": 4000, "watermark": 0.0}, 0.05),
        ({"memory": "predict", "quantile": 0.9}, 0.05),
    ],
)
def test_with_half_the_memory_little_is_computed_twice(keep: bool, config: dict[str, object], most: float) -> None:
    sim = half_of_what_it_would_use(keep=keep, **config)
    assert sim.recomputed_share <= most
    assert all(seen.reason in (Reason.STOP, Reason.LENGTH) for seen in sim.seen.values())


def test_no_request_is_preempted_beyond_its_limit_and_then_holds_all_it_needs() -> None:
    for most in (1, 2, 5):
        scheduler = made(blocks=60, watermark=0.0, max_preemptions=most)
        sim = Sim(scheduler, check=True).run(requests := chat(80, 30.0))
        preempted = [one.preemptions for _, one in requests]
        assert max(preempted) <= most
        assert sim.preemptions > 10


def test_dropped_requests_end_with_an_error_or_a_refusal() -> None:
    scheduler = made(blocks=60, watermark=0.0, when_short="drop")
    sim = Sim(scheduler, check=True).run(chat(80, 30.0))
    dropped = [seen for seen in sim.seen.values() if seen.reason in (Reason.ERROR, Reason.REJECTED)]
    assert len(dropped) == sim.preemptions > 3
    for seen in dropped:
        assert (seen.reason is Reason.REJECTED) == (not seen.token_s) == (seen.refused == "Evicted")
        assert (seen.reason is Reason.ERROR) == (seen.kind == "Evicted"), "the engine is not to blame"
    assert scheduler.kv.pool.held == 0


def test_swapped_blocks_come_back_and_are_not_computed_again() -> None:
    scheduler = made(blocks=60, watermark=0.0, when_short="swap", host_blocks=1000, keep=False)
    sim = Sim(scheduler, check=True).run(chat(80, 30.0))
    assert sim.preemptions > 10
    out, back = sum(one.blocks_out for one in sim.records), sum(one.blocks_in for one in sim.records)
    assert out > 20
    assert back > 20
    # what is computed again is the block that was not full, and what went while it was under way
    assert sim.recomputed_share * sim.computed <= sim.preemptions * (scheduler.kv.block_size + 1)


def test_copies_hold_up_no_pass() -> None:
    """Very slow copies: those who run go on meanwhile."""
    scheduler = made(blocks=60, watermark=0.0, when_short="swap", host_blocks=1000)
    sim = Sim(scheduler, Costs(out_s=0.2, in_s=0.2)).run(chat(60, 30.0))
    longest = max(one.committed_s - one.planned_s for one in sim.records if one.scheduled_ids)
    assert longest <= 0.010 + 256 * 0.0005 + 1e-9
    assert all(seen.reason in (Reason.STOP, Reason.LENGTH) for seen in sim.seen.values())


def test_a_prefix_that_left_the_device_is_hit_in_host_memory() -> None:
    scheduler = made(blocks=40, host_blocks=400)
    sim = Sim(scheduler, check=True)
    system = [3 + place % 30 for place in range(320)]
    first = scripted("first", [*system, 1], 4)
    others = [(1.0 + number, scripted(f"o{number}", 500, 4)) for number in range(6)]
    again = scripted("again", [*system, 2], 4)
    sim.run([(0.0, first), *others, (20.0, again)])
    assert again.cached_tokens >= 300
    assert sum(one.blocks_in for one in sim.records) >= 18


CASES: dict[str, tuple[Costs, dict[str, object], How]] = {
    "slow copies": (Costs(out_s=0.05, in_s=0.05), {}, How.RECOMPUTE),
    "fast copies": (Costs(token_s=0.002), {}, How.SWAP),
    "a long victim, reading dear": (Costs(read_s=2e-6, out_s=0.002, in_s=0.002), {}, How.SWAP),
    "a short victim, cheap tokens": (Costs(token_s=0.0001, out_s=0.004, in_s=0.004), {}, How.RECOMPUTE),
}


@pytest.mark.parametrize(("case", "keep"), covering(list(CASES), [True, False], ways=1))
def test_auto_is_as_good_as_the_better_choice(case: str, keep: bool) -> None:
    costs, config, right = CASES[case]
    took: dict[str, float] = {}
    how: set[str] = set()
    for when_short in ("recompute", "swap", "auto"):
        scheduler = made(
            blocks=60, watermark=0.0, when_short=when_short, host_blocks=2000, keep=keep, max_preemptions=50, **config
        )
        sim = Sim(scheduler, costs).run(chat(120, 40.0))
        took[when_short] = sim.now_s
        if when_short == "auto":
            how = {one.how for events in sim.records[len(sim.records) // 2 :] for one in events.preempted}
    assert took["auto"] <= 1.03 * min(took["recompute"], took["swap"]), took
    assert not how or right.value in how


def test_auto_recomputes_what_the_prefix_cache_still_has() -> None:
    """All share a long prompt, so a victim loses only its own tail."""
    system = [3 + place % 30 for place in range(640)]
    took = {}
    for when_short in ("recompute", "swap", "auto"):
        scheduler = made(blocks=70, watermark=0.0, when_short=when_short, host_blocks=2000, max_preemptions=50)
        arrivals = [(0.02 * n, scripted(f"r{n}", [*system, n % 40, 1], 20 + n % 60)) for n in range(80)]
        sim = Sim(scheduler, Costs(out_s=0.01, in_s=0.01)).run(arrivals)
        took[when_short] = sim.now_s
        assert sim.preemptions > 5
    assert took["auto"] <= 1.03 * min(took.values()), took


def test_an_abort_while_its_blocks_come_back_frees_them_when_they_have_come() -> None:
    scheduler = made(blocks=40, watermark=0.0, when_short="swap", host_blocks=400, max_num_seqs=4)
    sim = Sim(scheduler, Costs(in_s=0.05, out_s=0.01))
    aborted = 0
    for at_s, request in chat(40, 30.0):
        sim.submit(request, at_s)
    for _ in range(3000):
        plan = scheduler.plan(sim.now_s)
        if plan is None:
            break
        sim._begin(plan)
        sim._finish()
        if scheduler.tables.fetching and aborted < 5:
            victim = next(iter(scheduler.tables.fetching))
            assert scheduler.finish(victim.id, Reason.ABORT)
            aborted += 1
        scheduler.check()
    assert aborted >= 1
    assert scheduler.idle
    assert scheduler.kv.pool.held == 0
    assert all(request.state is State.FINISHED for request in scheduler.requests.values())


def test_every_request_gets_its_tokens_whatever_the_policies() -> None:
    """make_request's answers end at max_tokens: each is told exactly so many, once."""
    for order in ("fcfs", "slo", "fair", "sjf", "priority"):
        scheduler = made(
            order=order, tiers=TIERS, blocks=50, watermark=0.0, when_short="auto", host_blocks=50, headroom=0.1,
            lane_tokens=150, budget="promise",
        )  # fmt: skip
        sim = Sim(scheduler, check=True)
        arrivals = [(0.05 * n, make_request(f"r{n}", [1 + n % 40] * (5 + n * 37 % 300), 1 + n % 30)) for n in range(60)]
        for n, (_, request) in enumerate(arrivals):
            request.tier = ("premium", "standard", "batch")[n % 3]
        sim._ends = dict.fromkeys(range(200), 0)
        sim.run(arrivals)
        for n in range(60):
            assert len(sim.seen[f"r{n}"].token_s) == 1 + n % 30
