"""The C kernels under the compiler's address sanitizer: nothing is read or written beside what was handed over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.kernels.cpu import compiled
from tests.kernels.pretended import FLAGS

HAS = compiled.cpu_features()
KINDS = {level: compiled.flags_for(level, HAS) for level in compiled.usable_levels(HAS)}
KINDS |= {f"pretended {name}": (flag,) for name, flag in FLAGS.items()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = compiled._compiler()
    if compiler is None:
        pytest.skip("no compiler here")
    asked = [compiler, "-print-file-name=libasan.so"]
    sanitizer = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(sanitizer):
        pytest.skip("this compiler has no address sanitizer")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "COMPILE_TIMEOUT_S", 900)
    library = compiled._compiled(compiler, (*KINDS[kind], "-fsanitize=address", "-fno-omit-frame-pointer", "-g", "-O1"))
    command = [sys.executable, "-m", "tests.kernels.sanitized", str(library), "1", "60"]
    env = {**os.environ, "LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout == "60 cases\n"
