"""Recordings for the live page, made of benchmark runs: one pane for each run, all on one clock.

Owns the way from a RunRecord to the lines of obs/live.py. Knows no engine and no page.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.record import PassRecord, Promise, RequestRecord, RunRecord
from shoal.core.live import LivePass, LiveRequest
from shoal.obs.live import LiveSummary, header

LINE_S = 0.1
MOST_PASSES = 20_000  # of one pane; what a browser replays with ease


def write_recording(path: Path, runs: Sequence[RunRecord], promise: Promise, **facts: Any) -> None:
    """All of these runs, side by side."""
    with path.open("w") as file:
        for line in recording(runs, promise, **facts):
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")


def recording(runs: Sequence[RunRecord], promise: Promise, **facts: Any) -> Iterator[dict[str, Any]]:
    yield header([run.label for run in runs], **facts)
    for pane, run in enumerate(runs):
        for line in lines_of(run, promise):
            yield {"pane": pane, **line}


def lines_of(run: RunRecord, promise: Promise) -> Iterator[dict[str, Any]]:
    """The lines of one run, in the order of time."""
    summary, due_s = LiveSummary(0.0), LINE_S
    summary.up(0, 0, 0.0)
    coming = sorted(range(len(run.requests)), key=lambda number: -run.requests[number].arrived_s)
    for one in live_passes(run):
        while coming and run.requests[coming[-1]].arrived_s <= one.begun_s:
            number = coming.pop()
            summary.came(0, 0, [live_request(number, run.requests[number], promise)], one.begun_s)
        while one.ended_s > due_s and summary.news:
            yield summary.line(due_s)
            due_s = max(due_s + LINE_S, one.ended_s // LINE_S * LINE_S)
        due_s = max(due_s, one.ended_s // LINE_S * LINE_S)
        summary.passed(0, 0, one)
    yield summary.line(max(due_s, run.passes[-1].committed_s if run.passes else 0.0))


def live_request(number: int, record: RequestRecord, promise: Promise) -> LiveRequest:
    return LiveRequest(
        number + 1, f"{number}.0", record.arrived_s, prompt=record.prompt, most=record.output,
        ttft_s=promise.ttft_s, itl_s=promise.gap_s,
    )  # fmt: skip


def live_passes(run: RunRecord) -> Iterator[LivePass]:
    """The passes, with what else is known to have happened by then."""
    high: dict[int, int] = {}
    firsts = by_time((one.token_s[0], number) for number, one in enumerate(run.requests) if one.token_s)
    ends = by_time((one.ended_s, number) for number, one in enumerate(run.requests) if one.ended_s is not None)
    for step, one in enumerate(run.passes[:MOST_PASSES]):
        made = live_pass(step, one)
        for number, start, count in one.rows:
            before = high.get(number)
            if before is None:
                record = run.requests[number]
                made.admitted.append((number + 1, one.planned_s - record.arrived_s, start, False))
            elif start < before:
                made.preempted.append((number + 1, before - start, "recompute"))
            high[number] = start + count
        while firsts and firsts[-1][0] <= one.committed_s:
            made.first.append(firsts.pop()[1] + 1)
        while ends and ends[-1][0] <= one.committed_s:
            number = ends.pop()[1]
            record = run.requests[number]
            made.ended.append((number + 1, record.reason, len(record.token_s), None, None))
        yield made


def by_time(items: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """The earliest is last."""
    return sorted(items, reverse=True)


def live_pass(step: int, one: PassRecord) -> LivePass:
    rows, starts, counts = (list(part) for part in zip(*one.rows, strict=True)) if one.rows else ([], [], [])
    return LivePass(
        step,
        one.planned_s,
        one.committed_s,
        [number + 1 for number in rows],
        starts,
        counts,
        computed=one.useful,
        recomputed=one.recomputed,
        padded=one.padded,
        budget=one.budget if one.budget < 2**40 else 0,
        running=one.running,
        waiting=one.waiting,
        held=one.kv_held,
        total=one.kv_total,
    )
