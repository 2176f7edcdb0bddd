"""The tuner: searches settings of an engine for an objective, one axis at a time, by simulated runs.

Starts from the defaults and goes round the axes: every value of one axis is tried with the others as they are, and the
best is kept if it is better by more than a hundredth. Ends when a round changes nothing or the trials are used up. Owns
the search; what a trial is worth is a function that it is handed. Knows no flags, no files and no clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.config.engine import PASS_TOKENS, SLOTS, EngineConfig
from shoal.errors import BadConfig

Settings = Mapping[str, Any]
BETTER = 1.01  # how much better a change must be, as a factor
ROUNDS = 3


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and what they are worth: more is better, and always above 0."""

    settings: dict[str, Any]
    worth: float


def axes_of(kind: str, host_bytes: int, fixed: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
    """Axis → changes to try, for a device; without those that the user has fixed.

    >>> axes_of("cpu", 0, fixed=["order"])["max_num_seqs"][0]
    {'max_num_seqs': 8}
    """
    tokens, slots = PASS_TOKENS[kind], SLOTS[kind]
    axes: dict[str, list[dict[str, Any]]] = {
        "max_num_batched_tokens": [{"max_num_batched_tokens": tokens * two // 8} for two in (1, 2, 4, 8, 16, 32)],
        "max_num_seqs": [{"max_num_seqs": slots * two // 8} for two in (1, 2, 4, 8, 16)],
        "chunk_tokens": [{"chunk_tokens": value} for value in (0, tokens // 8, tokens // 2)],
        "order": [{"order": value} for value in ("fcfs", "sjf")],
        "memory": [
            {"memory": "ondemand", "when_short": "recompute"},
            {"memory": "ondemand", "when_short": "swap", "host_kv_memory": host_bytes},
            {"memory": "ondemand", "when_short": "auto", "host_kv_memory": host_bytes},
            {"memory": "predict", "when_short": "recompute"},
            {"memory": "reserve", "when_short": "recompute"},
        ],
        "prefill": [{"prefill": value} for value in ("chunked", "inline", "exclusive")],
        "block_size": [{"block_size": value} for value in (16, 32, 64)],
        "depth": [{"depth": value} for value in (1, 2)],
    }
    if not host_bytes:
        axes["memory"] = [one for one in axes["memory"] if "host_kv_memory" not in one]
    return {
        name: changes
        for name, changes in axes.items()
        if not any(changed in fixed for change in changes for changed in change)
    }


class Tuner:
    """Searches; `worth` raises BadConfig for settings that cannot be used."""

    def __init__(
        self,
        axes: Mapping[str, Sequence[Settings]],
        worth: Callable[[dict[str, Any]], float],
        most: int,
        tell: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self.axes, self.most, self.tell = axes, most, tell
        self._worth = worth
        self._tried: dict[str, Trial] = {}

    def search(self) -> Trial:
        """The best of all trials; the first is of the defaults. Tells of each as it is made."""
        first = self._try({})
        if first is None:
            raise BadConfig(
                "the engine cannot be simulated with these settings; see shoal simulate with the same flags"
            )
        best = first
        for _ in range(ROUNDS):
            before = best
            for changes in self.axes.values():
                for change in changes:
                    if len(self._tried) >= self.most:
                        return best
                    trial = self._try(kept({**best.settings, **change}))
                    if trial is not None and trial.worth > best.worth * BETTER:
                        best = trial
            if best is before:
                break
        return best

    def _try(self, settings: dict[str, Any]) -> Trial | None:
        """None: such settings cannot be used."""
        key = repr(sorted(settings.items()))
        if key not in self._tried:
            try:
                trial = Trial(settings, self._worth(settings))
            except BadConfig:
                return None
            self._tried[key] = trial
            self.tell(trial)
        return self._tried[key]

    def best(self, count: int) -> list[Trial]:
        """The best, without the defaults; of those equally good, the one found first."""
        found = [trial for trial in self._tried.values() if trial.settings]
        return sorted(found, key=lambda trial: -trial.worth)[:count]


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    """Without what is as the defaults have it.

    >>> kept({"order": "fcfs", "block_size": 32})
    {'block_size': 32}
    """
    default = EngineConfig()
    return {name: value for name, value in settings.items() if value != getattr(default, name)}
