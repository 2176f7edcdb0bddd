"""How many tokens a text has at least, found without tokenizing all of it.

Owns the proof that a text is too long: by its length against the longest token of the vocabulary where the tokenizer
keeps every byte of a text, else by counting the tokens of a part. Does not know requests or limits.
"""

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from shoal.text.pieces import BYTE_OF
from shoal.text.tokenizer import Tokenizer

PIECE = 64 * 2**10  # characters that are counted at a time
CUT_TOKENS = 128  # more tokens than cutting a text at any place can add: WordPiece gives up on words of 100 characters
USUAL_CHARACTERS = 8  # per token, more than real texts have; a text of fewer is tokenized without counting first
NFC_SHRINKS = 4  # composing characters never makes a text so many times shorter, in bytes
KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")  # pre-tokenizers that drop nothing


class LeastTokens:
    """Lower bounds for one tokenizer.

    >>> from tokenizers import models
    >>> least = LeastTokens(Tokenizer(Backend(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))))
    >>> least.above("ab" * 100, 50), least.above("ab" * 100_000, 50) > 50
    (None, True)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend

    def above(self, text: str, most: int) -> int | None:
        """A number above `most` that the text has tokens at least; None if it has fewer, or might have."""
        if self._longest is not None and len(text) > most:
            data = text.encode(errors="replace")
            proven = len(data.translate(None, self._lost) if self._lost else data) // self._longest
            if proven > most:
                return proven
        if len(text) <= most * USUAL_CHARACTERS:
            return None
        counted = 0
        for begin in range(0, len(text), PIECE):
            piece = text[begin : begin + PIECE]
            if self._takes_spaces:
                piece = piece.strip()
            ids = self._backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            counted += max(0, len(ids) - CUT_TOKENS)
            if counted > most:
                return counted
        return None

    @cached_property
    def _takes_spaces(self) -> bool:
        """Whether some token takes all spaces around it with it, also those of another piece."""
        return any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _lost(self) -> bytes | None:
        """Bytes of a text for which there may be no token; None where that cannot be said."""
        return None if self._takes_spaces else _lost_bytes(self._backend)

    @cached_property
    def _longest(self) -> int | None:
        """No token stands for more bytes of a text than this; None where that cannot be said."""
        backend = self._backend
        shrinks = _most_shrinking(backend)
        if shrinks is None or self._lost is None or (shrinks > 1 and self._lost):
            return None
        return shrinks * max(map(_bytes_of, backend.get_vocab()))


def _bytes_of(token: str) -> int:
    """Most bytes that a token can stand for, whether it is written byte by byte or as it is."""
    return len(token) if all(character in BYTE_OF for character in token) else len(token.encode())


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if part is None:
        return
    state = json.loads(part.__getstate__())
    for name in ("normalizers", "pretokenizers"):
        if state["type"] == "Sequence" and name in state:
            yield from state[name]
            return
    yield state


def _most_shrinking(backend: Backend) -> int | None:
    """How many times shorter, in bytes, normalizing can make a text; None where there is no limit."""
    shrinks = 1
    for step in _steps(backend.normalizer):
        if step["type"] == "NFC":
            shrinks *= NFC_SHRINKS
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"].encode()) < len(pattern.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrinks


def _lost_bytes(backend: Backend) -> bytes | None:
    """The bytes of a normalized text that end up in no token; None where it cannot be said which."""
    steps = list(_steps(backend.pre_tokenizer))
    for step in steps:
        if step["type"] not in KEEPING and step.get("behavior", "Removed") == "Removed":
            return None
    model = backend.model
    if not isinstance(model, BPE):
        return None
    if model.byte_fallback:
        return b"" if all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)) else None
    if not any(step["type"] == "ByteLevel" for step in steps):
        return None
    return bytes(byte for name, byte in BYTE_OF.items() if backend.token_to_id(name) is None)
