"""Prompts in any form become jobs: texts, lists of token ids, chats; one of them or many.

Owns what a prompt may be, and the seeds of jobs that bring none. Knows a tokenizer and a model's defaults; no engine.
"""

import random
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shoal.build import Built, need_tokenizer
from shoal.core.job import GrammarSpec, Job
from shoal.core.params import SamplingParams
from shoal.errors import BadParameter, EmptyPrompt, ShoalError
from shoal.text.bad_words import bad_word_ids

Chat: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | Chat
FORMS = "a prompt is a text, a list of token ids or a chat (a list of messages)"


class JobMaker:
    """Makes the jobs of each call, with ids of its own."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._count = 0
        self._lock = threading.Lock()  # AsyncLLM makes jobs in several threads
        seed = built.config.seed
        self._seeds = random.Random(secrets.randbits(64) if seed is None else seed)

    def jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str = "",
        grammar: GrammarSpec | None = None,
    ) -> list[Job]:
        """One job for each prompt; raises if any of them cannot be read."""
        many = as_many(prompts)
        each = each_params(params, len(many))
        jobs = []
        for number, (prompt, how) in enumerate(zip(many, each, strict=True)):
            try:
                ids = self.encode(prompt)
                if not ids:
                    raise EmptyPrompt("the prompt has no tokens; give at least one (a BOS token will do)")
            except ShoalError as error:
                if len(many) > 1:
                    error.args = (f"prompt {number}: {error}",)
                raise
            jobs.append(self._job(ids, how, salt, grammar))
        return jobs

    def _job(self, ids: list[int], params: SamplingParams, salt: str, grammar: GrammarSpec | None) -> Job:
        params = params.resolved(self._built.defaults)
        if params.stop or params.stop_regex:
            need_tokenizer(self._built)
        bad_words = bad_word_ids(need_tokenizer(self._built), params.bad_words) if params.bad_words else ()
        stop_ids = frozenset(params.stop_token_ids)
        if grammar is not None or not params.ignore_eos:
            stop_ids |= self._built.eos
        with self._lock:
            self._count += 1
            number, seed = self._count, params.seed if params.seed is not None else self._seeds.getrandbits(63)
        return Job(
            id=str(number),
            prompt=ids,
            params=params,
            seed=seed,
            stop_ids=stop_ids,
            salt=salt,
            grammar=grammar,
            bad_words=bad_words,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt in any form."""
        if isinstance(prompt, str):
            return need_tokenizer(self._built).encode(prompt)
        items = as_list(prompt)
        if items and isinstance(items[0], Mapping):
            return need_tokenizer(self._built).chat(items)
        for token in items:
            if isinstance(token, bool) or not isinstance(token, int):
                raise BadParameter(f"{FORMS}; found {token!r} in a list")
        return items


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also where only one was given.

    >>> as_many("hi"), as_many([1, 2]), as_many([[1, 2], "hi"])
    (['hi'], [[1, 2]], [[1, 2], 'hi'])
    """
    if isinstance(prompts, str):
        return [prompts]
    items = as_list(prompts)
    if items and isinstance(items[0], (int, Mapping)):
        return [items]
    return items


def as_chats(messages: str | Chat | Sequence[str | Chat]) -> list[Chat]:
    """A list of conversations, also where only one was given, or a text for one.

    >>> as_chats("hi"), as_chats([{"role": "user", "content": "hi"}]) == as_chats(["hi"])
    ([[{'role': 'user', 'content': 'hi'}]], True)
    """
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    items = as_list(messages)
    if items and all(isinstance(one, Mapping) for one in items):
        return [items]
    found: list[Chat] = []
    for one in items:
        if isinstance(one, str):
            found.append([{"role": "user", "content": one}])
        elif isinstance(one, Sequence) and all(isinstance(message, Mapping) for message in one):
            found.append(one)
        else:
            raise BadParameter(f"a chat is a text or a list of messages with a role and a content, not {one!r}")
    return found


def as_list(value: Any) -> list[Any]:
    """A list from any sequence of prompts, messages or token ids; from arrays and tensors too."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise BadParameter(f"{FORMS}, or a list of these; found {value!r}")
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
