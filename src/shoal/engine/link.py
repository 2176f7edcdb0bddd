"""The connection of a front to one engine: its socket, whether the engine is up, and what is sent and received.

Owns the socket, Hello and Ready, the engine's info and the questions under way. Lasts across restarts of the engine,
which is the same one as long as it listens at the same address. Knows no jobs: what arrives goes to the link's owner.
"""

import asyncio
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from shoal.core.job import EngineInfo
from shoal.core.turns import TurnTaker
from shoal.engine import wire
from shoal.engine.restart_policy import RETRY_S
from shoal.errors import EngineDown

log = logging.getLogger(__name__)

ANSWER_S = 5.0  # longest wait for an answer to a question
FRESH_S = 1.0  # longest wait for fresh metrics: a pass may take long, and old ones are better than none


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine listens, across all its restarts."""

    number: int  # unique among the engines of a server, from 0
    url: str  # as ZMQ writes it, such as ipc:///tmp/shoal-1/engine.ipc
    home: Path | None = None  # its folder, if it is on this machine
    options: tuple[tuple[int, int | bytes], ...] = ()  # of the ZMQ socket, such as the keys of CURVE

    @classmethod
    def in_folder(cls, folder: Path, number: int = 0) -> "EngineAddress":
        """
        >>> EngineAddress.in_folder(Path("/tmp/shoal-1")).url
        'ipc:///tmp/shoal-1/engine.ipc'
        """
        return cls(number, f"ipc://{folder / wire.ADDRESS}", folder)


class LinkOwner(Protocol):
    """Takes what arrives on links. Calls for one link come one after the other, except lost()."""

    async def up(self, link: "EngineLink", pause: TurnTaker) -> None:
        """The engine is up, and has no jobs of this front."""

    async def lost(self, link: "EngineLink") -> None:
        """The engine is gone, whether it was up or not."""

    async def passed(self, link: "EngineLink", message: wire.Pass, pause: TurnTaker) -> None:
        """A pass of the engine that is up now."""

    async def leaving(self, link: "EngineLink", pause: TurnTaker) -> None:
        """The engine will end soon; what runs there should go elsewhere."""

    def reported(self, link: "EngineLink", message: wire.Report) -> None: ...

    def followed(self, link: "EngineLink", message: wire.Passes) -> None: ...


@dataclass
class Question:
    """A question that has been sent."""

    answer: "asyncio.Future[bytes]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EngineLink:
    """One engine. Started, used and closed on one event loop."""

    def __init__(self, address: EngineAddress, front: str, owner: LinkOwner, watch: bool) -> None:
        """`watch`: ask the engine for Reports."""
        self.address = address
        self.number = address.number
        self.info: EngineInfo | None = None  # None while it is down
        self.last_info: EngineInfo | None = None
        self.is_leaving = False
        self._front = front
        self._owner = owner
        self._watch = watch
        self._metrics: str | None = None  # as of its last answer
        self._questions: dict[int, Question] = {}
        self._asked = 0
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def takes_jobs(self) -> bool:
        """Whether it is up, and will stay so."""
        return self.info is not None and not self.is_leaving

    def start(self, context: zmq.asyncio.Context) -> None:
        """Connect as soon as there is an engine. Needs a running event loop."""
        socket = self._socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._front.encode())
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # messages are not queued for an engine that is down
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        for name, value in self.address.options:
            socket.setsockopt(name, value)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self.address.url)
        self._tasks = [
            asyncio.create_task(self._follow(self._monitor), name=f"connection of engine {self.number}"),
            asyncio.create_task(self._listen(socket), name=f"messages of engine {self.number}"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
        self._forget()

    def send(self, message: wire.Message) -> bool:
        """False if no engine is connected."""
        if self._socket is None or self._socket.closed:
            return False
        sent: Any = self._socket.send(wire.pack(message), zmq.NOBLOCK)  # NOBLOCK: sent at once or not at all
        return not sent.cancelled() and sent.done() and sent.exception() is None

    async def ask(self, what: str) -> Any:
        """Text for "metrics", else what the answer's JSON says. Raises EngineDown if there is none."""
        self._asked += 1
        number, question = self._asked, Question()
        self._questions[number] = question
        try:
            self.send(wire.Ask(number, what))
            wait_s = FRESH_S if what == "metrics" and self._metrics is not None else ANSWER_S
            text = await asyncio.wait_for(question.answer, wait_s)
        except TimeoutError:
            if what == "metrics" and self._metrics is not None:
                return self._metrics
            raise EngineDown(
                f"the engine has not answered for {ANSWER_S:g} s; it may be busy with a long pass"
            ) from None
        finally:
            del self._questions[number]
        return text.decode() if what == "metrics" else json.loads(text)

    async def _follow(self, monitor: Any) -> None:
        """Whether the engine is connected."""
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.send(wire.Hello())
            elif event == zmq.EVENT_DISCONNECTED:
                await self._lost()

    async def _lost(self) -> None:
        try:
            await self._owner.lost(self)
        except Exception:  # the next engine must be noticed, too
            log.exception("the jobs of engine %d could not be taken over", self.number)

    def gone(self) -> None:
        """The engine is down: nothing of it is true any more. The owner calls this first of all."""
        self._forget()
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_exception(EngineDown("the engine went away before it answered", RETRY_S))

    def _forget(self) -> None:
        self.info = self._metrics = None
        self.is_leaving = False

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        pause = TurnTaker()
        while True:
            await pause.if_long()  # recv() does not wait while there are messages
            arriving: Any = socket.recv()
            if not arriving.done():
                data = await arriving
                pause.restart()
            else:
                data = arriving.result()
            try:
                await self._take(wire.read_engine(data), pause)
            except Exception:  # one bad message must not end this task
                log.exception("a message of the engine could not be processed")

    async def _take(self, message: wire.EngineMessage, pause: TurnTaker) -> None:
        if isinstance(message, wire.Pass):
            if self._is_of_now(message.epoch):
                await self._owner.passed(self, message, pause)
        elif isinstance(message, wire.Ready):
            self.info = self.last_info = message.info
            self.is_leaving = False
            if self._watch:
                self.send(wire.Watch())
            self.send(wire.Ask(0, "metrics"))  # so that there are some to show during a long pass
            await self._owner.up(self, pause)
        elif isinstance(message, wire.Report):
            if self._is_of_now(message.epoch):
                self._owner.reported(self, message)
        elif isinstance(message, wire.Passes):
            if self._is_of_now(message.epoch):
                self._owner.followed(self, message)
        elif isinstance(message, wire.Leaving):
            if self.info is not None:
                self.is_leaving = True
                await self._owner.leaving(self, pause)
        else:
            self._replied(message)

    def _is_of_now(self, epoch: int) -> bool:
        """Whether a message is from the engine that is up, not from one that is gone."""
        return self.info is not None and self.info.epoch == epoch

    def _replied(self, message: wire.Reply) -> None:
        if message.what == "metrics":
            self._metrics = message.text.decode()
        question = self._questions.get(message.number)
        if question is not None and not question.answer.done():
            question.answer.set_result(message.text)
