"""Tools in the prompt of a model whose chat template knows none: written as text into the messages.

Owns that text. What the model is asked to write is the generic format of formats.py. Knows no template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

INTRODUCTION = (
    "You may call functions to help the user. Their signatures, one JSON object per line:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "To call a function, write its name and its arguments as JSON between these tags:\n"
    '<tool_call>\n{{"name": "<name>", "arguments": {{<arguments>}}}}\n</tool_call>'
)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools, earlier calls and their results as text.

    >>> with_tools([{"role": "tool", "content": "18"}, {"role": "tool", "content": "19"}], [])
    [{'role': 'user', 'content': '<tool_response>\\n18\\n</tool_response>\\n<tool_response>\\n19\\n</tool_response>'}]
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
            if found and found[-1].get("is_result"):
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result, "is_result": True})
        elif message.get("tool_calls"):
            calls = "\n".join(written(call["function"]) for call in message["tool_calls"] if "function" in call)
            before = text_of(message.get("content"))
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            found.append({**kept, "content": f"{before}\n{calls}" if before else calls})
        else:
            found.append(dict(message))
    for message in found:
        message.pop("is_result", None)
    return introduced(found, tools) if tools else found


def introduced(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """… after the system's message, or in one."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = INTRODUCTION.format(tools=lines)
    if messages and messages[0]["role"] in ("system", "developer"):
        own = text_of(messages[0]["content"])
        return [{**messages[0], "content": f"{own}\n\n{text}" if own else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def written(function: Mapping[str, Any]) -> str:
    """A call as the model would write it."""
    call = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def text_of(content: Any) -> str:
    """The text of a message's content: a text, text parts, or nothing."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content or ""
