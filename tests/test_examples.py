"""The examples in docstrings are run."""

import doctest
import importlib
import pkgutil
from importlib.util import find_spec

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


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(bool(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert count >= 8
