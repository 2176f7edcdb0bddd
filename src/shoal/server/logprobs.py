"""Logprobs as clients see them: how single tokens are written, and OpenAI's two shapes.

A whole answer's are written in pieces, each of them a few milliseconds of work; together they are the same bytes as the
structures declared here. Knows a tokenizer's pieces and core's Logprobs. Does not know requests or streams.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from shoal.core.request import Logprobs
from shoal.output.logprob_list import LogprobList
from shoal.text.tokenizer import Tokenizer

encode = msgspec.json.Encoder().encode
PIECE_ENTRIES = 1024  # logprobs; composing so many takes a few milliseconds
FLOOR = -9999.0  # JSON has no infinity; OpenAI sends this for "impossible"


class LegacyLogprobs(Struct):
    """Logprobs of each token, as /v1/completions shows them. The first prompt token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TopLogprob(Struct):
    """An alternative token. `bytes` are exact, also where a token is part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    """A sampled token, and the likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Logprobs of each token, as /v1/chat/completions shows them."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    """The logprob of a token of the prompt; the likeliest token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


# of each token of the prompt: itself and the likeliest, by their ids; the first token has none
PromptLogprobs = list[dict[str, PromptLogprob] | None] | None


class TokenNames:
    """How single tokens are written; without a tokenizer, by their ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes | None] = {}
        self._names: dict[int, str] = {}

    def written(self, as_ids: bool) -> "TokenNames":
        """These, or the same tokens as their ids."""
        return TokenIds(self._tokenizer) if as_ids else self

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes a token stands for wherever it stands; None without a tokenizer."""
        if token not in self._bytes:
            self._bytes[token] = self._find(token)
        return self._bytes[token]

    def _find(self, token: int) -> bytes | None:
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
        """For chat: part of a character is U+FFFD, and `bytes` has the exact bytes."""
        raw = self.bytes_of(token)
        return f"token_id:{token}" if raw is None else raw.decode(errors="replace")

    def name_of(self, token: int) -> str:
        """For completions, which have no `bytes` and use names as keys: part of a character is escaped."""
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._find_name(token)
        return name

    def _find_name(self, token: int) -> str:
        raw = self.bytes_of(token)
        if raw is None:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def length_of(self, token: int, skip_special: bool) -> int:
        """How many characters of the text begin in it; a token with only the rest of one begins none."""
        raw = self.bytes_of(token)
        if raw is None or (self._tokenizer and self._tokenizer.pieces.is_silent(token, skip_special)):
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in raw)  # the bytes that begin a character in UTF-8


class TokenIds(TokenNames):
    """Tokens are written by their ids, which tell all of them apart; their bytes and lengths stay."""

    def text_of(self, token: int) -> str:
        return f"token_id:{token}"

    def name_of(self, token: int) -> str:
        return f"token_id:{token}"


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # NaN too


def completion_logprobs(
    names: TokenNames,
    tokens: Sequence[int],
    known: Sequence[Logprobs | None],
    top: int,
    offset: int = 0,
    skip_special: bool = True,
) -> LegacyLogprobs:
    """As /v1/completions shows them; `offset` is where in the answer's text the first token begins."""
    tops = [None if one is None else _top(names, one, top) for one in known] if top else None
    logprobs = [None if one is None else finite(one.logprob) for one in known]
    texts = [names.name_of(token) for token in tokens]
    return LegacyLogprobs(texts, logprobs, tops, _offsets(names, tokens, offset, skip_special))


def _offsets(names: TokenNames, tokens: Sequence[int], offset: int, skip_special: bool) -> list[int]:
    """Where in the text each token begins."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += names.length_of(token, skip_special)
    return offsets


def _top(names: TokenNames, one: Logprobs, top: int) -> dict[str, float]:
    """The likeliest, and the chosen one even if it is not among them."""
    found: dict[str, float] = {}
    for token, logprob in zip(one.top_tokens[:top], one.top_logprobs[:top], strict=True):
        found.setdefault(names.name_of(token), finite(logprob))
    found.setdefault(names.name_of(one.token), finite(one.logprob))
    return found


def chat_logprobs(names: TokenNames, known: Sequence[Logprobs], top: int) -> ChatLogprobs:
    return ChatLogprobs([_token(names, one, top) for one in known])


def _token(names: TokenNames, one: Logprobs, top: int) -> TokenLogprob:
    others = [
        TopLogprob(names.text_of(token), finite(logprob), _list(names.bytes_of(token)))
        for token, logprob in zip(one.top_tokens[:top], one.top_logprobs[:top], strict=True)
    ]
    raw = _list(names.bytes_of(one.token))
    return TokenLogprob(names.text_of(one.token), finite(one.logprob), raw, others)


def _list(raw: bytes | None) -> list[int] | None:
    return None if raw is None else list(raw)


def mean_logprob(known: LogprobList) -> float:
    """The mean logprob per token, by which best_of ranks; an empty answer ranks last."""
    return sum(map(finite, known.values(0, len(known)))) / len(known) if known else -math.inf


# ---- whole answers, in pieces ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens that follow each other in an answer: an echoed prompt, whose first token has no logprobs, or a sample."""

    tokens: Sequence[int]
    known: LogprobList
    offset: int  # where in the answer's text the first one begins
    skipped: int = 0  # first tokens without logprobs

    def slice(self, begin: int, end: int) -> list[Logprobs | None]:
        missing = max(0, self.skipped - begin)
        return [None] * missing + self.known[max(0, begin - self.skipped) : end - self.skipped]

    def values(self, begin: int, end: int) -> list[float | None]:
        missing = max(0, self.skipped - begin)
        return [None] * missing + [*map(finite, self.known.values(max(0, begin - self.skipped), end - self.skipped))]


