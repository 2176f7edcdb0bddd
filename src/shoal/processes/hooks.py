"""Hooks for debugging: environment variables that name a function to import, described in docs/operations.md.

Owns the names of the variables and how a function is found. Knows nothing of what the functions do.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import BadConfig

log = logging.getLogger(__name__)

EXECUTOR_WRAPPER = "_SHOAL_EXECUTOR_WRAPPER"  # gets the engine's executor and returns the one to use
LOOP_FACTORY = "_SHOAL_LOOP_FACTORY"  # makes the event loop of a front


def hook(name: str, environ: Mapping[str, str]) -> Callable[..., Any] | None:
    """The function that variable `name` names as MODULE:FUNCTION; None where it is not set."""
    value = environ.get(name)
    if not value:
        return None
    module, _, function = value.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadConfig(f"{name} must name an importable MODULE:FUNCTION, not {value!r}: {error}") from error
    log.warning("debugging: %s is %s", name, value)
    return found
