"""Random traffic through scheduler, KV manager and engine, every invariant checked after every move.

The fake executor computes a pass only when its result is taken, with up to three passes in flight; the oracle says
which tokens each request must get, whatever happened around it.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.request import Group, Reason, Request, State
from shoal.engine.engine import Engine
from shoal.errors import PromptTooLong
from shoal.sched.memory import Reserve
from shoal.sched.prefill import Chunked
from shoal.sched.rows import RowTable
from shoal.sched.scheduler import Draft, Scheduler
from tests.fakes import FakeExecutor, make_request, make_scheduler, oracle


@dataclass
class Run:
    """One engine under traffic, and what each request has been told."""

    scheduler: Scheduler
    depth: int
    requests: dict[str, Request] = field(default_factory=dict)
    told: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Reason] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    passes: int = 0
    preemptions: int = 0
    cached: int = 0
    prompts_seen: dict[str, list[int]] = field(default_factory=dict)  # tokens whose prompt logprobs were told
    admitted: list[str] = field(default_factory=list)  # in the order of their first start

    def __post_init__(self) -> None:
        kv = self.scheduler.kv
        self.engine = Engine(self.scheduler)
        self.executor = FakeExecutor(kv.pool.total, kv.block_size)

    def submit(self, request: Request) -> None:
        self.engine.submit(request, float(self.passes))
        self.requests[request.id] = request
        self.told[request.id] = []

    def begin(self) -> bool:
        if self.engine.in_flight >= self.depth:
            return False
        plan = self.engine.begin(float(self.passes))
        self.scheduler.check()
        if plan is None:
            return False
        whole = self.scheduler.policies.batching.grouped or (plan.counts > 1).sum() <= 1
        chunked = isinstance(self.scheduler.policies.prefill, Chunked)
        within = plan.tokens.size <= self.scheduler.limits.max_num_batched_tokens
        assert within or (whole and not (chunked and not self.scheduler.policies.batching.grouped)), "over the budget"
        assert plan.tokens.size == plan.counts.sum() > 0
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row stands in a pass twice"
        self.executor.forward(plan)
        self.executor.sample(None)
        return True

    def finish(self) -> bool:
        if not self.engine.in_flight:
            return False
        self.note(self.engine.finish(self.executor.result(), float(self.passes)))
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
        self.preemptions += len(events.preempted)
        self.cached += sum(a.cached_tokens for a in events.admitted)
        self.admitted += [a.id for a in events.admitted if not a.resumed]

    def fail(self) -> None:
        """The device breaks: all passes in flight are lost."""
        self.executor.queue.clear()
        self.note(self.engine.fail("broken", float(self.passes)))

    def drain(self) -> None:
        """To the end: everything admitted must be answered within a bound."""
        left = sum(len(r.tokens) + r.max_tokens for r in self.requests.values()) * 4 + 100
        while not self.engine.idle:
            began = self.begin()
            if not self.finish() and not began:
                wake_s = self.engine.wake_s(float(self.passes))
                assert wake_s is not None, "requests wait, yet nothing can be planned"
                assert wake_s > self.passes, "it was to wake for nothing"
                self.passes += 1  # time passes
            left -= 1
            assert left > 0, "the engine does not come to an end"
        self.note(self.engine.rest(float(self.passes)))

    def verify(self) -> None:
        assert self.ended.keys() == self.requests.keys(), "a request was never answered"
        assert self.scheduler.kv.pool.held == 0, "blocks are held by nobody"
        if isinstance(self.scheduler.policies.memory, Reserve):
            assert self.preemptions == 0, "reservation never preempts"
        assert self.preemptions == sum(request.preemptions for request in self.requests.values())
        arrivals = [self.requests[id].order for id in self.admitted]
        grouped = any(request.group for request in self.requests.values())
        assert grouped or arrivals == sorted(arrivals), "somebody was overtaken"
        for id, request in self.requests.items():
            prompt = request.tokens[: request.prompt_len]
            want = oracle(
                prompt, request.max_tokens, request.stop_ids, request.seed, request.sample, request.params.min_tokens
            )
            if request.wants_prompt_logprobs and self.ended[id] in (Reason.STOP, Reason.LENGTH):
                assert self.prompts_seen.get(id, []) == prompt[1:]
            if self.ended[id] in (Reason.ABORT, Reason.ERROR) or id in self.cuts:
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
        )
        try:
            run.submit(request)
        except PromptTooLong:
            assert len(prompt) + max_tokens - 1 > run.scheduler.admission.kv_tokens


def play(run: Run, traffic: list[Move]) -> None:
    for number, (what, *how) in enumerate(traffic):
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
    run.drain()


def end_one(run: Run, what: str, which: int) -> None:
    alive = [id for id in run.requests if id not in run.ended]
    if not alive:
        return
    id = alive[which % len(alive)]
    if what == "abort":
        run.engine.abort(id)
    elif run.told[id]:  # the front found a stop string in some token it has already been told
        at = 1 + which % len(run.told[id])
        run.cuts[id] = at
        if run.engine.finish_at(id, at):
            assert run.requests[id].outputs == at


@given(configs, st.integers(1, 3), st.lists(moves, min_size=5, max_size=60))
@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic_keeps_every_invariant(config: dict[str, int], depth: int, traffic: list[Move]) -> None:
    run = Run(make_scheduler(**config), depth)  # type: ignore[arg-type]
    play(run, traffic)
    run.verify()


@given(configs, st.lists(moves, min_size=5, max_size=40))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_depth_changes_no_tokens(config: dict[str, int], traffic: list[Move]) -> None:
    """Aborts and cuts fall at other moments, so compare what both were told."""
    runs = [Run(make_scheduler(**config), depth) for depth in (1, 2)]  # type: ignore[arg-type]
    for run in runs:
        play(run, traffic)
        run.verify()
    one, two = runs
    for id in one.told:
        cut = id in one.cuts or id in two.cuts or {one.ended[id], two.ended[id]} & {Reason.ABORT, Reason.ERROR}
        if not cut:
            assert one.told[id] == two.told[id]


# ---- a busy standard load, and the rules broken on purpose ----------------------------------------------------------


def busy(kind: type[Scheduler] = Scheduler, depth: int = 2) -> Run:
    """Tiny memory, shared prefixes, passes in flight, stops and aborts in between: preempts all the time."""
    run = Run(make_scheduler(kind=kind, blocks=14, max_num_seqs=6, max_num_batched_tokens=24), depth)
    for number in range(60):
        prompt = [number % 3] * 5 + [number % 7, number % 5] * (1 + number % 4)
        stop = frozenset({1, 2, 3}) if number % 2 else frozenset()
        run.submit(make_request(f"r{number}", prompt, 4 + number % 20, seed=number, stop_ids=stop))
        while run.begin():
            pass
        run.finish()
        if number % 9 == 8:
            run.engine.abort(f"r{number - 1}")
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
        self.rows = EagerRows(self.limits.max_num_seqs)


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

    def _freeze(self, draft: Draft, events: PassEvents):  # type: ignore[no-untyped-def]
        for request in list(draft.takes)[:1]:
            if request.planned > self.kv.block_size and self.kv.pool.references[request.holding.blocks[0]] == 1:
                spare = self.kv.pool.grab(1)
                if spare:
                    self.kv.pool.drop([request.holding.blocks[0]])
                    request.holding.blocks[0] = spare[0]
        return super()._freeze(draft, events)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("broken", [RowsAtOnce, PublishesEarly, FreesBeforeUse])
def test_a_broken_rule_is_noticed(broken: type[Scheduler], depth: int) -> None:
    with pytest.raises((AssertionError, KeyError, IndexError)):
        busy(kind=broken, depth=depth)
