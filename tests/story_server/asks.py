"""What the tests ask for: prompts and small helpers that several of them share."""

from typing import Any

STORY = "Once upon a time"
ASKED: list[Any] = [{"role": "user", "content": "The quick brown fox"}]
PARIS: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ON = {"ignore_eos": True}  # answers of a random model would end anywhere


def ascii_piece(text: str, least: int) -> str:
    """Two plain characters that first stand together at `least` or later: a stop string with something before it."""
    for at in range(least, len(text) - 1):
        piece = text[at : at + 2]
        if piece.isascii() and piece.isprintable() and text.index(piece) == at:
            return piece
    raise AssertionError(f"no stop string to be had from {text!r}")
