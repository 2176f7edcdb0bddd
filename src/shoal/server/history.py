"""The messages of a chat as chat templates expect them: earlier tool calls with their arguments as objects.

Owns how calls and results in a history are read, under their old names (`function_call`, role `function`) too. Knows no
template.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.server.bodies import ChatMessage
from shoal.server.errors import BadField
from shoal.server.json_size import MOST_VALUES, measure
from shoal.server.rules import check_depth


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As text/template.py expects them."""
    left = MOST_VALUES  # of all arguments together: they are JSON inside JSON, which nothing has counted yet
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        check_depth(message.tool_calls or [], f"{where}.tool_calls")
        plain = message.plain()
        for place, call in enumerate(plain.get("tool_calls") or ()):
            function = call.get("function")
            if not isinstance(function, dict):
                continue
            text = function.get("arguments")
            if isinstance(text, str):
                values, left = arguments_of(text, f"{where}.tool_calls[{place}].function.arguments", left)
                plain["tool_calls"][place] = {**call, "function": {**function, "arguments": values}}
        found.append(plain)
    return found


def arguments_of(text: str, where: str, left: int) -> tuple[Any, int]:
    """(the arguments of a call, how many more values may come). A text that is no JSON object stays as it is: a call
    that was cut."""
    data = text.encode(errors="replace")
    size = measure(data, left, left)
    if size.values > left or size.long_number:
        raise BadField(where, f"{where} has too many values, or a number of too many digits; send less")
    try:
        values = msgspec.json.decode(data) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text, left - size.values
    if not isinstance(values, dict):
        return text, left - size.values
    check_depth(values, where)
    return values, left - size.values


def size_of(messages: Sequence[ChatMessage]) -> int:
    """How much work that is, in characters of arguments."""
    return sum(
        len(text)
        for message in messages
        for call in message.tool_calls or ()
        if isinstance(function := call.get("function"), dict) and isinstance(text := function.get("arguments"), str)
    )
