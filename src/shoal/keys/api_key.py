"""API keys in the form that is kept: a name, a hash, and what the key may do.

Owns the record. The key itself is not kept, only its sha256. Knows no files, no HTTP and no scheduling.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a key and of a tier


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key. Its name is the tenant that its requests belong to.

    >>> ApiKey(name="alice", digest=digest_of("sk-12345678")).admin
    False
    """

    name: str
    digest: bytes  # sha256 of the key
    tier: str = ""  # of its requests; "": none of its own
    max_concurrent: int | None = None  # unfinished requests; None: the server's default, 0: no limit
    tokens_per_minute: int | None = None  # None and 0 as above
    admin: bool = False  # may see the requests of all keys
    may_set_priority: bool = False  # of its own requests


KeySource: TypeAlias = Callable[[], Sequence[ApiKey]]  # the keys in force now; empty: no key is needed


def no_keys() -> Sequence[ApiKey]:
    """No key is needed."""
    return ()


def digest_of(key: str | bytes) -> bytes:
    """The hash that is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
