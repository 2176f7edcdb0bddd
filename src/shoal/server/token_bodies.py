"""The bodies of /tokenize and /detokenize. Knows no tokenizer."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from shoal.server.bodies import MOST_MESSAGES, ChatMessage, Nothing, TokenId
from shoal.server.tool_choice import ToolList


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool | None = None  # for a prompt; true by default
    add_generation_prompt: bool | None = None  # for messages; true by default
    continue_final_message: bool | None = None  # for messages: the prompt ends with the last one
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList | None = None  # for messages; as in a chat
    return_token_strs: bool | None = None  # the tokens as the vocabulary writes them, too
    chat_template: Nothing = None
    mm_processor_kwargs: Nothing = None
    media_io_kwargs: Nothing = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool | None = None  # false by default: special tokens are shown
