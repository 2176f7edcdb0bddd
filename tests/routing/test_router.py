"""The router: random engines, reports and jobs keep its invariants, and each policy chooses as it says."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.core.report import EngineReport, join_names
from shoal.errors import UnknownName
from shoal.kv.manager import KVManager
from shoal.kv.prefix import NetChanges
from shoal.routing.policies import ROUTING, LongestPrefix, RecentPrefixes
from shoal.routing.router import Router
from shoal.routing.work import BlockNames, Work

SIZE = 4  # tokens of a block


def work(tokens: Sequence[int], outputs: int = 8, salt: str = "") -> Work:
    return Work(len(tokens), outputs, 1, BlockNames(tokens, salt, SIZE))


def prompt(kind: int, length: int) -> list[int]:
    """Prompts of one kind begin alike."""
    return [kind * 1000 + place for place in range(length)]


def names(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    found = BlockNames(tokens, salt, SIZE)
    return [found[number] for number in range(len(found))]


def router(policy: str, engines: int) -> Router:
    made = Router(policy)
    for number in range(engines):
        made.joined(number, SIZE)
    return made


def test_the_names_are_those_of_the_engines() -> None:
    """A hit that the router counts on is one that the KV cache finds, and the other way round."""
    kv, tokens = KVManager(16, SIZE), prompt(1, 4 * SIZE + 1)
    kv.index.journal = changes = NetChanges()
    holding = kv.reserve(tokens, len(tokens), "salt", [])
    assert holding is not None
    kv.publish(holding, tokens, 3 * SIZE)
    added, evicted = changes.take()
    assert not evicted
    one = router("prefix", 1).engines[0]
    one.take(EngineReport(added=join_names(added)))
    for asked, salt, hits in ((tokens, "salt", 3), (tokens, "other", 0), (tokens[: 2 * SIZE + 1], "salt", 2)):
        found = one.hits(BlockNames(asked, salt, SIZE))
        assert found == hits == kv.count_hits(asked, salt, [])
    assert one.hits(BlockNames(tokens[: 2 * SIZE], "salt", SIZE)) == 1, "one token is left to compute"


def test_round_robin_takes_turns_among_those_that_are_up() -> None:
    one = router("round-robin", 3)
    assert [one.place(job, work([1])) for job in range(4)] == [0, 1, 2, 0]
    one.left(1)
    assert [one.place(job, work([1])) for job in range(4, 7)] == [2, 0, 2]


def test_least_load_counts_tokens_and_not_requests() -> None:
    one = router("least-load", 2)
    assert one.place(1, work(prompt(1, 500))) == 0
    assert [one.place(job, work(prompt(1, 50))) for job in range(2, 8)] == [1] * 6
    one.report(1, EngineReport(queued_tokens=2000, submissions=6))
    assert one.place(8, work([1])) == 0
    one.report(1, EngineReport(queued_tokens=0, submissions=6))
    assert one.place(9, work([1])) == 1


def test_a_prefix_is_followed_until_its_engine_is_too_busy() -> None:
    one, tokens = router("prefix", 3), prompt(1, 401)
    one.report(2, EngineReport(snapshot=True, added=join_names(names(tokens))))
    jobs = iter(range(1000))
    assert one.place(next(jobs), work(tokens)) == 2
    miss = int(LongestPrefix.MISS * 400)
    one.report(2, EngineReport(queued_tokens=miss - 10, submissions=1))
    assert one.place(next(jobs), work(tokens)) == 2, "a copy would cost more than the wait"
    one.report(2, EngineReport(queued_tokens=miss + 10, submissions=2))
    assert one.place(next(jobs), work(tokens)) == 0, "now it pays"
    one.report(2, EngineReport(queued_tokens=miss + 10, submissions=2, evicted=join_names(names(tokens))))
    assert one.place(next(jobs), work(tokens)) == 0, "where that prompt is being computed"


def chosen(one: Router, tokens: list[int]) -> int:
    """The engine that would get such a job."""
    found = one.choose(work(tokens), "")
    assert found is not None
    return found.number


def test_a_hot_prefix_gets_as_many_copies_as_it_needs() -> None:
    """Half of all jobs have one prefix, on four engines: it gets a second copy early, and a third one late."""
    one, hot = router("prefix", 4), prompt(1, 401)
    one.report(0, EngineReport(snapshot=True, added=join_names(names(hot))))
    jobs = iter(range(1000))
    for other in range(RecentPrefixes.LEAST):  # the others are of no prefix that is held
        for tokens in (hot, prompt(100 + other, 33)):
            job = next(jobs)
            one.place(job, work(tokens, outputs=1))
            one.ended(job)
    policy = one.policy
    assert isinstance(policy, LongestPrefix)
    few, many = int(policy.HOT_MISS * 400), int(policy.MISS * 400)
    for number in range(4):
        one.report(number, EngineReport(queued_tokens=0, submissions=1000))
    one.report(0, EngineReport(queued_tokens=few - 10, submissions=1000))
    assert chosen(one, hot) == 0
    one.report(0, EngineReport(queued_tokens=few + 10, submissions=1000))
    second = chosen(one, hot)
    assert second != 0
    one.report(second, EngineReport(added=join_names(names(hot)), queued_tokens=few + 10, submissions=1000))
    assert chosen(one, hot) in (0, second), "two are enough for half of the jobs"
    for number in (0, second):
        one.report(number, EngineReport(queued_tokens=many + 10, submissions=1000))
    assert chosen(one, hot) not in (0, second), "unless both are too busy"


def test_a_burst_of_one_new_prefix_stays_together_until_it_is_too_much() -> None:
    """Nothing is published yet; what was sent counts."""
    one, tokens = router("prefix", 4), prompt(3, 401)
    placed = [one.place(job, work(tokens, outputs=50)) for job in range(40)]
    assert placed[0] == placed[1] == placed[2]
    assert len(set(placed)) > 1, "but a hot prefix does not drown one engine"


def test_a_promised_prefix_counts_until_the_report_after_its_first_token() -> None:
    one, tokens = router("prefix", 2), prompt(1, 101)
    assert one.place(1, work(tokens)) == 0
    engine = one.engines[0]
    assert engine.hits(BlockNames(tokens, "", SIZE)) == 25
    one.began(1)
    assert engine.hits(BlockNames(tokens, "", SIZE)) == 25
    one.report(0, EngineReport(submissions=1))  # it was evicted at once
    assert engine.hits(BlockNames(tokens, "", SIZE)) == 0
    one.ended(1)
    one.check()


def test_a_job_that_could_not_be_sent_is_on_no_engine() -> None:
    one = router("least-load", 2)
    for job in range(4):
        assert one.place(job, work(prompt(1, 100))) == 0
        one.unsent(job)
        assert one.engine_of(job) is None
        one.check()
    assert one.engines[0].load == 0


def test_only_one_engine_may_get_a_suspect() -> None:
    one = router("prefix", 3)
    assert one.place(1, work([1]), only=2) == 2
    one.left(1)
    assert one.place(2, work([1]), only=1) is None


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="least-load, prefix, round-robin"):
        Router("prefixes")


class Routing(RuleBasedStateMachine):
    """Engines with real prefix caches come, go and report; jobs come, begin, end and fail to be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.caches: dict[int, tuple[KVManager, NetChanges]] = {}  # of the engines that are up
        self.read: dict[int, int] = {}  # engine → submissions that it has read
        self.sent: dict[int, int] = {}
        self.told: dict[int, set[bytes]] = {}  # what the last report said
        self.on: dict[int, int] = {}  # job → engine
        self.waiting: set[int] = set()
        self.count = 0

    @rule(policy=st.sampled_from(sorted(ROUTING)))
    def choose_policy(self, policy: str) -> None:
        self.router.policy = ROUTING[policy]()

    @rule(number=st.integers(0, 3))
    def engine_comes(self, number: int) -> None:
        kv = KVManager(24, SIZE)
        kv.index.journal = changes = NetChanges()
        self.caches[number], self.told[number] = (kv, changes), set()
        self.read[number] = self.sent[number] = 0
        self.engine_is_gone(number)
        self.router.joined(number, SIZE)

    @rule(number=st.integers(0, 3))
    def engine_goes(self, number: int) -> None:
        self.router.left(number)
        self.caches.pop(number, None)
        self.engine_is_gone(number)

    def engine_is_gone(self, number: int) -> None:
        self.waiting |= {job for job, engine in self.on.items() if engine == number}
        self.on = {job: engine for job, engine in self.on.items() if engine != number}

    @rule(kind=st.integers(0, 4), length=st.integers(1, 60), sent=st.booleans())
    def job_comes(self, kind: int, length: int, sent: bool) -> None:
        self.count += 1
        self.place(self.count, prompt(kind, length), sent)

    @precondition(lambda self: self.waiting)
    @rule(kind=st.integers(0, 4))
    def waiting_job_is_placed(self, kind: int) -> None:
        self.place(min(self.waiting), prompt(kind, 30), True)

    def place(self, job: int, tokens: list[int], sent: bool) -> None:
        engine = self.router.place(job, work(tokens))
        assert (engine is None) == (not self.caches)
        if engine is not None and not sent:
            self.router.unsent(job)
            engine = None
        if engine is None:
            self.waiting.add(job)
            return
        self.waiting.discard(job)
        self.on[job] = engine
        self.sent[engine] += 1

    @precondition(lambda self: self.on)
    @rule(data=st.data(), ends=st.booleans())
    def job_goes_on(self, data: st.DataObject, ends: bool) -> None:
        job = data.draw(st.sampled_from(sorted(self.on)))
        self.router.began(job)
        if ends:
            self.router.ended(job)
            del self.on[job]

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), kind=st.integers(0, 4), length=st.integers(1, 60), keep=st.booleans())
    def engine_computes(self, data: st.DataObject, kind: int, length: int, keep: bool) -> None:
        """Its cache changes: prompts are published, and others are evicted for them."""
        kv, _ = self.caches[data.draw(st.sampled_from(sorted(self.caches)))]
        tokens = prompt(kind, length)
        holding = kv.reserve(tokens, length, "", [])
        assert holding is not None
        kv.publish(holding, tokens, length)
        (kv.release if keep else kv.discard)(holding)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), queued=st.integers(0, 500), snapshot=st.booleans())
    def engine_reports(self, data: st.DataObject, queued: int, snapshot: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.caches)))
        kv, changes = self.caches[number]
        self.read[number] = data.draw(st.integers(self.read[number], self.sent[number]))
        added, evicted = changes.take()
        if snapshot:
            added, evicted = list(kv.index.names()), []
        report = EngineReport(queued, 20, 0.0, self.read[number], snapshot, join_names(added), join_names(evicted))
        self.router.report(number, report)
        self.told[number] = {name[:16] for name in kv.index.names()}

    @invariant()
    def every_job_is_on_one_engine_that_is_up_or_waits(self) -> None:
        for job in range(1, self.count + 1):
            assert self.router.engine_of(job) == self.on.get(job)
        assert set(self.on.values()) <= set(self.caches) == set(self.router.engines)
        self.router.check()

    @invariant()
    def the_names_are_those_of_the_last_report(self) -> None:
        for number, engine in self.router.engines.items():
            assert engine.names == self.told[number]
            assert engine.load >= engine.queued >= 0


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
