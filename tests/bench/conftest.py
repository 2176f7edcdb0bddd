"""One comparison, drawn once for all tests of plots and pages."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.bench import giant_plots, plot_style, plots
from shoal.bench.record import Promise, RunRecord, summarise
from tests.bench.made import PRESETS, giant_run, made_run
from tests.server.chromium import Browser

PROMISE = Promise(ttft_s=1.0, gap_s=0.1)


@dataclass(frozen=True)
class Drawn:
    runs: list[RunRecord]
    rows: list[dict[str, Any]]
    svgs: dict[str, Path]  # with a PNG beside each


def rows_of(runs: list[RunRecord]) -> list[dict[str, Any]]:
    return [
        {"preset": run.preset, "label": run.label, "rate": run.rate, **summarise(run, PROMISE, 0.5)} for run in runs
    ]


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    folder = tmp_path_factory.mktemp("drawn")
    runs = [made_run(preset, rate, count=26) for preset in PRESETS for rate in (2.0, 6.0)]
    svgs = plots.draw_all(runs, PROMISE, folder)
    giants = {prefill: giant_run(prefill) for prefill in ("inline", "exclusive", "chunked")}
    svgs["giant"] = plot_style.save(giant_plots.giant_plot(giants), folder, "giant")
    return Drawn(runs, rows_of(runs), svgs)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
