"""Deadlines: which requests' time is over.

A request may have a time by which it must have ended (its timeout) or started (where its tier refuses late requests),
and all may have a time by which they must have started (`max_wait_s`). Owns a heap of those times. The entry of a
request that ends earlier stays until its time comes, or until more than half of the heap is such entries. With no
deadlines it costs nothing. Knows no clock and ends no request: the scheduler asks which are due.
"""

import heapq
import math
from collections.abc import Iterable

from shoal.core.request import Request


class Deadlines:
    """By when requests must have started or ended."""

    SLACK = 64  # entries of the ended that are not worth a sweep

    def __init__(self, max_wait_s: float | None = None) -> None:
        self.max_wait_s = max_wait_s
        self._heap: list[tuple[float, int, Request]] = []  # (when, arrival, request)
        self._armed: set[Request] = set()

    def arm(self, request: Request) -> None:
        """It has just arrived; watch it if it has anything to be late for."""
        at_s = min(request.deadline_s, self._start_by_s(request))
        if at_s < math.inf:
            self._armed.add(request)
            heapq.heappush(self._heap, (at_s, request.order, request))

    def drop(self, request: Request) -> None:
        """It has ended, or has nothing to be late for any more."""
        if request not in self._armed:
            return
        self._armed.remove(request)
        if not self._armed:
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._armed) + self.SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in self._armed]
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> list[Request]:
        """Requests that are late. Each is returned once; the caller ends them."""
        late: list[Request] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, order, request = heapq.heappop(self._heap)
            if request not in self._armed:
                continue
            if request.deadline_s <= now_s or self._start_by_s(request) <= now_s:
                late.append(request)
            elif request.deadline_s < math.inf:  # it started in time; now it must end in time
                heapq.heappush(self._heap, (request.deadline_s, order, request))
            else:
                self.drop(request)
        return late

    def next_s(self) -> float | None:
        """When the next request may be late."""
        while self._heap and self._heap[0][2] not in self._armed:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def why(self, request: Request, now_s: float) -> str:
        """The message for a request that was late before its first token."""
        waited_s = now_s - request.arrived_s
        if request.deadline_s <= now_s:
            return (
                f"no token after {waited_s:.1f} s, and its timeout is {request.timeout_s:g} s; "
                f"raise timeout, or try again when the server is less busy"
            )
        if self.lost_promise(request, now_s):
            return (
                f"not started after {waited_s:.1f} s, too late for a first token within {request.promise.ttft_s:g} s, "
                f"as tier {request.promise.name} promises; try again when the server is less busy"
            )
        return (
            f"not started after {waited_s:.1f} s, and the longest wait is {self.max_wait_s:g} s; "
            f"try again when the server is less busy, or raise --max-wait or --max-num-seqs"
        )

    def lost_promise(self, request: Request, now_s: float) -> bool:
        """Whether what makes it late is its tier's promise."""
        return request.start_by_s <= now_s < request.deadline_s

    def _start_by_s(self, request: Request) -> float:
        """Infinite for a request that has started, on this engine or an earlier one."""
        if request.began:
            return math.inf
        longest_s = math.inf if self.max_wait_s is None else self.max_wait_s
        return min(request.queued_s + longest_s, request.start_by_s)

    def check(self, alive: Iterable[Request]) -> None:
        """Every request with a deadline is watched, and none that has ended."""
        alive = set(alive)
        assert self._armed <= alive, "a request that has ended is watched for a deadline"
        for request in alive:
            late = min(request.deadline_s, self._start_by_s(request)) < math.inf
            assert not late or request in self._armed, f"the deadline of {request} is not watched"
        assert {entry[2] for entry in self._heap} >= self._armed, "a watched request has no entry in the heap"
        assert len(self._heap) <= 2 * len(self._armed) + self.SLACK, "the heap is full of requests that have ended"
