"""LLM: generate for many prompts at once, or stream. The caller's thread drives the engine.

Not thread-safe. Several streams may be open at the same time; a call for the next piece of one of them steps the engine
for all. In a program with an event loop, use AsyncLLM.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Unpack

from tqdm import tqdm

from shoal.build import Built, build, need_tokenizer
from shoal.config.engine import EngineConfig
from shoal.config.keywords import EngineOptions
from shoal.core.job import GrammarSpec
from shoal.core.params import SamplingParams
from shoal.engine.local import LocalClient
from shoal.errors import EngineError
from shoal.llm.collect import Collection
from shoal.llm.jobs import Chat, JobMaker, Prompt, as_chats
from shoal.llm.records import Chunk, RequestOutput
from shoal.llm.words import in_keywords
from shoal.text.grammar import Grammars, grammars_of

CLOSED = "this LLM was closed; make a new one"


class LocalModel:
    """A built engine and its client in this process: what LLM and AsyncLLM share."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self.maker = JobMaker(built)
        self._grammars: Grammars | None = None
        self.client = LocalClient(built.loop, built.info(), lambda spec, output: self.grammars.make(spec, output))
        self.client.trouble = CLOSED

    def check_open(self) -> None:
        """Raise EngineError if the engine was closed or has stopped."""
        if self.client.info is None:
            raise EngineError(self.client.trouble)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for this model."""
        if self._grammars is None:
            self._grammars = grammars_of(self.built.files, need_tokenizer(self.built))
        return self._grammars

    def collect(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str,
        grammar: GrammarSpec | None,
        streams: bool,
    ) -> Collection:
        """Tokenize and check the prompts of one call; raises if any of them cannot be read."""
        self.check_open()
        with in_keywords():
            if grammar is not None:
                self.grammars.check(grammar)
            return Collection(self.maker.jobs(prompts, params, salt, grammar), self.built.tokenizer, streams)


class CompletionStream:
    """An iterator over the pieces of some samples. If it is closed, dropped or left, its requests are aborted."""

    def __init__(self, llm: "LLM", collection: Collection) -> None:
        self._llm = llm
        self._collection = collection

    def __iter__(self) -> "CompletionStream":
        return self

    def __next__(self) -> Chunk:
        collection = self._collection
        while not collection.chunks:
            if collection.error is not None:
                raise collection.error
            if not collection.running:
                raise StopIteration
            self._llm.step()
        return collection.chunks.popleft()

    def close(self) -> None:
        """Abort what still runs."""
        self._llm.forget(self._collection)

    def __enter__(self) -> "CompletionStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._llm.drop(self._collection)  # not close(): this may run in the middle of anything


class LLM:
    """A model and its engine in this process.

    Example (not run here, it loads a model):

        llm = LLM()
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Load a model: a folder, a .gguf file or a hub name; without one SmolLM2-135M-Instruct."""
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        with in_keywords():
            config = EngineConfig.from_mapping({"model": name, **options}).for_answers()
            self._model = LocalModel(build(config, progress=progress))
        self._client = self._model.client
        self.loop = self._model.built.loop
        self.tokenizer = self._model.built.tokenizer
        self._dropped: deque[Collection] = deque()

    @property
    def config(self) -> EngineConfig:
        """The options, with this machine's defaults filled in."""
        return self._model.built.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._model.built.limits.max_model_len

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for this model."""
        return self._model.grammars

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """The outputs for all prompts (texts, lists of token ids or chats), in their order.

        Prefix-cache blocks are shared only among requests of the same `cache_salt`. Every sample follows the `grammar`;
        where the grammar ends, the sample ends, whatever `ignore_eos` and `min_tokens` are.
        """
        collection = self._submit(self._model.collect(prompts, params, cache_salt, grammar, streams=False))
        total = collection.running
        with tqdm(total=total, unit="seq", disable=not progress) as bar:
            try:
                while collection.running:
                    self.step()
                    bar.update(total - collection.running - bar.n)
                if collection.error is not None:
                    raise collection.error
            finally:
                self.forget(collection)
        return collection.results()

    def chat(
        self,
        messages: str | Chat | Sequence[str | Chat],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """As generate(), through the model's chat template: messages with a `role` and a `content`, or a list of such
        conversations. A text is a conversation of one message of the user."""
        return self.generate(as_chats(messages), params, progress=progress, cache_salt=cache_salt, grammar=grammar)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> CompletionStream:
        """Pieces of the samples as they come. Closing or dropping the iterator aborts the requests."""
        collection = self._model.collect(prompts, params, cache_salt, grammar, streams=True)
        return CompletionStream(self, self._submit(collection))

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any form."""
        return self._model.maker.encode(prompt)

    def close(self) -> None:
        """Give the engine's thread and memory back."""
        self._client.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- for streams ----------------------------------------------------------------------------------------------

    def _submit(self, collection: Collection) -> Collection:
        """Submit all jobs of a call or, if this raises, none."""
        collection.submit(self._client)
        return collection

    def step(self) -> None:
        """Let the engine compute until something has happened."""
        self._model.check_open()
        while self._dropped:
            self.forget(self._dropped.popleft())
        with uninterrupted():
            self._client.step()

    def forget(self, collection: Collection) -> None:
        """Abort what still runs of a call."""
        collection.abort(self._client)

    def drop(self, collection: Collection) -> None:
        """As forget(), but before the next step."""
        if collection.running:
            self._dropped.append(collection)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the end: it must not leave the engine in the middle of a pass."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if asked and callable(before):
            before(*asked[0])
