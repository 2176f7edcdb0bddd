"""When memory is short: what happens to the request that gives way.

recompute   it gives up its blocks, waits in its old place and computes again what the prefix cache does not have
swap        its full blocks go to host memory and come back when it starts again; what does not fit is recomputed
auto        the quicker of these two for this victim, from measured copies and passes
drop        it ends with an error
wait        nobody gives way; only with `reserve`, where nobody ever runs short

Knows what each would cost. The scheduler does it.
"""

from enum import Enum
from typing import Protocol

from shoal.core.request import Request
from shoal.kv.manager import KVManager
from shoal.sched.steptime import StepModel

FADE = 0.2  # what the newest copy counts


class How(Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    DROP = "drop"


class Preempt(Protocol):
    """Decides how a running request gives way."""

    learns: bool  # wants to know how long passes take
    gives_way: bool  # a request may lose its place at all

    def choose(self, victim: Request, kv: KVManager) -> How: ...


class Recompute:
    """Forget its KV; its tokens are kept, so nothing that was said is lost."""

    learns = False
    gives_way = True

    def choose(self, victim: Request, kv: KVManager) -> How:
        return How.RECOMPUTE


class Swap:
    """Keep its KV in host memory."""

    learns = False
    gives_way = True

    def choose(self, victim: Request, kv: KVManager) -> How:
        return How.SWAP


class Drop:
    """End it."""

    learns = False
    gives_way = True

    def choose(self, victim: Request, kv: KVManager) -> How:
        return How.DROP


class Wait:
    """Nobody gives way."""

    learns = False
    gives_way = False

    def choose(self, victim: Request, kv: KVManager) -> How:
        raise AssertionError(f"{victim} ran out of blocks although its room was reserved")


class CopyTimes:
    """How long it takes to copy a block, out and in, as it was lately."""

    def __init__(self) -> None:
        self.block_s: dict[bool, float] = {}  # out → seconds

    def learn(self, out: bool, blocks: int, seconds: float) -> None:
        if blocks < 1 or not 0 < seconds < 3600:
            return
        newest = seconds / blocks
        before = self.block_s.get(out, newest)
        self.block_s[out] = before + FADE * (newest - before)

    def both_s(self) -> float | None:
        """Out and back; one stands for the other where it is not known. None: no copy was seen yet."""
        out_s, in_s = self.block_s.get(True), self.block_s.get(False)
        if out_s is None and in_s is None:
            return None
        return (out_s if out_s is not None else in_s or 0.0) + (in_s if in_s is not None else out_s or 0.0)


class Auto:
    """Whichever costs less time. Copies run beside the passes, yet they take the same memory's bandwidth and the victim
    comes back only when they are done, so they are counted in full.

    What a recompute would find on the device again is free: blocks that others hold, too, or, for the samples of one
    prompt, its blocks as long as another of them runs.
    """

    learns = True
    gives_way = True

    def __init__(self, steps: StepModel, copies: CopyTimes, budget: int = 512) -> None:
        self.steps = steps
        self.copies = copies
        self.budget = budget  # positions in one pass

    def choose(self, victim: Request, kv: KVManager) -> How:
        if kv.host is None:
            return How.RECOMPUTE
        full = victim.computed // kv.block_size
        own = [block for block in victim.holding.blocks[:full] if kv.pool.references[block] == 1]
        if not own:
            return How.RECOMPUTE  # all of it stays
        copy_s = self.copies.both_s()
        if copy_s is None or not self.steps.known:
            return How.SWAP  # nobody knows yet: this one will tell
        _, per_token, per_read = self.steps.coefficients
        tokens = len(own) * kv.block_size
        recompute_s = per_token * tokens + per_read * tokens * (1 + tokens / self.budget) / 2
        return How.SWAP if len(own) * copy_s < recompute_s else How.RECOMPUTE


PREEMPT: dict[str, type[Preempt]] = {
    "recompute": Recompute,
    "swap": Swap,
    "drop": Drop,
    "auto": Auto,
    "wait": Wait,
}
