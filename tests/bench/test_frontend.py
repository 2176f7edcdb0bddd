"""The bench of the fronts, through real processes."""

import json

import pytest

from shoal.cli import main


@pytest.mark.slow
def test_tokens_arrive_and_noise_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "frontend", "--streams", "2", "--rates", "20", "--seconds", "1", "--no-pin"]
    assert main([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tok_s"] > 0
    assert not row["problems"]
    assert {"others", "stolen"} <= set(row)
