"""Fair between tenants: the tenant served least goes first (virtual token counters).

Every tenant has a counter of the tokens computed for it, prompt and output priced apart, divided by the weight of its
tier. The waiting request of the tenant with the lowest counter is next, whatever the order of arrival; within a tenant
it is first come, first served. No request waits while there are slots and blocks, so no capacity is lost. A tenant that
returns begins at the counter of the least served tenant present: idle time is not saved up. One that left with a higher
counter keeps it, so leaving gains nothing either.

    counter  A ██████████        B ███        C (comes now) ███
    next: B, then B or C, … until they reach A

A prompt is charged when it starts, though it may take many passes: what is not computed yet is owed. Which request
starts next depends on both, the shares of a pass only on what was computed. So a tenant cannot start ten giant prompts
on credit, and a tenant beside a giant prompt is not held back by tokens that are not computed yet.

While several tenants always have requests waiting, their counters with what they owe differ by no more than one prompt,
plus what the running requests may still generate: the bound that tests/sched/test_fair.py checks.

Where several engines share the tenants, each is told what the others computed (`served_elsewhere`), and counts it as
its own; a tenant with requests on any of them is present.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from shoal.core.request import Request
from shoal.sched.order import BaseOrder

MOST_ABSENT = 10_000  # counters kept of tenants without requests


class Fair(BaseOrder):
    """An order policy that counts what each tenant was served."""

    PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0
    counts = True

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.owed: dict[str, float] = {}  # tenant → what its prompts under way will still be charged
        self._owed: dict[Request, float] = {}
        self.present: dict[str, int] = {}  # tenant → its requests that have not ended
        self.shares = False  # other engines are told what was computed here
        self.elsewhere: frozenset[str] = frozenset()  # tenants with requests on other engines
        self._untold: dict[str, float] = {}  # tenant → what was charged here since take_service()

    def queue(self) -> "FairQueue":
        return FairQueue(self)

    def prefill_key(self, request: Request) -> tuple[float, ...]:
        """Within a pass, the tenant served least first."""
        return (self.served[request.tenant], request.order)

    def victim(self, running: Iterable[Request]) -> Request:
        """The newest of the tenant that was served most."""
        return max(running, key=lambda request: (self.served[request.tenant], request.order))

    def arrived(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self.present and tenant not in self.elsewhere:
            self._lift(tenant)
        self.present[tenant] = self.present.get(tenant, 0) + 1

    def _lift(self, tenant: str) -> None:
        """A tenant that was not present begins where the least served one is."""
        present = [*self.present, *self.elsewhere]
        least = min((self.served[one] for one in present), default=0.0)
        if not present:
            self.served.clear()  # no tenant was present: nothing is owed
        self.served[tenant] = max(self.served.get(tenant, 0.0), least)
        self._forget_absent()

    def started(self, request: Request, tokens: int) -> None:
        """It computes so many prompt positions; what a preemption makes it compute again is not its fault."""
        if not request.preemptions and tokens > 0:
            owes = self.PROMPT_PRICE * tokens / request.promise.weight
            self._owed[request] = owes
            self.owed[request.tenant] = self.owed.get(request.tenant, 0.0) + owes

    def computed(self, request: Request, tokens: int) -> None:
        if request in self._owed:
            self._pay(request, self.PROMPT_PRICE * tokens / request.promise.weight)

    def generated(self, request: Request, tokens: int) -> None:
        """The prompt is computed; the tokens may be its last."""
        if request in self._owed:
            self._pay(request, self._owed[request])
        if request.tenant in self.served:
            self._charge(request.tenant, self.OUTPUT_PRICE * tokens / request.promise.weight)

    def _charge(self, tenant: str, amount: float) -> None:
        self.served[tenant] += amount
        if self.shares:
            self._untold[tenant] = self._untold.get(tenant, 0.0) + amount

    def take_service(self) -> dict[str, float]:
        self.shares = True
        service, self._untold = {**dict.fromkeys(self.present, 0.0), **self._untold}, {}
        return service

    def served_elsewhere(self, service: Mapping[str, float]) -> None:
        for tenant, amount in service.items():
            if tenant not in self.present and tenant not in self.elsewhere:
                self._lift(tenant)
            self.served[tenant] = self.served.get(tenant, 0.0) + amount
        self.elsewhere = frozenset(service)

    def left(self, request: Request, by_itself: bool) -> None:
        tenant = request.tenant
        self._forgive(request)
        self.present[tenant] -= 1
        if not self.present[tenant]:
            del self.present[tenant]
            self.owed.pop(tenant, None)

    def charged(self, tenant: str) -> float:
        """What it was served, and will have been when its prompts under way are computed."""
        return self.served[tenant] + self.owed.get(tenant, 0.0)

    def _pay(self, request: Request, most: float) -> None:
        paid = min(most, self._owed[request])
        self._charge(request.tenant, paid)
        self.owed[request.tenant] -= paid
        self._owed[request] -= paid
        if self._owed[request] <= 0:
            del self._owed[request]

    def _forgive(self, request: Request) -> None:
        """What was never computed costs nothing."""
        owes = self._owed.pop(request, 0.0)
        if owes:
            self.owed[request.tenant] -= owes

    def favours(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether its tenant has nothing running, or fewer slots than an equal share of those taken."""
        tenants = Counter(one.tenant for one in running)
        mine = tenants[request.tenant]
        return not mine or (mine + 1) * len(self.present) <= tenants.total()

    def _forget_absent(self) -> None:
        """There is a limit to the counters of tenants that left."""
        if len(self.served) <= MOST_ABSENT + len(self.present) + len(self.elsewhere):
            return
        absent = [tenant for tenant in self.served if tenant not in self.present and tenant not in self.elsewhere]
        absent.sort(key=self.served.__getitem__)
        for tenant in absent[: len(absent) // 2]:
            del self.served[tenant]


class FairQueue:
    """One queue per tenant; the first request of the least served tenant is next."""

    def __init__(self, fair: Fair) -> None:
        self._fair = fair
        self._queues: dict[str, list[tuple[int, Request]]] = {}
        self._length = 0
        self.newcomers = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter([request for queue in self._queues.values() for _, request in queue])

    def first(self) -> Request | None:
        return next(self.in_order(), None)

    def oldest(self) -> Request | None:
        heads = [queue[0][1] for queue in self._queues.values()]
        return min(heads, key=lambda request: request.arrived_s, default=None)

    def in_order(self) -> Iterator[Request]:
        """Read lazily: what is charged for one that was taken counts for the next."""
        charged = self._fair.charged
        heap = [(charged(tenant), queue[0][0], tenant, 0) for tenant, queue in self._queues.items()]
        heapq.heapify(heap)
        while heap:
            counter, _, tenant, place = heap[0]
            if counter != charged(tenant):  # charged meanwhile
                heapq.heapreplace(heap, (charged(tenant), *heap[0][1:]))
                continue
            queue = self._queues[tenant]
            yield queue[place][1]
            if place + 1 < len(queue):
                heapq.heapreplace(heap, (charged(tenant), queue[place + 1][0], tenant, place + 1))
            else:
                heapq.heappop(heap)

    def push(self, request: Request, key: tuple[float, ...]) -> None:
        insort(self._queues.setdefault(request.tenant, []), (request.order, request))
        self._length += 1
        self.newcomers += request.newcomer

    def remove(self, request: Request, key: tuple[float, ...]) -> None:
        queue = self._queues[request.tenant]
        place = bisect_left(queue, request.order, key=lambda entry: entry[0])
        assert queue[place][1] is request, f"{request.id} is not where it should be in the queue"
        del queue[place]
        if not queue:
            del self._queues[request.tenant]
        self._length -= 1
        self.newcomers -= request.newcomer

    def check(self) -> None:
        assert self.newcomers == sum(request.newcomer for request in self), "newcomers are counted wrongly"
        assert self._length == sum(map(len, self._queues.values())), "the queue's length drifted"
        assert all(self._queues.values()), "an empty queue was kept"
