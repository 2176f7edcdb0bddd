"""Handoffs: how a job goes from a prefill engine to a decode engine.

Three sides, each with its own table. The front knows on which engines a job's blocks are kept (HandoffTable). A prefill
engine knows which blocks of a job are in its outbox (Departures). A decode engine knows which copies a job has to wait
for (Receptions). None of them knows sockets, torch or a clock, so that a simulator runs the same code.

Blocks in an outbox are pinned until the front releases them, which it does when the decode engine has drawn a token, or
when the job is not going there any more. A front that is gone releases all that it had, as it aborts all its jobs.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from shoal.core.request import Reason, Request, State
from shoal.kv.manager import KVManager

PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)


class Stage(Enum):
    """Where a job is on its way."""

    PREFILLING = 1  # a prefill engine computes its prompt, and its blocks begin to leave
    PREFILLED = 2  # … and has drawn one token of each sample: no more blocks will come
    LEAVING = 3  # it is on no engine; the prefill engine keeps its blocks
    ARRIVING = 4  # a decode engine has it, and copies its blocks
    RUNNING = 5  # … and has drawn a token: nothing is left of it elsewhere


MOVES = {
    Stage.PREFILLING: {Stage.PREFILLED},
    Stage.PREFILLED: {Stage.LEAVING},
    Stage.LEAVING: {Stage.ARRIVING},
    Stage.ARRIVING: {Stage.RUNNING},
    Stage.RUNNING: set[Stage](),
}


# ---- the front


@dataclass
class Handoff:
    """One job's way."""

    source: int  # the prefill engine
    samples: set[int]  # that the prefill engine still computes
    stage: Stage = Stage.PREFILLING
    source_keeps: bool = True  # the prefill engine keeps blocks of it, or will
    target: int | None = None  # the decode engine that its blocks go to
    target_keeps: bool = False  # … which keeps some of them

    def move(self, to: Stage) -> None:
        assert to in MOVES[self.stage], f"a handoff cannot go from {self.stage.name} to {to.name}"
        self.stage = to


@dataclass(frozen=True, slots=True)
class Release:
    """An engine need not keep anything of this job any more."""

    engine: int
    job: int


