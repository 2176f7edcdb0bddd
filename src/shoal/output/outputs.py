"""The outputs of jobs that belong together: all samples of one call, and what they used.

Owns the samples and prompt logprobs of each job, and how many samples still run. Knows no engine, no clock and no API.
"""

from collections.abc import Callable, Sequence

from shoal.core.job import Ending, Job
from shoal.output.logprob_list import LogprobList
from shoal.output.parser import Parser, PlainParser
from shoal.output.sample import Sample
from shoal.text.tokenizer import Tokenizer


class Outputs:
    """Samples by job, then by number."""

    def __init__(
        self,
        jobs: Sequence[Job],
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        make_parser: Callable[[], Parser] = PlainParser,
    ) -> None:
        self.jobs = jobs
        self.eos_ids = eos_ids
        self.samples: list[list[Sample]] = []
        self.prompt_logprobs = [LogprobList() for _ in jobs]  # from the second prompt token on; the first has none
        self.running = 0  # samples that have not ended
        for job in jobs:
            numbers = range(job.params.n)
            self.samples.append([Sample(job, n, self.running + n, tokenizer, make_parser()) for n in numbers])
            self.running += job.params.n

    def end(self, sample: Sample, ending: Ending) -> str:
        """A sample has ended; returns the rest of its text."""
        rest = sample.end(ending, eos=ending.stop_token in self.eos_ids)
        self.running -= 1
        return rest

    # ---- what was used ----------------------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(len(sample.tokens) for samples in self.samples for sample in samples)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, by the first sample: later ones also find what it computed."""
        return sum(min((ending.cached_tokens for ending in _endings(samples)), default=0) for samples in self.samples)

    @property
    def queue_s(self) -> float:
        """The longest wait of a sample."""
        return max((ending.queue_s for samples in self.samples for ending in _endings(samples)), default=0.0)


def _endings(samples: Sequence[Sample]) -> list[Ending]:
    return [sample.ending for sample in samples if sample.ending is not None]
