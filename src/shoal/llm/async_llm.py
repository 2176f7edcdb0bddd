"""AsyncLLM: the engine in your own program, for code with an event loop; in a notebook too.

The engine runs in a thread of its own. Each call belongs to the event loop it was made on, so that several loops may
use one AsyncLLM. Owns how results get from the engine's thread to those loops: once per pass and call.
"""

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Unpack

from shoal.build import build
from shoal.config.engine import EngineConfig
from shoal.config.keywords import EngineOptions
from shoal.core.job import GrammarSpec
from shoal.core.params import SamplingParams
from shoal.engine.local import EngineThread, LocalClient, WakeClock
from shoal.errors import EngineError
from shoal.llm.collect import Collection
from shoal.llm.jobs import Chat, Prompt, as_chats
from shoal.llm.llm import CLOSED, LocalModel
from shoal.llm.records import Chunk, RequestOutput
from shoal.llm.words import in_keywords


class AsyncLLM:
    """A model and its engine in this process, with a thread of its own.

    Example (not run here, it loads a model):

        llm = await AsyncLLM.load()
        async for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=20)):
            print(chunk.text, end="", flush=True)
        await llm.close()
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Loads the model, which takes seconds and blocks; `await AsyncLLM.load(…)` does it beside the event loop."""
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        clock = WakeClock()
        with in_keywords():
            config = EngineConfig.from_mapping({"model": name, **options}).for_answers()
            self._model = LocalModel(build(config, clock=clock, progress=progress))
        self._calls: set[Collection] = set()  # that still run; only the engine's thread changes it
        self._engine = EngineThread(self._model.client, clock, partial(_fail_all, self._calls))
        weakref.finalize(self, self._engine.stop)  # the thread does not keep an AsyncLLM that is dropped

    @classmethod
    async def load(
        cls,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[EngineOptions],
    ) -> "AsyncLLM":
        """AsyncLLM(…), without blocking the event loop."""
        return await asyncio.to_thread(lambda: cls(model, progress=progress, **options))

    @property
    def config(self) -> EngineConfig:
        """The options, with this machine's defaults filled in."""
        return self._model.built.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._model.built.limits.max_model_len

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """As LLM.generate. If the task is cancelled, its requests are aborted."""
        collect = partial(self._model.collect, prompts, params, cache_salt, grammar, streams=False)
        async with AsyncStream(self, collect) as stream:
            return await stream.results()

    async def chat(
        self,
        messages: str | Chat | Sequence[str | Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """As LLM.chat."""
        return await self.generate(as_chats(messages), params, cache_salt=cache_salt, grammar=grammar)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> "AsyncStream":
        """Pieces of the samples as they come, with `async for`. The requests start with the first one asked for.

        Leaving `async with` or calling aclose() aborts what still runs; so does dropping the stream.
        """
        return AsyncStream(self, partial(self._model.collect, prompts, params, cache_salt, grammar, streams=True))

    async def close(self) -> None:
        """Stop the engine and give its memory back. Calls that still run fail. Dropping the object stops it, too."""
        await asyncio.to_thread(self._engine.close)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- for streams ----------------------------------------------------------------------------------------------

    def begin(self, collection: Collection, on_change: Callable[[], None]) -> None:
        """Submit the jobs of a call. `on_change` is called in the engine's thread for each job that a pass changed, and
        for an error; when the call is over, once."""
        calls = self._calls  # not self: the engine's thread keeps these functions

        def changed() -> None:
            if collection in calls:
                if not collection.running:
                    calls.discard(collection)
                on_change()

        def submit(client: LocalClient) -> None:
            calls.add(collection)
            collection.on_change = changed
            try:
                collection.submit(client)
            except Exception as error:
                collection.fail(error)
            if not collection.running:
                changed()  # it failed, or it has no prompts

        self._engine.call(submit)

    def end(self, collection: Collection) -> None:
        """Abort what still runs of a call. In any thread."""
        self._engine.call(partial(_abort, self._calls, collection))

    def drop(self, collection: Collection) -> None:
        """As end(), for finalizers, which may run in the middle of anything: takes no lock."""
        self._engine.call_later(partial(_abort, self._calls, collection))


def _abort(calls: set[Collection], collection: Collection, client: LocalClient) -> None:
    calls.discard(collection)
    collection.abort(client)


def _fail_all(calls: set[Collection], error: Exception | None) -> None:
    """The engine's thread ends: so do all calls."""
    for collection in list(calls):
        collection.fail(EngineError(CLOSED) if error is None else error)
    calls.clear()


class AsyncStream:
    """An asynchronous iterator over the pieces of some samples."""

    def __init__(self, llm: AsyncLLM, collect: Callable[[], Collection]) -> None:
        self._llm = llm
        self._collect = collect
        self._collection: Collection | None = None
        self._chunks: deque[Chunk] = deque()
        self._starting = asyncio.Lock()
        self._change = asyncio.Event()
        self._over = False  # no more chunks come
        self._error: Exception | None = None
        self._closed = False

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Chunk:
        await self._start()
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._over:
                raise StopAsyncIteration
            await self._next_change()
        return self._chunks.popleft()

    async def results(self) -> list[RequestOutput]:
        """Wait until all samples have ended."""
        await self._start()
        while not self._over and self._error is None:
            await self._next_change()
        if self._error is not None:
            raise self._error
        if self._collection is None or self._closed:
            raise EngineError("the stream was closed before its end")
        return self._collection.results()

    async def aclose(self) -> None:
        """Abort what still runs. No more chunks come, for a task that waits for the next one either."""
        self._close()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __del__(self) -> None:
        if self._collection is not None and not self._over:
            self._llm.drop(self._collection)  # not _close(): this may run in the middle of anything, in any thread

    def _close(self) -> None:
        if self._collection is not None and not self._over:
            self._llm.end(self._collection)
        self._closed = self._over = True
        self._chunks.clear()
        self._change.set()

    async def _start(self) -> None:
        if self._collection is None and not self._over:
            async with self._starting:
                if self._collection is None and not self._over:
                    await self._submit()

    async def _submit(self) -> None:
        self._loop = asyncio.get_running_loop()
        collection = await asyncio.to_thread(self._collect)  # a long prompt takes a while to tokenize
        if self._closed:
            return  # while the prompts were tokenized
        self._collection = collection
        hand_over = weakref.WeakMethod(self._hand_over)  # a stream that is dropped must not be kept by the engine

        def changed() -> None:
            method = hand_over()
            if method is not None:
                method()

        self._llm.begin(collection, changed)

    async def _next_change(self) -> None:
        self._change.clear()
        await self._change.wait()

    def _hand_over(self) -> None:
        """In the engine's thread, for each job that a pass changed: move the new chunks to the event loop.

        The first job takes the chunks of all, so that the event loop is woken up once per pass.
        """
        collection = self._collection
        assert collection is not None
        chunks, over = list(collection.chunks), not collection.running
        if not chunks and not over:
            return
        collection.chunks.clear()
        try:
            self._loop.call_soon_threadsafe(self._take, chunks, over, collection.error)
        except RuntimeError:  # the event loop was closed: there is no reader any more
            self._llm.end(collection)

    def _take(self, chunks: Sequence[Chunk], over: bool, error: Exception | None) -> None:
        if not self._closed:
            self._chunks.extend(chunks)
            self._over = over
            self._error = error
            self._change.set()