class HandoffTable:
    """The jobs of one front that are on their way, by number.

    >>> table = HandoffTable()
    >>> table.begin(7, source=0, samples=[0])
    >>> table.send_blocks(7, target=1), table.handed(7, 0)
    (True, True)
    >>> table.leave(7)
    >>> table.arrive(7, engine=1), table.token(7)
    ([], [Release(engine=0, job=7)])
    >>> table.end(7)
    []
    """

    def __init__(self) -> None:
        self._handoffs: dict[int, Handoff] = {}

    def __len__(self) -> int:
        return len(self._handoffs)

    def stage(self, job: int) -> Stage | None:
        handoff = self._handoffs.get(job)
        return None if handoff is None else handoff.stage

    def target(self, job: int) -> int | None:
        """The decode engine that its blocks went to, if there is one and that is up."""
        handoff = self._handoffs.get(job)
        return None if handoff is None else handoff.target

    def begin(self, job: int, source: int, samples: Iterable[int]) -> None:
        """It was submitted to a prefill engine, to be handed over by that."""
        assert job not in self._handoffs, f"job {job} is handed over already"
        self._handoffs[job] = Handoff(source, set(samples))

    def send_blocks(self, job: int, target: int) -> bool:
        """Blocks of it are in the outbox. True if they are to be announced to `target`, which must be up; False if its
        blocks have gone elsewhere."""
        handoff = self._handoffs.get(job)
        if handoff is None or handoff.stage not in (Stage.PREFILLING, Stage.PREFILLED):
            return False
        if handoff.target is None and not handoff.target_keeps:
            handoff.target = target
        if handoff.target != target:
            return False
        handoff.target_keeps = True
        return True

    def handed(self, job: int, sample: int) -> bool:
        """A sample is done on the prefill engine: it is handed over, or has ended. True if that was the last one."""
        handoff = self._handoffs.get(job)
        if handoff is None or handoff.stage is not Stage.PREFILLING:
            return False
        handoff.samples.discard(sample)
        if handoff.samples:
            return False
        handoff.move(Stage.PREFILLED)
        return True

    def leave(self, job: int) -> None:
        """It is on no engine from now on."""
        self._handoffs[job].move(Stage.LEAVING)

    def arrive(self, job: int, engine: int) -> list[Release]:
        """It was submitted to this engine, which goes on with it."""
        handoff = self._handoffs[job]
        handoff.move(Stage.ARRIVING)
        released = []
        if handoff.target_keeps and handoff.target not in (None, engine):
            released = self._of_target(job, handoff)
        if handoff.source == engine:  # no decode engine is left; it must not be released there once it runs
            released += self._of_source(job, handoff)
        handoff.target, handoff.target_keeps = engine, False  # the engine itself knows that it has started
        return released

    def token(self, job: int) -> list[Release]:
        """A token has come from the engine that has it."""
        handoff = self._handoffs.get(job)
        if handoff is None or handoff.stage is not Stage.ARRIVING:
            return []
        handoff.move(Stage.RUNNING)
        return self._of_source(job, handoff)

    def end(self, job: int) -> list[Release]:
        """It has ended, or begins anew elsewhere. Fine if it is not on its way."""
        handoff = self._handoffs.pop(job, None)
        if handoff is None:
            return []
        return self._of_source(job, handoff) + self._of_target(job, handoff)

    def lost(self, engine: int) -> None:
        """This engine is gone, and keeps nothing."""
        for handoff in self._handoffs.values():
            if handoff.source == engine:
                handoff.source_keeps = False
            if handoff.target == engine:
                handoff.target, handoff.target_keeps = None, False

    @staticmethod
    def _of_source(job: int, handoff: Handoff) -> list[Release]:
        keeps, handoff.source_keeps = handoff.source_keeps, False
        return [Release(handoff.source, job)] if keeps else []

    @staticmethod
    def _of_target(job: int, handoff: Handoff) -> list[Release]:
        keeps, handoff.target_keeps = handoff.target_keeps, False
        return [Release(handoff.target, job)] if keeps and handoff.target is not None else []

    def check(self, up: Iterable[int], on: dict[int, int | None]) -> None:
        """`up`: engines that are up; `on`: job → the engine that has it, None: it waits."""
        known = set(up)
        assert self._handoffs.keys() <= on.keys(), "a job has ended, and its blocks are kept"
        for job, handoff in self._handoffs.items():
            assert not handoff.source_keeps or handoff.source in known, "blocks are kept by an engine that is gone"
            assert not handoff.target_keeps or handoff.target in known, "blocks are kept by an engine that is gone"
            assert handoff.stage is not Stage.RUNNING or not handoff.source_keeps, "blocks are kept for a running job"
            if handoff.stage in (Stage.PREFILLING, Stage.PREFILLED):
                assert on[job] == handoff.source, "the prefill engine does not have the job"
            elif handoff.stage is Stage.LEAVING:
                assert on[job] is None, "a job that is leaving is on an engine"


# ---- a prefill engine


@dataclass(frozen=True, slots=True)
class Departed:
    """Blocks of a job that are in the outbox, or will be soon: names and places run in parallel."""

    job: Hashable
    names: tuple[bytes, ...]
    slots: tuple[int, ...]


@dataclass
class Departure:
    """One job whose blocks go to the outbox."""

    requests: Sequence[Request]
    pinned: list[bytes] = field(default_factory=list)
    full: bool = False  # the outbox had no place: nothing more of it goes there


