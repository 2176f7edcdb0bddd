"""Secret names for special tokens: what a template writes can be told from what a user writes.

A name is a long random number. It cannot be guessed, and it passes unchanged through a template's filters (upper,
tojson) and through a tokenizer's normalizers. Owns the names. Knows no templates, no messages and no tokenizer.
"""

import re
import secrets
from collections.abc import Iterable
from typing import Any

DIGITS = 30  # of the random part


class SecretNames:
    """Two names for each special token: `hidden` stands for the token, `masked` for its text written by a user.

    >>> names = SecretNames(["<s>", "</s>"])
    >>> names.hide("<s>a</s>") == names.hidden["<s>"] + "a" + names.hidden["</s>"]
    True
    >>> names.reveal(names.hide("<s>a</s>"))
    ('<s>a</s>', [(0, '<s>'), (4, '</s>')])
    """

    def __init__(self, tokens: Iterable[str], nonce: str | None = None) -> None:
        self.tokens = [token for token in dict.fromkeys(tokens) if token]
        self.nonce = nonce or "".join(secrets.choice("123456789") for _ in range(DIGITS))
        self.hidden = {token: f"{self.nonce}0{i:06d}" for i, token in enumerate(self.tokens)}
        self._masked = {token: f"{self.nonce}1{i:06d}" for i, token in enumerate(self.tokens)}
        self._hidden = re.compile(rf"{self.nonce}0(\d{{6}})")
        self._mask = re.compile(rf"{self.nonce}1(\d{{6}})")
        self.pattern = either(self.tokens)
        edges = {token[0] for token in self.tokens} | {token[-1] for token in self.tokens}
        self.edges = either(edges)  # a text without these characters can hold no whole token

    def hide(self, text: str, only: "re.Pattern[str] | None" = None) -> str:
        """The text with every special token under its secret name; `only`: with those that this pattern finds."""
        return (only or self.pattern).sub(lambda found: self.hidden[found[0]], text)

    def mask(self, value: Any, only: "re.Pattern[str]") -> Any:
        """A value from a request, with the special tokens in all its texts masked."""
        if isinstance(value, str):
            return only.sub(lambda found: self._masked[found[0]], value)
        if isinstance(value, dict):
            return {self.mask(key, only): self.mask(inner, only) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.mask(inner, only) for inner in value]
        return value

    def unmask(self, text: str) -> str:
        return self._mask.sub(lambda found: self.tokens[int(found[1])], text)

    def reveal(self, text: str) -> tuple[str, list[tuple[int, str]]]:
        """(the text with the tokens that were hidden, where they are in it)."""
        parts: list[str] = []
        at, size, places = 0, 0, []
        for found in self._hidden.finditer(text):
            token = self.tokens[int(found[1])]
            size += found.start() - at
            places.append((size, token))
            parts += (text[at : found.start()], token)
            at, size = found.end(), size + len(token)
        return "".join([*parts, text[at:]]), places

    def places(self, text: str) -> list[tuple[int, str]]:
        """Where a tokenizer would find special tokens in a text."""
        return [(found.start(), found[0]) for found in self.pattern.finditer(text)]


def either(tokens: Iterable[str]) -> "re.Pattern[str]":
    """A pattern that finds any of these, the longest one where several begin; nothing where there are none."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
