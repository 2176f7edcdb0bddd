"""Counting the values of JSON without decoding it."""

import json
import random
from typing import Any

import pytest

from shoal.server import json_size
from shoal.server.json_size import field_at, measure

FAR = 10**9
LEAVES = [0, 12, 999, 'a"\\[,', "\\", '"', "[1,2", '\\"', None, True, -1, ""]


def random_json(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if depth == 0 or kind < 0.3:
        return draw.choice([*LEAVES, "x" * draw.randint(0, 40)])
    if kind < 0.7:
        return [random_json(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    return {draw.choice(["k", "\\", "a,"]) + str(i): random_json(draw, depth - 1) for i in range(draw.randint(0, 4))}


def counts(value: Any) -> tuple[int, int]:
    """Numbers in lists, and all else, of a decoded value."""
    numbers = others = 0
    if isinstance(value, list):
        numbers = sum(type(item) is int and item >= 0 for item in value)
        others = max(1, len(value)) - numbers
    elif isinstance(value, dict):
        others = max(1, len(value))
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        more = counts(inner)
        numbers, others = numbers + more[0], others + more[1]
    return numbers, others


@pytest.mark.parametrize("piece", [3, 7, 64, 2**16])
def test_values_are_counted_wherever_a_piece_is_cut(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_size, "PIECE", piece)
    for seed in range(300):
        draw = random.Random(seed)
        value = {"root": random_json(draw, 4)}
        text = json.dumps(value, indent=draw.choice([None, 1])).encode()
        size = measure(text, FAR, FAR)
        assert (size.numbers, size.others) == counts(value), text
        assert size.end == len(text)


def test_counting_stops_at_a_limit() -> None:
    text = b"[" + b"[]," * 10**6 + b"[]]"
    size = measure(text, FAR, 1000)
    assert size.others > 1000
    assert size.end == json_size.PIECE
    assert measure(b"[" + b"1," * 10**6 + b"1]", 1000, FAR).end == json_size.PIECE


def test_the_field_is_found_in_which_a_limit_was_passed() -> None:
    text = b'{"model": "user", "user" : [' + b"[]," * 100_000 + b'[]], "prompt": "x"}'
    end = measure(text, FAR, 1000).end
    assert field_at(text, end, ("model", "prompt", "user")) == "user"
    assert field_at(b"[[[[[", 5, ("model",)) is None
