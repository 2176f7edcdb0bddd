"""The grammar of a whole answer: a thought that is free, then the answer or calls of the request's tools.

Owns how these are put together, as llguidance's list of grammars. Knows no requests and no tokens beyond marks.
"""

import json
from collections.abc import Collection, Mapping

from shoal.core.job import GrammarSpec
from shoal.text.reasoning import Thought
from shoal.text.tools.calls import ToolUse
from shoal.text.tools.formats import ToolFormat
from shoal.text.tools.harmony import Harmony
from shoal.text.tools.lark import LarkRules, one_of

ANSWER = "answer"  # the name of the grammar that the request itself brought
SPACE = r"/\n{0,2}/"  # between a thought and what follows it


def composed(
    marks: Mapping[str, int],
    special: Collection[int],
    *,
    use: ToolUse | None = None,
    format: ToolFormat | None = None,
    answer: str | None = None,
    thought: Thought | None = None,
) -> GrammarSpec:
    """The grammar of an answer. `answer`: what its text is held to, in llguidance's own form; None: nothing.

    `marks`: text → id of the tokens that are never matched as text; those in `special` do not occur in free text, nor
    do those that tool calls and reasoning consist of.
    """
    own = (format.texts if format else "") + (thought.opens + thought.closes if thought else "")
    rules = LarkRules(marks, [id for mark, id in marks.items() if id not in special and mark not in own])
    if isinstance(format, Harmony):
        start, thought = format.whole(rules, use, f"@{ANSWER}" if answer is not None else None), None
    elif use is None or format is None:
        start = rules.text() if answer is None else f"@{ANSWER}"
    elif use.required:
        start = format.rules(rules, use)
    elif answer is None:
        start = format.rules_after_text(rules, use)
    else:
        start = one_of([f"@{ANSWER}", format.rules(rules, use)])
    is_free = answer is None and not (use and use.required)
    if thought is not None:
        start = after_thought(rules, thought, start, is_free)
    grammars: list[Mapping[str, object]] = [{"name": "main", "lark_grammar": rules.write(start)}]
    if answer is not None and not (use and use.required):
        grammars += renamed(answer)
    return GrammarSpec("composed", json.dumps({"grammars": grammars}, ensure_ascii=False))


def after_thought(rules: LarkRules, thought: Thought, start: str, is_free: bool) -> str:
    """The same after a thought: one that has begun must end, another may be left out."""
    rest = start if is_free else f"{SPACE} {start}"
    if thought.begun:
        return f"{rules.text_until(thought.closes)} {rest}"
    if is_free and thought.opens not in rules.marks:
        return start  # free text holds it already
    return f"({rules.literal(thought.opens)} {rules.text_until(thought.closes)})? {rest}"


def renamed(answer: str) -> list[Mapping[str, object]]:
    """The grammars of an answer, the first under its new name."""
    if not answer.startswith('{"grammars"'):
        return [{"name": ANSWER, "lark_grammar": answer}]
    first, *others = json.loads(answer)["grammars"]
    return [{**first, "name": ANSWER}, *others]
