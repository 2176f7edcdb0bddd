"""A job as the router sees it: how much there is to compute, and the names of its blocks.

Owns the names' form, which is that of the engines' reports: the sha256 chain of kv/prefix.py, truncated. They are
computed as far as they are asked for. Knows no engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.job import Job
from shoal.core.report import NAME_BYTES
from shoal.kv.prefix import first_digest, next_digest


class BlockNames:
    """The names of the full blocks of a sequence, less the block of its last token: a hit never covers all of it.

    >>> names = BlockNames(list(range(40)), "salt", 16)
    >>> len(names), names[1] == BlockNames(list(range(33)), "salt", 16)[1], names[0] == names[1]
    (2, True, False)
    """

    def __init__(self, tokens: Sequence[int], salt: str, block_size: int) -> None:
        self.block_size = block_size
        self._tokens = tokens
        self._last = first_digest(salt)
        self._names: list[bytes] = []

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.block_size if self.block_size else 0

    def __getitem__(self, number: int) -> bytes:
        size, names = self.block_size, self._names
        while len(names) <= number:
            first = len(names) * size
            self._last = next_digest(self._last, self._tokens[first : first + size])
            names.append(self._last[:NAME_BYTES])
        return names[number]


@dataclass(frozen=True, slots=True)
class Work:
    """What one job asks of an engine."""

    tokens: int  # prompt and output so far: positions to compute where none is cached
    most_outputs: int | None  # tokens that each sample may still generate; None: up to the context's end
    samples: int
    names: BlockNames | Sequence[bytes]  # of the full blocks, less that of the last token

    @classmethod
    def of(cls, job: Job, outputs: dict[int, list[int]], block_size: int) -> "Work":
        """Of a job whose samples have these outputs so far.

        >>> from shoal.core.params import SamplingParams
        >>> job = Job(id="a", prompt=[1, 2, 3], params=SamplingParams(max_tokens=10), seed=0)
        >>> Work.of(job, {0: [7]}, 16).most_outputs
        9
        """
        longest = max(outputs.values(), key=len, default=[])
        tokens = job.prompt + longest if longest else job.prompt
        most = job.params.max_tokens
        left = None if most is None else max(0, most - len(longest))
        return cls(len(tokens), left, max(1, len(outputs)), BlockNames(tokens, job.salt, block_size))
