"""What `--speculate` says: off, drafters by name and in order, or synthetic drafts. Knows names, not drafters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import BadConfig

MODEL = "draft"
DRAFTERS = ("ngram", "suffix", "grammar", MODEL)
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

    @property
    def model(self) -> bool:
        """Whether a draft model is one of them."""
        return MODEL in self.drafters

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


def check_draft(speculate: str, draft: Mapping[str, object], quantization: str) -> None:
    """Raise BadConfig unless the options draft_… fit what `speculate` says; quantization: of the model."""
    given = [name for name, value in draft.items() if value is not None]
    if not Speculate.read(speculate).model:
        if given:
            raise BadConfig(
                f"draft_{given[0]} is for speculate={MODEL} only, and speculate is {speculate}; leave it out, or add "
                f"{MODEL} to speculate"
            )
    elif not any(value not in (None, same) for value, same in zip(draft.values(), ("", 0, quantization), strict=True)):
        raise BadConfig(
            f"speculate={MODEL} needs a draft model that is faster than the model: give draft_model, draft_layers, or "
            "draft_quantization=int8"
        )


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
