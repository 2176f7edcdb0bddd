"""What an engine says about its load: work that waits, the rate of computing, places and blocks in use."""

from shoal.core.events import PassEvents
from shoal.core.job import requests_of
from shoal.engine.load import FADE_S, LoadMeter
from shoal.engine.reporter import Reporter
from tests.engine.hosts import make_job
from tests.fakes import make_scheduler


def meter(**options: int) -> LoadMeter:
    scheduler = make_scheduler(**options)
    made = LoadMeter(scheduler, Reporter(scheduler))
    for number in range(4):
        scheduler.submit_all(requests_of(make_job(f"job-{number}", [1] * 10, max_tokens=20)), now_s=0.0)
    return made


def test_waiting_requests_count_with_their_prompts_and_outputs() -> None:
    found = meter().load()
    assert found["waiting_tokens"] == 4 * (10 + 20)
    assert (found["running"], found["waiting"], found["fill"]) == (0, 4, 0.0)
    assert found["tokens_per_s"] is None


def test_running_requests_fill_places_or_blocks() -> None:
    made = meter(max_num_seqs=8)
    made._scheduler.plan(0.0)
    found = made.load()
    assert 0 < found["running"] < 4, "as many as the pass has tokens for"
    assert found["waiting_tokens"] == found["waiting"] * (10 + 20)
    assert found["fill"] >= found["running"] / 8


def test_the_rate_follows_the_present() -> None:
    made = meter()
    made.take(PassEvents(0, computed_tokens=100, busy_s=1.0))
    assert made.load()["tokens_per_s"] == 100
    for step in range(round(10 * FADE_S)):
        made.take(PassEvents(step, computed_tokens=400, busy_s=1.0))
    assert 399 < made.load()["tokens_per_s"] <= 400
    made.take(PassEvents(0))  # nothing was computed
    assert 399 < made.load()["tokens_per_s"] <= 400
