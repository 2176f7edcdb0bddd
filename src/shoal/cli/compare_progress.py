"""What shoal compare tells while it runs: how long it will take, a line per preset, and what an interrupt leaves.

Owns these lines and the folder of unfinished runs. Knows the plan of a comparison; builds no engine.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.bench.compare import ComparePlan
    from shoal.bench.kept_runs import KeptRuns
    from shoal.bench.record import RunRecord
    from shoal.build import Loaded

UNFINISHED = "unfinished"  # folder below --out
SLOWER = 2.0  # than the floor, on average over all presets


def in_time(seconds: float) -> str:
    """
    >>> in_time(42), in_time(150)
    ('42 s', '2.5 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.3g} min"


def kept_runs(args: argparse.Namespace, loaded: "Loaded", plan: "ComparePlan") -> "KeptRuns":
    """The runs that an interrupted start of the same comparison has left."""
    from shoal.bench.kept_runs import KeptRuns

    apart = ("run", "out", "json", "presets", "rates")
    given = {name: value for name, value in vars(args).items() if name not in apart}
    shape = {name: value for name, value in asdict(plan).items() if name not in ("prompts", "presets", "rates")}
    about = [given, shape, loaded.files.name, str(loaded.dtype), loaded.device, plan.rates[len(plan.rates) // 2]]
    return KeptRuns(Path(args.out) / UNFINISHED, about)


class ProgressLines:
    """Lines on standard error; with a terminal, a bar stands below them."""

    def __init__(self, plan: "ComparePlan", now_s: Callable[[], float] = time.monotonic) -> None:
        self.plan = plan
        self.now_s = now_s
        self.begun_s = now_s()
        self.done = 0

    def announce(self, work_s: float, kept: int) -> None:
        """Before the first run. `work_s`: what the requests alone take at the machine's limits."""
        from shoal.bench.compare import count_runs, expected_s

        runs = count_runs(self.plan)
        left = f"; {kept} of them are there from an interrupted start" if kept else ""
        about_s = expected_s(self.plan, SLOWER * work_s) * (runs - kept) / runs
        self._say(
            f"{len(self.plan.presets)} presets, {runs} runs of {len(self.plan.trace)} requests{left}: "
            f"about {in_time(about_s)}. Ctrl-C keeps what has ended; the same command goes on."
        )

    def preset_ended(self, preset: str, runs: "Sequence[RunRecord]") -> None:
        self.done += 1
        took_s = self.now_s() - self.begun_s
        left_s = took_s / self.done * (len(self.plan.presets) - self.done)
        tokens = sum(len(request.token_s) for run in runs for request in run.requests)
        speed = tokens / max(sum(run.seconds for run in runs), 1e-9)
        left = f"; about {in_time(left_s)} left" if self.done < len(self.plan.presets) else ""
        self._say(f"{self.done}/{len(self.plan.presets)} {preset}: {speed:,.1f} output tok/s, {in_time(took_s)}{left}")

    def interrupted(self, folder: str) -> None:
        ended = f"{self.done} of {len(self.plan.presets)} presets"
        self._say(f"\nstopped after {ended}; {folder} keeps the runs that ended: start the same command again to go on")

    def _say(self, text: str) -> None:
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def count_kept(kept: "KeptRuns", plan: "ComparePlan") -> int:
    """Runs that need not be made again."""
    from shoal.bench.compare import variants

    middle = plan.middle_rate
    found = 0
    for preset in plan.presets:
        labels = [label for label, _ in variants(preset, plan)]
        found += sum(kept.find(label, middle) is not None for label in labels)
        others = [rate for rate in plan.rates if rate != middle]
        found += sum(any(kept.find(label, rate) is not None for label in labels) for rate in others)
    return found
