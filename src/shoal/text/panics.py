"""Panics of the tokenizer library: a fault in its Rust code, which a damaged tokenizer.json or a bad regular expression
can cause. It reaches Python as an exception outside of Exception, after a report on standard error.

Owns how they are recognized and kept from being printed. Does not know tokenizers.
"""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")


def reason_of(error: BaseException) -> str | None:
    """What the library said, if it has failed; None for what is none of its errors (an interrupt, for instance)."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return str(error) or type(error).__name__
    return None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keep a panic's own report from standard error; anything else that is written there meanwhile is shown after."""
    try:
        saved = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as kept:
        _flush()
        os.dup2(kept.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = not isinstance(error, Exception)
            raise
        finally:
            _flush()
            os.dup2(saved, 2)
            os.close(saved)
            if not panicked:
                kept.seek(0)
                with contextlib.suppress(OSError):
                    os.write(2, kept.read())


def _flush() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
        sys.stderr.flush()


def within(limit_s: float, work: Callable[[], Result]) -> Result:
    """The result of some work; TimeoutError if it takes too long. What goes on then ends with this process."""
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="trial", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"it takes more than {limit_s:g} s")
    return done[0]
