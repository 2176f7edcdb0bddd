"""What an answer consists of: the grammar that constrains it, and the parser that splits it into parts.

Owns how `response_format`, `structured_outputs`, tools and reasoning come together. Compiles nothing. Knows no HTTP
beyond its errors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.core.job import GrammarSpec, ThinkingLimit
from shoal.errors import BadGrammar
from shoal.output.parser import Parser, PlainParser
from shoal.server.bodies import GenerationBody
from shoal.server.constraint import grammar_of
from shoal.server.errors import BadField
from shoal.server.tool_choice import NO_TOOLS, ToolRequest
from shoal.text.grammar import check_text, source_of
from shoal.text.reasoning import ReasoningParser, Thought
from shoal.text.structural import structural
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.calls import ToolUse
from shoal.text.tools.compose import composed
from shoal.text.tools.formats import ToolFormat
from shoal.text.tools.harmony import Harmony, HarmonyReader


@dataclass(frozen=True)
class Reasoning:
    """What a chat says about the reasoning before its answer. `thought` is None where there is none."""

    thought: Thought | None = None
    shown: bool = True
    budget: int | None = None  # most tokens of it


NO_REASONING = Reasoning()


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is constrained and read."""

    grammar: GrammarSpec | None = None
    param: str = ""  # the field that the grammar comes from
    make_parser: Callable[[], Parser] = PlainParser
    shows_special: bool = False  # the parser needs the special tokens in the text
    tools: ToolRequest = NO_TOOLS
    ignored: tuple[str, ...] = ()  # fields without effect


def form_of(
    body: GenerationBody,
    tools: ToolRequest,
    format: ToolFormat,
    tokenizer: Tokenizer | None,
    reasoning: Reasoning = NO_REASONING,
) -> AnswerForm:
    """May take some milliseconds with many tools: called in a thread where the body is large."""
    spec, param = grammar_of(body)
    if tokenizer is None:
        return AnswerForm(spec, param, tools=tools)
    if spec is not None and spec.kind == "structural_tag":
        spec = tagged(spec, param, tokenizer)
    use, thought = tools.use, reasoning.thought
    limited = thought is not None and reasoning.budget is not None
    if use is not None:
        param = "functions" if tools.legacy else "tools"
    elif spec is None and limited:
        param = "thinking_token_budget"
    channels = isinstance(format, Harmony) and (use is not None or thought is not None)
    if use is not None or limited or (spec is not None and thought is not None):
        spec = compose(spec, param, tools, format, tokenizer, thought)
    if spec is not None and thought is not None and reasoning.budget is not None:
        limit = ThinkingLimit(reasoning.budget, thought.opens, thought.closes, thought.begun)
        spec = replace(spec, thinking=limit)
    texts = (format.texts if use or channels else "") + (thought.opens + thought.closes if thought else "")
    special = tokenizer.pieces.special_ids
    return AnswerForm(
        spec,
        param,
        channel_reader(use, reasoning) if channels else parser_maker(use, format, reasoning),
        shows_special=any(id in special and mark in texts for mark, id in tokenizer.marks.items()),
        tools=tools,
        ignored=() if limited or reasoning.budget is None else ("thinking_token_budget",),
    )


def tagged(spec: GrammarSpec, param: str, tokenizer: Tokenizer) -> GrammarSpec:
    """The grammar of a structural tag."""
    try:
        check_text(spec)
        return structural(spec.text, tokenizer.marks, tokenizer.pieces.special_ids)
    except BadGrammar as error:
        raise BadField(param, str(error)) from error


def compose(
    spec: GrammarSpec | None,
    param: str,
    tools: ToolRequest,
    format: ToolFormat,
    tokenizer: Tokenizer,
    thought: Thought | None,
) -> GrammarSpec:
    """The grammar of the whole answer; `spec` is that of its text."""
    try:
        if spec is not None:
            check_text(spec)
        answer = None if spec is None else source_of(spec)
        special = tokenizer.pieces.special_ids
        return composed(tokenizer.marks, special, use=tools.use, format=format, answer=answer, thought=thought)
    except BadGrammar as error:
        raise BadField(param, str(error)) from error


def channel_reader(use: ToolUse | None, reasoning: Reasoning) -> Callable[[], Parser]:
    names = [tool.name for tool in use.tools] if use else []
    return lambda: HarmonyReader(names, reasoning.shown)


def parser_maker(use: ToolUse | None, format: ToolFormat, reasoning: Reasoning) -> Callable[[], Parser]:
    thought, shown = reasoning.thought, reasoning.shown
    make: Callable[[], Parser] = PlainParser if use is None else lambda: format.reader(use)
    return make if thought is None else lambda: ReasoningParser(thought, make, shown)
