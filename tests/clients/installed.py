"""Where other people's clients are installed: virtual environments and node_modules in a folder of their own.

`make test-clients` fills that folder; TEST_CLIENTS names another one. Nothing of it is imported by the tests: each
client runs in a process of its own, as its users run it.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("TEST_CLIENTS", ROOT / ".clients"))
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 280.0  # a client that hangs must fail, a slow machine must not
ALONE = {  # no client may look for anything but the server
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "LANGSMITH_TRACING": "false",
    "OPENAI_API_KEY": "none",
}


def python_with(*modules: str) -> Path:
    """An interpreter that has these modules; the test is skipped where there is none."""
    for packages in sorted(FOLDER.glob("*/lib/python3*/site-packages")):
        if all((packages / name).is_dir() for name in modules):
            return packages.parents[2] / "bin" / "python"
    pytest.skip(f"{' and '.join(modules)} not installed; `make test-clients` installs all clients")


def node_modules(*packages: str) -> Path:
    found = FOLDER / "node_modules"
    if shutil.which("node") is None or not all((found / name).is_dir() for name in packages):
        pytest.skip(f"node with {' and '.join(packages)} not installed; `make test-clients` installs all clients")
    return found


def run(command: Sequence[str | Path], folder: Path, **env: str) -> str:
    """What it printed; it must end with 0."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **ALONE, **env},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    printed = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"{Path(str(command[0])).name} ended with {done.returncode}\n{printed}"
    return done.stdout


def run_python(program: str, modules: Sequence[str], folder: Path, *args: str) -> str:
    return run([python_with(*modules), PROGRAMS / program, *args], folder)


def run_node(program: str, packages: Sequence[str], folder: Path, *args: str) -> str:
    """Modules are looked up from where a program lies, so it is copied beside them."""
    (folder / "node_modules").symlink_to(node_modules(*packages))
    return run(["node", shutil.copy(PROGRAMS / program, folder), *args], folder)
