"""The limits of API keys on the path of a request: what it asks for, and whether its key may have that now.

Owns what a request demands of its key: a generation its prompts and max_tokens, a text to tokenize its length. The
ledger decides (keys/ledger.py). Knows no routes.
"""

from collections.abc import Callable, Sequence

from shoal.core.job import EngineInfo, Job
from shoal.errors import ShoalError
from shoal.keys.api_key import ApiKey
from shoal.keys.ledger import Demand
from shoal.keys.ledger_client import Limiter, Reservation
from shoal.server.front_metrics import FrontCounters

BYTES_PER_TOKEN = 4  # of a text that is not tokenized yet, roughly; a token is at least one byte
UNKNOWN_CONTEXT = 2**17  # tokens, for a request without max_tokens while the engine has never been up


class KeyGate:
    """Reserves what requests demand, and counts those that are refused."""

    def __init__(self, limiter: Limiter, metrics: FrontCounters, info: Callable[[], EngineInfo | None]) -> None:
        self._limiter = limiter
        self._metrics = metrics
        self._info = info
        self._context = UNKNOWN_CONTEXT

    async def reserve_jobs(self, key: ApiKey | None, jobs: Sequence[Job]) -> Reservation:
        """For all jobs of one HTTP request together."""
        if key is None:
            return Reservation()
        info = self._info()
        if info is not None:
            self._context = info.max_model_len
        return await self._reserve(key, demand_of(jobs, self._context))

    async def reserve_text(self, key: ApiKey | None, size_bytes: int) -> Reservation:
        """For a text that is to be tokenized."""
        if key is None:
            return Reservation()
        guess = size_bytes // BYTES_PER_TOKEN
        return await self._reserve(key, Demand(guess, 0, size_bytes - guess))

    async def _reserve(self, key: ApiKey, demand: Demand) -> Reservation:
        try:
            return await self._limiter.reserve(key.name, demand)
        except ShoalError as error:
            self._metrics.count_refusal(type(error).__name__)
            raise


def demand_of(jobs: Sequence[Job], context: int) -> Demand:
    """What these jobs can use, where prompt and output together have at most `context` tokens.

    >>> from shoal.core.params import SamplingParams
    >>> demand_of([Job(id="a", prompt=[1, 2], params=SamplingParams(n=3, max_tokens=5), seed=0)], context=6)
    Demand(prompt_tokens=2, samples=3, output_tokens=12)
    """
    output_tokens = 0
    for job in jobs:
        fits = max(0, context - len(job.prompt))
        asked = job.params.max_tokens
        output_tokens += job.params.n * (fits if asked is None else min(asked, fits))
    return Demand(sum(len(job.prompt) for job in jobs), sum(job.params.n for job in jobs), output_tokens)
