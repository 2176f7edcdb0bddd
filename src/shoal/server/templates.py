"""Chat templates, rendered in a process of their own: a front's side of text/worker.py.

Owns that process: starts it, sends it chats without waiting for the answers to those before, and starts it again when a
chat has ended it. The chats behind that one are sent again. The event loop only writes and reads bytes. Knows no HTTP
beyond the errors.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from shoal.errors import BadChat, Draining, Rejected
from shoal.server.errors import BadField, HttpError
from shoal.text.chat import ChatRenderer, Rendered
from shoal.text.worker import CPU_LIMIT_S, LENGTH_BYTES, TIMED_OUT, Kind, TemplateSetup

log = logging.getLogger(__name__)

WAIT_LIMIT_S = 60.0  # for an answer, in wall time; the worker's own limit is in CPU time
LARGE = 64 * 2**10  # characters of all messages
MOST_DEATHS = 2  # of workers that ended for no known reason; the chat they were rendering is then refused
PROBE = msgspec.json.encode(
    {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True, "variables": {}}
)
FAULT = "the model's chat template is too expensive to render; the operator can replace it with --chat-template"


class Templates(Protocol):
    """What makes the text of a prompt from messages."""

    async def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> Rendered:
        """Raises BadChat for messages that do not fit."""


class TemplatesHere:
    """Renders on the event loop, without limits: for tests, and for templates that are trusted."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer

    async def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> Rendered:
        return self.renderer.render(messages, add_generation_prompt, variables)


@dataclass(eq=False)
class Rendering:
    """A chat that waits for its text."""

    data: bytes
    text: "asyncio.Future[Rendered]"
    deaths: int = 0  # of workers that were rendering it


class TemplateWorker:
    """Renders in a process. Used on one event loop; start() first, close() last."""

    def __init__(self, renderer: ChatRenderer, special: Mapping[str, str], cpu_limit_s: float = CPU_LIMIT_S) -> None:
        self._setup = TemplateSetup.of(renderer, special, cpu_limit_s).encoded()
        self._limits = f"{cpu_limit_s:g} s of CPU time, or too much memory"
        self._waiting: deque[Rendering] = deque()  # in the order in which they were sent
        self._process: Process | None = None
        self._serving: asyncio.Task[None] | None = None
        self._closed = False
        self._large = asyncio.Lock()  # large chats are sent one by one, so that few copies of them exist
        self.fault = ""  # why no chat can be rendered with this template

    def start(self) -> None:
        """Start the process now, and find out whether the template can be used at all."""
        self._send(PROBE).add_done_callback(self._probed)

    def _probed(self, text: "asyncio.Future[Rendered]") -> None:
        error = None if text.cancelled() else text.exception()
        if isinstance(error, TooExpensive):
            self.fault = FAULT
            log.warning("a single short message takes the model's chat template more than %s: chats are refused; "
                        "supply another template with --chat-template", self._limits)  # fmt: skip
            for chat in self._waiting:
                if not chat.text.done():
                    chat.text.set_exception(TooExpensive())
        elif isinstance(error, BadChat):
            log.warning("the chat template refuses a single short message: %s", error)

    async def close(self) -> None:
        """End the process. Chats that wait are refused."""
        self._closed = True
        for chat in self._waiting:
            if not chat.text.done():
                chat.text.set_exception(Draining("the server is shutting down; use another one, or retry later"))
        self._kill()
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> Rendered:
        asked = {"messages": messages, "add_generation_prompt": add_generation_prompt, "variables": variables}
        try:
            async with self._large if is_large(messages) else contextlib.nullcontext():
                if self.fault:
                    raise TooExpensive
                async with asyncio.timeout(WAIT_LIMIT_S):
                    return await self._send(msgspec.json.encode(asked))
        except TooExpensive:
            if self.fault:
                raise HttpError(500, self.fault, type="server_error", code="bad_chat_template") from None
            raise BadField(
                "messages",
                f"these messages take the model's chat template more than {self._limits}; send fewer or shorter "
                "messages, or other chat_template_kwargs",
            ) from None
        except TimeoutError:
            self._kill()  # it does not run: it was stopped, or the machine is out of memory
            raise Rejected("the chat template was not rendered in time; try again soon", retry_after_s=5.0) from None

    # ---- the process ------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> "asyncio.Future[Rendered]":
        chat = Rendering(data, asyncio.get_running_loop().create_future())
        self._waiting.append(chat)
        if self._process is not None:
            self._write(self._process, data)
        elif self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return chat.text

    @staticmethod
    def _write(process: Process, data: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has just ended, and its end is noticed by the reader
            process.stdin.writelines((len(data).to_bytes(LENGTH_BYTES, "big"), data))

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _serve(self) -> None:
        """Keep a process running while there are chats to render. An idle one waits for more."""
        while self._waiting and not self._closed:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "shoal.text.worker", stdin=PIPE, stdout=PIPE, limit=2**20
                )
                was_ready = await self._serve_with(process)
                code: object = await process.wait()
            except OSError as error:
                was_ready, code = False, error
            self._process = None
            if self._closed:
                return
            if not was_ready:
                log.error("the process for chat templates cannot be started: %s", code)
            if self._waiting:
                self._blame(self._waiting[0], code, was_ready)

    async def _serve_with(self, process: Process) -> bool:
        """Read answers until the process ends. False: it was never ready."""
        assert process.stdout is not None
        was_ready = False
        self._write(process, self._setup)
        self._waiting = deque(chat for chat in self._waiting if not chat.text.done())
        for chat in self._waiting:
            self._write(process, chat.data)
        self._process = process
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not self._closed:
                size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
                answer = await process.stdout.readexactly(size)
                if answer[:1] == Kind.READY:
                    was_ready = True
                else:
                    self._answered(self._waiting.popleft(), answer[:1], str(memoryview(answer)[1:], "utf-8"))
        self._kill()
        return was_ready

    @staticmethod
    def _answered(chat: Rendering, kind: bytes, text: str) -> None:
        if chat.text.done():  # its client has disconnected
            return
        if kind == Kind.TOO_LARGE:
            chat.text.set_exception(TooExpensive())
        elif kind == Kind.REFUSED:
            chat.text.set_exception(BadChat(text))
        else:
            chat.text.set_result(Rendered(text, hidden=kind == Kind.HIDDEN))

    def _blame(self, chat: Rendering, code: object, was_ready: bool) -> None:
        """The process ended while it rendered this chat."""
        chat.deaths += 1
        if code != -TIMED_OUT and chat.deaths < MOST_DEATHS:
            return
        self._waiting.popleft()
        if chat.text.done():  # its client has disconnected
            return
        if was_ready:
            chat.text.set_exception(TooExpensive())
        else:
            chat.text.set_exception(RuntimeError("the process for chat templates cannot be started"))


def is_large(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the messages have more text than most."""
    size = 0
    for message in messages:
        content = message["content"] or ""
        size += len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
    return size > LARGE


class TooExpensive(Exception):
    """A chat exceeded the worker's limits."""
