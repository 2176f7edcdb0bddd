"""Random traffic through scheduler, KV manager and engine, every invariant checked after every move.

The fake executor computes a pass only when its result is taken, with up to three passes in flight; the oracle says
which tokens each request must get, whatever happened around it.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import Group, Reason, Request, State
from shoal.errors import BadRequest, PromptTooLong, QueueFull, Rejected
from shoal.sched.memory import Reserve
from shoal.sched.ordering import Fcfs
from shoal.sched.pass_builder import PassBuilder
from shoal.sched.prefill import Chunked
from shoal.sched.rows import RowTable
from shoal.sched.scheduler import Scheduler
from shoal.sched.steady import Steady
from tests.draft_fakes import one_device
from tests.effort import examples
from tests.fakes import FakeExecutor, PublishedBlocks, make_request, make_scheduler, oracle


@dataclass
class Run:
    """One engine under traffic, and what each request has been told."""

    scheduler: Scheduler
    depth: int
    requests: dict[str, Request] = field(default_factory=dict)
    unended: dict[str, Request] = field(default_factory=dict)  # those of them that had not ended after the last pass
    told: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Reason] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    preemptions: int = 0
    cached: int = 0
    prompts_seen: dict[str, list[int]] = field(default_factory=dict)  # tokens whose prompt logprobs were told
    admitted: list[str] = field(default_factory=list)  # in the order of their first start
    plans: list[bytes] = field(default_factory=list)  # what each pass was to compute
    device: type[FakeExecutor] = FakeExecutor
    slow_copies: int = 0  # passes that a copy of blocks may take
    failing: Callable[[int], bool] = lambda number: False  # copies that fail
    takes_s: Callable[[int], float] = lambda positions: 0.0  # how long the device says that a pass took
    computing: int = 0  # passes so far in which somebody computed something
    allowed: int = 0  # … and how many there may be before everybody has been answered

    def __post_init__(self) -> None:
        kv = self.scheduler.kv
        host = kv.host.total if kv.host is not None else 0
        self.executor = self.device(kv.pool.total, kv.block_size, host, self.slow_copies, self.failing, self.takes_s)
        self.published = PublishedBlocks(kv, self.executor)
        one_device(self.scheduler, self.executor)

    @property
    def now_s(self) -> float:
        return float(self.passes)

    def wait(self) -> None:
        """Nothing can be computed: time passes."""
        self.passes += 1

    def submit(self, *requests: Request, resumed: bool = False) -> None:
        self.scheduler.submit_all(requests, self.now_s, resumed)
        for request in requests:
            self.requests[request.id] = self.unended[request.id] = request
            self.told[request.id] = request.output_tokens
            # once, and again after each time it gave way: every pass computes at least one position of somebody
            self.allowed += (len(request.tokens) + request.max_tokens) * (self.scheduler.tables.max_preemptions + 1)

    def begin(self) -> bool:
        if self.scheduler.in_flight >= self.depth:
            return False
        plan = self.scheduler.plan(self.now_s)
        self.scheduler.check()
        if plan is None:
            return False
        self.computing += plan.tokens.size > 0
        assert self.computing <= self.allowed, "somebody computes for ever: those who wait starve"
        whole = self.scheduler.policies.batching.grouped or (plan.counts > 1).sum() <= 1
        chunked = isinstance(self.scheduler.policies.prefill, Chunked)
        within = plan.tokens.size <= self.scheduler.limits.max_num_batched_tokens
        assert within or (whole and not (chunked and not self.scheduler.policies.batching.grouped)), "over the budget"
        assert plan.tokens.size == plan.counts.sum()
        assert (plan.draws <= plan.counts).all(), "a row draws more often than it computes positions"
        assert plan.tokens.size or plan.copies or self.scheduler.kv.transfers, "a pass for nothing"
        arrays = (plan.rows, plan.starts, plan.counts, plan.draws, plan.tokens, plan.grown)
        self.plans.append(b"|".join(array.tobytes() for array in arrays) + repr(plan.copies).encode())
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row stands in a pass twice"
        self.executor.forward(plan)
        self.executor.sample(None)
        return True

    def finish(self) -> bool:
        if not self.scheduler.in_flight:
            return False
        self.note(self.scheduler.commit(self.executor.result(), self.now_s))
        self.published.check(self.unended.values())
        self.unended = {id: request for id, request in self.unended.items() if id not in self.ended}
        self.passes += 1
        return True

    def note(self, events: PassEvents) -> None:
        self.scheduler.check()
        for id, index, token in zip(events.owners, events.indexes, events.tokens, strict=True):
            assert id not in self.ended, "a token came after the end"
            assert index == len(self.told[id]), "a token was lost or doubled"
            self.told[id].append(token)
            if self.requests[id].params.logprobs is not None:
                assert events.logprobs[id, index].token == token, "logprobs of another token"
        for id, (first, values) in events.prompt_logprobs.items():
            seen = self.prompts_seen.setdefault(id, [])
            assert first <= len(seen) + 1, "prompt logprobs have a gap"
            seen += [value.token for value in values[len(seen) + 1 - first :]]
        for end in events.finished:
            assert end.id not in self.ended, "a request ended twice"
            self.ended[end.id] = end.reason
            assert self.requests[end.id].state is State.FINISHED
            assert end.outputs == len(self.told[end.id]) or end.id in self.cuts, "what it has is not what it was told"
        late = {one.id for one in events.rejected if one.kind in ("DeadlinePassed", "PromiseBroken", "Evicted")}
        assert late == {end.id for end in events.finished if end.reason is Reason.REJECTED}
        self.preemptions += len(events.preempted)
        self.cached += sum(a.cached_tokens for a in events.admitted)
        self.admitted += [a.id for a in events.admitted if not a.resumed]

    def fail(self) -> None:
        """The device breaks: all passes in flight are lost."""
        self.allowed += sum(len(request.tokens) for request in self.scheduler.running)  # all is to be computed again
        for plan in self.executor.queue:  # copies do not depend on what the passes compute
            self.executor.copies += [(0, order) for order in plan.copies]
        self.executor.queue.clear()
        self.note(self.scheduler.fail("broken", self.now_s))

    def drain(self) -> None:
        """To the end: everything admitted must be answered within a bound."""
        left = sum(len(r.tokens) + r.max_tokens for r in self.requests.values()) * 4 + 100
        left *= 4 if self.scheduler.kv.host is not None else 1  # copies take passes, too
        while not self.scheduler.idle:
            began = self.begin()
            if not self.finish() and not began and not self.scheduler.idle:
                wake_s = self.scheduler.wake_s(self.now_s)
                assert wake_s is not None, "requests wait, yet nothing can be planned"
                assert wake_s > self.now_s, "it was to wake for nothing"
                self.wait()
            left -= 1
            assert left > 0, "the engine does not come to an end"
        self.note(self.scheduler.take_events(self.now_s))

    def verify(self) -> None:
        assert self.ended.keys() == self.requests.keys(), "a request was never answered"
        assert all(request.state is State.FINISHED for request in self.requests.values())
        assert self.scheduler.kv.pool.held == 0, "blocks are held by nobody"
        policies = self.scheduler.policies
        if isinstance(policies.memory, Reserve) and not policies.order.overtakes:
            assert self.preemptions == 0, "reservation never preempts"
        assert self.preemptions == sum(request.preemptions for request in self.requests.values())
        assert max((request.preemptions for request in self.requests.values()), default=0) <= (
            self.scheduler.tables.max_preemptions
        )
        arrivals = [self.requests[id].order for id in self.admitted]
        grouped = any(request.group for request in self.requests.values())
        passing = policies.lanes.on or policies.headroom.share or self.scheduler.kv.host is not None
        first_come = isinstance(policies.order, Fcfs) and not passing
        assert grouped or not first_come or arrivals == sorted(arrivals), "somebody was overtaken"
        for id, request in self.requests.items():
            prompt = request.tokens[: request.prompt_len]
            want = oracle(
                prompt, request.max_tokens, request.stop_ids, request.seed, request.sample, request.params.min_tokens
            )
            if request.needs_prompt_logprobs and self.ended[id] in (Reason.STOP, Reason.LENGTH):
                assert self.prompts_seen.get(id, []) == prompt[1:]
            if self.ended[id] is Reason.REJECTED:
                assert not self.told[id], f"{id} was refused after it was told something"
            elif self.ended[id] in (Reason.ABORT, Reason.ERROR, Reason.TIMEOUT) or id in self.cuts:
                assert self.told[id] == want[: len(self.told[id])], f"{id} got wrong tokens before it was cut"
            else:
                assert self.told[id] == want, f"{id} got wrong tokens"


Move = tuple[object, ...]

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=24)  # few different ids: prefixes are often equal
arrival = st.tuples(
    st.just("arrive"),
    prompts,
    st.integers(1, 12),  # max_tokens
    st.sampled_from([frozenset(), frozenset({1, 2, 3, 4, 5}), frozenset(range(0, 50, 3))]),
    st.integers(1, 3),  # n
    st.sampled_from(["", "other tenant"]),
    st.sampled_from([0, 0, 0, 1, 2, 3]),  # 1: min_tokens, 2: logprobs, 3: both and prompt logprobs
)
moves = st.one_of(
    arrival,
    st.just(("begin",)),
    st.just(("finish",)),
    st.just(("finish",)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("cut"), st.integers(0, 30)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.just(("fail",)),
)
TIERS: dict[str, dict[str, object]] = {
    "premium": {"ttft": 3.0, "itl": 1.0, "weight": 2},
    "standard": {"ttft": 20.0},
    "batch": {},
}
LANED = {**TIERS, "premium": {**TIERS["premium"], "longest": 12}}
configs = st.fixed_dictionaries(
    {
        "blocks": st.integers(9, 40),
        "block_size": st.sampled_from([1, 3, 4, 8]),
        "keep": st.booleans(),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 30),
        "chunk_tokens": st.sampled_from([0, 0, 1, 5]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "batching": st.sampled_from(["continuous", "continuous", "static", "dynamic"]),
        "group_size": st.integers(1, 4),
        "window_s": st.sampled_from([0.0, 3.0]),
        "layout": st.sampled_from(["ragged", "padded", "shrink"]),
        "prefill": st.sampled_from(["chunked", "inline", "exclusive"]),
        "memory": st.sampled_from(["ondemand", "reserve", "predict"]),
        "order": st.sampled_from(["fcfs", "fcfs", "priority", "sjf", "fair", "slo", "slo"]),
        "tiers": st.sampled_from([TIERS, TIERS, LANED]),
        "when_short": st.sampled_from(["recompute", "recompute", "swap", "auto", "drop"]),
        "host_blocks": st.sampled_from([0, 0, 3, 12, 60]),
        "max_preemptions": st.sampled_from([1, 2, 8]),
        "budget": st.sampled_from(["fixed", "promise"]),
        "lane_tokens": st.sampled_from([0, 0, 8, 20]),
        "long_share": st.sampled_from([0.1, 0.5]),
        "headroom": st.sampled_from([0.0, 0.0, 0.3]),
        "headroom_tokens": st.sampled_from([0, 6]),
        "drafts": st.sampled_from([0, 0, 1, 4]),  # tokens drafted for a row and pass, at most
        "speculate": st.sampled_from(["off", "off", "ngram", "suffix", "ngram+suffix", "draft", "suffix+draft"]),
        "on_device": st.booleans(),  # where drafts of a draft model stay
    }
)


def arrive(
    run: Run, number: int, prompt: list[int], max_tokens: int, stop: frozenset[int], n: int, salt: str, extras: int
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=max_tokens // 2 if extras % 2 else 0,
        logprobs=1 if extras > 1 else None,
        prompt_logprobs=1 if extras == 3 else None,
    )
    group = Group(f"g{number}") if n > 1 else None
    for sample in range(n):
        request = make_request(
            f"r{number}.{sample}",
            prompt,
            params=params,
            seed=number,
            sample=sample,
            stop_ids=stop,
            group=group,
            salt=salt,
            priority=len(prompt) % 4 - 1,
            tenant=("", "a", "b")[len(prompt) % 3],
            tier=("", "batch", "premium")[number % 3],
        )
        try:
            run.submit(request)
        except PromptTooLong:
            assert len(prompt) + max_tokens - 1 > run.scheduler.tables.admission.kv_tokens


def play(run: Run, traffic: list[Move], drain: bool = True, first: int = 0) -> None:
    for number, (what, *how) in enumerate(traffic, first):
        if what == "arrive":
            arrive(run, number, *how)  # type: ignore[arg-type]
        elif what == "begin":
            run.begin()
        elif what == "finish":
            run.begin()
            run.finish()
        elif what == "fail":
            run.fail()
        else:
            end_one(run, str(what), int(how[0]))  # type: ignore[call-overload]
        run.scheduler.check()
    if drain:
        run.drain()


def end_one(run: Run, what: str, which: int) -> None:
    alive = [id for id in run.requests if id not in run.ended]
    if not alive:
        return
    id = alive[which % len(alive)]
    if what == "abort":
        run.scheduler.abort(id)
    elif run.told[id]:  # the front found a stop string in some token it has already been told
        at = 1 + which % len(run.told[id])
        run.cuts[id] = at
        if run.scheduler.finish_at(id, at):
            assert run.requests[id].outputs == at


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=60))
@examples(200, of=700)
def test_random_traffic_keeps_every_invariant(config: dict[str, int], depth: int, traffic: list[Move]) -> None:
    slow, failing = (
        len(traffic) % 4,
        (lambda number: number % 3 == 0) if len(traffic) % 5 == 0 else (lambda number: False),
    )
    run = Run(make_scheduler(**config), depth, slow_copies=slow, failing=failing)  # type: ignore[arg-type]
    play(run, traffic)
    run.verify()


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=50))
@examples(60, of=200)
def test_the_same_traffic_gives_the_same_plans_and_every_request_its_tokens_as_under_fcfs(
    config: dict[str, int], depth: int, traffic: list[Move]
) -> None:
    plain = {**config, "order": "fcfs", "when_short": "recompute", "lane_tokens": 0, "headroom": 0.0, "tiers": TIERS}
    runs = [Run(make_scheduler(**one), depth) for one in (config, config, plain)]  # type: ignore[arg-type]
    for run in runs:
        play(run, traffic)
    one, two, fcfs = runs
    assert one.plans == two.plans
    assert one.told == two.told
    for id, told in one.told.items():
        both = (told, fcfs.told[id])
        shorter = min(map(len, both))
        assert both[0][:shorter] == both[1][:shorter]
        if id not in one.cuts.keys() | fcfs.cuts.keys() and {one.ended[id], fcfs.ended[id]} <= {
            Reason.STOP,
            Reason.LENGTH,
        }:
            assert both[0] == both[1]


@given(configs, st.lists(moves, min_size=5, max_size=40))
@examples(100, of=400)
def test_depth_changes_no_tokens(config: dict[str, int], traffic: list[Move]) -> None:
    """Aborts, cuts and evictions fall at other moments; until then both were told the same."""
    runs = [Run(make_scheduler(**config), depth) for depth in (1, 2)]  # type: ignore[arg-type]
    for run in runs:
        play(run, traffic)
        run.verify()
    one, two = runs
    for id in one.told:
        shorter = min(len(one.told[id]), len(two.told[id]))
        assert one.told[id][:shorter] == two.told[id][:shorter]
        early = {one.ended[id], two.ended[id]} & {Reason.ABORT, Reason.ERROR, Reason.REJECTED}
        if not early and id not in one.cuts.keys() | two.cuts.keys():
            assert one.told[id] == two.told[id]


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=40))
@examples(50, of=150)
def test_a_steady_batch_is_planned_and_committed_like_any_other(
    config: dict[str, int], depth: int, traffic: list[Move]
) -> None:
    runs = [Run(make_scheduler(**config), depth) for _ in range(2)]  # type: ignore[arg-type]
    play(runs[0], traffic)
    with patch.object(Steady, "suits", return_value=False):
        play(runs[1], traffic)
    assert runs[0].plans == runs[1].plans
    assert runs[0].told == runs[1].told
    assert runs[0].ended == runs[1].ended


def test_a_batch_of_decodes_becomes_steady() -> None:
    """So that the test above is known to compare something."""
    run = Run(make_scheduler(blocks=200, max_num_batched_tokens=64), depth=2)
    for number in range(4):
        run.submit(make_request(f"r{number}", [number] * 5, 12 + 4 * number, seed=number))
    steady = 0
    while not run.scheduler.idle:
        while run.begin():
            steady += run.scheduler.tables.steady is not None
        run.finish()
    run.verify()
    assert steady > 12


def test_a_prompt_goes_on_beside_a_steady_batch_that_leaves_it_one_position() -> None:
    run = Run(make_scheduler(blocks=60, max_num_batched_tokens=3), depth=1)
    for number in range(2):
        run.submit(make_request(f"r{number}", [number], 40, seed=number))
    run.begin()
    run.finish()
    run.submit(make_request("prompt", [5] * 6, 1, seed=3))
    for _ in range(6):
        run.begin()
        run.finish()
    assert run.ended.keys() == {"prompt"}
    run.drain()
    run.verify()


# ---- a busy standard load, and the rules broken on purpose ----------------------------------------------------------


def busy(
    kind: type[Scheduler] = Scheduler,
    depth: int = 2,
    device: type[FakeExecutor] = FakeExecutor,
    **config: object,
) -> Run:
    """Tiny memory, shared prefixes, passes in flight, stops and aborts in between: preempts all the time."""
    tight = {"blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 24, "watermark": 0.0, **config}
    run = Run(make_scheduler(kind=kind, **tight), depth, device=device)  # type: ignore[arg-type]
    for number in range(60):
        prompt = [number % 3] * 5 + [number % 7, number % 5] * (1 + number % 4)
        stop = frozenset({1, 2, 3}) if number % 2 else frozenset()
        run.submit(make_request(f"r{number}", prompt, 4 + number % 20, seed=number, stop_ids=stop))
        while run.begin():
            pass
        run.finish()
        if number % 9 == 8:
            run.scheduler.abort(f"r{number - 1}")
    run.drain()
    run.verify()
    return run


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_busy_load_is_busy(depth: int) -> None:
    run = busy(depth=depth)
    assert run.preemptions > 20
    assert run.cached > 50


class RowsAtOnce(Scheduler):
    """Breaks the rule: a row is handed out again while a pass that names it is still in flight."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.tables.rows = EagerRows(self.limits.max_num_seqs)


