"""The whole engine with drafts and a real model: random traffic, and every request gets the tokens it gets without.

Scheduler, loop, executor thread, runner and C kernels are the real ones, the model is tiny, and so is the KV memory:
requests are preempted, recomputed, swapped to the host and back, share prefixes, are aborted and cut, in every place
of a pass. The drafter is scripted: it knows each request's answer, and makes mistakes.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import SamplingParams, kernels
from shoal.core.clock import VirtualClock
from shoal.core.drafts import Draft
from shoal.core.plan import SCRIPTED_END, StepPlan
from shoal.core.request import Group, Logprobs, Reason, Request
from shoal.engine.loop import EngineLoop
from shoal.kernels.cpu import NativeOps
from shoal.models import Model, make_model, spec_from_config
from shoal.runner.kvstore import KVStore
from shoal.runner.loader import dummy_weights
from shoal.runner.runner import Runner
from shoal.runner.threaded import ThreadedExecutor
from shoal.sched.scheduler import Scheduler
from shoal.sched.steptime import StepModel
from tests.effort import examples
from tests.fakes import VOCAB, FakeGrammar, FreeDrafts, make_scheduler
from tests.runner.verifying import CONFIG

pytestmark = pytest.mark.skipif(
    not isinstance(kernels.pick("cpu"), NativeOps), reason="in plain torch a position rounds as its neighbours make it"
)

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"temperature": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 1.0, "logit_bias": {3: 3.0, 7: -100.0}, "min_tokens": 5},
    {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 1},
]


@dataclass(frozen=True)
class Asked:
    """A request as it is sent, `n` samples of it."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    n: int
    kind: int  # of PARAMS; beyond them: a grammar, a scripted end
    salt: str = ""

    def requests(self, known: Sequence[int] = ()) -> list[Request]:
        """known: tokens that it has already, from an engine that is gone."""
        values, extra = dict(PARAMS[self.kind % len(PARAMS)]), self.kind // len(PARAMS)
        least = 0 if extra == 2 else min(values.pop("min_tokens", 0), self.max_tokens)  # a scripted end comes earlier
        params = SamplingParams(max_tokens=self.max_tokens, **{**values, "min_tokens": least}).resolved({})
        group = Group(f"g{self.number}") if self.n > 1 else None
        return [
            Request(
                f"r{self.number}.{sample}",
                list(self.prompt),
                params,
                seed=self.number,
                sample=sample,
                stop_ids=self.stop_ids | {SCRIPTED_END},
                group=group,
                salt=self.salt,
                grammar=self.grammar(known) if extra == 1 else None,
                output=known,
                ends_after=1 + self.max_tokens // 2 if extra == 2 else 0,
            )
            for sample in range(self.n)
        ]

    def grammar(self, known: Sequence[int]) -> FakeGrammar:
        made = FakeGrammar(self.number, self.max_tokens)
        assert all(made.accept(token) for token in known)
        return made


