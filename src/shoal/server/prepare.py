"""From a request's body to jobs: parameters, grammar and seed. Prompts are read by prompt_reader.py.

Owns the steps that all dialects share. Grammars are compiled in threads, so that the event loop is never blocked. Knows
no HTTP beyond its errors, and no engine beyond EngineInfo.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

from shoal.core.job import EngineInfo, GrammarSpec, Job
from shoal.core.params import PARAMS, SamplingParams
from shoal.errors import BadGrammar, QueueFull
from shoal.keys.api_key import ApiKey
from shoal.server.answer_form import AnswerForm, form_of
from shoal.server.answer_size import check_logprobs
from shoal.server.auth import salt_of
from shoal.server.bodies import SMALL_BODY, GenerationBody
from shoal.server.constraint import is_constrained
from shoal.server.errors import BadField, HttpError, shorten
from shoal.server.prepared import PreparedRequest
from shoal.server.prompt_reader import NO_TOKENIZER, PromptReader
from shoal.server.rules import (
    check_beams,
    check_defaults,
    check_priority,
    continuous_usage,
    include_usage,
    length_penalty,
    priority_ignored,
    tier_ignored,
    tier_of,
)
from shoal.server.settings import ServerSettings
from shoal.server.tool_choice import NO_TOOLS
from shoal.server.workers import PYTHON, off_loop
from shoal.text.bad_words import bad_word_ids
from shoal.text.detok import prepare_stops
from shoal.text.stop_regex import prepare_regex
from shoal.text.tokenizer import Tokenizer

BLAME_S = 4.0  # for finding the one of several schemas that cannot be used
PASSED = tuple(name for name, param in PARAMS.items() if param.in_body and param.passed)


class GrammarChecker(Protocol):
    """Whether a grammar can be used. May take long; raises BadGrammar. Called from threads."""

    def check(self, spec: GrammarSpec) -> object: ...


class Preparer(PromptReader):
    """Prepares requests for one model: tokenizer, sampling defaults, end tokens, grammars."""

    def __init__(
        self,
        settings: ServerSettings,
        tokenizer: Tokenizer | None,
        grammars: GrammarChecker | None,
        eos_ids: Collection[int],
        sampling_defaults: Mapping[str, Any],
        info: Callable[[], EngineInfo | None],
    ) -> None:
        super().__init__(settings, tokenizer, info)
        self.grammars = grammars
        self.eos = frozenset(eos_ids)
        self.defaults = dict(sampling_defaults)
        # not a secret, but draws should not be predictable unless the operator asks for repeatable runs
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self._grammar_slots = asyncio.Semaphore(settings.grammar_threads)
        self._grammars_waiting = 0

    def check_model(self, name: str | None) -> str:
        """The model name for the answer; None stands for the one model that is served."""
        if name is None:
            return self.settings.model
        if name not in self.settings.models:
            raise no_model(name, self.settings)
        return name

    # ---- used by the dialects ---------------------------------------------------------------------------------------

    async def request(
        self,
        body: GenerationBody,
        id: str,
        key: ApiKey | None,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        model: str,
        keep: int,
        top: int | None,
        echo: list[str] | None = None,
        prefix: str = "",
        prompt_only: bool = False,
        form: AnswerForm | None = None,
    ) -> PreparedRequest:
        """The last step: jobs for the encoded prompts, and how they are to be answered."""
        if form is None:
            size = SMALL_BODY + 1 if is_constrained(body) else 0  # a structural tag takes milliseconds
            form = await off_loop(
                size, lambda: form_of(body, NO_TOOLS, self.tool_format, self.tokenizer), PYTHON, SMALL_BODY
            )
        info, lengths = self.info(), [len(prompt) for prompt in prompts]
        context = None if info is None else info.max_model_len
        of_prompt = body.prompt_logprobs
        check_logprobs(lengths, params, context, echo=echo is not None, stream=bool(body.stream), of_prompt=of_prompt)
        check_priority(body, key)
        if body.use_beam_search:
            check_beams(body, params, form.grammar is not None)
        if params.stop_regex:
            await asyncio.to_thread(lambda: [prepare_regex(one) for one in params.stop_regex])
        await off_loop(sum(map(len, params.stop)), lambda: prepare_stops(tuple(params.stop)), PYTHON)
        await self._check_grammar(form, params)
        if form.shows_special:
            params = replace(params, skip_special_tokens=False)
        return PreparedRequest(
            jobs=await self._jobs(body, id, key, prompts, params, form.grammar),
            keep=keep,
            model=model,
            stream=bool(body.stream),
            include_usage=include_usage(body),
            continuous_usage=continuous_usage(body),
            top=top,
            echo=echo,
            token_ids=self.tokenizer is None if body.return_token_ids is None else body.return_token_ids,
            prefix=prefix,
            prompt_top=of_prompt,
            prompt_only=prompt_only,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            length_penalty=length_penalty(body),
            request_id=body.request_id or body.rid or "",
            warnings=[*self._ignored(body, key), *form.tools.warnings, *form.ignored],
            make_parser=form.make_parser,
            tools=form.tools,
        )

    def _ignored(self, body: GenerationBody, key: ApiKey | None) -> list[str]:
        """Fields of the body without effect."""
        return body.ignored() + tier_ignored(body, key) + priority_ignored(body, self.settings.uses_priority)

    def params(self, body: GenerationBody, **more: Any) -> SamplingParams:
        given = {name: getattr(body, name) for name in PASSED if getattr(body, name) is not None}
        if body.no_stop_trim:
            given["include_stop_str_in_output"] = True
        if body.logprob_token_ids is not None:
            if more.get("logprobs") is None:
                raise BadField("logprob_token_ids", "logprob_token_ids requires logprobs; ask for them, too")
            more["logprobs"] = len(body.logprob_token_ids)
        if body.prompt_logprobs is not None:
            if body.stream:
                raise BadField("prompt_logprobs", "prompt_logprobs cannot be streamed; leave stream out")
            of_echo = more.get("prompt_logprobs")
            if of_echo is None or not 0 <= body.prompt_logprobs < of_echo:
                more["prompt_logprobs"] = body.prompt_logprobs
        params = SamplingParams(**given, **more).resolved(self.defaults)
        check_defaults(body)
        for name in ("stop", "stop_regex", "bad_words"):
            if getattr(params, name) and self.tokenizer is None:
                raise BadField(name, f"{name} cannot be used: {NO_TOKENIZER}; use stop_token_ids or logit_bias")
        if body.stream_options is not None and not body.stream:
            raise BadField("stream_options", "stream_options requires stream to be true")
        return params

    def check_count(self, prompts: int, sampled: int, field: str) -> None:
        """`field`: the one that sets the number of answers to each prompt."""
        choices, limit = prompts * sampled, self.settings.max_choices
        if choices > limit:
            asks = "prompt asks" if sampled == 1 else f"{field} asks" if prompts == 1 else f"prompt and {field} ask"
            param = field if prompts == 1 else "prompt"
            raise BadField(param, f"{asks} for {choices} answers, limit {limit}; split it into several requests")

    # ---- parts ------------------------------------------------------------------------------------------------------

    async def _check_grammar(self, form: AnswerForm, params: SamplingParams) -> None:
        """Compile it in a thread, within limits."""
        spec, param = form.grammar, form.param
        if spec is None:
            return
        for name in ("ignore_eos", "min_tokens"):
            if getattr(params, name):
                raise BadField(
                    name, f"{name} cannot be used with {param}: the grammar determines where the answer ends"
                )
        if self.grammars is None or self.tokenizer is None:
            raise BadField(param, f"{param} cannot be used: {NO_TOKENIZER}")
        if self._grammars_waiting >= self.settings.max_waiting_grammars:
            raise QueueFull("too many grammars are waiting to be compiled; try again soon", 1.0)
        self._grammars_waiting += 1
        try:
            async with self._grammar_slots:
                await asyncio.to_thread(compile_grammar, self.grammars, form)
        except BadGrammar as error:
            raise BadField(param, str(error)) from error
        finally:
            self._grammars_waiting -= 1

    async def _jobs(
        self,
        body: GenerationBody,
        id: str,
        key: ApiKey | None,
        prompts: list[list[int]],
        params: SamplingParams,
        grammar: GrammarSpec | None,
    ) -> list[Job]:
        ends = self.eos if grammar is not None or not params.ignore_eos else frozenset()
        stop_ids = frozenset(params.stop_token_ids) | ends
        tenant = key.name if key is not None else ""
        salt = salt_of(self.settings.salt_secret, tenant, body.cache_salt or "")
        tier = tier_of(body, key)
        bad_words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words and self.tokenizer is not None:
            tokenizer, words = self.tokenizer, params.bad_words
            bad_words = await off_loop(sum(map(len, words)) * 2, lambda: bad_word_ids(tokenizer, words))
        return [
            Job(
                id=f"{id}.{number}",
                prompt=prompt,
                params=params,
                seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
                stop_ids=stop_ids,
                tenant=tenant,
                salt=salt,
                grammar=grammar,
                tier=tier,
                bad_words=bad_words,
                **body.job_fields(),
            )
            for number, prompt in enumerate(prompts)
        ]


def compile_grammar(grammars: GrammarChecker, form: AnswerForm) -> None:
    """Raises a BadField that names the tool whose schema is to blame, where there is one."""
    assert form.grammar is not None
    try:
        grammars.check(form.grammar)
    except BadGrammar:
        until_s = time.monotonic() + BLAME_S
        for tool in form.tools.use.tools if form.tools.use else ():
            if time.monotonic() > until_s:
                break
            try:
                grammars.check(GrammarSpec("json", json.dumps(tool.parameters)))
            except BadGrammar as error:
                place = form.tools.places[tool.name]
                raise BadField(place, f"{place} of {tool.name!r}: {error}") from error
        raise


def no_model(name: str, settings: ServerSettings) -> HttpError:
    text = f"no model named {shorten(name)!r}; available: {', '.join(map(repr, settings.models))}"
    return HttpError(404, text, param="model", code="model_not_found")
