"""Recordings of runs: as complete as those of a server, bounded, and in the report."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shoal.bench import live_tape
from shoal.bench.live_recording import excerpt_s, panes_of, recording, write_recording
from shoal.bench.record import RunRecord
from shoal.bench.recorder import RunRecorder
from shoal.cli.live import read
from shoal.sim.request import RequestMaker
from shoal.sim.split import SplitServer
from shoal.sim.virtual import OpenArrivals
from tests.bench.recorded import PROMISE, TENANTS, recorded_run, requests
from tests.sim.made import engine


def lines_of(run: RunRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.live]


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return recorded_run()


def test_every_request_has_its_whole_story(run: RunRecord) -> None:
    lines = lines_of(run)
    lanes = {one[0]: one for line in lines for one in line.get("new", ())}
    assert {int(one[1]) for one in lanes.values()} == set(range(40))
    assert {one[4] for one in lanes.values()} == set(TENANTS)
    for lane in lanes.values():
        record, (_, _, _, at_s, *_, prompt, _, _) = run.requests[int(lane[1])], lane
        assert prompt == record.prompt
        assert at_s == pytest.approx(record.arrived_s, abs=1e-3)
    events = [one for line in lines for one in line.get("ev", ())]
    counts = Counter(one[0] for one in events)
    assert counts["admit"] >= counts["first"] == counts["end"] == 40
    for _, at_s, lane, ttft_s in (one for one in events if one[0] == "first"):
        record = run.requests[int(lanes[lane][1])]
        assert at_s == pytest.approx(record.token_s[0], abs=1e-3)
        assert ttft_s == pytest.approx(record.ttft_s, abs=2e-3)


def test_passes_add_up(run: RunRecord) -> None:
    lines = lines_of(run)
    passes = [one for line in lines for one in line.get("passes", ())]
    assert len(passes) == len(run.passes)
    assert sum(one["p"] + one["d"] + one["r"] for one in passes) == sum(one.useful for one in run.passes)
    assert all(one["mbu"] > 0 and one["mfu"] > 0 for one in passes)
    made: Counter[str] = Counter()
    for line in lines:
        made.update(line.get("tenants", {}))
    assert set(made) == set(TENANTS)
    assert sum(made.values()) == sum(one.useful for one in run.passes)
    times = [line["t"] for line in lines]
    assert all(later - earlier > 0.0999 for earlier, later in pairwise(times[:-1]))


def test_the_queue_has_reasons_and_slack_and_blocks_have_owners(run: RunRecord) -> None:
    lines, told = lines_of(run), Counter[str]()
    arrived = {one[0]: one[3] for line in lines for one in line.get("new", ())}
    seen = [(line["t"], view) for line in lines for view in line.get("views", {}).values()]
    assert len(seen) > 3
    for at_s, view in seen:
        blocks = view["blocks"]
        assert sum(cells for _, _, cells in blocks["runs"]) == -(-blocks["total"] // blocks["per_cell"])
        owners = [owner for owner in blocks["owners"] if owner]  # 0: it ended since
        assert set(owners) <= set(arrived)
        for lane, why, slack_s in view["queue"]:
            told[why.translate({ord(sign): None for sign in "0123456789"})] += 1
            assert slack_s == pytest.approx(arrived[lane] + PROMISE.ttft_s - at_s, abs=0.2)  # the line is later
    assert told["all  places are taken"] > 0
    assert any(view["blocks"]["owners"] for _, view in seen)
    tiers = [line["tiers"] for line in lines if line.get("tiers")]
    assert tiers[-1][""]["ttft"][-1] == PROMISE.ttft_s


def test_blocks_in_host_memory_are_on_the_map() -> None:
    arriving = requests(30, rate=200.0, longest=60, outputs=400)
    run = recorded_run(arriving=arriving, blocks=60, when_short="swap", max_num_seqs=8)
    views = [view for line in lines_of(run) for view in line.get("views", {}).values()]
    held = [view["host_blocks"] for view in views if any(state == 2 for state, _, _ in view["host_blocks"]["runs"])]
    assert held
    assert all(one["owners"] for one in held)


def test_engines_are_told_apart() -> None:
    run = recorded_run(replicas=3, arriving=requests(60, rate=300.0))
    lines = lines_of(run)
    assert {one["e"] for line in lines for one in line.get("passes", ())} == {0, 1, 2}
    assert {engine for line in lines for engine in line.get("views", {})} == {"0", "1", "2"}


def test_a_request_that_is_handed_over_has_one_lane_and_one_end() -> None:
    """Most prompts take one pass of the prefill engine: they arrive and leave it in one record."""
    tape = live_tape.LiveTape(PROMISE)
    recorder, loops = RunRecorder(tape=tape), [engine(prefill="disaggregated") for _ in range(2)]
    for loop in loops:
        tape.follow(loop.scheduler)
    server = SplitServer(loops[:1], loops[1:], recorder, RequestMaker(200, 16))
    server.run(OpenArrivals(requests(30, rate=100.0)))
    lines = [json.loads(line) for line in recorder.live()]
    lanes = [one for line in lines for one in line.get("new", ())]
    assert [one[6] for one in lanes] == [recorder.requests[int(one[1])].prompt for one in lanes]
    assert {one[4] for one in lanes} == set(TENANTS)
    ends = [one for line in lines for one in line.get("ev", ()) if one[0] == "end" and one[3] != "handed"]
    assert len(lanes) == len(ends) == 30
    moves = [one[3:] for line in lines for one in line.get("ev", ()) if one[0] == "move"]
    assert len(moves) > 20
    assert set(map(tuple, moves)) == {(0, 1)}


def test_a_long_run_is_cut(monkeypatch: pytest.MonkeyPatch, run: RunRecord) -> None:
    monkeypatch.setattr(live_tape, "MOST_VIEWS", 3)
    monkeypatch.setattr(live_tape, "MOST_PASSES", 50)
    short = lines_of(recorded_run())
    assert sum(len(line.get("passes", ())) for line in short) == 50
    assert 1 <= sum("views" in line for line in short) <= 3
    assert short[-1]["t"] < lines_of(run)[-1]["t"]


def test_panes_are_spread_over_the_techniques() -> None:
    names = ["shoal", "vllm", "orca", "tgi", "transformers", "classic-dynamic"]
    runs = [recorded_run(name, requests(2)) for name in names]
    for one, batching in zip(runs[4:], ("static", "dynamic"), strict=True):
        one.settings["batching"] = batching
    assert [one.label for one in panes_of(runs)] == ["transformers", "vllm", "orca", "shoal"]
    assert panes_of(runs[:1]) == runs[:1]


def test_an_excerpt_ends_at_one_time_in_all_panes(tmp_path: Path, run: RunRecord) -> None:
    runs = [run, recorded_run("orca", requests(10))]
    until_s = excerpt_s(runs, most=20_000)
    assert excerpt_s(runs) == float("inf")
    assert 0 < until_s < lines_of(run)[-1]["t"]
    kept = [json.loads(line) for line in recording(runs, until_s, model="m")]
    assert kept[0]["panes"] == ["shoal", "orca"]
    assert max(line["t"] for line in kept[1:]) <= until_s
    assert {line["pane"] for line in kept[1:]} == {0, 1}
    write_recording(tmp_path / "live.jsonl", runs, model="m")
    head, lines = read(str(tmp_path / "live.jsonl"))
    assert head["model"] == "m"
    assert len(lines) == sum(len(one.live) for one in runs)
