"""The examples in docstrings are run."""

import doctest
import importlib
import pkgutil

import pytest

import shoal

MODULES = [module.name for module in pkgutil.walk_packages(shoal.__path__, "shoal.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    count = sum(bool(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert count >= 8
