"""Random traffic for a scheduler, KV manager and engine, and a busy standard load: what the tests of their invariants
play.

The fake executor computes a pass only when its result is taken, with up to three passes in flight; the oracle says
which tokens each request must get, whatever happened around it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.request import Group, Reason, Request, State
from shoal.errors import PromptTooLong
from shoal.sched.memory import Reserve
from shoal.sched.ordering import Fcfs
from shoal.sched.prefill import Chunked
from shoal.sched.scheduler import Scheduler
from tests.draft_fakes import one_device
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
    computing: int = 0  # passes so far that computed a position of some request
    allowed: int = 0  # … and how many there may be before all requests have been answered

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
            # once, and again after each time it gave way: every pass computes at least one position
            self.allowed += (len(request.tokens) + request.max_tokens) * (self.scheduler.tables.max_preemptions + 1)

    def begin(self) -> bool:
        if self.scheduler.in_flight >= self.depth:
            return False
        plan = self.scheduler.plan(self.now_s)
        self.scheduler.check()
        if plan is None:
            return False
        self.computing += plan.tokens.size > 0
        assert self.computing <= self.allowed, "passes go on for ever, while other requests wait"
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
        assert self.scheduler.kv.pool.held == 0, "blocks are held for no request"
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
        assert grouped or not first_come or arrivals == sorted(arrivals), "a request was overtaken"
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
