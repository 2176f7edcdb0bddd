"""shoal calibrate with a real engine: a short run ends with a profile, also where no front can be measured."""

import json
from pathlib import Path

import pytest

from shoal.cli import frontend, main
from shoal.errors import EngineError
from shoal.sim.profile import read_profile


def test_a_profile_is_kept_when_the_front_cannot_be_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_front(*_: object, **__: object) -> None:
        raise EngineError("the default model is not installed")

    monkeypatch.setattr(frontend, "measure", no_front)
    out = tmp_path / "profile.json"
    flags = ("--max-num-seqs", "4", "--max-model-len", "256", "--kv-memory", "8MiB", "--threads", "1")
    assert main(["calibrate", "--model", str(model), "--seconds", "2", "--out", str(out), *flags]) == 0
    profile = read_profile(str(out))
    assert profile.device.decode[0][1] > 0
    assert json.loads(out.read_text())["front"]["request_s"] == 0
    assert profile.kv_tokens > 256
    assert "the front was not measured" in caplog.text
