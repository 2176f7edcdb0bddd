"""From a request's body to jobs: parameters, token ids, grammar and seed.

Owns the steps that all dialects share. Long texts and grammars are handled in threads, so that the event loop is never
blocked. Knows no HTTP beyond its errors, and no engine beyond EngineInfo.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shoal.core.job import EngineInfo, GrammarSpec, Job
from shoal.core.params import PARAMS, SamplingParams
from shoal.errors import BadChat, BadGrammar, EmptyPrompt, PromptTooLong, QueueFull
from shoal.keys.api_key import ApiKey
from shoal.output.outputs import Outputs
from shoal.output.parser import Parser, PlainParser
from shoal.server.answer_form import AnswerForm, form_of
from shoal.server.answer_size import check_logprobs
from shoal.server.auth import salt_of
from shoal.server.bodies import SMALL_BODY, ChatMessage, GenerationBody
from shoal.server.constraint import is_constrained
from shoal.server.errors import BadField, HttpError, shorten
from shoal.server.final_message import cut, marked
from shoal.server.history import plain_messages, size_of
from shoal.server.response_log import EventLog
from shoal.server.rules import (
    check_beams,
    check_defaults,
    check_depth,
    check_priority,
    continuous_usage,
    include_usage,
    length_penalty,
    priority_ignored,
    tier_ignored,
    tier_of,
)
from shoal.server.settings import ServerSettings
from shoal.server.templates import Templates, TemplatesHere
from shoal.server.tool_choice import NO_TOOLS, ToolRequest
from shoal.server.workers import PYTHON, off_loop
from shoal.text.bad_words import bad_word_ids
from shoal.text.detok import prepare_stops
from shoal.text.length import LeastTokens
from shoal.text.reasoning import reasoning_for
from shoal.text.stop_regex import prepare_regex
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.formats import format_for
from shoal.text.tools.harmony import Harmony, channel_messages
from shoal.text.tools.prompt import with_tools

PROMPT_END = 200  # characters at the end of a prompt, in which reasoning may have been opened
EXACT = 2**16  # characters; of so many the exact number of tokens is told, and not only that they are too many
BLAME_S = 4.0  # for finding the one of several schemas that cannot be used
MOST_CUT = 2**18  # tokens of a prompt that is cut to fewer
CALL = 32  # characters whose tokenizing takes as long as a call of the tokenizer
NO_TOKENIZER = "the model has no tokenizer and takes only token ids"
PASSED = tuple(name for name, param in PARAMS.items() if param.in_body and param.passed)
OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "self"}
)  # variables of a chat template that the server sets


class GrammarChecker(Protocol):
    """Whether a grammar can be used. May take long; raises BadGrammar. Called from threads."""

    def check(self, spec: GrammarSpec) -> object: ...


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """One HTTP request, ready to be submitted, and how to answer it."""

    jobs: list[Job]
    keep: int  # answers shown for each prompt; fewer than are sampled with best_of
    model: str
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False  # in every event
    top: int | None = None  # alternatives to show for each token; None: no logprobs at all
    echo: list[str] | None = None  # the text of each prompt, where it is repeated before the answer
    prefix: str = ""  # text that is repeated before each answer
    prompt_top: int | None = None  # alternatives to show for each token of the prompt; None: no logprobs of it
    prompt_only: bool = False  # nothing is generated; the one token that was is not shown
    token_ids: bool = False  # show token ids
    tokens_as_ids: bool = False  # in logprobs, write tokens as their ids
    length_penalty: float | None = None  # of a beam search; None: answers are drawn
    request_id: str = ""  # the client's own name for it
    warnings: list[str]  # fields that have no effect
    make_parser: Callable[[], Parser] = PlainParser
    tools: ToolRequest = NO_TOOLS

    @property
    def shows_tokens(self) -> bool:
        """Whether each token is shown, and not only the text."""
        return self.token_ids or self.top is not None

    @property
    def skip_special(self) -> bool:
        return self.jobs[0].params.skip_special_tokens

    @property
    def in_background(self) -> bool:
        """The client is answered at once, and the request goes on without it."""
        return False

    async def at_begin(self, cancel: Callable[[], None]) -> bytes:
        """The answer to a request that goes on in the background. `cancel`: ends it."""
        raise NotImplementedError

    async def at_stream_begin(self, cancel: Callable[[], None]) -> EventLog:
        """The same for one that is streamed: where its events go."""
        raise NotImplementedError

    async def at_end(self, outputs: Outputs) -> None:
        """All samples have ended well; the end of the answer is sent after this."""

    async def at_failure(self, error: HttpError) -> None:
        """A request in the background has failed."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat: its ids, and the end of its text."""

    ids: list[int]
    end: str


