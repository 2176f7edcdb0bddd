"""From texts and messages to token ids: what the model reads.

Owns the chat prompt and the limits on a prompt's length. Long texts are tokenized in threads, so that the event loop is
never blocked. Knows no HTTP beyond its errors, and no engine beyond EngineInfo.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.job import EngineInfo
from shoal.core.params import SamplingParams
from shoal.errors import BadChat, EmptyPrompt, PromptTooLong
from shoal.server.bodies import ChatMessage, GenerationBody
from shoal.server.errors import BadField, shorten
from shoal.server.final_message import cut, marked
from shoal.server.history import plain_messages, size_of
from shoal.server.rules import check_depth
from shoal.server.settings import ServerSettings
from shoal.server.templates import Templates, TemplatesHere
from shoal.server.workers import PYTHON, off_loop
from shoal.text.length import LeastTokens
from shoal.text.reasoning import reasoning_for
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.formats import format_for
from shoal.text.tools.harmony import Harmony, channel_messages
from shoal.text.tools.prompt import with_tools

PROMPT_END = 200  # characters at the end of a prompt, in which reasoning may have been opened
EXACT = 2**16  # characters; of so many the exact number of tokens is told, and not only that they are too many
MOST_CUT = 2**18  # tokens of a prompt that is cut to fewer
CALL = 32  # characters whose tokenizing takes as long as a call of the tokenizer
NO_TOKENIZER = "the model has no tokenizer and takes only token ids"
OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "self"}
)  # variables of a chat template that the server sets


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a chat: its ids, and the end of its text."""

    ids: list[int]
    end: str


@dataclass(frozen=True, slots=True)
class TokenCut:
    """How many tokens of a prompt are kept: its last ones, or its first."""

    most: int
    first: bool = False

    def of(self, ids: list[int]) -> list[int]:
        return ids[: self.most] if self.first else ids[-self.most :]


class PromptReader:
    """Of one model: its tokenizer and chat template."""

    def __init__(
        self, settings: ServerSettings, tokenizer: Tokenizer | None, info: Callable[[], EngineInfo | None]
    ) -> None:
        self.settings, self.tokenizer, self.info = settings, tokenizer, info
        self.least = None if tokenizer is None else LeastTokens(tokenizer)
        template = tokenizer.renderer.plain.source if tokenizer is not None and tokenizer.has_chat_template else None
        self.tool_format = format_for(template, settings.tool_format)
        self.reasoning = reasoning_for(template, settings.reasoning_format)
        self.templates: Templates | None = None  # set where they are rendered in another process

    async def text_ids(
        self, texts: Sequence[str], add_special: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """`most`: refuse texts of more tokens than this together, before tokenizing them if that can be told then."""
        tokenizer = self.need_tokenizer("prompt")

        def encode() -> list[list[int]]:
            found, count = list[list[int]](), 0
            for number, text in enumerate(texts):
                where = f"prompt {number}" if len(texts) > 1 else "prompt"
                self.check_length(text, where, most)
                found.append(tokenizer.encode(text, add_special))
                count += len(found[-1])
                if most is not None and count > most:
                    these = "prompt has" if len(texts) == 1 else f"the first {number + 1} prompts have"
                    raise PromptTooLong(f"{these} {count} tokens; the limit is {most}; shorten it")
            return found

        return await off_loop(sum(len(text) + CALL for text in texts), encode)

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

    async def encode(
        self, prompts: Sequence[str | list[int]], add_special: bool = True, keep: TokenCut | None = None
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

    async def texts(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[str]:
        tokenizer, skip = self.need_tokenizer("echo"), params.skip_special_tokens
        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await off_loop(
            size, lambda: [one if isinstance(one, str) else tokenizer.decode(one, skip_special=skip) for one in prompts]
        )

    def token_cut(self, body: GenerationBody, max_tokens: int | None) -> TokenCut | None:
        """Which tokens of a prompt the body keeps; None: all."""
        most, info = body.truncate_prompt_tokens, self.info()
        if most is None:
            return None
        if most == 0:
            raise BadField("truncate_prompt_tokens", "truncate_prompt_tokens 0 leaves no prompt; raise it, or use -1")
        if most < 0:
            most = MOST_CUT if info is None else max(1, info.max_model_len - (max_tokens or 1))
        return TokenCut(most, body.truncation_side == "right")

    # ---- limits -----------------------------------------------------------------------------------------------------

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
