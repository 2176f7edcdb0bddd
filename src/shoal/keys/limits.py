"""The limits of each API key.

Owns their meaning (None is no limit) and the choice: a key's own limit, else the server's. Knows no files; it is given
the source of the keys in force.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.keys.api_key import ApiKey, KeySource


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What one tenant may have; None is no limit."""

    max_concurrent: int | None = None  # samples that have not ended
    tokens_per_minute: int | None = None  # prompt and output

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return self.max_concurrent is not None or self.tokens_per_minute is not None


LimitsOf: TypeAlias = Callable[[str], TenantLimits]


class KeyLimits:
    """Limits by the name of a key. A key that was removed has the server's: its running requests may finish.

    >>> KeyLimits(lambda: (), TenantLimits(max_concurrent=2))("alice").max_concurrent
    2
    """

    def __init__(self, source: KeySource, default: TenantLimits) -> None:
        self._source = source
        self._default = default
        self._seen: object = None
        self._limits: dict[str, TenantLimits] = {}

    def __call__(self, tenant: str) -> TenantLimits:
        keys = self._source()
        if keys is not self._seen:
            self._limits = {key.name: self._of(key) for key in keys}
            self._seen = keys
        return self._limits.get(tenant, self._default)

    def _of(self, key: ApiKey) -> TenantLimits:
        return TenantLimits(
            _own_or(key.max_concurrent, self._default.max_concurrent),
            _own_or(key.tokens_per_minute, self._default.tokens_per_minute),
        )


def _own_or(own: int | None, default: int | None) -> int | None:
    """0 is no limit.

    >>> _own_or(None, 5), _own_or(3, 5), _own_or(0, 5)
    (5, 3, None)
    """
    return default if own is None else own or None
