"""What an answer consists of: the grammar that constrains it, and the parser that splits it into parts.

Owns how `response_format`, `structured_outputs`, tools and reasoning come together. Compiles nothing. Knows no HTTP
beyond its errors.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.job import GrammarSpec
from shoal.errors import BadGrammar
from shoal.output.parser import Parser, PlainParser
from shoal.server.bodies import GenerationBody
from shoal.server.errors import BadField
from shoal.server.rules import grammar_of
from shoal.server.tool_choice import NO_TOOLS, ToolRequest
from shoal.text.grammar import check_text, source_of
from shoal.text.tokenizer import Tokenizer
from shoal.text.tools.compose import composed
from shoal.text.tools.formats import ToolFormat


@dataclass(frozen=True)
class AnswerForm:
    """How an answer is constrained and read."""

    grammar: GrammarSpec | None = None
    param: str = ""  # the field that the grammar comes from
    make_parser: Callable[[], Parser] = PlainParser
    shows_special: bool = False  # the parser needs the special tokens in the text
    tools: ToolRequest = NO_TOOLS


def form_of(body: GenerationBody, tools: ToolRequest, format: ToolFormat, tokenizer: Tokenizer | None) -> AnswerForm:
    """May take some milliseconds with many tools: called in a thread where the body is large."""
    spec, param = grammar_of(body)
    use = tools.use
    if use is None or tokenizer is None:
        return AnswerForm(spec, param, tools=tools)
    try:
        if spec is not None:
            check_text(spec)
        answer = None if spec is None else source_of(spec)
    except BadGrammar as error:
        raise BadField(param, str(error)) from error
    what = "functions" if tools.legacy else "tools"
    special = tokenizer.pieces.special_ids
    try:
        grammar = composed(tokenizer.marks, special, use=use, format=format, answer=answer)
    except BadGrammar as error:
        raise BadField(what, str(error)) from error
    return AnswerForm(
        grammar,
        what,
        lambda: format.reader(use),
        shows_special=any(id in special and mark in format.texts for mark, id in tokenizer.marks.items()),
        tools=tools,
    )
