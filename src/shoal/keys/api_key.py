"""API keys as everybody may know them: a name, a hash, and what the key may ask for.

Owns the words. A key itself is kept nowhere, only its sha256. Knows no files, no HTTP and no scheduling.
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
    max_concurrent: int | None = None  # requests alive; None: the server's default, 0: no limit
    tokens_per_minute: int | None = None  # the same
    admin: bool = False  # may see what all others do


KeySource: TypeAlias = Callable[[], Sequence[ApiKey]]  # the keys in force now; none: everybody may ask


def no_keys() -> Sequence[ApiKey]:
    """Everybody may ask."""
    return ()


def digest_of(key: str | bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
