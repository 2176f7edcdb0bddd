"""The last message of a chat, where the answer continues or repeats it (`continue_final_message`, `echo`).

Owns how the rendered chat is cut where that message ends: a mark at its end shows the place, whatever the template
writes behind it. Pure functions. Knows no tokenizer.
"""

import secrets
from typing import Any

from shoal.server.bodies import ChatMessage
from shoal.server.errors import BadField
from shoal.text.chat import Rendered

MARK_BYTES = 16


def text_of(message: ChatMessage) -> str:
    """Its text; that of several parts is joined."""
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(the messages with a mark at the end of the last one, the mark, which no user can know)."""
    last, mark = dict(messages[-1]), f"mark{secrets.token_hex(MARK_BYTES)}"
    content = last["content"]
    if isinstance(content, str) and content:
        last["content"] = content + mark
    elif isinstance(content, list) and content:
        last["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]
    else:
        raise BadField(
            "continue_final_message", "continue_final_message needs a last message with text; give it some, or leave "
            "continue_final_message out"
        )  # fmt: skip
    return [*messages[:-1], last], mark


def cut(rendered: Rendered, mark: str) -> Rendered:
    """The chat up to the end of the marked message."""
    at = rendered.text.rfind(mark)
    if at < 0:
        raise BadField(
            "continue_final_message",
            "continue_final_message cannot be used: the model's chat template does not write the last message as it is",
        )
    return Rendered(rendered.text[:at], rendered.hidden)
