"""Calls whose arguments are JSON: Hermes and Qwen, Llama 3, Mistral, and models without a format of their own.

Owns the shape that these formats share:

    opens  begin get_weather middle {"city": "Paris"} end   again get_time middle {} end   last

Knows no tokens: which of these texts are special tokens is up to lark.py.
"""

from dataclasses import dataclass

from shoal.text.tools.calls import Tool, ToolUse
from shoal.text.tools.lark import ANY, LarkRules, one_of, pattern
from shoal.text.tools.reading import CallReader, JsonArguments
from shoal.text.tools.schema import SEPARATORS


@dataclass(frozen=True)
class JsonFormat:
    """One format. A call is opened by a text anywhere, or (`anchored`) by one of several at the answer's very start."""

    name: str
    opens: str = ""
    begin: str = ""  # between that and the tool's name
    anchored: tuple[str, ...] = ()  # all that comes before the name
    middle: str = ""  # between the name and the arguments
    end: str = ""
    again: str | None = None  # before the name of the next call; None: a model of this kind makes one at a time
    last: str = ""  # after the last call
    in_template: bool = True
    short_ids: bool = False  # ids of nine letters and digits, which Mistral's templates insist on

    @property
    def texts(self) -> str:
        return "".join((self.opens, self.begin, *self.anchored, self.middle, self.end, self.again or "", self.last))

    def rules(self, rules: LarkRules, use: ToolUse) -> str:
        begin = self.anchored[0] if self.anchored else self.opens + self.begin
        return f"{rules.literal(begin)} {self._calls(rules, use)}"

    def rules_after_text(self, rules: LarkRules, use: ToolUse) -> str:
        if not self.anchored:
            opened = rules.text_until(self.opens)
            begin = f" {rules.literal(self.begin)}" if self.begin else ""
            return one_of([rules.text(), f"{opened}{begin} {self._calls(rules, use)}"])
        # one literal for all up to the arguments: while it is incomplete, the text may still become free text
        heads = {head: tool for head, tool in self.heads(use).items() if not self._has_mark(rules, head)}
        marked = {head: tool for head, tool in self.heads(use).items() if self._has_mark(rules, head)}
        for head in heads:
            rules.forbid(pattern(head) + ANY)
        arguments = {tool.name: rules.json(tool.parameters, SEPARATORS) for tool in use.tools}
        end = f" {rules.literal(self.end + self.last)}"
        calls = [f"{rules.literal(head)} {arguments[tool.name]}{end}" for head, tool in {**heads, **marked}.items()]
        return one_of([rules.text(), *calls])

    def heads(self, use: ToolUse) -> dict[str, Tool]:
        """All that may open a call at the start of an answer, up to its arguments."""
        return {f"{head}{tool.name}{self.middle}": tool for head in self.anchored for tool in use.tools}

    def reader(self, use: ToolUse) -> CallReader:
        again = self.again if use.parallel else None
        return CallReader(
            opens=self.opens,
            heads={head: tool.name for head, tool in self.heads(use).items()},
            begin=self.begin,
            middle=self.middle,
            again=None if again is None else self.end + again,
            arguments=lambda name: JsonArguments(),
            short_ids=self.short_ids,
        )

    def _calls(self, rules: LarkRules, use: ToolUse) -> str:
        """From the first call's name to the end."""
        named = [
            f"{rules.literal(tool.name + self.middle)} {rules.json(tool.parameters, SEPARATORS)}" for tool in use.tools
        ]
        call = rules.rule(one_of(named))
        if use.parallel and self.again is not None:
            call += f" ({rules.literal(self.end + self.again)} {call})*"
        closing = self.end + self.last
        return f"{call} {rules.literal(closing)}" if closing else call

    @staticmethod
    def _has_mark(rules: LarkRules, text: str) -> bool:
        return any(text.startswith(mark) for mark in rules.marks)
