"""Tiers: what requests are promised.

A tier states how soon its requests should get their first token, how far apart the next ones may be, and its weight
beside the others. Tiers are listed from the most to the least important. Owns their reading and their limits; knows
nothing of how promises are kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.names import pick
from shoal.errors import BadConfig, BadParameter

STANDARD = "standard"  # where requests belong that name no tier, if there is one of this name; else the last tier
MOST_TIERS = 16
DEFAULT = {
    "premium": {"ttft": 0.3, "itl": 0.04, "weight": 8},
    "standard": {"ttft": 2.0, "itl": 0.2, "weight": 4},
    "batch": {"weight": 1},
}


@dataclass(frozen=True, slots=True)
class Tier:
    """One promise. Without times it is best effort."""

    name: str = ""
    rank: int = 0  # 0 is the most important
    ttft_s: float = math.inf  # from arrival to the first token
    itl_s: float = math.inf  # from one token to the next
    weight: float = 1.0  # how many of its requests may pass one of a lower tier; and its tenants' share under `fair`
    longest: int = 0  # tokens of the longest sequence that shares passes with it; 0: any
    reject_late: bool = False  # refuse at once what cannot be on time


NO_PROMISE = Tier()

_NUMBERS = ("ttft", "itl", "weight", "longest")


class Tiers:
    """All tiers of an engine, most important first.

    >>> tiers = Tiers.read({"premium": {"ttft": 0.3, "weight": 8}, "batch": {}})
    >>> [tier.name for tier in tiers], tiers.of("").name, tiers.of("premium").ttft_s
    (['premium', 'batch'], 'batch', 0.3)
    """

    def __init__(self, tiers: tuple[Tier, ...] = (NO_PROMISE,)) -> None:
        self._tiers = tiers
        self._by_name = {tier.name: tier for tier in tiers}
        self._default = self._by_name.get(STANDARD, tiers[-1])

    def __iter__(self) -> Any:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def of(self, name: str) -> Tier:
        """The tier of a request that asks for this one."""
        if not name:
            return self._default
        found = self._by_name.get(name)
        if found is None:
            known = ", ".join(tier.name for tier in self._tiers if tier.name) or "none: start the server with --tiers"
            raise BadParameter(f"tier {name!r} is not known; known tiers: {known}")
        return found

    @classmethod
    def read(cls, table: Mapping[str, Any] | None) -> "Tiers":
        """From a config's table name → {ttft, itl, weight, longest, reject_late}; None: nothing is promised."""
        if table is None:
            return cls()
        if not isinstance(table, Mapping) or not 1 <= len(table) <= MOST_TIERS:
            raise BadConfig(
                f"tiers must be a table of 1 to {MOST_TIERS} names, such as premium: {{ttft: 0.3, itl: 0.04}}"
            )
        return cls(
            tuple(_read_tier(str(name), rank, values or {}) for rank, (name, values) in enumerate(table.items()))
        )


def _read_tier(name: str, rank: int, values: Any) -> Tier:
    if not name or len(name) > 64 or not isinstance(values, Mapping):
        raise BadConfig(f"tier {name!r} must have a name and a table of values, such as {{ttft: 0.3, itl: 0.04}}")
    known = dict.fromkeys([*_NUMBERS, "reject_late"])
    for key, value in values.items():
        pick(known, str(key), f"value of tier {name}")
        if key == "reject_late":
            if not isinstance(value, bool):
                raise BadConfig(f"tier {name}: reject_late must be true or false, not {value!r}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise BadConfig(f"tier {name}: {key} must be a number above 0, not {value!r}")
    longest, weight = values.get("longest", 0), values.get("weight", 1.0)
    if int(longest) != longest:
        raise BadConfig(f"tier {name}: longest must be a whole number of tokens, not {longest!r}")
    if not 0.01 <= weight <= 1000:
        raise BadConfig(f"tier {name}: weight must be between 0.01 and 1000, not {weight!r}")
    reject_late = bool(values.get("reject_late", False))
    if reject_late and "ttft" not in values:
        raise BadConfig(f"tier {name}: reject_late needs a ttft to be late for")
    ttft_s, itl_s = float(values.get("ttft", math.inf)), float(values.get("itl", math.inf))
    return Tier(name, rank, ttft_s, itl_s, float(weight), int(longest), reject_late)
