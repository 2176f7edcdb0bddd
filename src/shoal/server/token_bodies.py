"""The bodies of /tokenize and /detokenize. Knows no tokenizer."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from shoal.server.bodies import MOST_MESSAGES, ChatMessage, Nothing, TokenId
from shoal.server.errors import BadField
from shoal.server.tool_choice import ToolChoice, ToolList

MOST_TEXTS = 1024  # of one request
MOST_LIST = 2**18  # ids of one text


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt, several, or messages."""

    model: str | None = None
    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_TEXTS)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # for a prompt; true by default
    add_generation_prompt: bool | None = None  # for messages; true by default
    continue_final_message: bool | None = None  # for messages: the prompt ends with the last one
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList | None = None  # for messages; as in a chat
    tool_choice: ToolChoice | None = None  # "none": the tools are not shown
    reasoning_effort: Annotated[str, Meta(max_length=16)] | None = None  # for messages; as in a chat
    return_token_strs: bool | None = None  # the tokens as the vocabulary writes them, too
    chat_template: Nothing = None
    mm_processor_kwargs: Nothing = None
    media_io_kwargs: Nothing = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId | Annotated[list[TokenId], Meta(max_length=MOST_LIST)]]  # of one text, or of several
    skip_special_tokens: bool | None = None  # false by default: special tokens are shown


def lists_of(tokens: list[Any]) -> list[list[int]] | None:
    """The lists of ids of several texts; None where the ids are those of one."""
    kinds = set(map(type, tokens))  # quick: there may be many
    if kinds == {int, list}:
        raise BadField("tokens", "tokens mixes ids with lists of ids; give one kind of them")
    return tokens if kinds == {list} else None
