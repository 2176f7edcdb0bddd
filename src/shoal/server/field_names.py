"""The names of a body's fields at any depth and the values that they may have, for errors that suggest one.

Reads the types of the structures that bodies are read into. Knows no body.
"""

import re
from functools import cache
from typing import Any, Literal  # noqa: F401 (for the examples)

import msgspec
from msgspec import Struct


@cache
def _type_of(kind: type[Struct]) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)


def known_at(kind: type[Struct], path: str) -> set[str]:
    """The fields of the object at a path, as msgspec writes it: a.b[...].c

    >>> class Inner(Struct): x: int
    >>> class Outer(Struct): one: Inner | None; many: list[Inner]
    >>> known_at(Outer, "many[...]"), sorted(known_at(Outer, ""))
    ({'x'}, ['many', 'one'])
    """
    level = _types_at(kind, path)
    return {field.encode_name for one in level if isinstance(one, msgspec.inspect.StructType) for field in one.fields}


def allowed_at(kind: type[Struct], path: str) -> list[str]:
    """The values that the field at a path may have, where they are listed; nothing where they are not.

    >>> class Fish(Struct): size: Literal["small", "large"] | None
    >>> allowed_at(Fish, "size")
    ['large', 'small']
    """
    found: list[str] = []
    for one in _types_at(kind, path):
        if isinstance(one, msgspec.inspect.LiteralType):
            found += [str(value) for value in one.values]
    return found


def _types_at(kind: type[Struct], path: str) -> list[Any]:
    level = _structs([_type_of(kind)])
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
        found: list[Any] = []
        for one in level:
            if isinstance(one, msgspec.inspect.StructType):
                found += [field.type for field in one.fields if field.encode_name == step]
            elif step.startswith("["):
                found.append(one.item_type if hasattr(one, "item_type") else getattr(one, "value_type", one))
        level = _structs(found)
    return level


def _structs(kinds: list[Any]) -> list[Any]:
    """The same with unions taken apart."""
    found: list[Any] = []
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.Metadata):
            found += _structs([kind.type])
        elif isinstance(kind, msgspec.inspect.UnionType):
            found += _structs(list(kind.types))
        else:
            found.append(kind)
    return found
