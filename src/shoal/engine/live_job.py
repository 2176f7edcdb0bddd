"""A job of a front that has not ended: what it asked for, what it has so far, and which engine has it.

Decides nothing.
"""

from dataclasses import dataclass, field, replace

from shoal.core.job import Ending, Job, Sink
from shoal.engine.link import EngineLink


@dataclass
class LiveJob:
    """A job that has not ended."""

    number: int
    job: Job
    sink: Sink
    begun_s: float
    outputs: dict[int, list[int]]  # sample → its output so far, for samples that have not ended
    link: EngineLink | None = None  # the engine that has it; None: it waits
    waits_for: EngineLink | None = None  # the one engine that may have it, since that suspects it; None: any
    prompt_logprobs: int = 0  # how many of them the sink has
    accepted: bool = False
    sent: bool = False  # an engine has had it
    prefilled: bool = False  # a token has come from the engine that has it
    stopped: set[int] = field(default_factory=set)  # samples whose stop string was found
    resumes: int = 0
    handed: dict[int, Ending] = field(default_factory=dict)  # sample → how its prefill engine was done with it

    def ending(self, sample: int, ending: Ending) -> Ending:
        """As its client sees it: what came of its prompt is known where that was computed first."""
        first = self.handed.get(sample)
        if first is None:
            return ending
        preemptions = first.preemptions + ending.preemptions
        return replace(ending, cached_tokens=first.cached_tokens, queue_s=first.queue_s, preemptions=preemptions)
