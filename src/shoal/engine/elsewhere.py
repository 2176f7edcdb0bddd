"""What other engines compute for the tenants, so that the fair order of this one counts it.

Owns which of their messages were counted: every front passes all of them on, so most come several times. An engine that
has been silent for a while has no tenants any more. Knows no sockets and no order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SILENT_S = 3.0  # an engine with requests tells every half second


@dataclass
class OtherEngine:
    """Another engine, as its messages tell."""

    latest: tuple[int, int] = (-1, 0)  # epoch and number of the last message
    heard_s: float = 0.0
    tenants: frozenset[str] = field(default_factory=frozenset)


class ServiceElsewhere:
    """Adds up what the other engines tell.

    >>> others = ServiceElsewhere()
    >>> others.take(1, 0, 1, {"alice": 5.0}, now_s=0.0)
    {'alice': 5.0}
    >>> others.take(1, 0, 1, {"alice": 5.0}, now_s=0.1)  # again, by another front
    >>> others.take(2, 0, 1, {"bob": 1.0}, now_s=0.2)
    {'alice': 0.0, 'bob': 1.0}
    """

    def __init__(self) -> None:
        self._engines: dict[int, OtherEngine] = {}

    def take(
        self, engine: int, epoch: int, number: int, service: Mapping[str, float], now_s: float
    ) -> dict[str, float] | None:
        """What was computed elsewhere since the last call, for every tenant that has requests on any of the others;
        None if this message was counted before."""
        one = self._engines.setdefault(engine, OtherEngine())
        if (epoch, number) <= one.latest:
            return None
        one.latest, one.heard_s, one.tenants = (epoch, number), now_s, frozenset(service)
        present = {
            tenant for other in self._engines.values() if now_s - other.heard_s <= SILENT_S for tenant in other.tenants
        }
        return {tenant: service.get(tenant, 0.0) for tenant in sorted(present)}
