"""Workloads by name: the lengths behind the published figures, made by formula so that no file is needed.

Owns the names and the formulas. Knows no engine and no clock.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from shoal.errors import BadConfig
from shoal.workload.lengths import Lengths, read_lengths
from shoal.workload.synthetic import draw_lengths


@dataclass(frozen=True)
class NamedWorkload:
    """What it is, for readers, and how its lengths are made."""

    about: str
    make: Callable[[], list[Lengths]]


def _nano256() -> list[Lengths]:
    """As nano-vllm's benchmark draws them: lengths and token ids alternate in one stream of random numbers."""
    source = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(source.randint(100, 1024))
        for _ in range(prompts[-1]):
            source.randint(0, 10_000)  # a token id there; only its place in the stream counts
    return [Lengths(prompt, source.randint(100, 1024)) for prompt in prompts]


def _cpu64() -> list[Lengths]:
    import numpy as np  # here: the names are wanted where the lengths are not

    source = np.random.RandomState(0)
    prompts, outputs = (source.lognormal(math.log(median), 0.8, 64) for median in (128, 64))
    return [Lengths(round(prompt), round(output)) for prompt, output in zip(prompts, outputs, strict=True)]


def _azure() -> list[Lengths]:
    return [Lengths(one.prompt, one.output) for one in draw_lengths("azure-conv", 1000)]


WORKLOADS = {
    "cpu64": NamedWorkload("64 requests, lognormal lengths with medians of 128 in and 64 out", _cpu64),
    "nano256": NamedWorkload("256 requests, 100 to 1,024 tokens in and out, as nano-vllm's benchmark", _nano256),
    "azure": NamedWorkload("1,000 requests with lengths drawn like the Azure chat trace's", _azure),
    "single": NamedWorkload("one request, 128 tokens in, 256 out", lambda: [Lengths(128, 256)]),
    "decodes": NamedWorkload("32 requests, 32 tokens in, 40 out: passes of decodes", lambda: [Lengths(32, 40)] * 32),
}


def find_lengths(name: str) -> list[Lengths]:
    """A named workload, or the lengths in a file.

    >>> find_lengths("single")
    [Lengths(prompt=128, output=256)]
    """
    if name in WORKLOADS:
        return WORKLOADS[name].make()
    if not Path(name).exists():
        close = get_close_matches(Path(name).stem, WORKLOADS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise BadConfig(
            f"there is no workload {name!r}{hint}; name one of {', '.join(WORKLOADS)}, or a JSON file of "
            "[prompt, output] lengths"
        )
    return read_lengths(name)
