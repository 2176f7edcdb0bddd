"""What `--speculate` says: off, drafters by name and in order, or synthetic drafts. Knows names, not drafters."""

import math
from dataclasses import dataclass

from shoal.errors import BadConfig

DRAFTERS = ("ngram", "suffix", "grammar")
SYNTHETIC = "synthetic"
USAGE = f"off, {', '.join(DRAFTERS)}, several joined by + (such as grammar+suffix), or {SYNTHETIC}:P for benchmarks"


@dataclass(frozen=True, slots=True)
class Speculate:
    """Which drafters propose tokens."""

    drafters: tuple[str, ...] = ()
    synthetic: float | None = None  # the probability that a draft token is accepted, in benchmarks

    @property
    def on(self) -> bool:
        return bool(self.drafters) or self.synthetic is not None

    @classmethod
    def read(cls, text: str) -> "Speculate":
        """
        >>> Speculate.read("grammar+suffix").drafters, Speculate.read("synthetic:0.7").synthetic
        (('grammar', 'suffix'), 0.7)
        """
        if text == "off":
            return cls()
        name, colon, number = text.partition(":")
        if name == SYNTHETIC:
            return cls(synthetic=_probability(number if colon else ""))
        names = tuple(part.strip() for part in text.split("+"))
        for name in names:
            if name == "off" or name.startswith(SYNTHETIC):
                raise BadConfig(f"speculate {text!r}: {name} cannot be combined with others; choose from: {USAGE}")
            if name not in DRAFTERS:
                raise BadConfig(f"speculate: unknown drafter {name!r}; choose from: {USAGE}")
        if len(set(names)) < len(names):
            raise BadConfig(f"speculate {text!r} names a drafter twice; name each once")
        return cls(names)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise BadConfig(
            f"speculate: {SYNTHETIC}:P needs a probability P between 0 and 1, such as {SYNTHETIC}:0.7, not {text!r}"
        )
    return value
