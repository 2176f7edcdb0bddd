"""The examples in docstrings are run."""

import doctest
import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import shoal

NEEDS = {
    "shoal.kernels.triton": "triton",
    "shoal.cluster.nodes": "ray",
    "shoal.cluster.process": "ray",
    "shoal.cluster.serving": "ray",
}  # modules that can be loaded only where a library is

MODULES = [
    module.name
    for module in pkgutil.walk_packages(shoal.__path__, "shoal.")
    if all(find_spec(library) for room, library in NEEDS.items() if module.name.startswith(room))
]


def has_examples(module: ModuleType) -> bool:
    """Whether it is worth a search: to look through every object of a module takes longer than to load it."""
    return ">>>" in Path(module.__file__ or "").read_text()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    if not has_examples(module):
        return
    failed, _ = doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [module for module in map(importlib.import_module, MODULES) if has_examples(module)]
    count = sum(bool(test.examples) for module in modules for test in finder.find(module))
    assert count >= 8
