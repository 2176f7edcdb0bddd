"""From the records of passes to the lines of the live page: with a real scheduler, and by hand."""

import json
from typing import Any

import msgspec

from shoal.core.live import LivePass, LiveRequest
from shoal.engine.block_map import live_view
from shoal.engine.loop import EngineLoop
from shoal.engine.pass_feed import FEED_S, PassFeed
from shoal.obs.live import KEY_LINES, PROMPT, RECOMPUTE, LiveSummary
from tests.fakes import FakeExecutor, make_request, make_scheduler

decode = msgspec.msgpack.Decoder(list[LivePass]).decode


class StepClock:
    """A tenth of a second per look."""

    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        self.now += 0.01
        return self.now

    def wait_until(self, at_s: float) -> None:
        self.now = max(self.now, at_s)


def drive(requests: list[Any], summary: LiveSummary, **options: Any) -> list[dict[str, Any]]:
    """All lines of a run of these requests through a real scheduler, feed and summary."""
    scheduler = make_scheduler(**options)
    loop = EngineLoop(scheduler, FakeExecutor(scheduler.kv.pool.total, scheduler.kv.block_size), StepClock(), depth=1)
    feed, lines = PassFeed(scheduler), list[dict[str, Any]]()
    feed.follow(b"front")
    summary.up(0, 0, 0.0)
    for request in requests:
        loop.submit(request)
    sent_s = -1.0
    while not loop.idle or feed.pending:
        if not loop.idle:
            feed.take(loop.step())
        now_s = loop.clock.now_s()
        for batch in feed.due(now_s).values():
            assert now_s - sent_s >= FEED_S, "at most ten a second"
            sent_s = now_s
            summary.came(0, 0, batch.came, now_s)
            for one in decode(batch.packed):
                summary.passed(0, 0, one)
            summary.view(0, live_view(scheduler, now_s))
            lines.append(json.loads(json.dumps(summary.line(now_s), allow_nan=False)))
    return lines


def gathered(lines: list[dict[str, Any]], name: str) -> list[Any]:
    return [one for line in lines for one in line.get(name, ())]


def decodes_of(lines: list[dict[str, Any]]) -> dict[int, int]:
    """Lane → passes in which it decoded, as a page counts them."""
    decoding: set[int] = set()
    found: dict[int, int] = {}
    for one in gathered(lines, "passes"):
        decoding = decoding - set(one.get("out", ())) | set(one.get("in", ()))
        for lane in decoding:
            found[lane] = found.get(lane, 0) + 1
    return found


def test_every_token_of_every_request_is_in_the_lines() -> None:
    requests = [make_request(f"r{n}", [n + 1] * (5 + 3 * n), 4 + n, tenant=f"t{n % 2}") for n in range(5)]
    lines = drive(requests, LiveSummary(0.0), max_num_seqs=3)
    lanes = {one[1]: one for one in gathered(lines, "new")}
    assert set(lanes) == {f"r{n}" for n in range(5)}
    ends = {one[2]: one for one in gathered(lines, "ev") if one[0] == "end"}
    firsts = [one for one in gathered(lines, "ev") if one[0] == "first"]
    assert len(ends) == len(firsts) == 5
    chunks = [chunk for one in gathered(lines, "passes") for chunk in one.get("c", ())]
    decodes = decodes_of(lines)
    for request in requests:
        number = lanes[request.id][0]
        assert sum(count for lane, _, count, kind in chunks if lane == number and kind == PROMPT) == request.prompt_len
        assert decodes.get(number, 0) == request.outputs - 1, "the first token comes with the prompt"
        assert ends[number][4] == request.outputs
        assert lanes[request.id][4] == request.tenant
    computed = sum(len(request.tokens) - 1 for request in requests)
    assert sum(one["p"] + one["d"] for one in gathered(lines, "passes")) == computed
    shares: dict[str, int] = {}
    for line in lines:
        for tenant, tokens in line.get("tenants", {}).items():
            shares[tenant] = shares.get(tenant, 0) + tokens
    assert sum(shares.values()) == computed
    assert set(shares) == {"t0", "t1"}


def test_no_line_holds_a_token_or_a_text() -> None:
    lines = drive([make_request("r", [41, 42, 43, 44, 45], 6)], LiveSummary(0.0))
    known = {"t", "key", "new", "ev", "passes", "tenants", "views", "tiers"}
    assert all(set(line) <= known for line in lines)
    fields = {"e", "n", "a", "b", "p", "d", "r", "w", "u", "run", "wait", "kv", "in", "out", "c", "x", "mfu", "mbu"}
    assert all(set(one) <= fields for one in gathered(lines, "passes"))