class EagerRows(RowTable):
    def give_back(self, row: int, last_step: int) -> None:
        super().give_back(row, -1)


class PublishesEarly(Scheduler):
    """Breaks the rule: blocks are published when planned, before their tokens are known."""

    def plan(self, now_s: float):  # type: ignore[no-untyped-def]
        plan = super().plan(now_s)
        for request in self.running:
            padded = request.tokens + [0] * request.pending
            self.kv.publish(request.holding, padded, request.planned)
        return plan


class FreesBeforeUse(Scheduler):
    """Breaks the rule: the blocks of a running request go back to the pool although its next pass reads them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.freeze, self.planner.freeze = self.planner.freeze, self.freeze_too_late  # type: ignore[method-assign]

    def freeze_too_late(self, batch: PassBuilder, events: PassEvents):  # type: ignore[no-untyped-def]
        for request in list(batch.takes)[:1]:
            if request.planned > self.kv.block_size and self.kv.pool.references[request.holding.blocks[0]] == 1:
                spare = self.kv.pool.grab(1)
                if spare:
                    self.kv.pool.drop([request.holding.blocks[0]])
                    request.holding.blocks[0] = spare[0]
        return self.freeze(batch, events)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("broken", [RowsAtOnce, PublishesEarly, FreesBeforeUse])
def test_a_broken_rule_is_noticed(broken: type[Scheduler], depth: int) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        busy(kind=broken, depth=depth)


# ---- several tokens per row and pass --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("when_short", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_busy_load_verifies_drafts(depth: int, when_short: str, batching: str) -> None:
    """So that the random traffic above is known to accept and to reject, with and without passes planned on top."""
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


# ---- deadlines and limits, on a clock of their own ------------------------------------------------------------------


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


def timed_job(number: int, prompt: list[int], max_tokens: int, n: int, tenant: str, timeout_s: float | None):  # type: ignore[no-untyped-def]
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
    assert any(request.last_step >= 0 for request in late), "nobody was late with its first token on the way"
    assert any(request.last_step < 0 for request in late), "nobody was late in the line"
    assert run.preemptions > 5


# ---- a run cut off and taken up by another engine -------------------------------------------------------------------


@given(configs, configs, st.integers(1, 3), st.lists(moves, min_size=15, max_size=40), st.sampled_from([0, 2, 3, 5, 8]))
@examples(80, of=300)
def test_a_request_resumed_on_a_fresh_engine_generates_what_it_would_have(
    config: dict[str, object], other: dict[str, object], depth: int, traffic: list[Move], passes: int
) -> None:
    """The first engine dies at a random moment; what its requests were told is all that is left of them."""
    first = Run(make_scheduler(**config), depth)  # type: ignore[arg-type]
    play(first, [*traffic, *[("finish",)] * passes], drain=False)
    second = Run(make_scheduler(**other, max_queue=1), depth)  # type: ignore[arg-type]
    groups: dict[str, Group] = {}
    for id, old in first.requests.items():
        if id in first.ended:
            continue
        told = first.told[id]
        if told and old.needs_prompt_logprobs:
            assert first.prompts_seen.get(id, []) == old.tokens[1 : old.prompt_len], "it will not be told again"
        group = groups.setdefault(old.group.name, Group(old.group.name)) if old.group else None
        more = {"seed": old.seed, "sample": old.sample, "stop_ids": old.stop_ids, "salt": old.salt, "group": group}
        prompt = old.tokens[: old.prompt_len]
        again = make_request(id, prompt, params=old.params, output=told, tenant="a", **more)
        if old.state is State.FINISHED and old.reason in (Reason.STOP, Reason.LENGTH):
            continue  # it has ended, and that is about to be told
        try:
            second.submit(again, resumed=True)
        except PromptTooLong:
            assert old.end > second.scheduler.tables.admission.kv_tokens
    play(second, [])
    second.verify()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_engine_that_dies_again_and_again_changes_no_tokens(depth: int) -> None:
    stop = frozenset({41, 42, 43})
    prompts = {f"r{number}": [number % 3] * 5 + [number % 7, number % 5] * (1 + number % 4) for number in range(30)}
    told: dict[str, list[int]] = {id: [] for id in prompts}
    left = set(prompts)
    lives = resumed = 0
    while left:
        run = Run(make_scheduler(blocks=14, max_num_seqs=6, max_num_batched_tokens=24), depth)
        for seed, (id, prompt) in enumerate(prompts.items()):
            if id in left:
                resumed += bool(told[id])
                run.submit(
                    make_request(id, prompt, 4 + seed % 20, seed=seed, stop_ids=stop, output=told[id]), resumed=True
                )
        for _ in range(5):
            while run.begin():
                pass
            run.finish()
        told |= run.told
        left -= run.ended.keys()
        lives += 1
    assert lives > 5
    assert resumed > 30
    for seed, (id, prompt) in enumerate(prompts.items()):
        assert told[id] == oracle(prompt, 4 + seed % 20, stop, seed, 0), f"{id} got wrong tokens"


# ---- a client that goes away ----------------------------------------------------------------------------------------


@dataclass
class Deserted(Run):
    """Remembers whom nobody waits for any more."""

    gone: dict[Request, int] = field(default_factory=dict)  # how many commits there were before
    places: set[tuple[int, int]] = field(default_factory=set)  # their rows, in that life
    commits: int = 0
    were_held: int = 0

    def desert(self, id: str) -> None:
        request = self.requests[id]
        self.places.add((request.row, request.generation))
        self.were_held += request.state is State.RUNNING
        assert self.scheduler.abort(id)
        self.gone[request] = self.commits

    def begin(self) -> bool:
        before = len(self.scheduler.flights)
        began = super().begin()
        for flight in list(self.scheduler.flights)[before:]:
            named = zip(flight.plan.rows.tolist(), flight.plan.generations.tolist(), strict=True)
            assert not self.places & set(named), "a later plan names the row of somebody who is gone"
            assert not self.gone.keys() & set(flight.requests), "somebody who is gone is in a later plan"
        return began

    def finish(self) -> bool:
        finished = super().finish()
        self.commits += finished
        for request, then in self.gone.items():
            if self.commits >= then + 2:
                assert request.holding is None, "somebody who is gone holds blocks after two commits"
        others = {block for request in self.scheduler.requests.values() for block in _blocks(request)}
        kv = self.scheduler.kv
        others |= {block for copy in kv.transfers.values() for block in (copy.holding or copy).blocks}
        if all(self.commits >= then + 2 for then in self.gone.values()):
            assert kv.pool.held == len(others), "blocks are held for somebody who is gone"
        return finished


def _blocks(request: Request) -> list[int]:
    holding = request.holding if request.holding is not None else request.fetching
    return holding.blocks if holding is not None else []


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=60))
@examples(100, of=400)
def test_a_client_that_goes_away_is_in_no_later_plan_and_its_blocks_are_free_within_two_commits(
    config: dict[str, object], depth: int, traffic: list[Move]
) -> None:
    run = Deserted(make_scheduler(**config), depth)  # type: ignore[arg-type]
    for number, move in enumerate(traffic):
        alive = list(run.scheduler.requests)
        if move[0] == "abort" and alive:
            run.desert(alive[int(move[1]) % len(alive)])  # type: ignore[call-overload]
        else:
            play(run, [move], drain=False, first=number)
    run.drain()
    run.verify()


class HoldsOn(Scheduler):
    """Breaks the rule: who is in a pass in flight is not ended before it has said all it may."""

    def finish(self, request_id: str, reason: Reason, at_output: int | None = None, error: str = "") -> bool:
        request = self.requests.get(request_id)
        return bool(request and request.pending) or super().finish(request_id, reason, at_output, error)


def deserters(kind: type[Scheduler] = Scheduler) -> Deserted:
    run = Deserted(make_scheduler(kind=kind, max_num_seqs=4), depth=2)
    for number in range(20):
        run.submit(make_request(f"r{number}", [number % 3] * 9, 12, seed=number))
        while run.begin():
            pass
        if number % 3 == 2:
            run.desert(next(iter(run.scheduler.running)).id)
        run.finish()
    run.drain()
    run.verify()
    return run


def test_a_client_that_goes_away_in_the_middle_of_a_pass() -> None:
    assert deserters().were_held >= 6


def test_an_engine_that_holds_on_to_an_aborted_request_is_noticed() -> None:
    with pytest.raises(AssertionError, match="gone"):
        deserters(HoldsOn)
