"""What an engine says about its requests: who runs, who waits and why."""

from typing import Any

import pytest

from shoal.core.request import Group
from shoal.engine import view
from shoal.sched.scheduler import Scheduler
from tests.fakes import FakeExecutor, make_request, make_scheduler


def told(scheduler: Scheduler, now_s: float = 1.0) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in view.requests(scheduler, now_s)}


def step(scheduler: Scheduler, executor: FakeExecutor, now_s: float) -> None:
    plan = scheduler.plan(now_s)
    assert plan is not None
    executor.forward(plan)
    executor.sample(None)
    scheduler.commit(executor.result(), now_s)


def test_which_requests_run_and_which_wait_and_why() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    executor = FakeExecutor(64, 4)
    for number in range(4):
        request = make_request(f"r{number}", [1] * (5 + number), tenant=f"t{number}", timeout_s=10.0)
        scheduler.submit(request, float(number) / 10)
    step(scheduler, executor, 1.0)
    found = told(scheduler, 2.0)
    assert [(entry["id"], entry["state"]) for entry in found.values()] == [
        ("r0", "running"), ("r1", "running"), ("r2", "waiting"), ("r3", "waiting")
    ]  # fmt: skip
    assert found["r0"]["why"] == "output"
    assert found["r2"]["why"] == "all 2 places are taken"
    assert [found[id].get("place") for id in found] == [None, None, 0, 1]
    assert found["r0"]["blocks"] == len(scheduler.requests["r0"].holding.blocks) > 0
    assert found["r3"]["blocks"] == 0
    assert found["r1"]["prompt_tokens"] == 6
    assert found["r1"]["output_tokens"] == 1
    assert found["r3"]["tenant"] == "t3"
    assert found["r3"]["age_s"] == pytest.approx(1.7)
    assert found["r3"]["time_left_s"] == pytest.approx(8.3)


def test_one_without_room_says_what_it_needs() -> None:
    scheduler = make_scheduler(blocks=8, max_model_len=30, watermark=0.0)
    executor = FakeExecutor(8, 4)
    scheduler.submit(make_request("large", [1] * 24, 4), 0.0)
    for _ in range(2):
        step(scheduler, executor, 0.0)
    scheduler.submit(make_request("other", [2] * 20, 4), 0.0)
    scheduler.submit(make_request("third", [3] * 20, 4), 0.0)
    found = told(scheduler)
    assert found["other"]["why"].startswith("needs 5 KV blocks, ")
    assert found["third"]["why"] == "1 wait before it"


def test_samples_wait_for_the_prompt_they_share() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    executor = FakeExecutor(64, 4)
    group = Group("g")
    scheduler.submit_all([make_request(f"g.{n}", [1] * 30, group=group, sample=n) for n in range(2)], 0.0)
    step(scheduler, executor, 0.0)
    found = told(scheduler)
    assert found["g.0"]["why"] == "prompt"
    assert found["g.1"]["why"] == "another sample of its prompt computes what they share"


def test_no_tokens_are_shown() -> None:
    scheduler = make_scheduler()
    scheduler.submit(make_request("r", [41, 42, 43], salt="pepper"), 0.0)
    assert "42" not in str(told(scheduler))
    assert "pepper" not in str(told(scheduler))


def test_the_list_has_an_end() -> None:
    scheduler = make_scheduler()
    for number in range(20):
        scheduler.submit(make_request(f"r{number}", [1]), 0.0)
    assert len(view.requests(scheduler, 0.0, most=7)) == 7


TIERS: dict[str, dict[str, object]] = {"gold": {"ttft": 2.0, "itl": 0.1}, "batch": {}}


@pytest.mark.parametrize(("tier", "promise_s", "slack_s"), [("gold", 2.0, 1.5), ("batch", None, None)])
def test_a_promise_is_shown_where_there_is_one(tier: str, promise_s: float | None, slack_s: float | None) -> None:
    scheduler = make_scheduler(order="slo", tiers=TIERS)
    scheduler.submit(make_request("r", [1], tier=tier), 1.0)
    found = told(scheduler, 1.5)["r"]
    assert found["tier"] == tier
    assert (found.get("promise_s"), found.get("slack_s")) == (promise_s, slack_s)


def test_drafts_are_shown_where_there_are_any() -> None:
    scheduler = make_scheduler(speculate="suffix", blocks=100, max_num_batched_tokens=64)
    executor = FakeExecutor(100, 4)
    scheduler.submit(make_request("a", [1, 2, 3, 4] * 4, 40, seed=1), 0.0)
    for number in range(8):
        step(scheduler, executor, float(number))
    entry = told(scheduler)["a"]
    assert entry["draft_tokens"] == executor.accepted_drafts + executor.rejected_drafts > 0
    assert entry["draft_tokens_accepted"] == executor.accepted_drafts
    assert "draft_tokens" not in told_without_drafts()


def told_without_drafts() -> dict[str, Any]:
    scheduler = make_scheduler()
    scheduler.submit(make_request("a", [1]), 0.0)
    return told(scheduler)["a"]
