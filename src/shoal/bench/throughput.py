"""Offline throughput: all requests at once, random token ids, no early stop.

Takes a loop; knows how to fill it and what to count. Times are from the first submission to the last token.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from shoal.bench.cpu_noise import Noise, NoiseWatch
from shoal.core.events import PassEvents
from shoal.core.params import SamplingParams
from shoal.core.request import Request
from shoal.engine.loop import EngineLoop
from shoal.errors import EngineError
from shoal.workload.lengths import Lengths


@dataclass(frozen=True)
class Throughput:
    """Figures of one run."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    passes: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    peak_kv_share: float
    mean_batch: float
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # … and of those, accepted
    speculate: str = "off"
    noise: Noise | None = None  # what other programs took of the CPUs meanwhile

    @property
    def meaningless(self) -> bool:
        """Its text means nothing, since draft tokens were accepted by chance."""
        return self.speculate.startswith("synthetic")

    @property
    def output_tok_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tok_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def run_throughput(
    loop: EngineLoop,
    lengths: Sequence[Lengths],
    prompts: Sequence[list[int]],
    progress: bool = True,
    name: str = "",
    after_pass: Callable[[PassEvents], None] = lambda events: None,
    params: SamplingParams | None = None,
    speculate: str = "off",
    first_seed: int = 0,
) -> Throughput:
    """Submit everything, step until idle, count. `params`: sampling parameters other than lengths; default: greedy.
    `first_seed`: of the first request; the others count on."""
    outputs = sum(one.output for one in lengths)
    passes = computed = recomputed = preemptions = scheduled = drafted = accepted = 0
    peak = 0.0
    watch = NoiseWatch()
    begun = time.perf_counter()
    for number, (one, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        own = replace(params or SamplingParams(temperature=0.0), max_tokens=one.output, ignore_eos=True).resolved({})
        loop.submit(Request(f"{name}{number}", prompt, own, seed=first_seed + number))
    with tqdm(total=outputs, unit="tok", disable=not progress) as bar:
        while not loop.idle:
            events = loop.step()
            for end in events.finished:
                if end.error:
                    raise EngineError(f"request {end.id} failed: {end.error}")
            passes += 1
            computed += events.computed_tokens
            recomputed += events.recomputed_tokens
            preemptions += len(events.preempted)
            drafted += sum(events.proposed.values())
            accepted += sum(events.accepted.values())
            scheduled += len(events.scheduled_ids)
            peak = max(peak, events.blocks_held / max(events.blocks_total, 1))
            bar.update(len(events.tokens))
            after_pass(events)
    seconds = time.perf_counter() - begun
    return Throughput(
        requests=len(lengths),
        prompt_tokens=sum(one.prompt for one in lengths),
        output_tokens=outputs,
        seconds=seconds,
        passes=passes,
        computed_tokens=computed,
        recomputed_tokens=recomputed,
        preemptions=preemptions,
        peak_kv_share=peak,
        mean_batch=scheduled / max(passes, 1),
        drafted_tokens=drafted,
        accepted_tokens=accepted,
        speculate=speculate,
        noise=watch.noise(),
    )
