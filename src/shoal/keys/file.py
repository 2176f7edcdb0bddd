"""The key file: reading it, checking it, and handing the keys to the processes that need them.

Owns the file's format and its error messages. Only the supervisor reads the file; it writes the valid keys into the
private folder, where fronts read them. So a broken file changes nothing, and a front that starts later has the same
keys as the others. Knows no HTTP, and not what limits mean.

    keys.yaml ──► `shoal serve` (at the start, and on SIGHUP) ──► keys.json in the private folder ──► fronts
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.names import pick
from shoal.core.tiers import Tiers
from shoal.errors import BadConfig, BadParameter
from shoal.keys.api_key import NAME, ApiKey, digest_of

PUBLISHED = "keys.json"  # its name in the private folder
SHORTEST = 8  # characters of a key
MOST_KEYS = 4096  # each request's key is compared with all of them
RIGHTS = ("admin", "may_set_priority")
FIELDS = ("name", "sha256", "tier", "max_concurrent", "tokens_per_minute", *RIGHTS)
HOW = "run `shoal key NAME --stdin`, type the key, and put the line that it prints into the file"

# ---- the file -------------------------------------------------------------------------------------------------------


def read_key_file(path: str | Path) -> list[ApiKey]:
    """The keys of a YAML file; raises BadConfig with the place of what is wrong."""
    import yaml  # imported lazily: only needed when a key file is given

    try:
        read = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise BadConfig(f"cannot read the key file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)  # not the whole message: it quotes the file, perhaps a key
        line = f" (line {where.line + 1})" if where is not None else ""
        raise BadConfig(f"the key file {path} is not YAML{line}; `shoal key NAME` prints a valid line") from None
    if not isinstance(read, list) or not read:
        raise BadConfig(
            f"the key file {path} must be a list of keys, with at least one; `shoal key NAME >> {path}` adds one"
        )
    return [_read_entry(entry, f"{path}: key {number}") for number, entry in enumerate(read, 1)]


def _read_entry(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, Mapping):
        raise BadConfig(f"{where} must be an entry with a name and a sha256, as `shoal key NAME` prints it")
    if "key" in entry:
        raise BadConfig(f"{where} contains the key itself, but a key file holds only hashes; {HOW}")
    for field in entry:
        pick(dict.fromkeys(FIELDS), str(field), f"field in {where}")
    name = entry.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadConfig(f"{where} needs a name of at most 64 letters, digits and any of _.-")
    where = f"{where} ({name})"
    tier = entry.get("tier") or ""
    if tier and not (isinstance(tier, str) and NAME.fullmatch(tier)):
        raise BadConfig(f"{where}: tier must be a name of at most 64 letters, digits and any of _.-")
    rights = {right: entry.get(right, False) for right in RIGHTS}
    for right, value in rights.items():
        if not isinstance(value, bool):
            raise BadConfig(f"{where}: {right} must be true or false, not {value!r}")
    return ApiKey(
        name=name,
        digest=_read_hash(entry.get("sha256"), where),
        tier=tier,
        max_concurrent=_read_limit(entry, "max_concurrent", where),
        tokens_per_minute=_read_limit(entry, "tokens_per_minute", where),
        **rights,
    )


def _read_hash(value: Any, where: str) -> bytes:
    """The message never repeats the value: it may be the key itself."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9A-Fa-f]{64}", value):
        raise BadConfig(f"{where}: sha256 must be 64 hexadecimal digits in quotes, the hash of the key; {HOW}")
    digest = bytes.fromhex(value)
    if digest == digest_of(""):
        raise BadConfig(f"{where}: sha256 is the hash of an empty string, which is not a key; {HOW}")
    return digest


def _read_limit(entry: Mapping[str, Any], field: str, where: str) -> int | None:
    value = entry.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise BadConfig(f"{where}: {field} must be a whole number, 0 for no limit, not {value!r}")
    return value


def joined(*groups: Sequence[ApiKey]) -> list[ApiKey]:
    """The keys of all sources; refuses two that are equal or have the same name."""
    keys = [key for group in groups for key in group]
    if len(keys) > MOST_KEYS:
        raise BadConfig(f"there are {len(keys)} API keys, the limit is {MOST_KEYS}; remove some")
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise BadConfig(f"two API keys are named {key.name!r}; give each its own name")
        if key.digest in digests:
            raise BadConfig(f"{key.name!r} and {digests[key.digest]!r} are the same API key; remove one")
        names.add(key.name)
        digests[key.digest] = key.name
    return keys


def check_tiers(keys: Sequence[ApiKey], tiers: Tiers) -> None:
    """Check that the server has each key's tier; otherwise every request of that key would be refused."""
    for key in keys:
        try:
            tiers.of(key.tier)
        except BadParameter as error:
            raise BadConfig(
                f"API key {key.name!r}: {error}; change the key's tier, leave it out, or add it to --tiers"
            ) from error


# ---- new keys -------------------------------------------------------------------------------------------------------


def new_key() -> str:
    """256 random bits: a plain hash of so many cannot be searched, so no slow hash is needed."""
    return f"sk-{secrets.token_urlsafe(32)}"


def line_of(key: ApiKey) -> str:
    """A key as a line of the file.

    >>> line_of(ApiKey(name="a", digest=bytes(32), max_concurrent=4))[:22]
    '- {"name": "a", "sha25'
    """
    return f"- {json.dumps(_as_mapping(key))}"


def _as_mapping(key: ApiKey) -> dict[str, Any]:
    """Only what differs from the defaults."""
    found: dict[str, Any] = {"name": key.name, "sha256": key.digest.hex()}
    for field in FIELDS[2:]:
        value = getattr(key, field)
        if value is not None and value != "" and value is not False:
            found[field] = value
    return found


# ---- from process to process ----------------------------------------------------------------------------------------


def publish(keys: Sequence[ApiKey], folder: Path) -> None:
    """Write the keys in force, atomically: readers see the old ones or the new ones."""
    fresh = folder / f"{PUBLISHED}.new"
    fresh.write_text(json.dumps([_as_mapping(key) for key in keys]))
    fresh.replace(folder / PUBLISHED)


class KeyBook:
    """The keys in force, as they were last published. A call costs one stat of the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PUBLISHED
        self._stamp = (-1, -1)
        self._keys: tuple[ApiKey, ...] = ()
        try:
            self._read()
        except OSError as error:  # not "no keys": then no key would be needed
            raise BadConfig(f"the private folder has no keys ({error.strerror}); restart the server") from error

    def __call__(self) -> tuple[ApiKey, ...]:
        with contextlib.suppress(OSError):  # the server ends and its folder is gone: running requests go on
            self._read()
        return self._keys

    def _read(self) -> None:
        found = os.stat(self._path)
        stamp = (found.st_ino, found.st_mtime_ns)
        if stamp != self._stamp:
            entries = json.loads(self._path.read_text())
            self._keys = tuple(_read_entry(entry, PUBLISHED) for entry in entries)
            self._stamp = stamp


def hashed(pairs: Sequence[tuple[str, str]]) -> list[ApiKey]:
    """Keys that were given in plain text, as (name, key), by a flag or a variable. They have no rights and no limits
    of their own."""
    return [ApiKey(name=name, digest=digest_of(key)) for name, key in pairs]
