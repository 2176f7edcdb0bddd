"""Stop regexes: where in a growing text one of several regexes has matched for the first time.

Owns the use of llguidance's regexes for that: they take constant time per byte, whatever the pattern and the text, so
that no user can make a front search for long. They have no look-around, no backreferences and no anchors. Knows no
tokens of a model.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from shoal.errors import BadParameter
from shoal.text.matcher import shortened

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

ANYTHING = "(?:.|\n)*"
FUEL = 20_000  # work units of llguidance for the first states and for each step: at most a few milliseconds
MAX_STATES = 4_000  # of one regex, at 1 to 2 kB each


class RegexStops:
    """Takes the text of one sample, piece by piece.

    >>> stops = RegexStops(["[0-9]{2}", "END"])
    >>> stops.feed("one 1, two"), stops.feed(" 12 or EN"), stops.matched
    (None, 3, '[0-9]{2}')
    """

    __slots__ = ("_matchers", "matched")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._matchers = [(pattern, prepare_regex(pattern).deep_copy()) for pattern in patterns]
        self.matched: str | None = None

    def feed(self, text: str) -> int | None:
        """How many characters of this text it took to match; None: nothing has matched yet."""
        if not self._matchers:
            return None
        for place, character in enumerate(text):
            raw = list(character.encode(errors="replace"))
            for pattern, matcher in self._matchers:
                if not matcher.consume_tokens(raw) or matcher.is_error():
                    raise BadParameter(
                        f"stop_regex {pattern[:80]!r} is too complex to follow in this text "
                        f"({shortened(matcher.get_error())}); make it simpler"
                    )
                if matcher.is_accepting():
                    self.matched = pattern
                    return place + 1
        return None


@lru_cache(maxsize=64)  # the samples of a request have the same ones
def prepare_regex(pattern: str) -> "LLMatcher":
    """The regex, compiled for a search; raises BadParameter for one that cannot be used. May take milliseconds."""
    alone = _compiled(pattern, pattern)  # else "a)(b" would become something else below
    if alone.is_accepting():
        raise BadParameter(f"stop_regex {pattern[:80]!r} matches an empty text; make it match at least one character")
    return _compiled(f"{ANYTHING}(?:{pattern})", pattern)


def _compiled(regex: str, pattern: str) -> "LLMatcher":
    vocabulary, limits = _bytes()
    from llguidance import LLMatcher

    try:
        made = LLMatcher(vocabulary, LLMatcher.grammar_from_regex(regex), limits=limits, log_level=0)
        why = made.get_error() if made.is_error() else ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside llguidance is not an Exception
        why = str(error) or "it cannot be read"
    if why:
        raise BadParameter(
            f"stop_regex {pattern[:80]!r} cannot be used: {shortened(why)}; write it without look-around, "
            "backreferences and anchors, or shorter"
        )
    return made


@cache
def _bytes() -> "tuple[LLTokenizer, LLParserLimits]":
    """A vocabulary whose tokens are single bytes, and limits."""
    try:
        from llguidance import LLParserLimits, LLTokenizer
    except ImportError as error:
        raise BadParameter("stop_regex needs the llguidance package; pip install 'shoal[server]'") from error
    limits = LLParserLimits(
        initial_lexer_fuel=FUEL, step_lexer_fuel=FUEL, max_lexer_states=MAX_STATES, verbose_errors=False
    )
    return LLTokenizer("byte"), limits
