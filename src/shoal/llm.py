"""LLM: the engine in your own program. Generate for many prompts at once, or stream.

Owns prompts in every shape, and the answers: text, logprobs, reasons and times. Not thread-safe. Several streams may
be open at the same time; asking one of them for its next chunk runs the engine for all of them.
"""

import os
import random
import secrets
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

from tqdm import tqdm

from shoal.build import Built, build, need_tokenizer
from shoal.config.engine import EngineConfig
from shoal.core.events import Finished, PassEvents
from shoal.core.job import GrammarSpec, Job, requests_of
from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs, Reason, Request
from shoal.errors import BadParameter, EmptyPrompt, EngineError, ShoalError
from shoal.text.detok import Detokenizer
from shoal.text.grammar import Grammars, grammars_of

Chat: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | Chat
WHAT_A_PROMPT_IS = "a prompt is a text, a list of token ids or a chat (a list of messages)"


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to one request, in seconds since it arrived."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    queue_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True)
class Completion:
    """One answer. finish_reason is stop, length, abort or error; stop_reason the stop string or token that ended it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[Logprobs] | None
    metrics: RequestMetrics
    error: str = ""


@dataclass(frozen=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass(frozen=True)
class Chunk:
    """The next part of one answer; finish_reason is set in its last chunk."""

    prompt: int  # which prompt, counted from 0
    index: int  # which of its n samples
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str = ""


@dataclass
class Collector:
    """Collects the events of one sequence."""

    request: Request
    prompt_number: int
    detok: Detokenizer | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    call: "GenerateCall | None" = None
    queue_s: float | None = None
    first_token_s: float | None = None
    done: Completion | None = None
    stopped: bool = False

    def chunk(self, text: str, tokens: list[int], reason: str | None = None, error: str = "") -> None:
        if self.call is not None and self.call.streams:
            self.call.chunks.append(Chunk(self.prompt_number, self.request.sample, text, tokens, reason, error))


@dataclass
class GenerateCall:
    """The sequences of one call: how many have not ended, and the chunks that were not read yet."""

    streams: bool
    collectors: list[Collector] = field(default_factory=list)
    left: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)

    def add(self, one: Collector) -> None:
        one.call = self
        self.collectors.append(one)
        self.left += 1


class CompletionStream:
    """An iterator over the chunks of some answers. Closing it, dropping it or an exception ends the requests."""

    def __init__(self, llm: "LLM", call: GenerateCall) -> None:
        self._llm = llm
        self._call = call

    def __iter__(self) -> "CompletionStream":
        return self

    def __next__(self) -> Chunk:
        while not self._call.chunks:
            if not self._call.left:
                raise StopIteration
            self._llm.step()
        return self._call.chunks.popleft()

    def close(self) -> None:
        """End the requests; no more chunks come."""
        self._llm.forget(self._call)

    def __enter__(self) -> "CompletionStream":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._llm.drop(self._call)  # not close(): the garbage collector may run in the middle of a step


class LLM:
    """A model and its engine in this process.

    Example (not run here, it loads a model):

        llm = LLM()
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text)
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, *, progress: bool = False, **options: Any) -> None:
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._built: Built = build(EngineConfig.from_mapping({"model": name, **options}), progress=progress)
        self.loop = self._built.loop
        self.tokenizer = self._built.tokenizer
        self._collectors: dict[str, Collector] = {}
        self._count = 0
        self._closed = False
        self._dropped: deque[GenerateCall] = deque()
        self._grammars: Grammars | None = None
        seed = self._built.config.seed
        self._seeds = random.Random(secrets.randbits(64) if seed is None else seed)

    @property
    def config(self) -> EngineConfig:
        return self._built.config

    @property
    def max_model_len(self) -> int:
        return self._built.limits.max_model_len

    # ---- use ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """Answers to all prompts (texts, lists of token ids or chats), in their order.

        Requests share cached prefixes only with requests of the same `cache_salt`. Every answer follows the `grammar`
        and ends where the grammar ends, even with `ignore_eos` or `min_tokens`.
        """
        call = GenerateCall(streams=False)
        groups = self._submit(prompts, params, call, cache_salt, grammar)
        total = call.left
        with tqdm(total=total, unit="seq", disable=not progress) as bar:
            try:
                while call.left:
                    self.step()
                    bar.update(total - call.left - bar.n)
            finally:
                self.forget(call)
        return [self._output(group) for group in groups]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> CompletionStream:
        """Chunks of the answers as they are computed. Closing or dropping the iterator ends the requests."""
        call = GenerateCall(streams=True)
        self._submit(prompts, params, call, cache_salt, grammar)
        return CompletionStream(self, call)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for this model."""
        if self._grammars is None:
            self._grammars = grammars_of(self._built.files, need_tokenizer(self._built))
        return self._grammars

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any shape."""
        if isinstance(prompt, str):
            return need_tokenizer(self._built).encode(prompt)
        items = as_list(prompt)
        if items and isinstance(items[0], Mapping):
            return need_tokenizer(self._built).chat(items)
        for token in items:
            if isinstance(token, bool) or not isinstance(token, int):
                raise BadParameter(f"{WHAT_A_PROMPT_IS}; found {token!r} in a list")
        return items

    def close(self) -> None:
        """Free the engine's thread and memory."""
        self._closed = True
        self.loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- requests -------------------------------------------------------------------------------------------------

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        call: GenerateCall,
        salt: str,
        grammar: GrammarSpec | None,
    ) -> list[list[Collector]]:
        """All or none: a bad prompt is refused before any of them starts."""
        if self._closed:
            raise EngineError("this LLM was closed; make a new one")
        if grammar is not None:
            self.grammars.check(grammar)
        many = as_many(prompts)
        each = each_params(params, len(many))
        groups: list[list[Collector]] = []
        try:
            for number, (prompt, how) in enumerate(zip(many, each, strict=True)):
                groups.append([])
                for one in self._collect(number, prompt, how, len(many), salt, grammar):
                    self.loop.submit(one.request)
                    self._collectors[one.request.id] = one
                    call.add(one)
                    groups[-1].append(one)
        except BaseException:
            self.forget(call)
            raise
        return groups

    def _collect(
        self, number: int, prompt: Prompt, params: SamplingParams, many: int, salt: str, grammar: GrammarSpec | None
    ) -> list[Collector]:
        """The n sequences of one prompt."""
        try:
            ids = self.encode(prompt)
            if not ids:
                raise EmptyPrompt("the prompt has no tokens; give at least one (a BOS token will do)")
        except ShoalError as error:
            if many > 1:
                error.args = (f"prompt {number}: {error}",)
            raise
        job = self._job(ids, params.resolved(self._built.defaults), salt, grammar)
        grammars = {sample: self.grammars.make(grammar) for sample in range(job.params.n)} if grammar else None
        return [
            Collector(request, number, self._detok(ids, job.params)) for request in requests_of(job, grammars=grammars)
        ]

    def _job(self, ids: list[int], params: SamplingParams, salt: str, grammar: GrammarSpec | None) -> Job:
        if params.stop:
            need_tokenizer(self._built)
        eos = frozenset[int]() if params.ignore_eos and grammar is None else self._built.eos  # a grammar ends with one
        self._count += 1
        return Job(
            id=str(self._count),
            prompt=ids,
            params=params,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            stop_ids=frozenset(params.stop_token_ids) | eos,
            salt=salt,
            grammar=grammar,
        )

    def _detok(self, ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(
            self.tokenizer,
            ids,
            tuple(params.stop),
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
        )

    def forget(self, call: GenerateCall) -> None:
        """Abort the requests of this call that still run."""
        for one in call.collectors:
            self._collectors.pop(one.request.id, None)
            if one.done is None:
                self.loop.abort(one.request.id)
        call.left = 0
        call.chunks.clear()

    def drop(self, call: GenerateCall) -> None:
        """As forget(), but put off to the next step."""
        if call.left:
            self._dropped.append(call)

    # ---- events of the engine -------------------------------------------------------------------------------------

    def step(self) -> None:
        """Run the engine until something has happened, and hand the events to the collectors."""
        while self._dropped:
            self.forget(self._dropped.popleft())
        with uninterrupted():
            self._take(self.loop.step())

    def _take(self, events: PassEvents) -> None:
        now_s = events.committed_s
        for admitted in events.admitted:
            one = self._collectors.get(admitted.id)
            if one and one.queue_s is None:
                one.queue_s = admitted.waited_s
        for id, (first, values) in events.prompt_logprobs.items():
            one = self._collectors.get(id)
            if one:
                one.prompt_logprobs += values[len(one.prompt_logprobs) - first :]
        ended_by_token = {(end.id, end.outputs - 1) for end in events.finished if end.stop_token is not None}
        for id, index, token in zip(events.owners, events.indexes, events.tokens, strict=True):
            one = self._collectors.get(id)
            if one and not one.stopped:
                self._token(one, token, (id, index) in ended_by_token, now_s, events.logprobs.get((id, index)))
        for end in events.finished:
            one = self._collectors.get(end.id)
            if one:
                self._finish(one, end, now_s)

    def _token(self, one: Collector, token: int, ends: bool, now_s: float, logprobs: Logprobs | None) -> None:
        if one.first_token_s is None:
            one.first_token_s = now_s - one.request.arrived_s
        one.tokens.append(token)
        if logprobs is not None:
            one.logprobs.append(logprobs)
        detok = one.detok
        shown = ""
        if detok is not None and (not ends or one.request.params.include_stop_str_in_output):
            shown = detok.push(token)
            if detok.stopped is not None and detok.stop_at is not None:
                one.stopped = True
                del one.tokens[detok.stop_at :], one.logprobs[detok.stop_at :]
                self.loop.finish_at(one.request.id, detok.stop_at)
        one.chunk(shown, [token])

    def _finish(self, one: Collector, end: Finished, now_s: float) -> None:
        detok = one.detok
        rest = detok.finish() if detok is not None else ""
        stopped = detok is not None and detok.stopped is not None and end.reason in (Reason.STOP, Reason.LENGTH)
        reason = Reason.STOP if stopped else end.reason
        if detok is not None and detok.stop_at is not None:  # found only now, in text that had been held back
            del one.tokens[detok.stop_at :], one.logprobs[detok.stop_at :]
        metrics = RequestMetrics(
            one.request.prompt_len,
            len(one.tokens),
            end.cached_tokens,
            end.preemptions,
            one.queue_s,
            one.first_token_s,
            now_s - one.request.arrived_s,
        )
        one.done = Completion(
            one.request.sample,
            detok.text if detok is not None else "",
            one.tokens,
            reason.value,
            detok.stopped if detok is not None and stopped else end.stop_token,
            one.logprobs if one.request.params.logprobs is not None else None,
            metrics,
            end.error,
        )
        one.chunk(rest, [], reason.value, end.error)
        del self._collectors[end.id]
        if one.call is not None:
            one.call.left -= 1

    def _output(self, group: list[Collector]) -> RequestOutput:
        first = group[0].request
        prompt = first.tokens[: first.prompt_len]
        wanted = first.wants_prompt_logprobs
        completions = [one.done for one in group if one.done is not None]
        text = self.tokenizer.decode(prompt, skip_special=False) if self.tokenizer else None
        return RequestOutput(text, prompt, completions, group[0].prompt_logprobs if wanted else None)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block: the engine must not stop in the middle of a pass."""
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


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, even if only one was given.

    >>> as_many("hi"), as_many([1, 2]), as_many([[1, 2], "hi"])
    (['hi'], [[1, 2]], [[1, 2], 'hi'])
    """
    if isinstance(prompts, str):
        return [prompts]
    items = as_list(prompts)
    if items and isinstance(items[0], (int, Mapping)):
        return [items]
    return items


def as_list(value: Any) -> list[Any]:
    """A list from anything that lists prompts, messages or token ids; arrays and tensors too."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise BadParameter(f"{WHAT_A_PROMPT_IS}, or a list of these; found {value!r}")
    return list(value)


def each_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each prompt."""
    each = list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * count
    if len(each) != count:
        raise BadParameter(f"{count} prompts but {len(each)} sampling parameters; give one, or one for each")
    for one in each:
        if not isinstance(one, SamplingParams):
            raise BadParameter(f"sampling parameters must be a SamplingParams, not {one!r}")
    return each
