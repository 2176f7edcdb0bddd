"""Engines on virtual time: the engine's own objects, every request to its end, and the same run for the same seed."""

import numpy as np
import pytest

from shoal.config.presets import PRESETS
from shoal.core.plan import StepPlan
from shoal.engine.loop import EngineLoop
from shoal.errors import BadConfig
from shoal.kv.manager import KVManager
from shoal.routing.router import Router
from shoal.sched import make
from shoal.sched.policies import Policies
from shoal.sched.scheduler import Scheduler
from shoal.sim.cost import CostModel, DeviceTimes, HostTimes, PassSize, SimulatedExecutor
from shoal.sim.front import FrontTimes, SimulatedFronts
from shoal.sim.request import RequestMaker
from shoal.sim.virtual import ClosedArrivals, OpenArrivals, VirtualServer
from shoal.workload.traces import TraceRequest
from tests.sim.made import COSTS, Seen, engine, trace


def run(requests: list[TraceRequest], loops: list[EngineLoop], users: int = 0, **more: object) -> tuple[Seen, float]:
    seen = Seen()
    server = VirtualServer(loops, seen, RequestMaker(80, 16), **more)  # type: ignore[arg-type]
    end_s = server.run(ClosedArrivals(requests, users) if users else OpenArrivals(requests))
    if server.router is not None:
        server.router.check()
    return seen, end_s


def test_everything_but_the_executor_is_the_engines_own() -> None:
    loop = engine()
    assert type(loop) is EngineLoop
    assert type(loop.scheduler) is Scheduler
    assert type(loop.scheduler.kv) is KVManager
    assert type(loop.scheduler.policies) is Policies
    for axis in (make.BATCHING, make.PREFILL, make.MEMORY, make.ORDER, make.PREEMPT, make.LAYOUT, make.BUDGET):
        chosen = [policy for policy in vars(loop.scheduler.policies).values() if type(policy) in axis.values()]
        assert len(chosen) == 1
    assert type(VirtualServer([loop, engine()], Seen(), RequestMaker(80, 16)).router) is Router
    assert isinstance(loop.executor, SimulatedExecutor)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_ends_at_its_length_under_every_preset(preset: str, depth: int) -> None:
    requests = trace(60, rate=20, outputs=60)
    seen, _ = run(requests, [engine(blocks=120, depth=depth, preset=preset)])
    for number, one in enumerate(requests):
        assert seen.reasons[number] in ("stop", "length")
        assert len(seen.token_s[number]) == one.output
        assert seen.token_s[number] == sorted(seen.token_s[number])
        assert seen.token_s[number][0] > seen.arrived_s[number] == one.at_s


def test_preemption_and_swapping_lose_no_token() -> None:
    requests = trace(60, rate=40, longest=300)
    for when_short in ("recompute", "swap", "auto"):
        loop = engine(blocks=60, when_short=when_short, max_preemptions=3)
        seen, _ = run(requests, [loop])
        assert [len(seen.token_s[number]) for number in range(60)] == [one.output for one in requests]
        scheduled = [row for _, rows in seen.passes for row in rows]
        assert sum(count for _, _, count in scheduled) > sum(one.prompt + one.output - 1 for one in requests)


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    def passes(seed: int) -> list[object]:
        return [*run(trace(40, 20, seed), [engine(), engine()], routing="least-load")[0].passes]

    assert passes(1) == passes(1)
    assert passes(1) != passes(2)


def test_a_pass_takes_what_the_costs_say() -> None:
    costs = CostModel(DeviceTimes(((1, 0.5),), ((1, 2.0),), pair_s=0.001))
    seen, end_s = run([TraceRequest(0.0, 10, 3)], [engine(costs, depth=1)])
    first_s = 2.0 + 0.001 * 55  # position p looks at p positions: 1 + … + 10
    assert seen.token_s[0] == pytest.approx([first_s, first_s + 0.5, first_s + 1.0])
    assert end_s == pytest.approx(first_s + 1.0)


def test_the_host_is_hidden_behind_the_device_only_with_two_passes_in_flight() -> None:
    costs = CostModel(COSTS.device, HostTimes(0.004))
    ends = {depth: run([TraceRequest(0.0, 10, 50)], [engine(costs, depth=depth)])[1] for depth in (1, 2)}
    assert ends[1] - ends[2] == pytest.approx(48 * 0.004, rel=0.1)