def test_what_is_computed_again_after_a_preemption_is_told_apart() -> None:
    requests = [make_request(f"r{n}", [n + 1] * 10, 14) for n in range(4)]
    lines = drive(requests, LiveSummary(0.0), blocks=14, max_model_len=40, watermark=0.0, keep=False)
    preempted = [one for one in gathered(lines, "ev") if one[0] == "preempt"]
    chunks = [chunk for one in gathered(lines, "passes") for chunk in one.get("c", ())]
    again = [chunk for chunk in chunks if chunk[3] == RECOMPUTE]
    assert preempted
    assert {lane for lane, *_ in again} == {one[2] for one in preempted}
    assert sum(one["r"] for one in gathered(lines, "passes")) > 0


def test_a_waiting_request_says_why_and_blocks_say_whose() -> None:
    requests = [make_request(f"r{n}", [n + 1] * 9, 20) for n in range(3)]
    lines = drive(requests, LiveSummary(0.0), max_num_seqs=2)
    lanes = {one[0]: one[1] for one in gathered(lines, "new")}
    views = [line["views"]["0"] for line in lines if "views" in line]
    waits = [entry for view in views for entry in view["queue"]]
    assert waits[0][1] == "all 2 places are taken"
    assert lanes[waits[0][0]] == "r2"
    first = views[0]["blocks"]
    assert sum(run[2] for run in first["runs"]) == first["total"] == 64
    holders = {lanes[first["owners"][run[1]]] for run in first["runs"] if run[0] >= 2 and run[1] >= 0}
    assert holders == {"r0", "r1"}


def request(number: int, id: str, at_s: float = 0.0, **more: Any) -> LiveRequest:
    return LiveRequest(number, id, at_s, **{"prompt": 4, "most": 9, **more})


def one_pass(step: int, at_s: float, rows: list[tuple[int, int, int]] | None, **more: Any) -> LivePass:
    made = LivePass(step, at_s, at_s + 0.1, None, **more)
    if rows is not None:
        made.rows, made.starts, made.counts = (list(part) for part in zip(*rows, strict=True)) if rows else ([], [], [])
    return made


def test_a_request_goes_on_in_its_lane_when_its_engine_is_restarted() -> None:
    summary = LiveSummary(0.0)
    summary.up(0, 0, 0.0)
    summary.came(0, 0, [request(1, "a")], 0.0)
    summary.passed(0, 0, one_pass(1, 0.1, [(1, 0, 4)], first=[1]))
    summary.passed(0, 0, one_pass(2, 0.2, [(1, 4, 1)]))
    summary.line(0.3)
    summary.down(0, 0.4)
    summary.up(0, 1, 2.0)
    summary.came(0, 1, [request(7, "a", outputs=2, resumed=True)], 2.1)
    summary.passed(0, 1, one_pass(1, 2.2, [(7, 0, 5)]))
    summary.passed(0, 1, one_pass(2, 2.3, [(7, 5, 1)], ended=[(7, "length", 9, None, None)]))
    line = summary.line(2.5)
    assert [one[0] for one in line["ev"]] == ["down", "up", "move", "end"]
    assert "new" not in line, "it has its lane already"
    assert line["passes"][0]["c"] == [[1, 0, 5, RECOMPUTE]]
    assert line["passes"][1]["in"] == [1]


def test_a_request_that_ended_as_its_engine_went_down_does_not_wait_for_ever() -> None:
    """The engine died before it could say so; a request that was aborted before has its end already."""
    summary = LiveSummary(0.0)
    summary.up(0, 0, 0.0)
    summary.came(0, 0, [request(1, "a"), request(2, "b"), request(3, "c")], 0.0)
    summary.passed(0, 0, one_pass(1, 0.1, [(1, 0, 4), (2, 0, 4), (3, 0, 4)], ended=[(3, "abort", 0, None, None)]))
    assert [one[0] for one in summary.line(0.3)["ev"]] == ["up", "end"]
    summary.down(0, 0.4)
    summary.up(0, 1, 9.0)
    summary.came(0, 1, [request(7, "b", outputs=1, resumed=True)], 9.1)
    assert "lost" not in str(summary.line(13.9))
    ended = summary.line(14.1)["ev"]
    assert ended == [["end", 0.4, 1, "lost", 0, None, None]]
    assert "ev" not in summary.line(99.0)


