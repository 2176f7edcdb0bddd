"""What the metrics say, held against what the real scheduler did."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from shoal.core.events import Admitted, Finished, PassEvents, Rejection
from shoal.core.report import EngineStatus
from shoal.core.request import Reason
from shoal.errors import PromptTooLong
from shoal.obs import metrics
from shoal.obs.engines import join_engines
from shoal.obs.metrics import EngineMetrics, FrontMetrics, Tally
from shoal.sched.scheduler import Scheduler
from tests.fakes import FakeExecutor, make_request, make_scheduler

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def read(text: bytes) -> dict[str, float]:
    """Every sample by its name and labels, as Prometheus would take it; no name comes twice."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in samples
            samples[key] = sample.value
    return samples


class Drive:
    """A real scheduler on a fake device; a pass is planned at one second and committed at another."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.executor = FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size)
        self.metrics = EngineMetrics()
        self.records: list[PassEvents] = []

    def turn(self, plan_s: float, commit_s: float) -> PassEvents:
        plan = self.scheduler.plan(plan_s)
        if plan is None:
            return self.note(self.scheduler.take_events(commit_s))
        self.executor.forward(plan)
        return self.note(self.scheduler.commit(self.executor.result(), commit_s))

    def note(self, events: PassEvents) -> PassEvents:
        self.metrics.take(events)
        self.records.append(events)
        return events

    def run(self, now_s: float = 0.0) -> None:
        while not self.scheduler.idle:
            self.turn(now_s, now_s + 1)
            now_s += 1

    def read(self) -> dict[str, float]:
        return read(self.metrics.render())

    def total(self, count: Callable[[PassEvents], int]) -> int:
        return sum(count(events) for events in self.records)


def test_the_times_of_one_request() -> None:
    drive = Drive(make_scheduler(max_num_batched_tokens=4))
    drive.scheduler.submit(make_request("a", [1] * 8, max_tokens=3), 10.0)
    for plan_s, commit_s in ((10.5, 11.0), (11.0, 12.0), (12.0, 12.1), (12.1, 14.1)):
        drive.turn(plan_s, commit_s)
    seen = drive.read()
    assert seen["shoal_queue_seconds_sum"] == 0.5
    assert seen["shoal_time_to_first_token_seconds_sum"] == 2.0
    assert seen['shoal_time_to_first_token_seconds_bucket{le="1.0"}'] == 0
    assert seen['shoal_time_to_first_token_seconds_bucket{le="2.0"}'] == 1
    assert seen["shoal_inter_token_seconds_count"] == 2
    assert seen["shoal_inter_token_seconds_sum"] == pytest.approx(2.1)
    assert seen["shoal_end_to_end_seconds_sum"] == pytest.approx(4.1)
    assert seen["shoal_step_turnaround_seconds_sum"] == pytest.approx(3.6)
    assert seen['shoal_requests_finished_total{reason="length"}'] == 1
    assert seen["shoal_request_prompt_tokens_sum"] == seen["shoal_prompt_tokens_total"] == 8
    assert seen["shoal_request_output_tokens_sum"] == seen["shoal_output_tokens_total"] == 3
    assert seen["shoal_computed_tokens_total"] == 10
    assert seen["shoal_budget_tokens_total"] == 16
    assert seen['shoal_budget_use_ratio_bucket{le="0.3"}'] == 2
    assert seen['shoal_budget_use_ratio_bucket{le="1.0"}'] == 4
    assert drive.metrics.tracked == 0


def test_the_gauges_are_those_of_the_last_record() -> None:
    drive = Drive(make_scheduler(blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=64))
    for name in "abc":
        drive.scheduler.submit(make_request(name, [ord(name) % 40] * 9), 0.0)
    drive.turn(0.0, 1.0)
    seen = drive.read()
    assert (seen["shoal_requests_running"], seen["shoal_requests_waiting"]) == (2, 1)
    assert (seen["shoal_kv_blocks_held"], seen["shoal_kv_blocks_capacity"]) == (6, 16)
    assert seen["shoal_kv_use_ratio"] == 6 / 16
    drive.run(1.0)
    seen = drive.read()
    assert (seen["shoal_requests_running"], seen["shoal_requests_waiting"], seen["shoal_kv_use_ratio"]) == (0, 0, 0)
    assert seen["shoal_kv_blocks_cached"] == drive.scheduler.kv.pool.cached > 0


def test_a_prompt_seen_before_is_a_prefix_hit() -> None:
    drive = Drive(make_scheduler(block_size=4))
    for name in "ab":
        drive.scheduler.submit(make_request(name, range(10)), 0.0)
        drive.run()
    seen = drive.read()
    assert (seen["shoal_prompt_tokens_total"], seen["shoal_prefix_hit_tokens_total"]) == (20, 8)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_adds_up_and_leaves_nothing_behind(seed: int) -> None:
    """Two passes in flight, preemptions, and clients that go away at any time."""
    dice = random.Random(seed)
    drive = Drive(make_scheduler(blocks=12, block_size=4, watermark=0.0, keep=seed % 2 == 0))
    scheduler, now_s, names = drive.scheduler, 0.0, [f"r{number}" for number in range(60)]
    to_come = list(names)
    while to_come or not scheduler.idle:
        while to_come and dice.random() < 0.4:
            scheduler.submit(make_request(to_come.pop(), [dice.randrange(9)] * dice.randint(1, 20), 12), now_s)
        while len(scheduler.flights) < 2 and (plan := scheduler.plan(now_s)) is not None:
            drive.executor.forward(plan)
        if dice.random() < 0.2:
            scheduler.finish(dice.choice(names), Reason.ABORT)
        now_s += dice.random()
        if scheduler.flights:
            drive.note(scheduler.commit(drive.executor.result(), now_s))
        else:
            drive.note(scheduler.take_events(now_s))
        assert drive.metrics.tracked <= 2 * len(scheduler.requests)
    drive.note(scheduler.take_events(now_s))
    seen = drive.read()
    first = {owner for events in drive.records for owner in events.owners}
    tokens = drive.total(lambda events: len(events.owners))
    aborted = drive.total(lambda events: sum(one.reason is Reason.ABORT for one in events.finished))
    assert aborted > 0
    assert drive.metrics.tracked == 0
    assert seen["shoal_requests_arrived_total"] == 60
    assert sum(value for name, value in seen.items() if name.startswith("shoal_requests_finished")) == 60
    assert seen['shoal_requests_finished_total{reason="abort"}'] == aborted
    assert seen["shoal_end_to_end_seconds_count"] == 60 - aborted
    assert seen["shoal_output_tokens_total"] == tokens
    assert seen["shoal_time_to_first_token_seconds_count"] == len(first)
    assert seen["shoal_inter_token_seconds_count"] == tokens - len(first)
    assert seen["shoal_computed_tokens_total"] == drive.executor.computed_tokens
    assert seen["shoal_preemptions_total"] == drive.total(lambda events: len(events.preempted)) > 0
    assert seen["shoal_recomputed_tokens_total"] == drive.total(lambda events: events.recomputed_tokens) > 0
    assert seen["shoal_queue_seconds_count"] == len({one.id for events in drive.records for one in events.admitted})


def test_a_groups_answers_come_at_its_end_and_all_at_once() -> None:
    drive = Drive(make_scheduler(batching="static", group_size=2, layout="padded", prefill="inline"))
    for name, many in (("a", 3), ("b", 5)):
        drive.scheduler.submit(make_request(name, [1] * 4, max_tokens=many), 0.0)
    drive.run()
    seen = drive.read()
    ended_s = drive.records[-1].committed_s
    assert seen["shoal_time_to_first_token_seconds_sum"] == 2 * ended_s
    assert (seen["shoal_inter_token_seconds_count"], seen["shoal_inter_token_seconds_sum"]) == (6, 0)
    assert seen["shoal_padded_tokens_total"] == drive.total(lambda events: events.padded_tokens) > 0
    assert drive.metrics.tracked == 0


def test_a_request_that_began_in_a_dead_engine_has_no_first_token_here() -> None:
    drive = Drive(make_scheduler())
    drive.scheduler.submit(make_request("a", [1] * 4, max_tokens=6, output=[5, 6]), 0.0)
    drive.run()
    seen = drive.read()
    assert seen["shoal_time_to_first_token_seconds_count"] == 0
    assert (seen["shoal_output_tokens_total"], seen["shoal_inter_token_seconds_count"]) == (4, 3)
    assert drive.metrics.tracked == 0


def test_a_refusal_is_counted_by_its_kind_and_leaves_nothing_behind() -> None:
    drive = Drive(make_scheduler(max_model_len=10))
    with pytest.raises(PromptTooLong):
        drive.scheduler.submit(make_request("a", [1] * 40), 0.0)
    drive.turn(0.0, 1.0)
    late = Rejection("b", "DeadlinePassed", "it waited too long")
    drive.note(PassEvents(-1, arrived=["b"], arrived_s=[1.0], rejected=[late]))
    drive.note(PassEvents(-1, rejected=[Rejection(f"c{number}", f"Made{number}", "") for number in range(50)]))
    seen = drive.read()
    assert seen['shoal_requests_rejected_total{kind="PromptTooLong"}'] == 1
    assert seen['shoal_requests_rejected_total{kind="DeadlinePassed"}'] == 1
    assert seen['shoal_requests_rejected_total{kind="other"}'] == 50
    assert seen['shoal_requests_rejected_total{kind="QueueFull"}'] == 0
    assert not any("Made" in name for name in seen)
    assert drive.metrics.tracked == 0


def test_a_request_told_to_have_started_after_it_ended_leaves_nothing_behind() -> None:
    """An abort is recorded with pass k, the start of a request that k+1 was to compute with k+1."""
    counted = EngineMetrics()
    counted.take(PassEvents(0, committed_s=2.0, arrived=["a"], arrived_s=[1.0]))
    counted.take(PassEvents(1, committed_s=3.0, finished=[Finished("a", Reason.ABORT, 0, 0, 0)]))
    counted.take(PassEvents(2, committed_s=4.0, admitted=[Admitted("a", 0.5, 4, False, 8)]))
    assert counted.tracked == 0
    seen = read(counted.render())
    assert (seen["shoal_queue_seconds_sum"], seen["shoal_prefix_hit_tokens_total"]) == (0.5, 4)
    assert seen["shoal_end_to_end_seconds_count"] == 0


def test_a_tally_agrees_with_the_librarys_histogram() -> None:
    dice = random.Random(3)
    library = Histogram("x_seconds", "x", buckets=metrics.GAP_S, registry=CollectorRegistry())
    tally = Tally("x_seconds", "x", metrics.GAP_S)
    for value in [*metrics.GAP_S, 0.0, 11.0, *(dice.expovariate(10) for _ in range(500))]:
        times = dice.randint(1, 4)
        tally.add(value, times)
        for _ in range(times):
            library.observe(value)
    theirs = [(one.name, one.labels, one.value) for family in library.collect() for one in family.samples]
    ours = [(one.name, one.labels, one.value) for one in tally.family().samples]
    assert [one for one in theirs if one[0].endswith(("_bucket", "_count"))] == [
        one for one in ours if one[0] != "x_seconds_sum"
    ]
    assert tally.total == pytest.approx(library._sum.get())


def test_the_text_is_all_ours_and_every_bucket_holds_the_ones_below() -> None:
    drive = Drive(make_scheduler())
    for number in range(5):
        drive.scheduler.submit(make_request(str(number), [number] * 7), 0.0)
    drive.run()
    families = list(text_string_to_metric_families(drive.metrics.render().decode()))
    assert {family.name for family in families} == {
        *metrics.GAUGES, *metrics.COUNTERS, *metrics.HISTOGRAMS, *metrics.LABELLED, metrics.PROMISES,
    }  # fmt: skip
    for family in families:
        assert family.name.startswith("shoal_")
        if family.type == "histogram":
            counts = [one.value for one in family.samples if one.name.endswith("_bucket")]
            assert counts == sorted(counts)
            assert counts[-1] == next(one.value for one in family.samples if one.name.endswith("_count"))


# ---- the front

UP, DOWN = [EngineStatus(0, True, 2)], [EngineStatus(0, False, 0)]


def test_answers_are_counted_by_route_and_status() -> None:
    front = FrontMetrics()
    for status in (200, 200, 429):
        front.count("/v1/chat/completions", status)
    front.count("/static/chat.js", 200)
    front.count("/v1/models/some-model", 404)
    seen = read(front.render(7, UP))
    assert seen['shoal_http_requests_total{front="front-0",route="/v1/chat/completions",status="200"}'] == 2
    assert seen['shoal_http_requests_total{front="front-0",route="/v1/chat/completions",status="429"}'] == 1
    assert seen['shoal_http_requests_total{front="front-0",route="/static",status="200"}'] == 1
    assert seen['shoal_http_requests_total{front="front-0",route="/v1/models/{model}",status="404"}'] == 1
    assert seen['shoal_http_active_requests{front="front-0"}'] == 7
    assert (seen["shoal_engine_up"], seen["shoal_engine_restarts_total"]) == (1, 2)


def test_paths_without_a_route_make_one_series() -> None:
    front = FrontMetrics()
    for number in range(1000):
        front.count(f'/wp-{number}"\n', 404)
        front.count(f"/static/{number}", 404)
    series = [name for name in read(front.render(0, DOWN)) if name.startswith("shoal_http_requests_total")]
    assert len([name for name in series if 'status="404"' in name]) == 2


def test_two_fronts_tell_series_of_their_own() -> None:
    fronts = [FrontMetrics(f"front-{number}") for number in range(2)]
    for front in fronts:
        front.count("/v1/completions", 200)
    one, other = ({name for name in read(front.render(0, DOWN)) if "http" in name} for front in fronts)
    assert not one & other, "they would look like one counter that jumps back and forth"


def test_a_front_shows_the_counts_of_all_fronts() -> None:
    fronts = [FrontMetrics(f"front-{number}") for number in range(3)]
    for number, front in enumerate(fronts):
        for _ in range(number + 1):
            front.count("/v1/completions", 200)
    sent = [fronts[1].tell(4, UP), fronts[2].tell(0, DOWN)]
    text = fronts[0].render(1, DOWN, sent)
    seen = read(text)
    for number, active in enumerate((1, 4, 0)):
        series = f'{{front="front-{number}",route="/v1/completions",status="200"}}'
        assert seen[f"shoal_http_requests_total{series}"] == number + 1
        assert seen[f'shoal_http_active_requests{{front="front-{number}"}}'] == active
    assert seen["shoal_engine_restarts_total"] == 2, "another front knows of more restarts"
    assert text.count(b"# TYPE shoal_http_requests_total") == 1
    gone = read(fronts[0].render(1, DOWN))
    assert 'shoal_http_active_requests{front="front-1"}' not in gone, (
        "the numbers of a dead front are not shown forever"
    )
    assert gone["shoal_engine_restarts_total"] == 2, "a counter never goes back"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b'{"name": "x"}', b'{"name": "x", "active": "y"}']
)
def test_numbers_that_cannot_be_read_are_left_out(data: bytes) -> None:
    front = FrontMetrics()
    assert front.render(0, DOWN, [data]) == front.render(0, DOWN)


def test_the_first_500_can_be_seen_in_a_rate() -> None:
    assert (
        read(FrontMetrics().render(0, DOWN))[
            'shoal_http_requests_total{front="front-0",route="/v1/completions",status="500"}'
        ]
        == 0
    )


def test_an_engine_that_is_down_keeps_its_count_of_restarts() -> None:
    front = FrontMetrics()
    assert read(front.render(0, DOWN))["shoal_engine_restarts_total"] == 0
    front.render(0, UP)
    seen = read(front.render(0, DOWN))
    assert (seen["shoal_engine_up"], seen["shoal_engine_restarts_total"]) == (0, 2)


def test_several_engines_have_labels_of_their_own() -> None:
    front, one, other = FrontMetrics(), EngineMetrics(), EngineMetrics()
    one.totals["shoal_output_tokens"], other.totals["shoal_output_tokens"] = 3, 4
    texts = {number: engine.render().decode() for number, engine in enumerate((one, other))}
    engines = [EngineStatus(0, True, 2), EngineStatus(1, False, 1)]
    text = join_engines(texts).encode() + front.render(0, engines)
    seen = read(text)
    assert (seen['shoal_output_tokens_total{engine="0"}'], seen['shoal_output_tokens_total{engine="1"}']) == (3, 4)
    assert (seen['shoal_engine_up{engine="0"}'], seen['shoal_engine_up{engine="1"}']) == (1, 0)
    assert (seen['shoal_engine_restarts_total{engine="0"}'], seen['shoal_engine_restarts_total{engine="1"}']) == (2, 1)
    assert 'shoal_step_seconds_bucket{engine="1",le="0.001"}' in seen
    for name in (b"shoal_output_tokens_total", b"shoal_step_seconds", b"shoal_requests_running"):
        assert text.count(b"# TYPE " + name + b" ") == 1


def test_both_texts_can_follow_each_other() -> None:
    front = FrontMetrics()
    front.count("/health", 200)
    text = front.render(0, UP) + EngineMetrics().render()
    assert read(text)["shoal_requests_running"] == 0


def test_every_metric_stands_in_the_docs_and_no_other() -> None:
    counters = {*metrics.COUNTERS, *metrics.LABELLED, metrics.PROMISES, metrics.HTTP, metrics.LIMITED}
    counters.add("shoal_engine_restarts")
    names = {*metrics.GAUGES, *metrics.HISTOGRAMS, *metrics.FRONT, metrics.POLICIES} - counters | {
        f"{name}_total" for name in counters
    }
    assert set(re.findall(r"^\| `(\w+)", PAGE.read_text(), re.MULTILINE)) == names


def test_promises_are_counted_by_tier_and_by_whether_they_were_kept() -> None:
    tiers: dict[str, dict[str, object]] = {"premium": {"ttft": 1.0, "itl": 0.5}, "batch": {}}
    drive = Drive(make_scheduler(order="slo", tiers=tiers, max_num_batched_tokens=64))
    for name, arrived_s in (("late", 0.0), ("timely", 2.5)):
        drive.scheduler.submit(make_request(name, [1] * 4, max_tokens=3, tier="premium"), arrived_s)
    drive.scheduler.submit(make_request("no tier", [1] * 4, max_tokens=3), 2.5)
    for commit_s in (3.0, 3.4, 3.8):
        drive.turn(commit_s - 0.1, commit_s)
    seen = drive.read()
    assert seen['shoal_promises_total{kept="no",promise="ttft",tier="premium"}'] == 1
    assert seen['shoal_promises_total{kept="yes",promise="ttft",tier="premium"}'] == 1
    assert seen['shoal_promises_total{kept="yes",promise="itl",tier="premium"}'] == 2
    assert not any('tier="batch"' in name for name in seen)


def test_preemptions_are_counted_by_what_happened_to_the_blocks() -> None:
    drive = Drive(make_scheduler(blocks=6, block_size=2, watermark=0.0, max_num_batched_tokens=30, when_short="drop"))
    for name in "abc":
        drive.scheduler.submit(make_request(name, [1, 2, 3], max_tokens=5), 0.0)
    drive.run()
    seen = drive.read()
    assert seen['shoal_requests_gave_way_total{how="drop"}'] == seen["shoal_preemptions_total"] > 0
    assert seen['shoal_requests_gave_way_total{how="recompute"}'] == 0
    assert drive.metrics.tracked == 0


def test_the_choices_are_shown() -> None:
    shown = read(EngineMetrics({"order": "slo", "budget": "promise"}).render())
    assert shown['shoal_policies{budget="promise",order="slo"}'] == 1


def test_drafts_are_counted_by_drafter() -> None:
    drive = Drive(make_scheduler(speculate="ngram+suffix", blocks=100, max_num_batched_tokens=64))
    drive.metrics = EngineMetrics({}, ["ngram", "suffix"])
    for number in range(4):
        drive.scheduler.submit(make_request(str(number), [number, 7, 8, 9] * 3, max_tokens=40, seed=number), 0.0)
    drive.run()
    seen, executor = read(drive.metrics.render()), drive.executor
    proposed = {name: seen[f'shoal_draft_tokens_proposed_total{{drafter="{name}"}}'] for name in ("ngram", "suffix")}
    accepted = {name: seen[f'shoal_draft_tokens_accepted_total{{drafter="{name}"}}'] for name in ("ngram", "suffix")}
    assert sum(accepted.values()) == executor.accepted_drafts > 20
    assert sum(proposed.values()) == executor.accepted_drafts + executor.rejected_drafts
    assert all(0 < accepted[name] <= proposed[name] for name in proposed)
    rows = seen["shoal_draft_row_tokens_count"]
    assert seen["shoal_draft_row_tokens_sum"] == rows + executor.accepted_drafts
    assert seen["shoal_output_tokens_total"] == 160


def test_a_pass_tells_what_its_drafts_saved() -> None:
    metrics = EngineMetrics()
    metrics.take(PassEvents(1, proposed={"suffix": 4}, accepted={"suffix": 3}, row_tokens=[4], saved_s=0.25))
    metrics.take(PassEvents(2, proposed={"suffix": 4}, accepted={"suffix": 0}, row_tokens=[1], saved_s=-0.05))
    seen = read(metrics.render())
    assert seen["shoal_draft_saved_seconds"] == pytest.approx(0.2)
    assert seen['shoal_draft_tokens_accepted_total{drafter="suffix"}'] == 3
