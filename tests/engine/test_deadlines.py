"""Random traffic with deadlines and limits, on a clock of its own."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.request import Group, Reason, Request, State
from shoal.errors import BadRequest, PromptTooLong, QueueFull, Rejected
from tests.effort import examples
from tests.engine.traffic import Move, Run, configs, end_one, prompts
from tests.fakes import make_request, make_scheduler


@dataclass
class Clocked(Run):
    """Time passes when told to. Whatever the rules promise is checked after every move."""

    pass_s: float = 0.0  # how long a pass takes
    time_s: float = 1000.0
    refused: list[str] = field(default_factory=list)  # what for

    @property
    def now_s(self) -> float:
        return self.time_s

    def wait(self) -> None:
        self.time_s += 1

    def begin(self) -> bool:
        asked = self.scheduler.in_flight < self.depth
        began = super().begin()
        if asked:
            max_wait_s = self.scheduler.tables.deadlines.max_wait_s
            waiting = set(self.scheduler.waiting)
            for request in self.scheduler.requests.values():
                assert request.deadline_s > self.now_s, f"{request} has outlived its deadline"
                new = request in waiting and not request.began
                late = max_wait_s is not None and request.arrived_s + max_wait_s <= self.now_s
                assert not (new and late), f"{request} still waits"
        return began

    def finish(self) -> bool:
        self.time_s += self.pass_s if self.scheduler.in_flight else 0
        before = self.unended
        finished = super().finish()
        if finished and not self.scheduler.policies.batching.grouped:
            ended = {id for id, request in before.items() if request.state is State.FINISHED}
            assert ended == before.keys() & self.ended.keys(), "an end was not reported with the next pass"
        return finished

    def tables(self) -> object:
        """Everything a refusal must leave alone."""
        scheduler = self.scheduler
        lines = [list(scheduler.requests), list(scheduler.waiting), list(scheduler.running)]
        return lines, scheduler.tables.deadlines.next_s(), scheduler.kv.pool.held

    def offer(self, requests: list[Request]) -> None:
        """Submit a job; a refusal must have its reason, and leave no trace."""
        before, refusal = self.tables(), None
        try:
            self.submit(*requests)
        except (BadRequest, Rejected) as error:
            refusal = error
        if refusal is None:
            most = self.scheduler.tables.admission.max_queue
            assert not most or self.scheduler.waiting.newcomers <= most, "too many wait"
            return
        self.refused.append(type(refusal).__name__)
        assert self.tables() == before
        assert {request.order for request in requests} == {-1}
        self.check_refusal(refusal, len(requests))

    def check_refusal(self, refusal: Exception, n: int) -> None:
        if isinstance(refusal, QueueFull):
            assert self.scheduler.waiting.newcomers + n > self.scheduler.tables.admission.max_queue > 0
            assert 1 <= (refusal.retry_after_s or 0) <= 60
        elif not isinstance(refusal, PromptTooLong):
            assert n > 1, "one request was refused for its n"


timed_arrival = st.tuples(
    st.just("arrive"),
    prompts,
    st.integers(1, 12),  # max_tokens
    st.sampled_from([1, 1, 1, 2, 3]),  # n
    st.sampled_from(["", "a", "a", "b"]),  # tenant
    st.sampled_from([None, None, 0.25, 1.0, 3.0, 9.0]),  # timeout
)
timed_moves = st.one_of(
    timed_arrival,
    timed_arrival,
    st.just(("begin",)),
    st.tuples(st.just("finish"), st.integers(1, 6)),
    st.tuples(st.just("finish"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.sampled_from([0.1, 0.5, 1.0, 4.0, 30.0])),
    st.just(("expire",)),
    st.just(("fail",)),
)
rules = st.fixed_dictionaries(
    {
        "max_queue": st.sampled_from([0, 1, 2, 5]),
        "max_wait_s": st.sampled_from([None, None, 1.0, 4.0]),
    }
)


def timed_job(
    number: int, prompt: list[int], max_tokens: int, n: int, tenant: str, timeout_s: float | None
) -> list[Request]:
    group = Group(f"g{number}") if n > 1 else None
    more = {"seed": number, "tenant": tenant, "salt": tenant, "timeout_s": timeout_s, "group": group}
    return [make_request(f"r{number}.{one}", prompt, max_tokens, sample=one, **more) for one in range(n)]


def play_timed(run: Clocked, traffic: list[Move]) -> None:
    for number, (what, *how) in enumerate(traffic):
        if what == "arrive":
            run.offer(timed_job(number, *how))  # type: ignore[arg-type]
        elif what == "begin":
            run.begin()
        elif what == "finish":
            for _ in range(how[0]):  # type: ignore[call-overload]
                run.begin()
                run.finish()
        elif what == "tick":
            run.time_s += how[0]  # type: ignore[operator]
        elif what == "expire":
            run.scheduler.expire(run.now_s)
        elif what == "fail":
            run.fail()
        else:
            end_one(run, "abort", int(how[0]))  # type: ignore[call-overload]
        run.scheduler.check()
    run.drain()
    run.verify()
    check_forgotten(run)


def check_forgotten(run: Clocked) -> None:
    """All have ended, so nothing is left of them."""
    scheduler = run.scheduler
    assert scheduler.tables.deadlines.next_s() is None, "a deadline of a request that has ended is still kept"
    assert scheduler.wake_s(run.now_s) is None
    scheduler.expire(run.now_s + 24 * 3600)
    assert not scheduler.news


@given(
    configs,
    rules,
    st.integers(1, 3),
    st.sampled_from([0.0, 0.25, 0.7]),
    st.lists(timed_moves, min_size=25, max_size=60),
)
@examples(100, of=500)
def test_random_traffic_keeps_deadlines_and_limits(
    config: dict[str, object], rule: dict[str, object], depth: int, pass_s: float, traffic: list[Move]
) -> None:
    run = Clocked(make_scheduler(**config, **rule), depth, pass_s=pass_s)  # type: ignore[arg-type]
    play_timed(run, traffic)


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_rush_hour_has_endings_and_refusals_of_all_kinds(depth: int, batching: str) -> None:
    """So that the random traffic above is known to get there."""
    chance = random.Random(depth)
    traffic: list[Move] = []
    for _ in range(160 if batching == "continuous" else 400):
        for _ in range(chance.choice([1, 1, 2, 6])):
            prompt = [chance.randrange(4) for _ in range(chance.randrange(1, 20))]
            n, tenant = chance.choice([1, 1, 1, 2, 3, 7]), chance.choice(["", "a", "b"])
            timeout_s = chance.choice([None, None, 1.0, 2.0, 5.0, 20.0])
            traffic.append(("arrive", prompt, chance.randrange(1, 25), n, tenant, timeout_s))
        traffic.append(("finish", chance.randrange(1, 9)))
        if chance.random() < 0.2:
            traffic += [("abort", chance.randrange(30)), ("begin",), ("tick", chance.choice([1.0, 5.0])), ("expire",)]
    scheduler = make_scheduler(blocks=14, max_num_seqs=4, batching=batching, max_queue=6, max_wait_s=4.0)
    run = Clocked(scheduler, depth, pass_s=0.2)
    play_timed(run, traffic)
    ends = Counter(run.ended.values())
    assert min(ends[reason] for reason in (Reason.LENGTH, Reason.ABORT, Reason.TIMEOUT, Reason.REJECTED)) >= 10
    assert min(Counter(run.refused)[kind] for kind in ("QueueFull", "BadParameter")) >= 10
    late = [run.requests[id] for id, reason in run.ended.items() if reason is Reason.REJECTED]
    assert any(request.last_step >= 0 for request in late), "no deadline passed during a prompt"
    assert any(request.last_step < 0 for request in late), "no deadline passed in the queue"
    assert run.preemptions > 5
