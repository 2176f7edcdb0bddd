"""Incremental detokenizer: token ids in, the text that may be shown now out; finds stop strings on the way.

Owns the text that is held back: part of a character, and text that may still become a stop string. All returned pieces
together are the tokenizer's decoding of the whole output, cut at the first stop string. Knows no requests or streams.

tokenizers' own DecodeStream is not used: it fails on a run of byte tokens that turns invalid after part of it was
returned, decodes all pending bytes again at each token while they form no character, and cannot flush at the end.
"""

import codecs
from collections.abc import Sequence
from functools import lru_cache

from shoal.errors import BadParameter
from shoal.text.pieces import Pieces
from shoal.text.stop_regex import RegexStops
from shoal.text.tokenizer import Tokenizer

_CONTEXT = 4  # tokens kept as context, more than any known decoder looks back
_PROMPT_SCAN = 64  # how far back in the prompt to search for a token with text
_MAX_WAIT = 8  # most tokens of an incomplete character; none has more than four bytes


class Detokenizer:
    """Turns one request's output tokens into text, piece by piece.

    `prompt_ids` matter only where a tokenizer drops the space before its first word: after a prompt it is kept. Of
    several stop strings the first complete one counts; of two that are complete at once, the longer. The text of the
    first `min_tokens` tokens is not searched. A text that matches a stop regex is part of what is shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        stop_regex: Sequence[str] = (),
    ) -> None:
        self._regexes = RegexStops(stop_regex)
        self._min_tokens = min_tokens
        self._stream = _open_stream(tokenizer, prompt_ids, skip_special)
        self._stops = _StopFinder(stop)
        self._include_stop = include_stop
        self._shown: list[str] = []
        self._held = ""
        self._tokens = 0
        self.stopped: str | None = None
        self.stop_at: int | None = None

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token_id: int) -> str:
        """Add the next output token; returns the text that can be shown now, and nothing after a stop string."""
        if self.stopped is not None:
            return ""
        self._tokens += 1
        return self._show(self._stream.push(token_id, self._tokens))

    def finish(self) -> str:
        """No token follows; returns what was held back, with an incomplete character as U+FFFD."""
        if self.stopped is not None:
            return ""
        delta = self._show(self._stream.flush())
        if self.stopped is None and self._held:
            self._shown.append(self._held)
            delta, self._held = delta + self._held, ""
        return delta

    def _show(self, new: str) -> str:
        if not new:
            return ""
        if self._tokens <= self._min_tokens:
            self._shown.append(new)
            return new
        found, matched = self._stops.feed(new), self._regexes.feed(new)
        text = self._held + new
        if matched is not None and (found is None or matched < found[0]):
            self.stopped, self.stop_at = self._regexes.matched, self._stream.token_at(matched)
            border = len(self._held) + matched
        elif found is not None:
            end, stop = found
            self.stopped, self.stop_at = stop, self._stream.token_at(end)
            border = len(self._held) + end - (0 if self._include_stop else len(stop))
        else:
            border = len(text) - self._stops.held
        self._held = text[border:] if self.stopped is None else ""
        if border:
            self._shown.append(text[:border])
        return text[:border]


def _open_stream(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> "_ByteStream | _WindowStream":
    if tokenizer.pieces.is_byte_level:
        return _ByteStream(tokenizer.pieces, skip_special)
    return _WindowStream(tokenizer, prompt_ids, skip_special)


class _ByteStream:
    """Byte-level tokenizers: a token has the same bytes in every context, so no context is needed."""

    def __init__(self, pieces: Pieces, skip_special: bool) -> None:
        self._pieces = pieces
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._number = 0

    def push(self, token_id: int, number: int) -> str:
        self._number = number
        if self._pieces.is_silent(token_id, self._skip_special):
            return ""
        return self._decoder.decode(self._pieces.bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def token_at(self, end: int) -> int:
        return self._number


class _WindowStream:
    """Any other tokenizer: decode the waiting tokens after a few earlier ones, and keep the text that these add.

        context          waiting
        [▁Once ▁upon]    [▁a]           decode(both) − decode(context) = " a"

    A run of byte tokens is held until it ends: one invalid byte in it changes how all of them are decoded.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._pieces = tokenizer.pieces
        self._decode = tokenizer.decode
        self._skip_special = skip_special
        self._context: list[int] = self._last_with_text(prompt_ids)
        self._waiting: list[int] = []
        self._numbers: list[int] = []
        self._taken: tuple[list[int], list[int], list[int]] = ([], [], [])

    def _last_with_text(self, prompt_ids: Sequence[int]) -> list[int]:
        for token_id in reversed(prompt_ids[-_PROMPT_SCAN:]):
            if not self._pieces.is_silent(token_id, self._skip_special) and not self._pieces.is_byte_token(token_id):
                return [token_id]
        return []

    def push(self, token_id: int, number: int) -> str:
        if self._pieces.is_silent(token_id, self._skip_special):
            return ""
        self._waiting.append(token_id)
        self._numbers.append(number)
        if self._pieces.is_byte_token(token_id):
            return ""
        return self._take(final=False)

    def flush(self) -> str:
        return self._take(final=True) if self._waiting else ""

    def _take(self, final: bool) -> str:
        text = self._text(self._context, self._waiting)
        half = self._pieces.may_split_characters and text.endswith("\ufffd") and len(self._waiting) < _MAX_WAIT
        if half and not final:
            return ""
        self._taken = (self._context, self._waiting, self._numbers)
        self._context = (self._context + self._waiting)[-_CONTEXT:]
        self._waiting, self._numbers = [], []
        return text

    def _text(self, context: list[int], waiting: list[int]) -> str:
        before = len(self._decode(context, self._skip_special)) if context else 0
        return self._decode(context + waiting, self._skip_special)[before:]

    def token_at(self, end: int) -> int:
        """The number of the token that completed the first `end` characters of the last text taken."""
        context, waiting, numbers = self._taken
        wanted = self._text(context, waiting)[:end]
        for n in range(1, len(waiting)):
            if self._text(context, waiting[:n])[:end] == wanted:
                return numbers[n - 1]
        return numbers[-1]


class _StopFinder:
    """All stop strings at once, character by character (Knuth, Morris, Pratt): constant work per character."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise BadParameter(f"stop must be a list of non-empty strings, got {stops!r}")
        self._stops, self._tables = prepare_stops(tuple(stops))
        self._matched = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """(how many characters of `text` were needed, the stop string), or None."""
        if not self._stops:
            return None
        for position, character in enumerate(text):
            for i, stop in enumerate(self._stops):
                self._matched[i] = _advance(stop, self._tables[i], self._matched[i], character)
                if self._matched[i] == len(stop):
                    return position + 1, stop
        return None


def _advance(stop: str, fallbacks: Sequence[int], matched: int, character: str) -> int:
    while matched and stop[matched] != character:
        matched = fallbacks[matched - 1]
    return matched + 1 if stop[matched] == character else 0


@lru_cache(maxsize=32)  # the samples of a request have the same stop strings
def prepare_stops(stops: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """What searching for these needs: the strings, the longest first, and their tables. Of long ones it takes a while.

    Of two that end at the same character, the longer is found first.
    """
    ordered = tuple(sorted(set(stops), key=len, reverse=True))
    return ordered, tuple(map(_fallbacks, ordered))


def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    for i in range(1, len(stop)):
        table[i] = _advance(stop, table, table[i - 1], stop[i])
    return tuple(table)
