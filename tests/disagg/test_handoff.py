"""Handoffs under random traffic, deaths and failed transfers: each job ends once with the right tokens, and no block
stays held, on either side."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.request import Reason
from shoal.disagg.handoff import DECODE, PREFILL, HandoffTable, Release, Site, Stage, choose_transport, why_not
from tests.disagg.world import BLOCK, World
from tests.fakes import oracle

COMMON = [5, 6, 7, 8, 9, 10, 11, 12]  # a prefix that many prompts share

prompts = st.tuples(st.booleans(), st.lists(st.integers(1, 40), min_size=1, max_size=30)).map(
    lambda drawn: COMMON + drawn[1] if drawn[0] else drawn[1]
)
moves = st.one_of(
    st.tuples(st.just("ask"), prompts, st.integers(1, 12), st.sampled_from([1, 1, 1, 3])),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("kill"), st.integers(0, 3)),
    st.tuples(st.just("start"), st.integers(0, 3)),
    *[st.tuples(st.just(name), st.integers(0, 3)) for name in ("read", "plan", "commit", "deliver") for _ in range(4)],
)


def move(world: World, what: str, *values: int) -> None:
    if what == "ask":
        world.ask(*values)  # type: ignore[arg-type]
        return
    if what == "abort":
        if world.open:
            world.abort(sorted(world.open)[values[0] % len(world.open)])
        return
    number = values[0] % len(world.roles)
    if what in ("kill", "start"):
        getattr(world, what)(number)
        return
    engine = world.engines.get(number)
    if engine is None:
        return
    if what == "read" and engine.inbox:
        engine.read()
    elif what == "deliver":
        world.deliver(engine)
    elif what in ("plan", "commit"):
        engine.step(commit=what == "commit")


def verify(world: World) -> None:
    for job in world.asked.values():
        samples = job.ended.keys()
        assert samples, f"job {job.number} was never answered"
        for sample, reason in job.ended.items():
            if not job.aborted or reason is not Reason.ABORT:
                right = oracle(job.prompt, job.max_tokens, frozenset({3}), job.seed, sample)
                assert job.told[sample] == right, f"job {job.number} has wrong tokens"
                assert reason in (Reason.STOP, Reason.LENGTH)
    assert not len(world.table)
    for engine in world.engines.values():
        engine.check()
        kv = engine.scheduler.kv
        assert engine.scheduler.idle
        assert kv.pool.held == 0, "blocks are held for no request"
        assert kv.host is None or not kv.host.pinned(), "an outbox keeps blocks for no job"


@given(
    st.lists(moves, min_size=20, max_size=200),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    st.integers(0, 50),
    st.sampled_from([(40, 24), (24, 8), (100, 100)]),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_traffic(steps: list[tuple[int]], counts: tuple[int, int], odds: int, sizes: tuple[int, int]) -> None:
    world = World(*counts, odds, *sizes)
    for step in steps:
        move(world, *step)  # type: ignore[arg-type]
        world.check()
    world.drain()
    verify(world)


def test_blocks_travel_and_are_not_computed_again() -> None:
    """Without failures, a decode engine computes nothing of a prompt but the tokens after its last full block."""
    world = World(1, 1, odds=0, blocks=200, outbox=100)
    lengths = [3, 9, 16, 17, 40, 63]
    for number, length in enumerate(lengths):
        world.ask([(number * 7 + place) % 40 + 4 for place in range(length)], 6, 1)
    world.drain()
    verify(world)
    moved = [job for job in world.asked.values() if len(job.told[0]) > 1]
    outputs = sum(len(job.told[0]) - 1 for job in moved)
    assert world.left == len(moved) > 3
    # one pass more than needed may be planned for each before its end is known
    least = sum(len(job.prompt) % BLOCK for job in moved) + outputs
    assert least <= world.engines[1].executor.computed_tokens <= least + len(moved)
    assert world.engines[1].executor.received >= sum(len(job.prompt) // BLOCK for job in moved)


def test_what_the_decode_engine_has_is_not_sent() -> None:
    world = World(1, 1, odds=0, blocks=200, outbox=100)
    prompt = [place % 40 + 4 for place in range(42)]
    world.ask([*prompt, 5], 6, 1)
    world.drain()
    before = world.engines[1].executor.received
    world.ask([*prompt, 6, 7, 8], 6, 1)
    world.drain()
    verify(world)
    assert before == 10
    assert world.engines[1].executor.received == before + 1  # 45 tokens: one block more than the 42 that both share


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_without_engines_of_a_role_the_others_do_all(role: str) -> None:
    world = World(1, 1, odds=0)
    world.kill(world.roles.index(role))
    for number in range(4):
        world.ask([number + 4] * 20, 8, 1)
    for _ in range(400):
        for engine in list(world.engines.values()):
            while engine.inbox:
                engine.read()
            engine.step(commit=False)
            engine.step(commit=True)
            while world.deliver(engine):
                pass
    assert not world.open
    assert world.left == 0
    verify(world)


def test_a_handoff_goes_one_way() -> None:
    table = HandoffTable()
    table.begin(1, source=0, samples=[0, 1])
    assert table.stage(1) is Stage.PREFILLING
    assert table.send_blocks(1, 2)
    assert not table.send_blocks(1, 3), "its blocks go to one engine"
    assert not table.handed(1, 0)
    assert table.handed(1, 1)
    table.leave(1)
    with pytest.raises(AssertionError, match="LEAVING"):
        table.leave(1)
    table.lost(2)
    assert table.target(1) is None
    assert table.arrive(1, 3) == []
    assert table.token(1) == [Release(0, 1)]
    assert table.token(1) == []
    assert table.end(1) == []
    assert table.end(1) == []


def test_a_job_that_ends_early_releases_both_sides() -> None:
    table = HandoffTable()
    table.begin(1, source=0, samples=[0])
    table.send_blocks(1, 2)
    assert table.end(1) == [Release(0, 1), Release(2, 1)]


def test_which_transport() -> None:
    here, gpu, other = Site("a"), Site("a", "0"), Site("b", "0")
    assert choose_transport(gpu, gpu) == "cuda-ipc"
    assert choose_transport(gpu, other) == "tcp"
    assert "another machine" in why_not("shm", gpu, other)
    assert "CPUs" in why_not("cuda-ipc", here, here)
    assert "same GPU" in why_not("cuda-ipc", gpu, Site("a", "1"))
    assert not why_not("tcp", here, here)