class Preparer:
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
        self.settings = settings
        self.tokenizer = tokenizer
        self.least = None if tokenizer is None else LeastTokens(tokenizer)
        self.grammars = grammars
        template = tokenizer.renderer.plain.source if tokenizer is not None and tokenizer.has_chat_template else None
        self.tool_format = format_for(template, settings.tool_format)
        self.reasoning = reasoning_for(template, settings.reasoning_format)
        self.templates: Templates | None = None  # set where they are rendered in another process
        self.eos = frozenset(eos_ids)
        self.defaults = dict(sampling_defaults)
        self.info = info
        # not a secret, but draws should not be predictable unless the operator asks for repeatable runs
        self._seeds = random.SystemRandom() if settings.seed is None else random.Random(settings.seed)
        self._grammar_slots = asyncio.Semaphore(settings.grammar_threads)
        self._grammars_waiting = 0

    # ---- shared with /tokenize --------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The model name for the answer; None stands for the one model that is served."""
        if name is None:
            return self.settings.model
        if name not in self.settings.models:
            raise no_model(name, self.settings)
        return name

    async def text_ids(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        """`most`: refuse a text of more tokens than this, before tokenizing it if that can be told then."""
        tokenizer = self.need_tokenizer("prompt")

        def encode() -> list[int]:
            self.check_length(text, "prompt", most)
            return tokenizer.encode(text, add_special)

        ids = await off_loop(len(text), encode)
        if most is not None and len(ids) > most:
            raise PromptTooLong(f"prompt has {len(ids)} tokens; the limit is {most}; shorten it")
        return ids

    async def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        most: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        continues: bool = False,
    ) -> ChatPrompt:
        """`continues`: the prompt ends with the last message, which the answer is to continue."""
        tokenizer = self.need_tokenizer("messages")
        given = dict(variables or {})
        for name in given:
            if name in OWN_VARIABLES or name in tokenizer.special or not name.isidentifier():
                raise BadField(
                    "chat_template_kwargs", f"chat_template_kwargs cannot set {shorten(name)!r}; the server sets it"
                )
        check_depth(given, "chat_template_kwargs")
        plain = await off_loop(size_of(messages), lambda: plain_messages(messages), PYTHON)
        if isinstance(self.tool_format, Harmony):
            plain = channel_messages(plain)
        if not self.tool_format.in_template:
            plain = with_tools(plain, tools)
        elif tools:
            given["tools"] = tools
        plain, mark = marked(plain) if continues else (plain, "")
        try:
            templates = self.templates or TemplatesHere(tokenizer.renderer)
            rendered = await templates.render(plain, add_generation_prompt and not continues, given)
        except BadChat as error:
            raise BadField("messages", str(error)) from error
        if continues:
            rendered = cut(rendered, mark)

        def encode() -> list[int]:
            self.check_length(rendered.text, "messages", most)
            return tokenizer.encode_rendered(rendered)

        return ChatPrompt(await off_loop(len(rendered.text), encode), tokenizer.end_of(rendered, PROMPT_END))

    def need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise BadField(param, f"{NO_TOKENIZER}; send a list of ids as the prompt of /v1/completions")
        return self.tokenizer

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

    async def encode(
        self, prompts: Sequence[str | list[int]], add_special: bool = True, keep: "TokenCut | None" = None
    ) -> list[list[int]]:
        """The ids of every prompt, or those of them that are kept. Many short texts are encoded together, as one."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded: list[list[int]] = []
        if texts:
            tokenizer = self.need_tokenizer("prompt")

            def encode_all() -> list[list[int]]:
                for number, text in enumerate(texts):
                    where = f"prompt {number}" if len(prompts) > 1 else "prompt"
                    self.check_length(text, where, MOST_CUT if keep is not None else None)
                return [tokenizer.encode(text, add_special) for text in texts]

            encoded = await off_loop(sum(len(text) + CALL for text in texts), encode_all)
        of_texts = iter(encoded)
        ids = [next(of_texts) if isinstance(prompt, str) else prompt for prompt in prompts]
        if keep is not None:
            ids = [keep.of(one) for one in ids]
        for number, one in enumerate(ids):
            self.check_ids(one, f"prompt {number}" if len(ids) > 1 else "prompt")
        return ids

    def check_length(self, text: str, where: str, most: int | None = None) -> None:
        """Refuse a text that is certainly too long, before it is tokenized: that takes long and much memory."""
        info = self.info()
        if most is None and info is not None:
            most = info.max_model_len - 1
        if most is None or len(text) <= max(most, EXACT) or self.least is None:
            return
        tokens = self.least.above(text, most)
        if tokens is not None:
            limit = f"the limit is {most}"
            if info is not None and most == info.max_model_len - 1:
                limit = f"the limit is {info.max_model_len} for prompt and output together"
            raise PromptTooLong(f"{where} has at least {tokens} tokens; {limit}; shorten it to at most {most}")

    def check_ids(self, ids: list[int], where: str) -> None:
        """Checks that the engine makes too, here made before a large message is sent to it."""
        if not ids:
            raise EmptyPrompt(f"{where} has no tokens; give at least one (a BOS token will do)")
        info = self.info()
        if info is None:
            return
        if len(ids) >= info.max_model_len:
            raise PromptTooLong(
                f"{where} has {len(ids)} tokens; the limit is {info.max_model_len} for prompt and output together; "
                f"shorten it to at most {info.max_model_len - 1}"
            )
        if max(ids) >= info.vocab_size:
            raise BadField(
                "prompt", f"token id {max(ids)} is not in the vocabulary; ids run from 0 to {info.vocab_size - 1}"
            )

    async def texts(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[str]:
        tokenizer, skip = self.need_tokenizer("echo"), params.skip_special_tokens
        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await off_loop(
            size, lambda: [one if isinstance(one, str) else tokenizer.decode(one, skip_special=skip) for one in prompts]
        )

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

    def token_cut(self, body: GenerationBody, max_tokens: int | None) -> "TokenCut | None":
        """Which tokens of a prompt the body keeps; None: all."""
        most, info = body.truncate_prompt_tokens, self.info()
        if most is None:
            return None
        if most == 0:
            raise BadField("truncate_prompt_tokens", "truncate_prompt_tokens 0 leaves no prompt; raise it, or use -1")
        if most < 0:
            most = MOST_CUT if info is None else max(1, info.max_model_len - (max_tokens or 1))
        return TokenCut(most, body.truncation_side == "right")

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


@dataclass(frozen=True, slots=True)
class TokenCut:
    """How many tokens of a prompt are kept: its last ones, or its first."""

    most: int
    first: bool = False

    def of(self, ids: list[int]) -> list[int]:
        return ids[: self.most] if self.first else ids[-self.most :]


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
