"""Messages in the words of a Python program: options are keyword arguments here, not flags.

Owns where LLM and AsyncLLM reword errors. Knows no engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TypeVar

from shoal.config.engine import EngineConfig
from shoal.config.options import as_keywords
from shoal.errors import ShoalError

NAMES = frozenset(item.name for item in fields(EngineConfig))
Error = TypeVar("Error", bound=BaseException)


def reworded(error: Error) -> Error:
    """The same error.

    >>> str(reworded(ShoalError("too long; raise --max-model-len")))
    'too long; raise max_model_len='
    """
    if isinstance(error, ShoalError) and error.args and isinstance(error.args[0], str):
        error.args = (as_keywords(error.args[0], NAMES), *error.args[1:])
    return error


@contextmanager
def in_keywords() -> Iterator[None]:
    """Errors that leave it are reworded."""
    try:
        yield
    except ShoalError as error:
        reworded(error)
        raise
