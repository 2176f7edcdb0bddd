"""Harmony, the format of gpt-oss: an answer is a series of messages, each on a channel.

Owns that format: the grammar of a whole answer, its reader, and the messages that its chat template expects. The
reasoning is on the channel analysis, a call of a function on commentary, the answer on final. A call ends the answer.

    <|channel|>analysis<|message|>Look it up.<|end|>                       ──► reasoning
    <|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>   ──► content
    <|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>Noon.<|return|>           ──► content

Knows no tokens: <|call|> and <|return|> end a sample, as the model's configuration says.
"""

import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shoal.text.parts import Parsed, ToolCall, joined, parts_of
from shoal.text.tools.calls import ToolUse
from shoal.text.tools.lark import LarkRules, one_of
from shoal.text.tools.reading import HELD_SPACE, MOST_HEAD, JsonArguments, partial_end

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
PROMPT_END = f"{START}assistant"  # what every prompt ends with
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FLEXIBLE = {"whitespace_pattern": r"[\x20\x0A]{1,20}"}  # the model writes JSON with and without spaces
RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


class Harmony:
    """The format."""

    name = "harmony"
    in_template = True
    texts = "".join((START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS))

    def rules(self, rules: LarkRules, use: ToolUse) -> str:
        return self.whole(rules, use, None)

    def rules_after_text(self, rules: LarkRules, use: ToolUse) -> str:
        return self.whole(rules, use, None)

    def reader(self, use: ToolUse) -> "HarmonyReader":
        return HarmonyReader([tool.name for tool in use.tools])

    def whole(self, rules: LarkRules, use: ToolUse | None, answer: str | None) -> str:
        """The items of a whole answer: reasoning, where no call is required a remark, then the end; the first two may
        be left out. `answer`: the items that the text on the final channel is held to; None: it is free."""
        again = rules.literal(PROMPT_END)
        analysis = f"{rules.literal(ANALYSIS)} {rules.text_until(ENDS[0])} {again}"
        remark = f"{rules.literal(f'{CHANNEL}commentary{MESSAGE}')} {rules.text_until(ENDS[0])} {again}"
        kind = f"({one_of(rules.literal(text) for text in (f' {CONSTRAIN}json', f'{CONSTRAIN}json', ' json'))})?"
        message = rules.literal(MESSAGE)
        ends: list[str] = []
        if use is None or not use.required:
            ends.append(f"{rules.literal(f'{CHANNEL}final')} {kind} {message} {answer or rules.text()}")
        for tool in use.tools if use else ():
            name, arguments = f"to=functions.{tool.name}", rules.json(tool.parameters, FLEXIBLE)
            heads = (f"{CHANNEL}commentary {name}", f" {name}{CHANNEL}commentary")
            ends += [f"{rules.literal(head)} {kind} {message} {arguments}" for head in heads]
        return f"({analysis})? {one_of(ends)}" if use and use.required else f"({analysis})? ({remark})? {one_of(ends)}"


