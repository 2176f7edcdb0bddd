"""The names of a body's fields at any depth, for errors that suggest one.

Reads the types of the structures that bodies are read into. Knows no values.
"""

import re
from functools import cache
from typing import Any

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
    level = _structs([_type_of(kind)])
    for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
        found: list[Any] = []
        for one in level:
            if isinstance(one, msgspec.inspect.StructType):
                found += [field.type for field in one.fields if field.encode_name == step]
            elif step.startswith("["):
                found.append(one.item_type if hasattr(one, "item_type") else getattr(one, "value_type", one))
        level = _structs(found)
    return {field.encode_name for one in level if isinstance(one, msgspec.inspect.StructType) for field in one.fields}


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
