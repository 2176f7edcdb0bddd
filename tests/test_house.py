"""The house rules that a machine can check: sizes, names, circles of imports, and words that code and docs avoid."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shoal"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {
    ".".join(("shoal", *(part for part in path.relative_to(SOURCE).with_suffix("").parts if part != "__init__"))): path
    for path in FILES
}
MOST_LINES, MOST_FUNCTION, MOST_TRITON, MOST_C_LINES, MOST_COLUMNS = 500, 60, 80, 700, 120
# words that stand for data where a plain one exists; prose about people may use them
WORDS = re.compile(r"thoughts|\bnobody\b|\bsomebody\b|\beverybody\b", re.IGNORECASE)
ABOUT_PEOPLE: frozenset[str] = frozenset()


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    most = MOST_TRITON if "triton" in path.parts else MOST_FUNCTION
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= most, f"{path}:{node.lineno} {node.name} has {lines} lines, at most {most}"


def test_c_files_are_short_and_narrow() -> None:
    sources = sorted(SOURCE.rglob("*.c"))
    assert sources
    for path in sources:
        lines = path.read_text().splitlines()
        assert len(lines) <= MOST_C_LINES, f"{path} has {len(lines)} lines"
        for number, line in enumerate(lines, 1):
            assert len(line) <= MOST_COLUMNS, f"{path}:{number} has {len(line)} columns"


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not {name: places for name, places in found.items() if len(places) > 1}


def imported(path: Path) -> Iterator[str]:
    """Modules of this project that a file imports, lazily or for types alone too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, however many steps it takes."""
    reach = {name: set(next_ones) for name, next_ones in edges.items()}
    for middle in reach:  # Warshall's closure: a room has few files
        for name in reach:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    return [[name, *sorted(reach[name])] for name in reach if name in reach[name]]


def test_a_circle_is_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


@pytest.mark.parametrize(
    "room", ["core", "kv", "sched", "sim", "engine", "server", "output", "text", "models", "runner"]
)
def test_no_circle_of_imports_inside(room: str) -> None:
    inside = {name: path for name, path in MODULES.items() if name.startswith(f"shoal.{room}")}
    assert inside
    assert not circles({name: {one for one in imported(path) if one in inside} for name, path in inside.items()})


def test_plain_words() -> None:
    docs = [*sorted((ROOT / "docs").glob("**/*.md")), ROOT / "README.md"]
    for path in [*FILES, *sorted(SOURCE.rglob("*.c")), *docs]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            assert not WORDS.search(line) or line.strip() in ABOUT_PEOPLE, f"{where}: {line.strip()}"
