"""GBNF grammars follow the same texts after their translation to Lark, and errors name the line."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from shoal.core.job import GrammarSpec
from shoal.errors import BadGrammar
from shoal.text.gbnf import is_gbnf, lark_of
from shoal.text.grammar import Grammars
from tests.text import tiny

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
# a comment with "quotes" and ::=
ws ::= | " " | "\n" [ \t]{0,20}
"""


def follows(grammar: str, text: str) -> bool:
    """Whether the whole text fits; byte by byte, so no vocabulary hides anything."""
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(lark_of(grammar)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "fits", "others"),
    [
        (JSON, ['{"a": [1, true, "x\\n\u00e9 \\u00e9"], "b": -1.5e10}', "{}"], ['{"a": tru}', "[1]", '{"a": 1'[:-1]]),
        ('root ::= "a" "b" | "ab" "c"', ["ab", "abc"], ["a", "abcc"]),  # a lexer would read ab as one
        ('root ::= x\nx ::= "a" x? "b" | "ab" "c"', ["ab", "aabb", "abc", "aabcb"], ["aab", "abab"]),
        ('root ::= [a-z]* "end"', ["end", "endend", "sendend"], ["en", "End"]),
        ('root ::= w | w "," root\nw ::= [a-z]+ | "if" "x"', ["ifx,a", "b"], ["if,", "1"]),
        (
            r'root ::= "\u00e9" [\u4e00-\u9fff]{2,3} [\]\[^-]?',
            ["\u00e9\u65e5\u672c", "\u00e9\u65e5\u672c]"],
            ["\u65e5"],
        ),
        ('root ::= [^a-c\\n/-] . ("x"{2} | "y"{1,})', ["d\nxx", "dayyy"], ["axxx", "/axx", "dax"]),
        ('root::="a"|\n  "b"\nother ::= "unused"', ["a", "b"], ["c"]),
        ('root ::= ""', [""], ["a"]),
    ],
)
def test_the_same_texts_fit(grammar: str, fits: list[str], others: list[str]) -> None:
    assert is_gbnf(grammar)
    for text in fits:
        assert follows(grammar, text), text
    for text in others:
        assert not follows(grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "line", "words"),
    [
        ('root ::= x\nx ::= "a', 2, "ends with a quote"),
        ("\n\nroot ::= y", 3, "there is no rule 'y'"),
        ('root ::= ("a"\n', 1, "not closed"),
        ('root ::= "a" )', 1, "expected a rule"),
        ("root ::= *", 1, "repeats nothing"),
        ('root ::= "a"\nroot ::= "b"', 2, "defined twice, first on line 1"),
        ("root ::= [z-a]", 1, "is empty"),
        ("root ::= []", 1, "no characters"),
        (r'root ::= "\q"', 1, "no character"),
        (r'root ::= "\ud800"', 1, "no character"),
        ('root ::= "a"{5,2}', 1, "before it begins"),
        ('root ::= "a"{1,20000}', 1, "more than 10000"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, 1, "nested"),
        ('root ::= "a" @', 1, "cannot be read"),
    ],
)
def test_errors_name_the_line(grammar: str, line: int, words: str) -> None:
    with pytest.raises(BadGrammar, match=rf"line {line}: .*{words}"):
        lark_of(grammar)


def test_a_root_is_needed() -> None:
    with pytest.raises(BadGrammar, match="no rule 'root'"):
        lark_of('x ::= "a"')


def test_grammars_takes_both_kinds() -> None:
    tokenizer = tiny.byte_level()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [])
    for text in ('root ::= "a" root?', 'start: "a" start?'):
        matcher = grammars.make(GrammarSpec("grammar", text))
        ids = tokenizer.encode("aa", add_special=False)
        assert all(map(matcher.accept, ids)), matcher.error
        assert not matcher.accept(tokenizer.encode("b", add_special=False)[0])
    with pytest.raises(BadGrammar, match="GBNF grammar cannot be read, line 1"):
        grammars.check(GrammarSpec("grammar", "root ::= nothing"))
