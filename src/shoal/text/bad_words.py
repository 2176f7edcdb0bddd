"""The tokens of texts that a sample must not draw.

Owns how such a text is spelled in tokens: at the start of a word and inside one. One that is split into other tokens is
not found. Knows a tokenizer; no requests.
"""

from collections.abc import Sequence

from shoal.errors import BadParameter
from shoal.text.tokenizer import Tokenizer

MOST_TOKENS = 4096


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each text as it is, and with a space before it. Raises BadParameter where they are too many."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special=False))
            if ids:
                found[ids] = None
        if sum(map(len, found)) > MOST_TOKENS:
            raise BadParameter(f"bad_words have more than {MOST_TOKENS} tokens together; give fewer or shorter ones")
    return tuple(found)
