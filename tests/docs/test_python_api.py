"""The Python API: the page is up to date, names are complete, options are typed as they are declared."""

import subprocess
import sys
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import shoal
from shoal.config.engine import EngineConfig
from shoal.config.keywords import EngineOptions
from tests.docs.python_api import CLASSES, PAGE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.docs.python_api"


def test_every_public_name_is_there_and_described() -> None:
    assert set(shoal.__all__) <= set(dir(shoal))
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
        if name[0].isupper():
            assert getattr(shoal, name).__doc__
    assert set(CLASSES) <= set(shoal.__all__)


def test_dir_is_complete_before_anything_is_used() -> None:
    code = "import shoal; print(*dir(shoal)); import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"LLM", "AsyncLLM", "SamplingParams", "errors", "__doc__"} <= set(done.stdout.split())


def test_a_misspelt_name_suggests_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'AsyncLMM' \(did you mean 'AsyncLLM'\?\)"):
        shoal.AsyncLMM  # noqa: B018


def test_options_are_typed_as_they_are_declared() -> None:
    hints = get_type_hints(EngineOptions)
    declared = {item.name: item for item in fields(EngineConfig) if item.name != "model"}
    assert list(hints) == list(declared)
    for name, hint in hints.items():
        parts = get_args(hint) if get_origin(hint) is not Literal else (hint,)
        literals = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
        assert tuple(literals) == declared[name].metadata["choices"], name
        assert (type(None) in parts) == (declared[name].default is None), name
