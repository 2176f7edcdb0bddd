"""How a process of the server says that its config cannot be served: one line for all of them.

Owns the mark in the private folder that says it was done. Does not know what the config is.
"""

import os
import sys
from pathlib import Path

from shoal.errors import ShoalError, one_line

REFUSED = "refused"  # a file of the server's private folder


def say_refused(error: ShoalError, folder: Path, start: int) -> None:
    """Print the reason. All processes read the same files, so at the server's start (number 0) the first one that fails
    speaks for all."""
    if start == 0:
        try:
            with open(os.open(folder / REFUSED, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as mark:
                mark.write(one_line(error))
        except FileExistsError:
            return
        except OSError:
            pass  # twice is better than not at all
    print(f"shoal: {one_line(error)}", file=sys.stderr)


def refusal_of(folder: Path) -> str:
    """The reason that was given at the first start of this folder's engine; "" if there is none."""
    try:
        return (folder / REFUSED).read_text()
    except OSError:
        return ""