def test_a_request_that_moves_to_another_engine_jumps_and_ends_once() -> None:
    summary = LiveSummary(0.0)
    for engine in (0, 1):
        summary.up(engine, 0, 0.0)
    summary.came(0, 0, [request(1, "a")], 0.0)
    summary.passed(0, 0, one_pass(1, 0.1, [(1, 0, 4)]))
    summary.passed(0, 0, one_pass(-1, 0.2, [], ended=[(1, "abort", 1, None, None)]))
    summary.came(1, 0, [request(1, "a", outputs=1, resumed=True)], 0.3)
    summary.passed(1, 0, one_pass(1, 0.3, [(1, 0, 5)], ended=[(1, "stop", 2, None, None)]))
    events = summary.line(0.5)["ev"]
    assert [one[0] for one in events if one[0] in ("move", "end")] == ["end", "move", "end"]
    assert next(one for one in events if one[0] == "move")[2:] == [1, 0, 1]


def test_the_first_engine_may_tell_its_story_after_the_second() -> None:
    summary = LiveSummary(0.0)
    for engine in (0, 1):
        summary.up(engine, 0, 0.0)
    summary.came(1, 0, [request(5, "a", outputs=1, resumed=True)], 0.2)
    summary.passed(1, 0, LivePass(1, 0.2, 0.3, [5], [4], [1]))
    summary.came(0, 0, [request(1, "a")], 0.0)
    summary.passed(0, 0, LivePass(1, 0.0, 0.1, [1], [0], [4], ended=[(1, "handed", 1, None, None)]))
    summary.passed(1, 0, LivePass(2, 0.3, 0.4, ended=[(5, "length", 3, None, None)]))
    line = summary.line(1.0)
    assert len(line["new"]) == 1
    assert [one for one in line["ev"] if one[0] in ("move", "end")] == [["end", 0.4, 1, "length", 3, None, None]]
    assert [(one["e"], one.get("c"), one.get("in")) for one in line["passes"][:2]] == [
        (1, None, [1]), (0, [[1, 0, 4, 0]], None),
    ]  # fmt: skip


def test_gaps_and_first_tokens_become_percentiles_beside_their_promise() -> None:
    summary = LiveSummary(0.0)
    summary.up(0, 0, 0.0)
    summary.came(0, 0, [request(1, "a", tier="gold", ttft_s=0.3, itl_s=0.04)], 0.0)
    summary.passed(0, 0, one_pass(1, 0.1, [(1, 0, 4)], first=[1]))
    summary.passed(0, 0, one_pass(2, 0.2, [(1, 4, 1)]))
    for step in range(3, 8):
        summary.passed(0, 0, one_pass(step, step / 10, None))
    found = summary.line(1.0)["tiers"]["gold"]
    assert found["ttft"][0] == 0.2
    assert found["ttft"][3:] == [1, 0.3]
    assert found["gap"] == [0.1, 0.1, 0.1, 6, 0.04]


def test_drafts_say_how_many_were_accepted() -> None:
    summary = LiveSummary(0.0)
    summary.came(0, 0, [request(1, "a")], 0.0)
    summary.passed(0, 0, one_pass(1, 0.1, [(1, 0, 4)]))
    summary.passed(0, 0, one_pass(2, 0.2, [(1, 4, 4)], yields={1: 3}))
    summary.passed(0, 0, one_pass(3, 0.3, [(1, 7, 1)]))
    passes = summary.line(0.5)["passes"]
    assert passes[1]["x"] == [[1, 3, 2]]
    assert "c" not in passes[2]


def test_a_reader_may_begin_at_a_key() -> None:
    summary = LiveSummary(0.0)
    summary.up(0, 0, 0.0)
    summary.came(0, 0, [request(1, "a")], 0.0)
    summary.passed(0, 0, one_pass(1, 0.1, [(1, 0, 4)]))
    summary.passed(0, 0, one_pass(2, 0.2, [(1, 4, 1)]))
    lines = [summary.line(number / 10) for number in range(KEY_LINES + 1)]
    assert [number for number, line in enumerate(lines) if "key" in line] == [0, KEY_LINES]
    assert lines[-1]["key"]["lanes"][0][:2] == [1, "a"]
    assert lines[-1]["key"]["decoding"] == {"0": [1]}


def test_nothing_is_kept_while_no_front_follows() -> None:
    scheduler = make_scheduler()
    loop, feed = EngineLoop(scheduler, FakeExecutor(64, 4), StepClock(), depth=1), PassFeed(scheduler)
    loop.submit(make_request("r", [1] * 5, 6))
    feed.take(loop.step())
    assert not feed.pending
    assert not feed.due(1.0)
    feed.follow(b"front")
    batch = feed.due(2.0)[b"front"]
    assert [one.id for one in batch.came] == ["r"], "a late follower learns of the requests that are there"
