"""Latency: the time to the first tokens of a batch that arrives at once, and the gaps between its further tokens.

Takes a loop; knows how to fill it and what to count. A gap is the time between two passes that both gave every
request a token.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

from shoal.bench.cpu_noise import Noise, NoiseWatch, noise_figures
from shoal.bench.floor import Machine, decode_pass_s, prompts_s
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.errors import EngineError
from shoal.models.spec import ModelSpec
from shoal.workload.lengths import Lengths, random_prompts


@dataclass(frozen=True)
class Latency:
    """The latencies of one batch, and their lower bounds."""

    batch: int
    prompt: int
    output: int
    ttft_p50_s: float
    ttft_last_s: float
    gap_p50_s: float
    gap_p99_s: float
    least_ttft_s: float  # of the last request
    least_gap_s: float
    output_tok_s: float
    row_tokens: float = 1.0  # tokens that a pass gave a request, on average: more than one with drafts
    noise: Noise | None = None  # what other programs took of the CPUs meanwhile

    @property
    def ttft_fraction(self) -> float:
        return self.least_ttft_s / self.ttft_last_s

    @property
    def gap_fraction(self) -> float:
        return self.least_gap_s / self.gap_p50_s


def run_latency(
    loop: EngineLoop, batch: int, prompt: int, output: int, spec: ModelSpec, itemsize: int, machine: Machine, seed: int
) -> Latency:
    """One batch, from the first submission to the last token."""
    lengths = [Lengths(prompt, output)] * batch
    watch = NoiseWatch()
    begun = time.perf_counter()
    for number, ids in enumerate(random_prompts(lengths, spec.vocab_size, seed)):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        loop.submit(Request(f"{seed}/{number}", ids, params, seed=number))
    firsts: list[float] = []
    full: list[float] = []  # when a pass gave every request a token
    tokens = rows = 0
    while not loop.idle:
        events = loop.step()
        now = time.perf_counter() - begun
        errors = [end.error for end in events.finished if end.error]
        if errors:
            raise EngineError(f"a request failed: {errors[0]}")
        firsts += [now] * events.indexes.count(0)
        if len(set(events.owners)) == batch:
            full.append(now)
        tokens += len(events.tokens)
        rows += len(set(events.owners))
    seconds = time.perf_counter() - begun
    gaps = [later - earlier for earlier, later in pairwise(full)] or [seconds]
    return Latency(
        batch=batch,
        prompt=prompt,
        output=output,
        ttft_p50_s=median(firsts),
        ttft_last_s=max(firsts),
        gap_p50_s=median(gaps),
        gap_p99_s=quantiles(gaps, n=100)[-1] if len(gaps) > 1 else gaps[0],
        least_ttft_s=prompts_s(lengths, spec, itemsize, machine),
        least_gap_s=decode_pass_s(batch, prompt + output // 2, spec, itemsize, machine),
        output_tok_s=batch * output / seconds,
        row_tokens=tokens / max(rows, 1),
        noise=watch.noise(),
    )


def latency_figures(run: Latency) -> dict[str, Any]:
    """All figures of one batch, for machines."""
    own = {name: value for name, value in asdict(run).items() if name != "noise"}
    return {
        **own, "ttft_fraction": run.ttft_fraction, "gap_fraction": run.gap_fraction, **noise_figures(run.noise)
    }  # fmt: skip


def best_of(runs: Sequence[Latency]) -> Latency:
    """The one with the least time per token."""
    return min(runs, key=lambda run: run.gap_p50_s / run.row_tokens)
