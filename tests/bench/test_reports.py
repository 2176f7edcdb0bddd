"""The published reports: their commands exist, their files are published, and a noisy run is noticed."""

import json
from pathlib import Path

import pytest

from benchmarks.reports import REPORTS, noises
from shoal.cli import make_parser

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_can_be_made_again(name: str) -> None:
    report = REPORTS[name]
    make_parser().parse_args([*report.command, "--out", "x"])
    assert (ROOT / report.page).is_file()
    for pattern in report.files:
        assert list((ROOT / report.into).glob(pattern)), f"{pattern} is not published in {report.into}"


def test_a_noisy_run_is_noticed(tmp_path: Path) -> None:
    runs = [{"others": 0.01, "stolen": 0.0}, {"others": 0.04, "stolen": 0.03}, {"others": None, "stolen": None}]
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs, "tried": []}))
    (tmp_path / "policies.json").write_text(json.dumps({"flood": {"noise": {"fair": {"others": 0.2, "stolen": 0.0}}}}))
    assert sorted(round(one.share, 2) for one in noises(tmp_path) if one.disturbs) == [0.07, 0.2]