class Departures:
    """What a prefill engine keeps in its outbox, for each job."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._under_way: dict[Hashable, Departure] = {}
        self._kept: dict[Hashable, Departure] = {}  # all their requests have ended

    @property
    def jobs(self) -> list[Hashable]:
        return [*self._under_way, *self._kept]

    def begin(self, job: Hashable, requests: Sequence[Request]) -> None:
        assert job not in {**self._under_way, **self._kept}, f"job {job} leaves already"
        self._under_way[job] = Departure(requests)

    def step(self) -> list[Departed]:
        """After each pass: copy the blocks that it completed to the outbox. Returns them, and their places there."""
        if not self._under_way:
            return []
        found = []
        for job, departure in list(self._under_way.items()):
            if not departure.full and self._kv.host is not None:
                new = self._complete(departure)[len(departure.pinned) :]
                slots = self._kv.export(new) if new else []
                departure.full = len(slots) < len(new)
                departure.pinned += new[: len(slots)]
                if slots:
                    found.append(Departed(job, tuple(new[: len(slots)]), tuple(slots)))
            if all(request.state is State.FINISHED for request in departure.requests):
                del self._under_way[job]
                if any(request.reason is Reason.HANDED for request in departure.requests):
                    self._kept[job] = departure
                else:
                    self._kv.unpin(departure.pinned)
        return found

    def _complete(self, departure: Departure) -> list[bytes]:
        """The names of its blocks that are computed. The samples of one job share those of the prompt, and no others
        travel."""
        size, most = self._kv.block_size, 0
        names: list[bytes] = []
        for request in departure.requests:
            computed = request.computed
            if request.state is State.FINISHED:
                computed = len(request.tokens) - 1 if request.reason is Reason.HANDED else 0
            if len(departure.requests) > 1:
                computed = min(computed, request.prompt_len)
            if computed // size > most:
                most, names = computed // size, request.names
        return names[:most]

    def release(self, job: Hashable) -> None:
        """Its blocks are no longer needed. Fine if there are none."""
        for table in (self._under_way, self._kept):
            departure = table.pop(job, None)
            if departure is not None:
                self._kv.unpin(departure.pinned)

    def check(self) -> None:
        """Exactly the blocks of jobs that have not been released are pinned, and those that are being fetched back."""
        departures = (*self._under_way.values(), *self._kept.values())
        pins = Counter(name for departure in departures for name in departure.pinned)
        pins.update(name for one in self._kv.transfers.values() if one.holding is not None for name in one.names)
        assert self._kv.host is None or self._kv.host.pinned() == pins, "blocks are pinned for no job, or the reverse"


# ---- a decode engine


class Receptions:
    """Which copies each job must wait for before it starts, and for which jobs blocks are kept."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._copies: dict[Hashable, set[int]] = {}

    def announce(self, job: Hashable, names: Sequence[bytes], slots: Sequence[int], peer: str, spare: int) -> None:
        """Blocks of a job that will come are in the outbox of this peer: copy those that are not here."""
        self._kv.arrive(job, names, slots, peer, spare)
        self._copies.setdefault(job, set()).update(self._kv.arrivals.waits_for(names))

    def waits(self, job: Hashable) -> bool:
        """Whether copies for it are under way."""
        return any(copy in self._kv.transfers for copy in self._copies.get(job, ()))

    def forget(self, job: Hashable) -> None:
        """It has started, or will not come. Fine if it is not known."""
        if self._copies.pop(job, None) is not None:
            self._kv.dismiss(job)

    @property
    def jobs(self) -> list[Hashable]:
        return list(self._copies)


# ---- how blocks travel


@dataclass(frozen=True, slots=True)
class Site:
    """Where an engine computes, as far as transports care."""

    machine: str
    gpu: str = ""  # "": on CPUs


TRANSPORTS = ("shm", "tcp", "cuda-ipc")


def choose_transport(source: Site, target: Site) -> str:
    """The fastest way between two engines.

    >>> choose_transport(Site("a"), Site("a")), choose_transport(Site("a"), Site("b"))
    ('shm', 'tcp')
    >>> choose_transport(Site("a", "0"), Site("a", "0")), choose_transport(Site("a", "0"), Site("a", "1"))
    ('cuda-ipc', 'shm')
    """
    if source.machine != target.machine:
        return "tcp"
    return "cuda-ipc" if source.gpu and source.gpu == target.gpu else "shm"


def why_not(transport: str, source: Site, target: Site) -> str:
    """Why this transport cannot be used between two engines; "": it can."""
    if transport == "shm" and source.machine != target.machine:
        return "shared memory does not reach another machine; use tcp"
    if transport == "cuda-ipc" and not (source.gpu and target.gpu):
        return "CUDA IPC shares the memory of a GPU, and these engines compute on CPUs; use shm"
    if transport == "cuda-ipc" and source != target:
        return "CUDA IPC is for engines on the same GPU; use shm"
    return ""