def completion_pieces(names: TokenNames, runs: Sequence[TokenRun], top: int, skip_special: bool) -> Iterator[bytes]:
    """The JSON of LegacyLogprobs for all runs together."""
    cuts = [(run, *cut) for run in runs for cut in _cuts(len(run.tokens), top)]
    yield b'{"tokens":['
    yield from _items([names.name_of(token) for token in run.tokens[begin:end]] for run, begin, end in cuts)
    yield b'],"token_logprobs":['
    yield from _items(run.values(begin, end) for run, begin, end in cuts)
    yield b'],"top_logprobs":[' if top else b'],"top_logprobs":null'
    if top:
        found = (run.slice(begin, end) for run, begin, end in cuts)
        yield from _items([None if one is None else _top(names, one, top) for one in known] for known in found)
        yield b"]"
    yield b',"text_offset":['
    yield from _items(_run_offsets(names, runs, top, skip_special))
    yield b"]}"


def _run_offsets(names: TokenNames, runs: Sequence[TokenRun], top: int, skip_special: bool) -> Iterator[list[int]]:
    for run in runs:
        offset = run.offset
        for begin, end in _cuts(len(run.tokens), top):
            found = _offsets(names, run.tokens[begin:end], offset, skip_special)
            offset = found[-1] + names.length_of(run.tokens[end - 1], skip_special)
            yield found


def chat_pieces(names: TokenNames, known: LogprobList, top: int) -> Iterator[bytes]:
    """The JSON of ChatLogprobs."""
    yield b'{"content":'
    yield from token_pieces(names, known, top)
    yield b',"refusal":null}'


def token_pieces(names: TokenNames, known: LogprobList, top: int, first: int = 0) -> Iterator[bytes]:
    """The JSON of a list of TokenLogprob, from the token numbered `first` on."""
    yield b"["
    cuts = ((first + begin, first + end) for begin, end in _cuts(len(known) - first, top))
    yield from _items([_token(names, one, top) for one in known[begin:end]] for begin, end in cuts)
    yield b"]"


def prompt_pieces(names: TokenNames, known: LogprobList, top: int) -> Iterator[bytes]:
    """The JSON of PromptLogprobs."""
    yield b"[null" + (b"," if known else b"")
    yield from _items([_ranked(names, one, top) for one in known[begin:end]] for begin, end in _cuts(len(known), top))
    yield b"]"


def triple_pieces(names: TokenNames | None, run: TokenRun, top: int = 0) -> Iterator[bytes]:
    """The JSON of a list: of each token [logprob, id, text], as SGLang writes them; with `top`, the list of these for
    its alternatives. Without names the text is null; a token without logprobs has null."""

    def triple(token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        shown = None if logprob is None else finite(logprob)
        return shown, token, None if names is None else names.text_of(token)

    def written(begin: int, end: int) -> list[object]:
        known = zip(run.tokens[begin:end], run.slice(begin, end), strict=True)
        if not top:
            return [triple(token, None if one is None else one.logprob) for token, one in known]
        return [one and [*map(triple, one.top_tokens[:top], one.top_logprobs[:top])] for _, one in known]

    yield b"["
    yield from _items(written(begin, end) for begin, end in _cuts(len(run.tokens), top))
    yield b"]"


def _ranked(names: TokenNames, one: Logprobs, top: int) -> dict[str, PromptLogprob]:
    found = {str(one.token): PromptLogprob(finite(one.logprob), one.rank, names.text_of(one.token))}
    for rank, (token, logprob) in enumerate(zip(one.top_tokens[:top], one.top_logprobs[:top], strict=True), 1):
        found.setdefault(str(token), PromptLogprob(finite(logprob), rank, names.text_of(token)))
    return found


def _cuts(tokens: int, top: int) -> Iterator[tuple[int, int]]:
    """Begins and ends of pieces, of about PIECE_ENTRIES logprobs each."""
    step = max(1, PIECE_ENTRIES // (1 + top))
    return ((begin, min(begin + step, tokens)) for begin in range(0, tokens, step))


def _items(lists: Iterable[Sequence[object]]) -> Iterator[bytes]:
    """The items of all lists as those of one JSON array, without its brackets."""
    comma = b""
    for items in lists:
        yield comma + encode(items)[1:-1]
        comma = b","
