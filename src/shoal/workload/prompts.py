"""Token ids for requests of given lengths: random, but equal where the trace's prefixes are equal."""

import math
import random
from collections.abc import Sequence

from shoal.workload.traces import TraceRequest


def make_prompts(requests: Sequence[TraceRequest], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """One prompt for each. Blocks with the same prefix id get the same tokens; everything else is unique."""
    blocks: dict[tuple[int, float], list[int]] = {}
    found = []
    for number, request in enumerate(requests):
        prompt: list[int] = []
        for index, id in enumerate(request.prefix):
            key = (id, request.prefix_block)
            if key not in blocks:
                source = random.Random(f"{seed} block {id}")
                blocks[key] = source.choices(range(vocab_size), k=math.ceil(request.prefix_block))
            prompt += blocks[key][: round((index + 1) * request.prefix_block) - len(prompt)]
        own = random.Random(f"{seed} request {number}")
        missing = request.prompt - len(prompt)
        found.append(prompt[: request.prompt] + own.choices(range(vocab_size), k=max(0, missing)))
    return found