class HarmonyReader:
    """Reads one sample. `shown`: False drops the reasoning. Text outside of any message is content."""

    def __init__(self, names: Collection[str] = (), shown: bool = True) -> None:
        self._names, self._shown = frozenset(names), shown
        self._held = ""  # text that is not understood yet
        self._in_head = True
        self._kind = ""  # of the message that is open: reasoning, content or call
        self._calls = 0
        self._arguments: JsonArguments | None = None  # of an open call; None: they are complete
        self._begun = False  # something of the open message has been returned
        self._said = {"content": False, "reasoning": False}
        self._gap = ""  # between the messages of a kind

    def push(self, text: str) -> Parsed:
        self._held += text
        found: list[Parsed] = []
        while True:
            before = self._held, self._in_head
            found.append(self._head() if self._in_head else self._body())
            if (self._held, self._in_head) == before or not self._held:
                return joined(found) if len(found) > 1 else found[0]

    def finish(self, text: str) -> Parsed:
        last, held, self._held = self.push(text), self._held, ""
        if self._in_head:
            return joined([last, "" if "<|" in held or self._any else held])
        return joined([last, self._piece(held, ends=True)])

    def parse(self, text: str) -> Parsed:
        fresh = HarmonyReader(self._names, self._shown)
        return joined([fresh.push(text), fresh.finish("")])

    @property
    def _any(self) -> bool:
        """A message has been read."""
        return bool(self._kind)

    # ---- states -----------------------------------------------------------------------------------------------------

    def _head(self) -> Parsed:
        at = self._held.find(MESSAGE)
        if at < 0:
            if len(self._held) <= MOST_HEAD:
                return ""
            self._open("content")  # it is none
            return ""
        head, self._held = self._held[:at], self._held[at + len(MESSAGE) :]
        called = RECIPIENT.search(head)
        if called and called[1] in self._names:
            self._open("call")
            self._calls, self._arguments = self._calls + 1, JsonArguments()
            return parts_of("", [ToolCall(self._calls - 1, "", f"call_{secrets.token_hex(12)}", called[1])])
        channel = head.partition(CHANNEL)[2].split()
        self._open("reasoning" if channel[:1] == ["analysis"] else "content")
        return ""

    def _open(self, kind: str) -> None:
        self._in_head, self._begun, self._kind = False, False, kind
        self._gap = ("\n" if kind == "reasoning" else "\n\n") if self._said.get(kind) else ""

    def _body(self) -> Parsed:
        held = self._held
        if self._arguments is not None:  # in which the text of an end may stand
            json, end = self._arguments.feed(held)
            self._held = "" if end is None else held[end:]
            self._arguments = None if end is not None else self._arguments
            return parts_of("", [ToolCall(self._calls - 1, json)] if json else [])
        found = [(at, end) for end in ENDS if (at := held.find(end)) >= 0]
        if not found:
            border = len(held) - max(partial_end(held, end) for end in ENDS)
            words = len(held[:border].rstrip())
            if self._kind == "reasoning" and border - words <= HELD_SPACE:
                border = words
            self._held = held[border:]
            return self._piece(held[:border])
        at, mark = min(found)
        self._held, self._in_head = held[at + len(mark) :], True
        return self._piece(held[:at], ends=True)

    def _piece(self, text: str, ends: bool = False) -> Parsed:
        """What a message adds; white space around the reasoning is dropped."""
        if self._kind == "reasoning":
            text = text if self._begun else text.lstrip()
            text = text.rstrip() if ends else text
        if not text or self._kind == "call":
            return ""
        self._begun = True
        self._said[self._kind] = True
        text, self._gap = self._gap + text, ""
        if self._kind == "reasoning":
            return parts_of("", reasoning=text) if self._shown else ""
        return text


def channel_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As the template expects them: reasoning under the name `thinking`, and one call in a message, with its result
    after it.

    >>> channel_messages([{"role": "assistant", "content": "Noon.", "reasoning_content": "Well"}])
    [{'role': 'assistant', 'content': 'Noon.', 'thinking': 'Well'}]
    """
    found: list[dict[str, Any]] = []
    results = {one.get("tool_call_id"): one for one in messages if one["role"] == "tool" and one.get("tool_call_id")}
    placed: set[int] = set()
    for message in messages:
        if id(message) in placed:
            continue
        own = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
        thinking, calls = message.get("reasoning_content"), message.get("tool_calls") or []
        if not calls:
            found.append({**own, "thinking": thinking} if thinking else own)
            continue
        content = own.pop("content", None)
        texts = [text for text in (thinking, content if isinstance(content, str) else text_of(content)) if text]
        for number, call in enumerate(calls):
            more = {"thinking": "\n".join(texts)} if texts and not number else {}
            found.append({**own, "content": "", **more, "tool_calls": [call]})
            result = results.get(call.get("id")) if isinstance(call, Mapping) else None
            if result is not None and id(result) not in placed and len(calls) > 1:
                placed.add(id(result))
                found.append(dict(result))
    return found


def text_of(parts: Any) -> str:
    return "\n".join(str(part.get("text", "")) for part in parts or ())
