"""Options: how one is declared as a field of a config, and how values are read and checked.

Owns sizes with units, tables in YAML or JSON, and the checks that all configs share. Knows no option by name.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

from shoal.core.names import pick
from shoal.errors import BadConfig

# values that messages recommend
VALUES = {"cpu", "cuda", "dummy", "off", "reserve", "recompute", "chunked", "int8", "fp8", "float32", "bfloat16"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int) -> int:
    """A size in bytes from a number with a unit.

    >>> parse_bytes("1.5GiB"), parse_bytes("200 MB"), parse_bytes(64)
    (1610612736, 200000000, 64)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in UNITS:
        raise BadConfig(f"cannot read {text!r} as a size; write a number and a unit, such as 2GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def read_table(text: str, what: str) -> Any:
    """A table from a YAML file, or from YAML text; the braces around the text may be left out.

    >>> read_table("premium: {ttft: 0.3}, batch: {}", "tiers")
    {'premium': {'ttft': 0.3}, 'batch': {}}
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml  # imported lazily: only needed when a table is given
    except ImportError:
        raise BadConfig(f"{what}: reading YAML needs pyyaml; pip install pyyaml, or write it as JSON") from None

    inline = text.lstrip()
    try:
        if "{" not in inline and ":" not in inline:
            inline = Path(text).read_text()
        elif not inline.startswith("{") and "\n" not in inline:
            inline = f"{{{inline}}}"
        return yaml.safe_load(inline)
    except OSError as error:
        raise BadConfig(f"cannot read the {what} from {text}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{what} is not YAML: {' '.join(str(error).split())}") from error


def option(
    default: Any,
    help: str,
    *,
    parse: Any = str,
    choices: tuple[str, ...] = (),
    group: str = "engine",
    also: tuple[str, ...] = (),
) -> Any:
    """A field of a config; `also` are other names of its flag."""
    metadata = {"help": help, "parse": parse, "choices": choices, "group": group, "also": also}
    return field(default=default, metadata=metadata)


def as_flags(text: str, names: Iterable[str]) -> str:
    """A message in which these options are named as on the command line.

    >>> as_flags("max_num_seqs must be at least 1; use memory=reserve", ["max_num_seqs", "memory"])
    '--max-num-seqs must be at least 1; use --memory reserve'
    >>> as_flags("order must be a name; KV memory is short", ["order", "memory"])
    '--order must be a name; KV memory is short'
    """
    for name in names:
        flag = "--" + name.replace("_", "-")
        text = re.sub(rf"(?<![\w'\"./-]){name}=(?:\"(\w+)\"|(?=\w))", rf"{flag} \1", text)
        text = re.sub(rf"(?<![\w'\"./-]){name}=", flag, text)  # as a call from Python names it
        # a name of one word is also a word of the language: it is the option where it begins a message
        where = rf"(?<![\w'\"./-]){name}(?![\w'\"/=]|\.\w)" if "_" in name else rf"\A{name}(?= (must|cannot))"
        text = re.sub(where, flag, text)
    return text


def as_keywords(text: str, names: Iterable[str]) -> str:
    """A message in which these options are named as in a call from Python.

    >>> as_keywords("raise --max-model-len, or use --device cpu", ["max_model_len", "device"])
    'raise max_model_len=, or use device="cpu"'
    """
    known = set(names)

    def named(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        if name not in known:
            return found[0]
        value = found[2] or ""
        return f'{name}="{value.strip()}"' if value.strip() in VALUES else f"{name}={value}"

    return re.sub(r"(?<![\w-])--([a-z][a-z-]*[a-z])( [a-z0-9]+\b)?", named, text)


class Options:
    """Shared by all configs: checks types, and refuses an option that does not exist."""

    def _check_types(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            self._check_type(item, getattr(self, item.name))

    def _check_type(self, item: "Field[Any]", value: Any) -> None:
        if value is None and item.default is None:
            return
        if isinstance(item.default, bool):
            if not isinstance(value, bool):
                raise BadConfig(f"{item.name} must be true or false, not {value!r}")
            return
        numbers = {int: (int,), float: (int, float), parse_bytes: (int,)}.get(item.metadata["parse"])
        if isinstance(item.default, tuple):
            if not isinstance(value, tuple) or not all(isinstance(one, str) for one in value):
                raise BadConfig(f"{item.name} must be a list of texts, not {value!r}")
        elif numbers is None:
            if not isinstance(value, str):
                raise BadConfig(f"{item.name} must be a name, not {value!r}")
            if item.metadata["choices"]:
                pick(dict.fromkeys(item.metadata["choices"]), value, item.name)
        elif isinstance(value, bool) or not isinstance(value, numbers):
            raise BadConfig(f"{item.name} must be a number, not {value!r}")

    def _at_least(self, name: str, least: float) -> None:
        if getattr(self, name) < least:
            raise BadConfig(f"{name} must be at least {least}, not {getattr(self, name)}")
