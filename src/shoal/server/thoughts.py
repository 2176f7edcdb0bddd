"""Logprobs as clients see them: what single tokens are called, and OpenAI's two shapes.

Knows a tokenizer's pieces and core's Logprobs. Does not know requests or streams.
"""

import math
from collections.abc import Sequence

from shoal.core.request import Logprobs
from shoal.server.answers import ChatLogprobs, LegacyLogprobs, TokenLogprob, TopLogprob
from shoal.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no infinity; OpenAI says this for "impossible"


class Words:
    """What single token ids are called; without a tokenizer they are called by their number."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes | None] = {}

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes a token stands for wherever it stands; None without a tokenizer."""
        if token not in self._bytes:
            self._bytes[token] = self._look_up(token)
        return self._bytes[token]

    def _look_up(self, token: int) -> bytes | None:
        if self._tokenizer is None:
            return None
        pieces = self._tokenizer.pieces
        if pieces.is_byte_level:
            return pieces.bytes_of(token)
        name = self._tokenizer.backend.id_to_token(token) or ""
        if pieces.is_byte_token(token):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode()  # how sentencepiece writes a space

    def text_of(self, token: int) -> str:
        """For chat: half a character is U+FFFD, and `bytes` tells the rest."""
        raw = self.bytes_of(token)
        return f"token_id:{token}" if raw is None else raw.decode(errors="replace")

    def name_of(self, token: int) -> str:
        """For completions, where names are keys and there are no bytes: half a character is spelt out."""
        raw = self.bytes_of(token)
        if raw is None:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def length_of(self, token: int, skip_special: bool) -> int:
        """How many characters of the text begin in it; the second half of one begins none."""
        raw = self.bytes_of(token)
        if raw is None or (self._tokenizer and self._tokenizer.pieces.is_silent(token, skip_special)):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in raw)  # the bytes that begin a character in UTF-8


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # NaN too


def legacy(
    words: Words,
    tokens: Sequence[int],
    thoughts: Sequence[Logprobs | None],
    top: int,
    offset: int = 0,
    skip_special: bool = True,
) -> LegacyLogprobs:
    """In the manner of /v1/completions; `offset` is where in the answer's text the first token begins."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += words.length_of(token, skip_special)
    tops: list[dict[str, float] | None] | None = None
    if top:
        tops = [None if thought is None else _top(words, thought, top) for thought in thoughts]
    logprobs = [None if thought is None else finite(thought.logprob) for thought in thoughts]
    return LegacyLogprobs([words.name_of(token) for token in tokens], logprobs, tops, offsets)


def joined(first: LegacyLogprobs, then: LegacyLogprobs) -> LegacyLogprobs:
    return LegacyLogprobs(
        first.tokens + then.tokens,
        first.token_logprobs + then.token_logprobs,
        None if first.top_logprobs is None or then.top_logprobs is None else first.top_logprobs + then.top_logprobs,
        first.text_offset + then.text_offset,
    )


def _top(words: Words, thought: Logprobs, top: int) -> dict[str, float]:
    """The likeliest, and the chosen one even if it is not among them."""
    found: dict[str, float] = {}
    for token, logprob in zip(thought.top_tokens[:top], thought.top_logprobs[:top], strict=True):
        found.setdefault(words.name_of(token), finite(logprob))
    found.setdefault(words.name_of(thought.token), finite(thought.logprob))
    return found


def chat(words: Words, thoughts: Sequence[Logprobs], top: int) -> ChatLogprobs:
    return ChatLogprobs([_token(words, thought, top) for thought in thoughts])


def _token(words: Words, thought: Logprobs, top: int) -> TokenLogprob:
    others = [
        TopLogprob(words.text_of(token), finite(logprob), _list(words.bytes_of(token)))
        for token, logprob in zip(thought.top_tokens[:top], thought.top_logprobs[:top], strict=True)
    ]
    raw = _list(words.bytes_of(thought.token))
    return TokenLogprob(words.text_of(thought.token), finite(thought.logprob), raw, others)


def _list(raw: bytes | None) -> list[int] | None:
    return None if raw is None else list(raw)


def mean(thoughts: Sequence[Logprobs]) -> float:
    """How likely an answer was per token; nothing said is the least likely."""
    return sum(finite(thought.logprob) for thought in thoughts) / len(thoughts) if thoughts else -math.inf
