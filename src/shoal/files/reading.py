"""Reading the files of a model, which come from strangers: only regular files, of bounded size, as text or JSON.

Owns the checks before a file is opened: a FIFO would block for ever, a device may never end. Does not know what the
files mean.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

from shoal.errors import ModelError

MOST_TEXT_BYTES = 64 * 2**20  # far more than any config, index of shards or chat template has
AGAIN = "download it again"
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def has_file(path: Path) -> bool:
    """Whether the file is there. A ModelError if the name stands for anything but a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise ModelError(f"{path} is a link to a file that is not there; {AGAIN}") from None
        return False
    except NotADirectoryError:
        return False
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {_reason(error)}; make it readable, or {AGAIN}") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ModelError(f"{path} is {kind}; a regular file is needed: {AGAIN}")
    return True


def read_text(path: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """The text of a file in UTF-8."""
    if not has_file(path):
        raise ModelError(f"{path} is missing; download the model again")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read() if size <= most_bytes else b""
        if size > most_bytes:
            raise ModelError(f"{path} has more than {most_bytes >> 20} MiB, which no such file needs; {AGAIN}")
        return content.decode("utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {_reason(error)}; make it readable, or {AGAIN}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"cannot read {path}: it is not UTF-8 text ({error}); {AGAIN}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        text = read_text(path)
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a character, written as an escape, is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or a number of too many digits
        raise ModelError(f"cannot read {path}: {error}; {AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}; {AGAIN}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The same; an empty object where there is no such file."""
    return read_json(path) if has_file(path) else {}


def is_integer(value: object) -> TypeGuard[int]:
    """A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