@dataclass
class Told:
    """What a request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt: list[Logprobs] = field(default_factory=list)
    reason: Reason | None = None


class ScriptedDrafter:
    """Proposes what requests will generate, where each token is another one with the probability `wrong`.

    It knows the tokens that are on their way, so it also proposes what follows those. In some passes it proposes
    nothing, so that passes are planned on top of each other in between.
    """

    ahead = True
    by_chance = False
    names: Sequence[str] = ("scripted",)

    def __init__(self, answers: Mapping[str, Told], wrong: float, seed: int) -> None:
        self.answers = answers
        self.wrong = wrong
        self.source = random.Random(seed)
        self.quiet = 0  # passes without drafts to come

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        if self.quiet:
            self.quiet -= 1
            return {}
        self.quiet = self.source.choice((0, 0, 0, 1, 2))
        found = {request: self._drafts(request)[:most] for request, most in wanted.items()}
        return {
            request: Draft(drafts, [0.8] * len(drafts), (("scripted", len(drafts)),))
            for request, drafts in found.items()
            if drafts
        }

    def cost_s(self, rows: int, tokens: int) -> float:
        return 0.0

    def ended(self, request: Request, by_itself: bool) -> None:
        pass

    def _drafts(self, request: Request) -> list[int]:
        known = request.outputs + request.pending
        right = self.answers[request.id].tokens[known:][: self.source.randint(0, 6)]
        right += [self.source.randrange(VOCAB)] * self.source.randint(0, 1)  # and now and then beyond its end
        return [max(0, t) if self.source.random() >= self.wrong else self.source.randrange(VOCAB) for t in right]


class DraftingScheduler(Scheduler):
    """Plans nothing on top of a pass with drafts: an executor takes positions as they were planned."""

    def __init__(self, drafter: ScriptedDrafter, *args: Any) -> None:
        limits, kv, policies, rules = args
        drafts = FreeDrafts(drafter, StepModel(), VOCAB, 6)
        super().__init__(limits, kv, replace(policies, drafts=drafts), rules)

    def plan(self, now_s: float) -> StepPlan | None:
        return None if any(flight.drafts for flight in self.flights) else super().plan(now_s)


@cache
def model() -> Model:
    spec = spec_from_config({**CONFIG, "vocab_size": VOCAB})
    params, ops = dummy_weights(spec, torch.float32, "cpu"), kernels.pick("cpu")
    params.convert(ops.prepare)
    return make_model(spec, params, ops)


class Engine:
    """A loop over a scheduler and a real runner, and what came of it."""

    def __init__(self, scheduler: Scheduler, depth: int, most_drafts: int = 0) -> None:
        kv, self.told = scheduler.kv, dict[str, Told]()
        host = kv.host.total if kv.host is not None else 0
        store = KVStore(model().spec, kv.pool.total, kv.block_size, torch.float32, "cpu", host)
        limits = scheduler.limits
        rows = scheduler.tables.rows.count
        self.runner = runner = Runner(model(), store, rows, limits.max_model_len, "cpu", most_drafts=most_drafts)
        self.scheduler = scheduler
        self.loop = EngineLoop(scheduler, ThreadedExecutor(runner), VirtualClock(), depth, check=True)
        self.passes = self.preemptions = self.cached = self.blocks_in = 0
        self.drafted = self.on_top = 0  # draft tokens; passes planned while another was in flight
        self.loop.on_begin = self._begin

    def _begin(self, ids: Sequence[str], suspects: bool) -> None:
        flights = self.scheduler.flights
        self.drafted += flights[-1].drafted
        self.on_top += len(flights) > 1
        assert not any(flight.drafted for flight in list(flights)[:-1]), "planned on top of drafts"

    def submit(self, asked: Asked) -> None:
        requests = asked.requests()
        self.loop.submit_all(requests)
        self.told |= {request.id: Told() for request in requests}

    def resume(self, asked: Asked, known: Sequence[int]) -> None:
        """A request of one sample that has these tokens from an engine that is gone."""
        (request,) = asked.requests(known)
        self.loop.submit_all([request], resumed=True)
        self.told[request.id] = Told(list(known))

    def step(self) -> None:
        events = self.loop.step()
        assert not events.faults, "a pass broke"
        self.passes += 1
        for id, index, token in zip(events.owners, events.indexes, events.tokens, strict=True):
            one = self.told[id]
            assert one.reason is None, "a token came after the end"
            assert index == len(one.tokens), "a token was lost or doubled"
            one.tokens.append(token)
            if (id, index) in events.logprobs:
                one.logprobs.append(events.logprobs[id, index])
        for id, (first, values) in events.prompt_logprobs.items():
            seen = self.told[id].prompt
            seen += values[len(seen) + 1 - first :]
        for end in events.finished:
            self.told[end.id].reason = end.reason
            assert not end.error, end
        self.preemptions += len(events.preempted)
        self.cached += sum(one.cached_tokens for one in events.admitted)
        self.blocks_in += events.blocks_in

    def drain(self) -> None:
        for _ in range(4000):
            if self.scheduler.idle and not self.scheduler.news:
                assert self.scheduler.kv.pool.held == 0, "blocks are held by no request"
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def end_one(self, what: str, which: int) -> None:
        alive = [id for id, one in self.told.items() if one.reason is None]
        if not alive:
            return
        id = alive[which % len(alive)]
        if what == "abort":
            self.loop.abort(id)
        elif self.told[id].tokens:  # a stop string, in a token that the front knows
            self.loop.finish_at(id, 1 + which % len(self.told[id].tokens))


@contextmanager
def engine(depth: int, drafter: ScriptedDrafter | None = None, **config: Any) -> Iterator[Engine]:
    kind: Any = Scheduler if drafter is None else partial(DraftingScheduler, drafter)
    made = Engine(make_scheduler(kind=kind, **config), depth)
    try:
        yield made
    finally:
        made.loop.close()


def answers_to(asked: Iterable[Asked]) -> dict[str, Told]:
    """What each request generates alone, without drafts and with memory for all."""
    with engine(1, blocks=400, max_num_seqs=16, max_num_batched_tokens=64) as plain:
        for one in asked:
            plain.submit(one)
        plain.drain()
        return plain.told


def compare(told: Mapping[str, Told], answers: Mapping[str, Told]) -> None:
    """The same tokens and logprobs, to the last bit; a request that was ended from outside has the first of them."""
    for id, got in told.items():
        want = answers[id]
        count = len(got.tokens)
        assert got.reason in (want.reason, Reason.ABORT, Reason.STOP)
        assert got.tokens == want.tokens[:count], id
        assert got.logprobs == want.logprobs[: len(got.logprobs)], id
        assert got.prompt == want.prompt[: len(got.prompt)], id
        if got.reason is want.reason is Reason.LENGTH:
            assert len(got.prompt) == len(want.prompt)
            assert count == len(want.tokens)


# ---- random traffic -------------------------------------------------------------------------------------------------

Move = tuple[Any, ...]
arrivals = st.tuples(
    st.just("arrive"),
    st.lists(st.integers(0, 2), min_size=1, max_size=24).map(tuple),  # few ids: prefixes are often equal
    st.integers(1, 16),
    st.sampled_from([frozenset(), frozenset({1, 2, 3}), frozenset(range(0, VOCAB, 7))]),
    st.integers(1, 3),
    st.integers(0, 3 * len(PARAMS) - 1),
    st.sampled_from(["", "other tenant"]),
)
moves = st.one_of(
    arrivals,
    arrivals,
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["abort", "cut"]), st.integers(0, 30)),
)
configs = st.fixed_dictionaries(
    {
        "blocks": st.integers(14, 40),
        "block_size": st.sampled_from([3, 4, 8]),
        "keep": st.booleans(),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(2, 40),
        "when_short": st.sampled_from(["recompute", "swap"]),
        "host_blocks": st.sampled_from([0, 6, 40]),
        "prefill": st.sampled_from(["chunked", "chunked", "exclusive"]),
        "order": st.sampled_from(["fcfs", "sjf", "fair"]),
    }
)


def play(made: Engine, traffic: Sequence[Move]) -> None:
    for number, (what, *how) in enumerate(traffic):
        if what == "arrive":
            made.submit(Asked(number, *how))
        elif what == "step":
            for _ in range(how[0]):
                made.step()
        else:
            made.end_one(what, how[0])
    made.drain()


@given(configs, st.integers(1, 2), st.sampled_from([0.0, 0.2, 0.6]), st.lists(moves, min_size=4, max_size=30))
@examples(12, of=40)
def test_random_traffic_gets_the_same_tokens_with_drafts(
    config: dict[str, Any], depth: int, wrong: float, traffic: list[Move]
) -> None:
    answers = answers_to(Asked(number, *how) for number, (what, *how) in enumerate(traffic) if what == "arrive")
    with engine(depth, ScriptedDrafter(answers, wrong, len(traffic)), **config) as made:
        play(made, traffic)
        compare(made.told, answers)


# ---- one busy load, so that the above is known to happen -------------------------------------------------------------


def busy_load(count: int) -> list[Move]:
    source, traffic = random.Random(5), []
    for number in range(count):
        prompt = (*[number % 2] * 12, *source.choices(range(3), k=source.randint(1, 12)))
        stop = frozenset({source.randrange(VOCAB)})
        kind = number % (3 * len(PARAMS))
        traffic.append(("arrive", prompt, source.randint(8, 24), stop, source.choice((1, 1, 2)), kind))
        traffic.append(("step", source.randint(1, 4)))
        if number % 9 == 8:
            traffic.append((source.choice(("abort", "cut")), source.randrange(30)))
    return traffic


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when_short", ["recompute", "swap"])
def test_a_busy_engine_verifies_drafts_and_loses_none_of_its_tokens(depth: int, when_short: str) -> None:
    traffic = busy_load(56)
    answers = answers_to(Asked(number, *how) for number, (what, *how) in enumerate(traffic) if what == "arrive")
    config = {"blocks": 21, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40, "host_blocks": 30}
    with engine(depth, **config, when_short=when_short) as plain:
        play(plain, traffic)
        compare(plain.told, answers)
    with engine(depth, ScriptedDrafter(answers, 0.2, 1), **config, when_short=when_short) as made:
        play(made, traffic)
        compare(made.told, answers)
    assert made.drafted > 150
    assert made.preemptions > 2
    assert made.cached > 300
    assert made.blocks_in > 5
    assert made.on_top > 50 or depth == 1
    assert made.passes < 0.9 * plain.passes


def test_right_drafts_give_several_tokens_a_pass() -> None:
    asked = [Asked(number, (number, 1, 2, 3), 60, frozenset(), 1, number) for number in range(6)]
    answers = answers_to(asked)
    drafter = ScriptedDrafter(answers, 0.0, 1)
    with engine(1, drafter, blocks=200, max_num_batched_tokens=64) as made:
        for one in asked:
            made.submit(one)
        made.drain()
        compare(made.told, answers)
    assert made.passes < 40  # 60 and more without


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_an_engine_that_died_go_on_with_drafts(depth: int) -> None:
    """Each is resumed from another of its tokens; its logprobs go on there, too."""
    asked = [
        Asked(number, (number, 1, 2), 20 + number % 5, frozenset({number % VOCAB}), 1, number)
        for number in range(3 * len(PARAMS))
    ]
    answers = answers_to(asked)
    with engine(depth, ScriptedDrafter(answers, 0.2, 2), blocks=80, max_num_batched_tokens=64) as made:
        kept: dict[str, int] = {}
        for one in asked:
            id = f"r{one.number}.0"
            want = answers[id].tokens
            kept[id] = one.number * 7 % len(want)
            made.resume(one, want[: kept[id]])
        made.drain()
    for id, count in kept.items():
        want, got = answers[id], made.told[id]
        assert (got.tokens, got.reason) == (want.tokens, want.reason), id
        assert got.logprobs == (want.logprobs[count:] if want.logprobs else []), id
    assert made.drafted > 40


def test_penalties_after_the_last_pass_count_the_accepted_tokens_only() -> None:
    """The runner's own counts, of a request whose drafts are often wrong."""
    asked = [Asked(1, (1, 2, 3), 30, frozenset(), 1, 4), Asked(2, (1, 2), 60, frozenset(), 1, 0)]
    answers = answers_to(asked)
    with engine(1, ScriptedDrafter(answers, 0.4, 3), blocks=200) as made:
        for one in asked:
            made.submit(one)
        slot = -1
        while made.told["r1.0"].reason is None:
            made.step()
            edits = made.runner.sampler.edits
            slot = max(slot, int(edits.penalty_slot.max()))
        counts = np.bincount(made.told["r1.0"].tokens, minlength=VOCAB)
        assert edits.counts[slot].tolist() == counts.tolist()
        made.drain()
