"""Reasoning: the text that a model writes between two marks before its answer.

Owns which marks a chat template speaks of, and the parser that splits reasoning from the rest. What follows it is read
by another parser. Knows no tokens and no API.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shoal.core.names import pick
from shoal.text.parts import Parsed, joined, parts_of

SPACE_HELD = 64  # characters of white space held back before the end of the reasoning


@dataclass(frozen=True)
class ReasoningMarks:
    """What stands before and after the reasoning."""

    opens: str
    closes: str
    sign: str = ""  # what a template with them contains; "": the closing one
    after: str = ""  # what a prompt ends with before them; "": anything


@dataclass(frozen=True)
class Thought:
    """The reasoning before one answer: free text between two marks. `begun`: the prompt ends inside it."""

    opens: str
    closes: str
    begun: bool


REASONING: Mapping[str, ReasoningMarks | None] = {
    "none": None,
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "harmony": ReasoningMarks(
        "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>analysis", "<|start|>assistant"
    ),  # read by tools/harmony.py
}


def reasoning_for(template: str | None, name: str = "auto") -> ReasoningMarks | None:
    """The marks called `name`; "auto": those that the chat template speaks of. None: the model does not reason.

    >>> reasoning_for("… <think>\\\\n\\\\n</think> …"), reasoning_for("{{ messages }}")
    (ReasoningMarks(opens='<think>', closes='</think>', sign='', after=''), None)
    """
    if name != "auto":
        return pick(REASONING, name, "reasoning format")
    for marks in REASONING.values():
        if marks is not None and template is not None and (marks.sign or marks.closes) in template:
            return marks
    return None


def thought_after(marks: ReasoningMarks | None, prompt_end: str) -> Thought | None:
    """The reasoning that may follow a prompt; None: none does, or the prompt has closed it.

    >>> thought_after(REASONING["think"], "assistant: <think>\\n")
    Thought(opens='<think>', closes='</think>', begun=True)
    >>> thought_after(REASONING["think"], "<think>\\n\\n</think>\\n\\n")
    """
    end = prompt_end.rstrip()
    if marks is None or end.endswith(marks.closes) or not end.endswith(marks.after):
        return None
    return Thought(marks.opens, marks.closes, end.endswith(marks.opens))


class Inner(Protocol):
    """A parser of the text after the reasoning."""

    def push(self, text: str) -> Parsed: ...

    def finish(self, text: str) -> Parsed: ...


class ReasoningParser:
    """Reads one sample. `shown`: False drops the reasoning."""

    def __init__(self, thought: Thought, make_inner: Callable[[], Inner], shown: bool = True) -> None:
        self._thought, self._make_inner, self._shown = thought, make_inner, shown
        self._inner = make_inner()
        self._read: Callable[[str], Parsed] = self._reasoning if thought.begun else self._start
        self._held = ""
        self._said = False  # some reasoning has been returned

    def push(self, text: str) -> Parsed:
        return self._read(text)

    def finish(self, text: str) -> Parsed:
        pieces = [self._read(text)]
        if self._read == self._reasoning:
            pieces.append(self._shown_reasoning(self._held.rstrip()))
            pieces.append(self._inner.finish(""))
        else:
            rest = self._held if self._read == self._start else ""
            pieces.append(self._inner.finish(rest))
        self._held = ""
        return joined(pieces)

    def parse(self, text: str) -> Parsed:
        fresh = ReasoningParser(self._thought, self._make_inner, self._shown)
        return joined([fresh.push(text), fresh.finish("")])

    # ---- what the next text is --------------------------------------------------------------------------------------

    def _start(self, text: str) -> Parsed:
        """Nothing is known yet: reasoning may be opened, after white space."""
        self._held += text
        begins, opens = self._held.lstrip(), self._thought.opens
        if begins.startswith(opens):
            self._held, self._read = "", self._reasoning
            return self._reasoning(begins[len(opens) :])
        if opens.startswith(begins) and len(self._held) <= SPACE_HELD:
            return ""
        self._read, held, self._held = self._answer, self._held, ""
        return self._answer(held)

    def _reasoning(self, text: str) -> Parsed:
        held, closes = self._held + text, self._thought.closes
        at = held.find(closes)
        if at >= 0:
            self._held, self._read = "", self._space
            return joined([self._shown_reasoning(held[:at].rstrip()), self._space(held[at + len(closes) :])])
        border = len(held) - next((n for n in range(len(closes) - 1, 0, -1) if held.endswith(closes[:n])), 0)
        words = len(held[:border].rstrip())
        if border - words <= SPACE_HELD:
            border = words
        self._held = held[border:]
        return self._shown_reasoning(held[:border])

    def _space(self, text: str) -> Parsed:
        """White space between the reasoning and the answer is dropped."""
        rest = text.lstrip()
        if not rest:
            return ""
        self._read = self._answer
        return self._answer(rest)

    def _answer(self, text: str) -> Parsed:
        return self._inner.push(text)

    def _shown_reasoning(self, text: str) -> Parsed:
        if not self._said:
            text = text.lstrip()
            self._said = bool(text)
        return parts_of("", reasoning=text if self._shown else "")
