"""When memory is short: what happens to the request that gives way.

recompute   it gives up its blocks, waits in its old place and computes again what the prefix cache does not have
wait        nobody gives way; only with `reserve`, where nobody ever runs short
"""

from typing import Protocol

from shoal.core.request import Request, State
from shoal.kv.manager import KVManager


class Preempt(Protocol):
    """Takes a running request's blocks away."""

    def evict(self, request: Request, kv: KVManager) -> None: ...


class Recompute:
    """Forget its KV; its tokens are kept, so nothing that was said is lost."""

    def evict(self, request: Request, kv: KVManager) -> None:
        kv.release(request.holding)
        request.holding = None
        request.computed = request.planned = 0
        request.move(State.WAITING)


class Wait:
    """Nobody gives way."""

    def evict(self, request: Request, kv: KVManager) -> None:
        raise AssertionError(f"{request} ran out of blocks although its room was reserved")


PREEMPT: dict[str, type[Preempt]] = {"recompute": Recompute, "wait": Wait}
