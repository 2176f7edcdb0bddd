"""Workloads as pairs of lengths: the prompt and output tokens of each request.

Owns the file format and its errors. Knows no engine and no clock.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import BadConfig


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request of a workload."""

    prompt: int
    output: int


def read_lengths(path: str | Path) -> list[Lengths]:
    """A JSON list of [prompt, output] pairs, or an object that has one under "requests" or "lengths"."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadConfig(f"cannot read the workload {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadConfig(f"the workload {path} is not JSON: {error}") from error
    if isinstance(data, dict):
        data = next((data[key] for key in ("requests", "lengths") if key in data), data)
    if not isinstance(data, list) or not data:
        raise BadConfig(f"the workload {path} must be a list of [prompt_tokens, output_tokens] pairs")
    found = []
    for number, pair in enumerate(data):
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(value) is int and value > 0 for value in pair)
        if not whole:
            raise BadConfig(
                f"request {number} of {path} must be [prompt_tokens, output_tokens], both above 0; found {pair}"
            )
        found.append(Lengths(*pair))
    return found


def random_prompts(lengths: list[Lengths], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths with random token ids, so that no two share a prefix."""
    source = random.Random(seed)
    return [source.choices(range(vocab_size), k=one.prompt) for one in lengths]
