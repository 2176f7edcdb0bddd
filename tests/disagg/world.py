"""Prefill engines, decode engines and a front without sockets: messages wait in queues until the test delivers them.

Every engine has a real scheduler and the fake device, whose tokens depend on the contents of all blocks that they read.
An engine may die at any moment, and with it all messages from and to it that were not delivered.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.core.plan import BlockCopy, StepPlan
from shoal.core.request import Group, Reason, Request
from shoal.disagg.handoff import DECODE, PREFILL, Departures, HandoffTable, Receptions, Release, Stage
from tests.fakes import FakeExecutor, PublishedBlocks, make_request, make_scheduler

BLOCK = 4


class PeerExecutor(FakeExecutor):
    """Also reads the outboxes of other devices, by address; waits a while for a block that is not there yet."""

    outboxes: dict[str, "PeerExecutor"]
    lost: Callable[[int], bool]  # whether this copy from a peer fails
    go_on: Callable[[], bool]  # hand over the next plan, if there is one; False: there is none

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.labels: dict[int, bytes] = {}  # of the outbox: which block holds what
        self.received = 0

    def forward(self, plan: StepPlan) -> None:
        super().forward(plan)
        for order in plan.copies:  # the copying thread is at them at once
            if order.direction == "out":
                for name, one, other in zip(order.names, order.source, order.target, strict=True):
                    self.labels.pop(other, None)
                    if not self.failing(order.id):
                        self.host[other] = list(self.memory[one])
                        self.labels[other] = name

    def _copy(self, everything: bool) -> tuple[list[BlockCopy], list[BlockCopy]]:
        from_peers = [one for one in self.copies if one[1].peer]
        self.copies = [one for one in self.copies if not one[1].peer]
        done, failed = super()._copy(everything)
        for passes, order in from_peers:
            came = self._read_from(order)
            while came is None and everything and self.outboxes[order.peer].go_on():
                came = self._read_from(order)
            if came is None and not everything:
                self.copies.append((passes, order))
            else:
                (done if came else failed).append(order)
        return done, failed

    def _read_from(self, order: BlockCopy) -> bool | None:
        """Whether all of it was there and was copied; None: not yet."""
        peer = self.outboxes.get(order.peer)
        if peer is None or self.lost(order.id):
            return False
        for name, one, other in zip(order.names, order.source, order.target, strict=True):
            if peer.labels.get(one) != name:
                return None
            self.memory[other] = list(peer.host[one])
        self.received += len(order.target)
        return True


class Engine:
    """One engine, as its host drives it."""

    def __init__(self, world: "World", number: int, role: str, life: int, blocks: int, outbox: int) -> None:
        self.number, self.role = number, role
        self.address = f"{number}.{life}"
        slots = outbox if role == PREFILL else 0
        self.scheduler = make_scheduler(blocks=blocks, block_size=BLOCK, host_blocks=slots, max_num_batched_tokens=9)
        self.scheduler.kv._spills_cold = False
        self.executor = PeerExecutor(blocks, BLOCK, slots, failing=lambda copy: world.chance(f"out{copy}", 8))
        self.executor.outboxes = world.outboxes
        self.executor.go_on = lambda: self.step(commit=False)
        self.executor.lost = lambda copy: world.chance(f"in{number}.{copy}", 6)
        world.outboxes[self.address] = self.executor
        self.published = PublishedBlocks(self.scheduler.kv, self.executor)
        self.departures = Departures(self.scheduler.kv)
        self.receptions = Receptions(self.scheduler.kv)
        self.inbox: deque[tuple[str, Any]] = deque()
        self.out: deque[tuple[str, Any]] = deque()  # to the front
        self.early: list[tuple[int, list[Request], bool]] = []  # submitted, and their blocks are under way
        self.jobs: dict[int, list[Request]] = {}
        self.seen = world.seen

    def read(self) -> None:
        kind, value = self.inbox.popleft()
        if kind == "submit":
            self.early.append(value)
        elif kind == "arriving":
            job, names, slots, peer = value
            self.receptions.announce(job, names, slots, peer, len(self.scheduler.running))
        else:
            self.early = [one for one in self.early if one[0] != value]
            for request in self.jobs.pop(value, ()):
                self.scheduler.abort(request.id)
            self.receptions.forget(value)
            self.departures.release(value)
        self._start_ready()

    def _start_ready(self) -> None:
        waiting = []
        for job, requests, leave in self.early:
            if self.receptions.waits(job):
                waiting.append((job, requests, leave))
                continue
            self.scheduler.submit_all(requests, 0.0, resumed=any(request.outputs for request in requests), leave=leave)
            self.jobs[job] = requests
            self.seen += requests
            if leave:
                self.departures.begin(job, requests)
        self.early = waiting

    def step(self, commit: bool) -> bool:
        """Begin a pass, or take the result of one; False if there was nothing to do."""
        if not commit:
            plan = self.scheduler.plan(0.0) if self.scheduler.in_flight < 2 else None
            if plan is not None:
                self.executor.forward(plan)
                self.executor.sample(None)
        elif self.scheduler.in_flight:
            plan = None
            self._note(self.scheduler.commit(self.executor.result(), 0.0))
            self.published.check(self.seen)
        else:
            return False
        self.check()
        return commit or plan is not None

    def _note(self, events: Any) -> None:
        tokens = list(zip(events.owners, events.indexes, events.tokens, strict=True))
        for admitted in events.admitted:
            self.receptions.forget(int(admitted.id.split(".")[0]))
        blocks = [(one.job, one.names, one.slots) for one in self.departures.step()]
        ended = [(end.id, end.reason) for end in events.finished]
        for id, _ in ended:
            job = int(id.split(".")[0])
            self.jobs[job] = [request for request in self.jobs.get(job, ()) if request.id != id]
            if not self.jobs[job]:
                del self.jobs[job]
        if tokens or blocks or ended:
            self.out.append((self.address, (tokens, blocks, ended)))
        self._start_ready()

    def check(self) -> None:
        self.scheduler.check()
        self.departures.check()


@dataclass
class Asked:
    """A job of the front."""

    number: int
    prompt: list[int]
    max_tokens: int
    seed: int
    outputs: dict[int, list[int]]  # sample → so far, for samples that have not ended
    told: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, Reason] = field(default_factory=dict)
    on: Engine | None = None
    aborted: bool = False

    def requests(self) -> list[Request]:
        group = Group(str(self.number)) if len(self.outputs) > 1 else None
        stops = frozenset({3})
        return [
            make_request(
                f"{self.number}.{sample}", self.prompt, self.max_tokens, seed=self.seed, sample=sample, group=group,
                stop_ids=stops, output=output,
            )
            for sample, output in self.outputs.items()
        ]  # fmt: skip


class World:
    """A front, and engines that come and go. `odds` makes every chance the same in a repeated run."""

    def __init__(self, prefill: int, decode: int, odds: int, blocks: int = 40, outbox: int = 24) -> None:
        self.odds, self.blocks, self.outbox = odds, blocks, outbox
        self.outboxes: dict[str, PeerExecutor] = {}
        self.roles = [PREFILL] * prefill + [DECODE] * decode
        self.lives = [0] * len(self.roles)
        self.engines: dict[int, Engine] = {}
        self.table = HandoffTable()
        self.asked: dict[int, Asked] = {}
        self.seen: list[Request] = []  # on all engines
        self.open: dict[int, Asked] = {}
        self.left = 0  # jobs that went from a prefill to a decode engine
        for number in range(len(self.roles)):
            self.start(number)

    def chance(self, what: str, one_in: int) -> bool:
        """Rare, and the same in each run with these odds; never with odds of 0."""
        return self.odds > 0 and sum(what.encode()) * 2654435761 * self.odds % 2**32 % one_in == 0

    # ---- engines

    def start(self, number: int) -> None:
        self.kill(number)
        self.lives[number] += 1
        self.engines[number] = Engine(self, number, self.roles[number], self.lives[number], self.blocks, self.outbox)
        self.place_waiting()

    def kill(self, number: int) -> None:
        engine = self.engines.pop(number, None)
        if engine is None:
            return
        self.outboxes.pop(engine.address)
        self.table.lost(number)
        for job in self.open.values():
            if job.on is engine:
                job.on = None
                self._release(self.table.end(job.number))
        self.place_waiting()

    def _of_role(self, role: str) -> list[Engine]:
        found = [one for one in self.engines.values() if one.role == role]
        return sorted(found or self.engines.values(), key=lambda one: (len(one.jobs) + len(one.inbox), one.number))

    # ---- jobs

    def ask(self, prompt: list[int], max_tokens: int, samples: int) -> None:
        number = len(self.asked)
        outputs: dict[int, list[int]] = {sample: [] for sample in range(samples)}
        job = self.asked[number] = self.open[number] = Asked(number, prompt, max_tokens, number * 3 + 1, outputs)
        self.place(job)

    def abort(self, number: int) -> None:
        job = self.open.pop(number)
        job.aborted = True
        if job.on is not None:
            job.on.inbox.append(("abort", number))
        self._release(self.table.end(number))
        for sample in job.outputs:
            job.ended[sample] = Reason.ABORT

    def place_waiting(self) -> None:
        for job in self.open.values():
            if job.on is None:
                self.place(job)

    def place(self, job: Asked) -> None:
        leaving = self.table.stage(job.number) is Stage.LEAVING
        if leaving and self.table.target(job.number) is not None:
            engine = self.engines[self.table.target(job.number) or 0]
        else:
            engines = self._of_role(DECODE if leaving else PREFILL)
            if not engines:
                return
            engine = engines[0]
        both = {one.role for one in self.engines.values()} == {PREFILL, DECODE}
        leave = not leaving and engine.role == PREFILL and both
        if leaving:
            self._release(self.table.arrive(job.number, engine.number))
            self.left += 1
        elif leave:
            self.table.begin(job.number, engine.number, job.outputs)
        engine.inbox.append(("submit", (job.number, job.requests(), leave)))
        job.on = engine

    def _release(self, releases: list[Release]) -> None:
        for one in releases:
            self.engines[one.engine].inbox.append(("abort", one.job))

    # ---- messages

    def deliver(self, engine: Engine) -> bool:
        if not engine.out:
            return False
        address, (tokens, blocks, ended) = engine.out.popleft()
        for id, index, token in tokens:
            job, sample = self._job_of(id, engine)
            if job is not None and len(job.outputs.get(sample, [0] * 999)) == index:
                job.outputs[sample].append(token)
                self._release(self.table.token(job.number))
        for number, names, slots in blocks:
            job = self.open.get(number)
            targets = [one for one in self._of_role(DECODE) if one.role == DECODE]
            if job is None or job.on is not engine or not targets:
                continue
            target = self.table.target(number)
            chosen = targets[0].number if target is None else target
            if self.table.send_blocks(number, chosen):
                self.engines[chosen].inbox.append(("arriving", (number, names, slots, address)))
        for id, reason in ended:
            self._ended(id, reason, engine)
        self.check()
        return True

    def _job_of(self, id: str, engine: Engine) -> tuple[Asked | None, int]:
        number, sample = map(int, id.split("."))
        job = self.open.get(number)
        return (job if job is not None and job.on is engine else None), sample

    def _ended(self, id: str, reason: Reason, engine: Engine) -> None:
        job, sample = self._job_of(id, engine)
        if job is None or sample not in job.outputs:
            return
        if reason is not Reason.HANDED:
            assert sample not in job.ended, "a sample ended twice"
            job.ended[sample] = reason
            job.told[sample] = job.outputs.pop(sample)
        last = self.table.handed(job.number, sample)
        if not job.outputs:
            del self.open[job.number]
            self._release(self.table.end(job.number))
        elif last:
            self.table.leave(job.number)
            job.on = None
            self.place(job)

    def check(self) -> None:
        on = {number: None if job.on is None else job.on.number for number, job in self.open.items()}
        self.table.check(self.engines, on)

    # ---- to the end

    def drain(self) -> None:
        for number in range(len(self.roles)):
            if number not in self.engines:
                self.start(number)
        for _ in range(20_000):
            moved = False
            for engine in list(self.engines.values()):
                while engine.inbox:
                    engine.read()
                    moved = True
                moved = engine.step(commit=False) or moved
                moved = engine.step(commit=True) or moved
                while self.deliver(engine):
                    moved = True
            if not moved and not self.open:
                return
        raise AssertionError("the jobs do not come to an end")
