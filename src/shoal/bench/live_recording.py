"""Recordings for the live page, made of benchmark runs: one pane for each run, all on one clock.

Owns which runs go into a file or a report, and how much of them. Their lines come from live_tape.py. Knows no engine
and no page.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.record import RunRecord
from shoal.bench.timeline_plots import group_first
from shoal.obs.live import header

PANES = 4  # that a page shows side by side
EXCERPT_BYTES = 6_000_000  # of all panes of a report, before they are compressed


def write_recording(path: Path, runs: Sequence[RunRecord], **facts: Any) -> None:
    """All of these runs, side by side."""
    with path.open("w") as file:
        for line in recording(runs, **facts):
            file.write(line + "\n")


def recording(runs: Sequence[RunRecord], until_s: float = float("inf"), **facts: Any) -> Iterator[str]:
    """Its lines, up to this second of the runs."""
    yield json.dumps(header([run.label for run in runs], **facts), separators=(",", ":"))
    for pane, run in enumerate(runs):
        for line in run.live:
            if seconds_of(line) > until_s:
                break
            yield f'{{"pane":{pane},{line[1:]}'


def seconds_of(line: str) -> float:
    """
    >>> seconds_of('{"t":12.25,"passes":[]}')
    12.25
    """
    return float(line[len('{"t":') :].split(",", 1)[0].rstrip("}"))


def panes_of(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """At most four, from the oldest technique to the newest, spread over what there is."""
    found = sorted((run for run in runs if run.live), key=lambda run: (run.preset == "shoal", group_first(run)))
    if len(found) <= PANES:
        return found
    return [found[round(place * (len(found) - 1) / (PANES - 1))] for place in range(PANES)]


def excerpt_s(runs: Sequence[RunRecord], most: int = EXCERPT_BYTES) -> float:
    """How many seconds of these runs fit into a report; infinite: all of them."""
    until_s = float("inf")
    for run in runs:
        left = most // len(runs)
        for line in run.live:
            left -= len(line)
            if left < 0:
                until_s = min(until_s, seconds_of(line))
                break
    return until_s
