"""Disaggregated prefill on virtual time: the server's own handoff objects, every request to its end, nothing kept."""

from itertools import pairwise

import pytest

from shoal.config.engine import EngineConfig
from shoal.disagg.handoff import DECODE, PREFILL, Departures, HandoffTable, Receptions
from shoal.engine.front_handoffs import FrontHandoffs
from shoal.engine.loop import EngineLoop
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.sim.cost import CopyCosts, CostModel, Times
from shoal.sim.front import FrontTimes, SimulatedFronts
from shoal.sim.request import RequestMaker
from shoal.sim.split import SplitServer
from shoal.sim.virtual import ClosedArrivals, OpenArrivals, VirtualServer, virtual_loop
from shoal.workload.traces import TraceRequest
from tests.sim.made import COSTS, Seen, engine, trace


def of_role(role: str, blocks: int = 400, times: Times = COSTS, outbox: int | None = None) -> EngineLoop:
    config = EngineConfig.from_mapping({"max_num_seqs": 16, "max_num_batched_tokens": 256, "prefill": "disaggregated"})
    limits = Limits(blocks * config.block_size, config.slots, config.pass_tokens, vocab_size=1000)
    host = (blocks if outbox is None else outbox) if role == PREFILL else 0
    return virtual_loop(make_scheduler(config, limits, blocks, host, spill_cold=False), times, 2, check=True)


def split(
    requests: list[TraceRequest],
    prefill: int = 1,
    decode: int = 1,
    users: int = 0,
    front: FrontTimes | None = None,
    **engines: object,
) -> tuple[Seen, SplitServer]:
    seen = Seen()
    loops = [[of_role(role, **engines) for _ in range(count)] for role, count in ((PREFILL, prefill), (DECODE, decode))]  # type: ignore[arg-type]
    server = SplitServer(*loops, seen, RequestMaker(80, 16), SimulatedFronts(front or FrontTimes()))
    server.run(ClosedArrivals(requests, users) if users else OpenArrivals(requests))
    server.check()
    assert server.router is not None
    server.router.check()
    return seen, server


def test_the_handoff_is_the_servers_own() -> None:
    _, server = split([TraceRequest(0.0, 100, 5)])
    assert type(server.handoffs) is FrontHandoffs
    assert type(server.handoffs.table) is HandoffTable
    assert {type(one) for one in server._departures} == {Departures}
    assert {type(one) for one in server._receptions} == {Receptions}


@pytest.mark.parametrize(
    ("prefill", "decode", "blocks", "outbox"), [(1, 1, 400, 400), (2, 3, 400, 400), (1, 2, 60, 60), (1, 1, 400, 5)]
)
def test_every_request_ends_at_its_length(prefill: int, decode: int, blocks: int, outbox: int) -> None:
    requests = trace(80, rate=20, outputs=60)
    seen, _ = split(requests, prefill, decode, blocks=blocks, outbox=outbox)
    for number, one in enumerate(requests):
        assert len(seen.token_s[number]) == one.output
        assert seen.token_s[number] == sorted(seen.token_s[number])
        assert seen.token_s[number][0] > one.at_s


def test_a_closed_loop_and_a_refused_prompt() -> None:
    requests = [*trace(20, rate=1), TraceRequest(99.0, 9000, 5), TraceRequest(99.0, 100, 1)]
    seen, _ = split(requests, users=3, blocks=60)
    assert seen.reasons[20] == "PromptTooLong"
    assert [len(seen.token_s[number]) for number in (*range(20), 21)] == [*(one.output for one in requests[:20]), 1]


def test_prompts_are_computed_on_one_engine_and_answers_on_the_other() -> None:
    seen, server = split([TraceRequest(0.0, 170, 20)])
    first, second = (engine.loop.scheduler for engine in server.engines)
    rows = [(start, count) for _, rows in seen.passes for _, start, count in rows]
    assert rows[0] == (0, 170)
    assert rows[1] == (160, 11), "the tokens after the last full block are computed again, with the first output"
    assert rows[2:20] == [(position, 1) for position in range(171, 189)]
    assert len(first.kv.index) == 10
    assert len(second.kv.index) == 11


def test_copies_and_hops_take_their_time() -> None:
    def second_token_s(out_block_s: float, in_block_s: float, hop_s: float) -> float:
        costs = CostModel(COSTS.device, COSTS.host, CopyCosts(0.0, out_block_s, in_block_s))
        seen, _ = split([TraceRequest(0.0, 170, 20)], times=costs, front=FrontTimes(hop_s=hop_s))
        return seen.token_s[0][1] - seen.token_s[0][0]

    base_s = second_token_s(0.0, 0.0, 0.0)
    assert second_token_s(0.0, 0.01, 0.0) == pytest.approx(base_s + 0.1)
    assert second_token_s(0.01, 0.0, 0.0) == pytest.approx(base_s + 0.1), "a block is not read before it is written"
    assert second_token_s(0.0, 0.0, 0.05) == pytest.approx(base_s + 0.05)


def test_streams_do_not_wait_for_prompts() -> None:
    """A giant prompt among streams: with one engine of each role no gap is longer than a pass of decodes."""
    requests = [TraceRequest(0.0, 20, 80) for _ in range(4)] + [TraceRequest(0.3, 2000, 4)]
    mixed = Seen()
    VirtualServer([engine()], mixed, RequestMaker(80, 16)).run(OpenArrivals(requests))
    apart, _ = split(requests)

    def longest_gap_s(seen: Seen) -> float:
        times = seen.token_s[0]
        return max(later - earlier for earlier, later in pairwise(times[2:]))

    assert longest_gap_s(apart) < 0.6 * longest_gap_s(mixed)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [split(trace(40, 20, seed=3), 2, 2)[0].passes for _ in range(2)]
    assert runs[0] == runs[1]
