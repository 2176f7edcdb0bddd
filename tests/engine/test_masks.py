"""Grammars in the engine: late masks, passes that wait for them, and requests that fail alone.

Random traffic of requests with and without a grammar goes through the real loop, at every depth, with preemptions,
aborts and failing passes. The oracle knows each grammar and no batch: it says what every request must get.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.clock import VirtualClock
from shoal.core.params import SamplingParams
from shoal.core.plan import StepPlan, StepResult
from shoal.core.ports import LateMasks
from shoal.core.request import Group, Reason, Request
from shoal.engine.loop import EngineLoop
from shoal.errors import PromptTooLong
from tests.draft_fakes import one_device
from tests.effort import examples
from tests.fakes import FakeExecutor, FakeGrammar, PublishedBlocks, make_request, make_scheduler, oracle


class Watchful(FakeExecutor):
    """Notices passes begun while another waits for its masks, and fails where it is told to."""

    def __init__(self, blocks: int, block_size: int, bad: dict[int, str] | None = None) -> None:
        super().__init__(blocks, block_size)
        self.bad = bad or {}  # pass → the call that raises
        self.calls: list[tuple[str, int]] = []
        self.owed = 0

    def forward(self, plan: StepPlan) -> None:
        self.calls.append(("forward", plan.step))
        assert not self.queue or self.queue[-1].step in self.masks, "begun while another waits for its masks"
        if self.bad.get(plan.step) == "forward":
            raise RuntimeError("no memory left")
        super().forward(plan)

    def sample(self, masks: LateMasks | None) -> None:
        step = self.queue[-1].step
        self.calls.append(("sample", step))
        if self.bad.get(step) == "sample":
            self.queue.pop()
            raise RuntimeError("no more samples")
        super().sample(masks)
        self.owed += 1

    def result(self) -> StepResult:
        step = self.queue[0].step
        self.calls.append(("result", step))
        assert step in self.masks, "a result was asked for that was never sampled"
        self.owed -= 1
        if self.bad.get(step) == "result":
            self.queue.popleft()
            raise RuntimeError("a bad pass")
        return super().result()


@dataclass
class Run:
    """One loop under traffic, and what each request was told."""

    loop: EngineLoop
    executor: Watchful
    requests: dict[str, Request] = field(default_factory=dict)
    told: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, tuple[Reason, str]] = field(default_factory=dict)
    preemptions: int = 0
    accepted: Counter[str] = field(default_factory=Counter)  # draft tokens, by drafter

    def __post_init__(self) -> None:
        self.published = PublishedBlocks(self.loop.scheduler.kv, self.executor)
        one_device(self.loop.scheduler, self.executor)

    def submit(self, request: Request) -> None:
        self.loop.submit(request)
        self.requests[request.id] = request
        self.told[request.id] = []

    def turn(self) -> None:
        events = self.loop.step()
        self.loop.scheduler.check()
        for id, index, token in zip(events.owners, events.indexes, events.tokens, strict=True):
            assert id not in self.ended
            assert index == len(self.told[id])
            self.told[id].append(token)
        for end in events.finished:
            assert end.id not in self.ended
            self.ended[end.id] = end.reason, end.error
        self.preemptions += len(events.preempted)
        self.published.check(self.requests.values())
        self.accepted.update(events.accepted)
        assert all(events.accepted[name] <= proposed for name, proposed in events.proposed.items())

    def drain(self) -> None:
        turns = 0
        while not self.loop.idle:
            self.turn()
            turns += 1
            assert turns < 20_000, "it does not come to an end"

    def verify(self) -> None:
        assert self.ended.keys() == self.requests.keys()
        assert self.loop.scheduler.kv.pool.held == 0
        assert not self.executor.queue, "a pass was left with the executor"
        assert self.executor.owed == 0
        for id, request in self.requests.items():
            grammar, (reason, error) = request.grammar, self.ended[id]
            fresh = None
            if grammar is not None:
                assert isinstance(grammar, FakeGrammar)
                assert grammar.outputs == self.told[id], "the grammar accepted other tokens than the client got"
                fresh = FakeGrammar(grammar.seed, grammar.length, grammar.breaks_at, grammar.refuses_at)
            prompt, params = request.tokens[: request.prompt_len], request.params
            want = oracle(
                prompt, request.max_tokens, request.stop_ids, request.seed, request.sample, params.min_tokens, fresh
            )
            if reason is Reason.ABORT or error.startswith("RuntimeError"):
                assert self.told[id] == want[: len(self.told[id])]
                continue
            assert self.told[id] == want, f"{id} got wrong tokens"
            if fresh is not None:
                ends = fresh.ended or (bool(want) and want[-1] in request.stop_ids)
                full = len(want) == request.max_tokens
                assert reason is (Reason.STOP if ends else Reason.LENGTH if full else Reason.ERROR)
                assert bool(error) == (reason is Reason.ERROR)


def make_run(depth: int, bad: dict[int, str] | None = None, **config: object) -> Run:
    scheduler = make_scheduler(**config)  # type: ignore[arg-type]
    executor = Watchful(scheduler.kv.pool.total, scheduler.kv.block_size, bad)
    return Run(EngineLoop(scheduler, executor, VirtualClock(), depth=depth, check=True), executor)


Move = tuple[object, ...]

arrival = st.tuples(
    st.just("arrive"),
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.integers(1, 12),  # max_tokens
    st.sampled_from([frozenset(), frozenset(range(0, 50, 5))]),
    st.integers(1, 2),  # n
    st.sampled_from([0, 1, 3, 8, 40]),  # the grammar's length; 0: none
    st.sampled_from(["", "", "", "breaks", "refuses"]),
    st.booleans(),  # min_tokens
)
moves = st.one_of(
    arrival, arrival, st.just(("turn",)), st.just(("turn",)), st.tuples(st.just("abort"), st.integers(0, 30))
)
configs = st.fixed_dictionaries(
    {
        "blocks": st.integers(9, 30),
        "block_size": st.sampled_from([1, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 30),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
        "layout": st.sampled_from(["ragged", "padded"]),
        "prefill": st.sampled_from(["chunked", "inline", "exclusive"]),
        "memory": st.sampled_from(["ondemand", "reserve"]),
        "speculate": st.sampled_from(
            ["off", "off", "ngram", "suffix", "grammar", "grammar+suffix", "draft", "grammar+draft"]
        ),
        "drafts": st.sampled_from([0, 1, 6]),
    }
)
failures = st.dictionaries(st.integers(0, 40), st.sampled_from(["forward", "sample", "result"]), max_size=3)


def arrive(
    run: Run,
    number: int,
    prompt: list[int],
    max_tokens: int,
    stop: frozenset[int],
    n: int,
    length: int,
    fault: str,
    least: bool,
) -> None:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=max_tokens // 2 if least else 0)
    group = Group(f"g{number}") if n > 1 else None
    for sample in range(n):
        at = {"breaks_at": 2 if fault == "breaks" else -1, "refuses_at": 2 if fault == "refuses" else -1}
        grammar = FakeGrammar(number, length, **at) if length else None
        more = {"seed": number, "sample": sample, "stop_ids": stop, "group": group, "grammar": grammar}
        try:
            run.submit(make_request(f"r{number}.{sample}", prompt, params=params, **more))
        except PromptTooLong:
            assert len(prompt) + max_tokens - 1 > run.loop.scheduler.tables.admission.kv_tokens


def play(run: Run, traffic: list[Move]) -> None:
    for number, (what, *how) in enumerate(traffic):
        if what == "arrive":
            arrive(run, number, *how)  # type: ignore[arg-type]
        elif what == "turn" and not run.loop.idle:
            run.turn()
        elif what == "abort":
            alive = [id for id in run.requests if id not in run.ended]
            if alive:
                run.loop.abort(alive[int(how[0]) % len(alive)])  # type: ignore[call-overload]
    run.drain()
    if run.requests.keys() - run.ended.keys():
        run.turn()  # those aborted last
    run.verify()


@given(configs, st.integers(1, 3), st.lists(moves, min_size=4, max_size=40), failures)
@examples(120, of=400)
def test_every_answer_obeys_its_grammar(
    config: dict[str, object], depth: int, traffic: list[Move], bad: dict[int, str]
) -> None:
    play(make_run(depth, bad, **config), traffic)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_requests_keep_their_place_in_the_grammar(depth: int) -> None:
    run = make_run(depth, blocks=14, max_num_seqs=6, max_num_batched_tokens=24)
    for number in range(40):
        prompt = [number % 3] * 5 + [number % 7, number % 5] * (1 + number % 4)
        grammar = FakeGrammar(number, 30) if number % 3 else None
        run.submit(make_request(f"r{number}", prompt, 4 + number % 20, seed=number, grammar=grammar))
        run.turn()
    run.drain()
    run.verify()
    assert run.preemptions > 10
    assert any(run.requests[id].grammar and run.requests[id].preemptions for id in run.requests)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("speculate", ["grammar", "grammar+suffix", "grammar+ngram"])
def test_drafts_under_a_grammar_are_verified_and_change_no_token(speculate: str, depth: int) -> None:
    """So that the random traffic above is known to verify some; with tiny memory, preemptions and aborts."""
    run = make_run(depth, blocks=16, max_num_seqs=6, max_num_batched_tokens=40, speculate=speculate, drafts=6)
    for number in range(40):
        prompt = [number % 3] * 5 + [number % 7, number % 5] * (1 + number % 4)
        grammar = FakeGrammar(number, 30) if number % 4 else None
        run.submit(make_request(f"r{number}", prompt, 4 + number % 20, seed=number, grammar=grammar))
        run.turn()
        if number % 9 == 8:
            run.loop.abort(f"r{number - 1}")
    run.drain()
    run.turn()
    run.verify()
    assert run.preemptions > 5
    assert run.accepted["grammar"] > 100
    assert speculate == "grammar" or run.accepted[speculate.partition("+")[2]] > 10
    assert run.executor.rejected_drafts > 10


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_come_in_fewer_passes(depth: int) -> None:
    passes = {}
    for speculate in ("off", "grammar"):
        run = make_run(depth, speculate=speculate, blocks=100)
        for number in range(3):
            run.submit(make_request(f"r{number}", [number], 40, seed=number, grammar=FakeGrammar(number, 40)))
        run.drain()
        run.verify()
        passes[speculate] = sum(what == "result" for what, _ in run.executor.calls)
    assert passes["grammar"] < 0.75 * passes["off"]


# ---- the order of calls ---------------------------------------------------------------------------------------------


def test_without_a_grammar_every_pass_is_sampled_at_once() -> None:
    run = make_run(2)
    run.submit(make_request("a", [1], max_tokens=6))
    run.drain()
    calls = run.executor.calls
    forwards = [place for place, (what, _) in enumerate(calls) if what == "forward"]
    assert all(calls[place + 1] == ("sample", calls[place][1]) for place in forwards)


def test_the_next_forward_runs_before_the_masks_are_known() -> None:
    """Pass 1 is begun while 0 is in flight, sampled after 0 came back, and before 2 is begun."""
    run = make_run(2)
    run.submit(make_request("a", [1], max_tokens=4, grammar=FakeGrammar(1, 4)))
    run.drain()
    assert run.executor.calls[:8] == [
        ("forward", 0), ("sample", 0),  # its first token waits for nothing
        ("forward", 1), ("result", 0), ("sample", 1),
        ("forward", 2), ("result", 1), ("sample", 2),
    ]  # fmt: skip


def test_a_newcomers_first_token_does_not_wait_for_the_pass_before() -> None:
    run = make_run(2)
    run.submit(make_request("plain", [1], max_tokens=9))
    run.turn()
    run.submit(make_request("new", [2], max_tokens=1, grammar=FakeGrammar(1, 4)))
    run.drain()
    calls = run.executor.calls
    forwards = [place for place, (what, _) in enumerate(calls) if what == "forward"]
    assert all(calls[place + 1] == ("sample", calls[place][1]) for place in forwards)
    run.verify()


def test_a_prompt_in_chunks_is_masked_only_where_it_chooses() -> None:
    run = make_run(2, max_num_batched_tokens=4, block_size=4)
    run.submit(make_request("a", list(range(15)), max_tokens=3, grammar=FakeGrammar(1, 9)))
    masked: list[int] = []
    sample = run.executor.sample

    def watch(masks: LateMasks | None) -> None:
        if masks is not None:
            masked.append(run.executor.queue[-1].step)
        sample(masks)

    run.executor.sample = watch  # type: ignore[method-assign]
    run.drain()
    run.verify()
    assert masked == [3, 4, 5]  # 15 positions in four passes, the last of which chooses


def test_neighbours_of_a_grammar_get_the_tokens_they_get_alone() -> None:
    alone, beside = make_run(2), make_run(2)
    for run in (alone, beside):
        for number in range(3):
            run.submit(make_request(f"p{number}", [number, 7], max_tokens=12, seed=number))
    for number in range(3):
        beside.submit(make_request(f"g{number}", [number, 9], max_tokens=12, grammar=FakeGrammar(number, 8)))
    alone.drain()
    beside.drain()
    beside.verify()
    assert {id: beside.told[id] for id in alone.told} == alone.told


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("fault", "message"), [({"breaks_at": 2}, "the grammar broke"), ({"refuses_at": 2}, "was refused")]
)
def test_a_grammar_that_cannot_go_on_ends_its_request_alone(depth: int, fault: dict[str, int], message: str) -> None:
    run = make_run(depth)
    run.submit(make_request("bad", [1], max_tokens=9, grammar=FakeGrammar(1, 9, **fault)))
    run.submit(make_request("good", [2], max_tokens=9, grammar=FakeGrammar(2, 7)))
    run.submit(make_request("plain", [3], max_tokens=9))
    run.drain()
    run.verify()
    assert run.ended["bad"][0] is Reason.ERROR
    assert message in run.ended["bad"][1]
    assert len(run.told["bad"]) == 2
    assert run.ended["good"] == (Reason.STOP, "")
    assert run.ended["plain"] == (Reason.LENGTH, "")


@pytest.mark.parametrize("call", ["forward", "sample", "result"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_failure_while_a_pass_waits_for_its_masks_leaves_nothing_behind(step: int, call: str) -> None:
    run = make_run(2, {step: call}, max_num_seqs=2)
    for number in range(5):
        run.submit(make_request(f"r{number}", [number], max_tokens=6, seed=number, grammar=FakeGrammar(number, 5)))
    run.drain()
    run.verify()
    assert set(run.ended.values()) == {(Reason.STOP, "")}, "once may be chance: nobody fails for it"


def test_an_aborted_request_needs_no_mask() -> None:
    run = make_run(2)
    run.submit(make_request("a", [1], max_tokens=9, grammar=FakeGrammar(1, 9)))
    run.submit(make_request("b", [2], max_tokens=9))
    run.turn()
    run.turn()
    run.loop.abort("a")
    run.drain()
    run.verify()
    assert run.ended["a"][0] is Reason.ABORT


def test_the_end_of_a_grammar_is_the_end_whatever_min_tokens_says() -> None:
    run = make_run(2)
    params = SamplingParams(max_tokens=20, min_tokens=15)
    run.submit(make_request("a", [1], params=params, grammar=FakeGrammar(1, 4)))
    run.drain()
    run.verify()
    assert len(run.told["a"]) == 4
    assert run.ended["a"] == (Reason.STOP, "")
