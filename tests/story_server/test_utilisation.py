"""MFU and MBU of a real server: in its metrics, in /debug/requests and in shoal top."""

import math

import pytest

from shoal.cli import main
from tests.story_server.servers import Server


def test_a_server_knows_its_utilisation(tiny: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny.complete(max_tokens=20).status_code == 200
    tiny.wait_for("measured rates", lambda: tiny.metrics()["shoal_device_flop_rate"] > 0)
    found = tiny.metrics()
    assert 0 < found["shoal_mfu_ratio"] < math.inf
    assert 0 < found["shoal_mbu_ratio"] < math.inf
    assert 0 < found["shoal_useful_work_ratio"] <= 1
    assert found["shoal_useful_flop_total"] <= found["shoal_flop_total"]
    assert main(["top", "--url", tiny.url, "--once"]) == 0
    assert "MFU" in capsys.readouterr().out
