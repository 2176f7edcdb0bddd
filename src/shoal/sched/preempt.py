"""When memory is short: what happens to the request that is preempted.

recompute   it gives up its blocks, waits under its old key and computes again what the prefix cache does not have
swap        its full blocks go to host memory and come back when it starts again; what does not fit is recomputed
auto        the quicker of these two for this victim, from measured copies and passes
drop        it ends with an error
wait        no request is preempted; only with `reserve`, where none ever runs short

Knows what each would cost. The scheduler does it.
"""

from enum import Enum
from typing import Protocol, Self

from shoal.core.request import Request
from shoal.kv.manager import KVManager
from shoal.sched.setup import NoOptions, Setup
from shoal.sched.steptime import CopyTimes, StepModel


class How(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    DROP = "drop"


class Preempt(Protocol):
    """Decides how a running request is preempted."""

    learns: bool  # it needs to know how long passes take
    preempts: bool  # a running request may be preempted at all

    @classmethod
    def make(cls, setup: Setup) -> Self: ...

    def choose(self, victim: Request, kv: KVManager) -> How: ...


class Recompute(NoOptions):
    """Forget its KV; its tokens are kept, so no output is lost."""

    learns = False
    preempts = True

    def choose(self, victim: Request, kv: KVManager) -> How:
        return How.RECOMPUTE


class Swap(NoOptions):
    """Keep its KV in host memory."""

    learns = False
    preempts = True

    def choose(self, victim: Request, kv: KVManager) -> How:
        return How.SWAP


class Drop(NoOptions):
    """End it."""

    learns = False
    preempts = True

    def choose(self, victim: Request, kv: KVManager) -> How:
        return How.DROP


class Wait(NoOptions):
    """No request is preempted."""

    learns = False
    preempts = False

    def choose(self, victim: Request, kv: KVManager) -> How:
        raise AssertionError(f"{victim} ran out of blocks although they were reserved")


class Auto:
    """Whichever costs less time. Copies run beside the passes, yet they take the same memory's bandwidth and the victim
    comes back only when they are done, so they are counted in full.

    What a recompute would find on the device again is free: blocks that others hold, too, or, for the samples of one
    prompt, its blocks as long as another of them runs.
    """

    learns = True
    preempts = True

    def __init__(self, steps: StepModel, copies: CopyTimes, budget: int = 512) -> None:
        self.steps = steps
        self.copies = copies
        self.budget = budget  # positions in one pass

    @classmethod
    def make(cls, setup: Setup) -> Self:
        return cls(setup.steps, setup.copies, setup.config.pass_tokens)

    def choose(self, victim: Request, kv: KVManager) -> How:
        if kv.host is None:
            return How.RECOMPUTE
        full = victim.computed // kv.block_size
        own = [block for block in victim.holding.blocks[:full] if kv.pool.references[block] == 1]
        if not own:
            return How.RECOMPUTE  # all of it stays
        copy_s = self.copies.both_s()
        if copy_s is None or not self.steps.known:
            return How.SWAP  # not known yet: this copy will be measured
        tokens = len(own) * kv.block_size
        recompute_s = self.steps.added_s(tokens, tokens / self.budget)
        return How.SWAP if len(own) * copy_s < recompute_s else How.RECOMPUTE


PREEMPT: dict[str, type[Preempt]] = {
    "recompute": Recompute,
    "swap": Swap,
    "drop": Drop,
    "auto": Auto,
    "wait": Wait,
}
