"""Without the extra, nothing loads ray, and what needs it says how to get it."""

import subprocess
import sys
from pathlib import Path

import shoal

MODULES = sorted(
    ".".join(("shoal", *path.relative_to(Path(shoal.__file__).parent).with_suffix("").parts)).removesuffix(".__init__")
    for path in Path(shoal.__file__).parent.rglob("*.py")
)
NEEDS_RAY = {"shoal.cluster.nodes", "shoal.cluster.process", "shoal.cluster.serving"}
# as if ray were not installed, whether it is or not
NO_RAY = "import sys; sys.modules['ray'] = None; "


def python(code: str, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", NO_RAY + code, *args], check=False, capture_output=True, text=True)


def test_every_module_but_those_of_ray_is_imported_without_it() -> None:
    skipped = ("shoal.kernels.triton", "shoal.__main__")
    wanted = [name for name in MODULES if name not in NEEDS_RAY and not name.startswith(skipped)]
    assert "shoal.cluster.fleet" in wanted
    done = python("import importlib; [importlib.import_module(name) for name in sys.argv[1:]]", *wanted)
    assert done.returncode == 0, done.stderr


def test_every_command_answers_without_it() -> None:
    code = (
        "import contextlib; from shoal.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit): main([command, '--help'])"
    )
    done = python(code, "serve", "generate", "chat", "bench", "compare", "key", "top", "doctor", "restart")
    assert done.returncode == 0, done.stderr
    assert "--cluster" in done.stdout


def test_a_cluster_without_it_is_refused_with_what_to_install() -> None:
    code = (
        "import importlib.util; importlib.util.find_spec = lambda name: None; from shoal.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = python(code, "serve", "--cluster", "ray")
    assert done.returncode == 2
    assert "pip install 'shoal[server,cluster]'" in done.stderr


def test_no_ray_is_loaded_where_there_is_one() -> None:
    names = "shoal, shoal.cli, shoal.cluster, shoal.processes.front, shoal.processes.engine"
    code = f"import sys, {names}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
