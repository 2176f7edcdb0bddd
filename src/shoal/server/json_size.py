"""How many values a JSON text holds, found without decoding it.

Owns the limits that keep a body from becoming millions of Python objects. A text is scanned in pieces, by calls that
run at the speed of C, so that a thread that scans it never holds the interpreter lock for long. Checks no syntax.
"""

from collections.abc import Collection
from dataclasses import dataclass

MOST_VALUES = 2**16  # in a body, but for token ids
MOST_IDS = 2**19  # token ids in a body
MOST_PLACES = 20  # how often a field's name is looked for
MOST_DIGITS = 1000
PIECE = 64 * 2**10  # bytes
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * MOST_DIGITS
_SPACES = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class JsonSize:
    """Counts of a JSON text: numbers in lists, all other values, and how far it was read."""

    numbers: int
    others: int
    end: int  # less than the length of the text where a limit was passed there
    long_number: bool = False  # there is one of more than MOST_DIGITS digits; reading such takes long

    @property
    def values(self) -> int:
        return self.numbers + self.others


def measure(text: bytes, most_numbers: int, most_others: int) -> JsonSize:
    r"""Count until one of the limits is passed.

    >>> measure(rb'{"a": [1, 2, 3], "b": "[,\",", "c": {}}', 100, 100)
    JsonSize(numbers=3, others=4, end=39, long_number=False)
    """
    numbers = others = at = 0
    in_string, before = False, b""  # `before`: the last structural character of the piece before
    long_number = False
    while at < len(text) and numbers <= most_numbers and others <= most_others and not long_number:
        piece = text[at : at + PIECE]
        at += len(piece)
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character belongs to this piece
            piece += text[at : at + 1]
            at += 1
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        outside = parts[in_string::2]
        in_string ^= len(parts) % 2 == 0
        shape = before + b'"'.join(outside).translate(_DIGITS_TO_0, _SPACES)
        commas, lists = shape.count(b","), shape.count(b"[")
        found = shape.count(b",0") + shape.count(b"[0")
        numbers += found
        long_number = _LONG_NUMBER in shape
        others += commas + lists + shape.count(b"{") - found
        before = b""
        if shape.endswith((b",", b"[")):  # whether a number follows is seen in the next piece
            before, others = shape[-1:], others - 1
    return JsonSize(numbers, others + len(before), min(at, len(text)), long_number)


def field_at(text: bytes, at: int, names: Collection[str]) -> str | None:
    """The field of the outermost object in which position `at` lies: the last of these lists and objects before it."""
    found = {_find_name(text, at, name): name for name in names}
    found.pop(-1, None)
    return found[max(found)] if found else None


def _find_name(text: bytes, end: int, name: str) -> int:
    """Where a name first stands as that of a list or an object; -1 if not among its first few places."""
    begin, quoted = -1, f'"{name}"'.encode()
    for _ in range(MOST_PLACES):
        begin = text.find(quoted, begin + 1, end)
        if begin < 0:
            break
        after = begin + len(quoted)
        colon, value = text[after : after + MOST_PLACES].translate(None, _SPACES)[:2].ljust(2)
        if colon == ord(":") and value in b"[{":
            return begin
    return -1
