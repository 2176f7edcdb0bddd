"""Runs requests through a whole engine, without a tokenizer: what the GPU tests share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.build import Built, build
from shoal.config.engine import EngineConfig
from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs, Request


@dataclass
class Answers:
    """What came back, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], Logprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, tuple[Logprobs, ...]]] = field(default_factory=dict)
    preemptions: int = 0
    cached: int = 0
    padded: int = 0
    blocks_in: int = 0

    def of(self, count: int) -> list[list[int]]:
        return [self.tokens[str(number)] for number in range(count)]


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[Built]:
    settings = {"max_num_seqs": 33, "max_num_batched_tokens": 200, "kv_memory": "64MiB", "check": True, **options}
    built = build(EngineConfig.from_mapping({"model": str(folder), "device": "cuda", **settings}))
    try:
        yield built
    finally:
        built.loop.close()


def ask(
    built: Built, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], **more: Any
) -> Answers:
    """All at once, until all have ended."""
    found = Answers()
    for number, prompt in enumerate(prompts):
        one = params if isinstance(params, SamplingParams) else params[number]
        found.tokens[str(number)] = []
        built.loop.submit(Request(str(number), list(prompt), one, seed=one.seed or number, **more))
    while not built.loop.idle:
        events = built.loop.step()
        for owner, token in zip(events.owners, events.tokens, strict=True):
            found.tokens[owner].append(token)
        found.logprobs |= events.logprobs
        found.prompt_logprobs |= events.prompt_logprobs
        found.preemptions += len(events.preempted)
        found.padded += events.padded_tokens
        found.blocks_in += events.blocks_in
        found.cached += sum(one.cached_tokens for one in events.finished)
        for end in events.finished:
            assert not end.error, end
    return found


def greedy(most: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": most, "ignore_eos": True, **more})
