"""Jobs whose grammars are being compiled, off the engine's loop, before they start.

Owns the thread that compiles, and the submissions that wait for it, in the order of their arrival. Keys are (front,
number of the job). Knows no sockets and no scheduler.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shoal.core.grammar import Grammar
from shoal.core.job import GrammarSpec, Job
from shoal.core.ports import MakeGrammar
from shoal.engine import wire

Outputs: TypeAlias = Mapping[int, list[int]]  # sample → its output tokens so far


@dataclass(frozen=True)
class Compiling:
    """A job whose grammar is being compiled."""

    front: bytes
    message: wire.Submit
    job: Job
    grammars: "Future[dict[int, Grammar]]"  # one for each sample
    finishes: list[wire.FinishAt] = field(default_factory=list)  # stop strings that were found meanwhile


class HostGrammars:
    """Of one engine."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int], Compiling] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-grammar")

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, front: bytes, message: wire.Submit, job: Job, make_grammar: MakeGrammar) -> None:
        assert job.grammar is not None
        outputs = message.outputs if message.outputs is not None else {sample: [] for sample in range(job.params.n)}
        grammars = self._thread.submit(compile_all, make_grammar, job.grammar, outputs)
        self._waiting[front, message.number] = Compiling(front, message, job, grammars)

    def ready(self) -> list[Compiling]:
        """Those that need not wait any more, also where compiling failed."""
        found = []
        for key, one in self._waiting.items():
            if not one.grammars.done():
                break
            found.append(key)
        return [self._waiting.pop(key) for key in found]

    def finish_later(self, front: bytes, message: wire.FinishAt) -> bool:
        """Whether this is about a job whose grammar is being compiled; then it is kept with it."""
        one = self._waiting.get((front, message.key // wire.SAMPLES))
        if one is not None:
            one.finishes.append(message)
        return one is not None

    def forget(self, front: bytes, number: int) -> None:
        """The front has aborted it. It may submit another job of this number."""
        one = self._waiting.pop((front, number), None)
        if one is not None:
            one.grammars.cancel()

    def view(self, most: int) -> list[dict[str, Any]]:
        """The first of them, for people and tests."""
        return [
            {
                "id": one.job.id,
                "state": "compiling",
                "why": "its grammar is being made",
                "tenant": one.job.tenant,
                "tier": one.job.tier,
                "prompt_tokens": len(one.job.prompt),
            }
            for one in list(self._waiting.values())[:most]
        ]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def compile_all(make_grammar: MakeGrammar, spec: GrammarSpec, outputs: Outputs) -> dict[int, Grammar]:
    """One grammar per sample, at the point that the sample's output has reached."""
    return {sample: make_grammar(spec, output) for sample, output in outputs.items()}