def test_padding_is_counted_and_costs() -> None:
    two = np.array([0, 1])
    plan = StepPlan(0, (), np.empty((0, 3), dtype=np.int64), two, two, np.array([0, 9]), np.array([7, 1]),
                    np.array([1, 1]), np.zeros(8, dtype=np.int64), width=7, dead=1)  # fmt: skip
    size = PassSize.of(plan)
    assert (size.positions, size.padded, size.rows) == (21, 13, 3)
    assert size.reads == 30, "every row reads as far as the longest"


def shared(at_s: float, ids: tuple[int, ...], prompt: int = 600) -> TraceRequest:
    return TraceRequest(at_s, prompt, 5, prefix=ids, prefix_block=256)


def test_prompts_share_blocks_where_the_trace_says_so() -> None:
    requests = [shared(0.0, (1, 2, 3)), shared(2.0, (1, 2, 4)), shared(4.0, (9, 2, 3)), shared(6.0, (1, 2, 3))]
    seen, _ = run(requests, [engine()])
    # ids 1 and 2 are 512 tokens; the third block ends with the prompt, of which the last token is always computed
    assert seen.cached == {0: 0, 1: 512, 2: 0, 3: 592}
    seen, _ = run([TraceRequest(at, 600, 5) for at in (0.0, 2.0)], [engine()])
    assert seen.cached == {0: 0, 1: 0}


def test_prefix_routing_finds_the_engine_that_has_the_prefix() -> None:
    requests = [shared(1.0 * number, (number % 3, 7)) for number in range(12)]
    by = {policy: run(requests, [engine(), engine(), engine(), engine()], routing=policy)[0] for policy in
          ("prefix", "round-robin")}  # fmt: skip
    assert sum(by["prefix"].cached.values()) == 9 * 512
    assert sum(by["round-robin"].cached.values()) < 9 * 512


def test_two_engines_serve_more_than_one() -> None:
    requests = trace(80, rate=1000)
    one, two = (run(requests, [engine() for _ in range(count)], routing="least-load")[1] for count in (1, 2))
    assert 0.4 * one < two < 0.7 * one


def test_the_front_delays_first_tokens_and_is_a_queue() -> None:
    requests, quick = trace(20, rate=1000), CostModel(DeviceTimes(((1, 1e-5),), ((1, 1e-5),)))
    plain, _ = run(requests, [engine(quick)])
    front = FrontTimes(request_s=0.003, prompt_token_s=1e-5, hop_s=0.001, pass_s=0.0005, token_s=1e-4)
    seen, _ = run(requests, [engine(quick)], fronts=SimulatedFronts(front))
    waits = [seen.token_s[number][0] - plain.token_s[number][0] for number in range(20)]
    assert waits[0] > 0.004
    assert waits[19] > 0.003 * 15, "the last waits until the front has read the others"
    several, _ = run(requests, [engine(quick)], fronts=SimulatedFronts(front, 4))
    assert several.token_s[19][0] < seen.token_s[19][0]


def test_a_closed_loop_has_so_many_requests_at_a_time() -> None:
    requests = trace(30, rate=1.0)
    seen, _ = run(requests, [engine()], users=4)
    spans = [(seen.arrived_s[number], seen.token_s[number][-1]) for number in range(30)]
    for at_s, _ in spans:
        assert sum(begun <= at_s < ended for begun, ended in spans) <= 4
    assert sorted(seen.arrived_s.values())[:5] == [0.0] * 4 + [min(ended for _, ended in spans[:4])]


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    seen, _ = run([TraceRequest(0.0, 9000, 5), TraceRequest(0.1, 10, 5)], [engine(blocks=20)])
    assert seen.reasons[0] == "PromptTooLong"
    assert len(seen.token_s[1]) == 5


def test_a_trace_out_of_order_is_refused() -> None:
    with pytest.raises(BadConfig, match="sort the trace"):
        run([TraceRequest(1.0, 10, 5), TraceRequest(0.5, 10, 5)], [engine()])
