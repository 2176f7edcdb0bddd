"""The parser stage: plain text passes through; another format has a place to be taken apart."""

from shoal.core.job import Job
from shoal.core.params import SamplingParams
from shoal.output.parser import Parsed, ParsedParts, Parser, PlainParser, content_of
from shoal.output.sample import Sample
from tests.text import tiny

MARK = "</think>"


class Thinking:
    """Text before the mark is reasoning. Holds back what may be the beginning of the mark."""

    def __init__(self) -> None:
        self.held: str | None = ""

    def push(self, text: str) -> Parsed:
        if self.held is None:
            return text
        self.held += text
        before, found, after = self.held.partition(MARK)
        if found:
            self.held = None
            return ParsedParts(after, before)
        keep = next((n for n in range(len(MARK) - 1, 0, -1) if before.endswith(MARK[:n])), 0)
        self.held = before[len(before) - keep :]
        return ParsedParts("", before[: len(before) - keep])

    def finish(self, text: str) -> Parsed:
        parsed = self.push(text)
        return parsed if isinstance(parsed, str) else ParsedParts(parsed.content, parsed.reasoning + (self.held or ""))

    def parse(self, text: str) -> Parsed:
        before, _, after = text.rpartition(MARK)
        return ParsedParts(after, before)


def test_plain_text_is_content_as_it_comes() -> None:
    parser: Parser = PlainParser()
    assert [parser.push("a"), parser.push(""), parser.finish("b"), parser.parse("ab")] == ["a", "", "b", "ab"]


def test_parts_without_anything_are_false_like_empty_text() -> None:
    assert not ParsedParts()
    assert ParsedParts(reasoning="x")
    assert content_of(ParsedParts("c", "r")) == "c"


def test_a_sample_hands_its_text_to_its_parser() -> None:
    tokenizer = tiny.byte_level()
    job = Job(id="j", prompt=[5], params=SamplingParams(), seed=0)
    sample = Sample(job, 0, 0, tokenizer, Thinking())
    parts = [sample.parser.push(sample.take(token, None)) for token in tokenizer.encode("so a b</think>fish")]
    content = "".join(content_of(one) for one in parts)
    reasoning = "".join(one.reasoning for one in parts if isinstance(one, ParsedParts))
    assert (content, reasoning) == ("fish", "so a b")
    assert sample.parsed == ParsedParts("fish", "so a b")
