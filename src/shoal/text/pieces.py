"""What single token ids stand for: bytes, a piece of text, one raw byte, or nothing to show.

Owns the per-id tables that the detokenizer needs. Does not know requests, stop strings or chat.
"""

import json
import re

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: each byte has a printable character; those without one of their own follow from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_of_character()  # how a byte-level tokenizer writes each byte


def _decoder_kinds(backend: Backend) -> list[str]:
    """The names of the decoder's steps, in order."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return [str(step["type"]) for step in steps]


class Pieces:
    """Tables over the ids of one tokenizer, filled on first use of an id."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.may_split_characters = "ByteLevel" in kinds
        self.has_byte_fallback = "ByteFallback" in kinds
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._silent: dict[int, bool] = {}
        self._byte_tokens: dict[int, bool] = {}

    def is_silent(self, token_id: int, skip_special: bool) -> bool:
        """Whether decoding leaves this id out: a special token that is not shown, or an id without a token."""
        if skip_special and token_id in self.special_ids:
            return True
        if token_id not in self._silent:
            self._silent[token_id] = self._backend.id_to_token(token_id) is None
        return self._silent[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level tokenizer; they need not be whole characters."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) or ""
            try:
                known = bytes([BYTE_OF[character] for character in token])
            except KeyError:  # an added token, written as it is
                known = token.encode()
            self._bytes[token_id] = known
        return known

    def is_byte_token(self, token_id: int) -> bool:
        """True for <0x00> … <0xFF> of a tokenizer that falls back to single bytes."""
        if not self.has_byte_fallback:
            return False
        if token_id not in self._byte_tokens:
            token = self._backend.id_to_token(token_id) or ""
            self._byte_tokens[token_id] = _BYTE_TOKEN.fullmatch(token) is not None
        return self._byte_tokens[token_id]
