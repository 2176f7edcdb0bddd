"""The formats of tool calls that models were trained on, and which one a chat template speaks of.

Owns the table. A format is a class with three parts: the rules of its calls, a reader of its text, and whether the
template itself writes tools into the prompt. Knows no requests.
"""

import re
from collections.abc import Mapping
from typing import Protocol

from shoal.core.names import pick
from shoal.text.parts import Parsed
from shoal.text.tools.calls import ToolUse
from shoal.text.tools.harmony import Harmony
from shoal.text.tools.json_calls import JsonFormat
from shoal.text.tools.lark import LarkRules
from shoal.text.tools.pythonic import Pythonic
from shoal.text.tools.xml_calls import XmlCalls


class CallParser(Protocol):
    """Reads the text of one sample; output/parser.py has the same interface."""

    def push(self, text: str) -> Parsed: ...

    def finish(self, text: str) -> Parsed: ...

    def parse(self, text: str) -> Parsed: ...


class ToolFormat(Protocol):
    """How a model writes tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def in_template(self) -> bool:
        """Whether the chat template writes tools, calls and results. If not, prompt.py does."""

    @property
    def texts(self) -> str:
        """All fixed texts of a call, one after the other: a special token in them is no free text."""

    def rules(self, rules: LarkRules, use: ToolUse) -> str:
        """The items of a call or several, from the first character on."""

    def rules_after_text(self, rules: LarkRules, use: ToolUse) -> str:
        """Free text, or calls, or the one before the other."""

    def reader(self, use: ToolUse) -> CallParser: ...


HERMES = JsonFormat(
    "hermes",
    opens="<tool_call>",
    begin='\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    again='\n<tool_call>\n{"name": "',
)
LLAMA3 = JsonFormat(
    "llama3",
    anchored=('{"name": "', '{"type": "function", "name": "', '<|python_tag|>{"name": "'),
    middle='", "parameters": ',
    end="}",
)
MISTRAL = JsonFormat(
    "mistral",
    opens="[TOOL_CALLS]",
    begin='[{"name": "',
    middle='", "arguments": ',
    end="}",
    again=', {"name": "',
    last="]",
    short_ids=True,
)
MISTRAL_ARGS = JsonFormat(
    "mistral-args", opens="[TOOL_CALLS]", begin="", middle="[ARGS]", end="", again="[TOOL_CALLS]", short_ids=True
)
GENERIC = JsonFormat(
    "generic",
    opens=HERMES.opens,
    begin=HERMES.begin,
    middle=HERMES.middle,
    end=HERMES.end,
    again=HERMES.again,
    in_template=False,
)
FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (HERMES, XmlCalls(), LLAMA3, Pythonic(), MISTRAL, MISTRAL_ARGS, Harmony(), GENERIC)
}
# what a template contains → the format it speaks of; the first match counts
SIGNS: tuple[tuple[str, str], ...] = (
    (r"<\|channel\|>[\s\S]*<\|message\|>", "harmony"),
    (r"\[TOOL_CALLS\][\s\S]*\[ARGS\]", "mistral-args"),
    (r"\[TOOL_CALLS\]", "mistral"),
    (r"<\|python_start\|>|func_name1\(", "pythonic"),
    (r"<\|python_tag\|>|\"parameters\": dictionary", "llama3"),
    (r"<tool_call>[\s\S]*<function=[\s\S]*<parameter=", "qwen3-coder"),
    (r"<tool_call>(?![\s\S]*<(function|arg_key)[=>])", "hermes"),
)


def format_for(template: str | None, name: str = "auto") -> ToolFormat:
    """The format called `name`; "auto": the one that the chat template speaks of, or the generic one.

    >>> format_for("… <tool_call></tool_call> … {% if tools %}").name, format_for("{{ messages }}").name
    ('hermes', 'generic')
    """
    if name != "auto":
        return pick(FORMATS, name, "tool format")
    if template is not None and re.search(r"\btools\b", template):
        for sign, known in SIGNS:
            if re.search(sign, template):
                return FORMATS[known]
    return GENERIC
