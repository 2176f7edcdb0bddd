"""The arrows of docs/architecture.md, enforced: which room may import which.

Parses every file's imports, the lazy ones inside functions too. A wrong arrow fails with the file, the line and the
import, so that the design cannot erode in silence.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "shoal"

# room → rooms it may import. Every room may import errors and itself.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "core": set(),
    "config": {"core"},
    "keys": {"core"},
    "kv": {"core"},
    "sched": {"kv", "config", "core"},
    "spec": {"config", "core"},
    "routing": {"kv", "core"},
    "disagg": {"kv", "core"},
    "disagg.handoff": {"kv", "core"},  # no clock and no sockets: a simulator runs the same code
    "disagg.cuda_ipc": {"disagg", "core"},
    "engine": {"sched", "routing", "disagg", "kv", "core"},
    "sim": {"engine", "routing", "disagg", "sched", "spec", "workload", "config", "core"},
    "files": {"core"},
    "text": {"files", "core"},
    "output": {"text", "core"},
    "obs": {"core"},
    "server": {"output", "text", "obs", "keys", "core"},
    "cluster": {"config", "engine", "core"},
    "cluster.process": {"cluster", "config", "core", "engine", "processes"},
    "machine": set(),
    "kernels": {"core"},
    "models": {"kernels", "core"},
    "runner": {"models", "kernels", "files", "machine", "core"},
    "workload": {"core"},
    "bench": {"engine", "disagg", "sched", "workload", "models", "kernels", "config", "machine", "obs", "core"},
    "build": {
        *("config", "core", "kv", "sched", "spec", "engine", "files", "text", "kernels", "machine", "models"),
        *("disagg", "runner", "workload", "build_draft", "build_ranks", "build_types"),
    },
    "build_draft": {"config", "core", "sched", "spec", "files", "text", "models", "runner"},
    "build_ranks": {"config", "files", "machine", "models", "runner"},
    "build_types": {"config", "kernels", "models", "runner"},
    "build_rates": {"build", "build_types", "config", "core", "kernels", "machine", "models", "runner"},
    "build_follower": {"build", "config", "files", "models", "runner"},
    "llm": {"build", "config", "core", "engine", "output", "text"},
    "bench.paced_engine": {"bench", "config", "core", "engine", "processes", "sched"},
    "processes.engine": {
        "processes",
        "build",
        "build_rates",
        "config",
        "core",
        "disagg",
        "engine",
        "machine",
        "sched",
        "text",
        "obs",
    },
    "processes.front": {
        *("processes", "config", "keys", "core", "engine", "files", "routing", "text", "obs", "server", "machine"),
    },
    "processes.rank": {"build_follower", "config", "engine", "obs", "runner"},
    "processes": set(),
    "cli": {
        "build",
        "build_rates",
        "build_types",
        "config",
        "disagg",
        "files",
        "keys",
        "core",
        "engine",
        "machine",
        "models",
        "obs",
        "runner",
        "sched",
        "sim",
        "spec",
        "llm",
        "bench",
        "workload",
        "",
    },
    "__main__": {"cli"},
    "": {"config", "core", "llm"},
}
# library → rooms that may load it
LIBRARIES: dict[str, set[str]] = {
    "torch": {
        *("kernels", "models", "runner", "bench"),
        *("build", "build_draft", "build_ranks", "build_rates", "build_follower", "build_types", "disagg.cuda_ipc"),
    },
    "transformers": set(),
    "triton": {"kernels"},
    "ray": {"cluster"},
    "gguf": {"files"},
    "huggingface_hub": {"files"},
    "safetensors": {"runner"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "llguidance": {"text"},
    "starlette": {"server", "cluster"},
    "uvicorn": {"server"},
    "httptools": {"server"},
    "uvloop": {"processes.front", "bench"},
    "msgspec": {"engine", "server", "bench"},
    "zmq": {"engine"},
    "yaml": {"config", "keys"},
    "prometheus_client": {"obs"},
    "opentelemetry": {"obs"},
    "aiohttp": {"bench", "cluster"},
    "yarl": {"bench"},
    "matplotlib": {"bench"},
}
CLOCKS = {"time", "datetime"}
WITHOUT_CLOCK = {
    *("kv", "sched", "sim", "spec", "routing", "disagg.handoff", "core", "config", "models", "kernels", "cluster"),
}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def room_of(path: Path, source: Path = SOURCE) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    if ".".join(parts) in ARROWS:
        return ".".join(parts)  # each program loads what it needs and no more
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            assert node.module is not None
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def wrong(path: Path, source: Path = SOURCE) -> Iterator[str]:
    room = room_of(path, source)
    for line, name in imports(path):
        parts = name.split(".")
        where = f"{path.relative_to(source.parent)}:{line} imports {name}"
        if parts[0] == "shoal":
            known = parts[1] in ARROWS
            to = parts[1] if known else ""
            if to not in {room, "errors"} | ARROWS[room]:
                yield f"{where}; {room or 'shoal/__init__'} may import {sorted(ARROWS[room])}"
        elif parts[0] in LIBRARIES and room not in LIBRARIES[parts[0]]:
            yield f"{where}; only {sorted(LIBRARIES[parts[0]])} may load {parts[0]}"
        elif parts[0] in CLOCKS and room in WITHOUT_CLOCK and path.name != "clock.py":
            yield f"{where}; time is an argument in {room}"
        elif parts[0] in PICKLES:
            yield f"{where}; nothing here is ever unpickled"


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(SOURCE)) for path in FILES])
def test_every_import_follows_an_arrow(path: Path) -> None:
    assert room_of(path) in ARROWS, f"{path} is in a room without arrows; add it to this test and to the docs"
    assert not list(wrong(path))


def test_a_wrong_arrow_is_noticed(tmp_path: Path) -> None:
    bad = tmp_path / "sched" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("def f():\n    import torch\n    import time\n    from shoal.runner.runner import Runner\n")
    assert len(list(wrong(bad, tmp_path))) == 3


@pytest.mark.parametrize(
    "name",
    [
        "shoal",
        "shoal.sched.make",
        "shoal.spec.make",
        "shoal.engine.loop",
        "shoal.sim.engines",
        "shoal.config.engine",
        "shoal.processes.front",
        "shoal.cli",
    ],
)
def test_no_torch_is_loaded_by(name: str) -> None:
    """Seen from outside, in a fresh interpreter."""
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_file_opens_with_what_it_owns() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
