"""shoal key: a new API key, and its entry for the key file."""

import argparse
import json
import sys
from typing import Any

from shoal.cli.common import new_command
from shoal.errors import BadConfig
from shoal.keys.api_key import NAME, ApiKey, digest_of
from shoal.keys.file import SHORTEST, line_of, new_key


def add_key(commands: Any) -> None:
    parser = new_command(
        commands,
        "key",
        "create an API key: its entry for the key file on standard output, the key itself on standard error",
        "shoal key alice --max-concurrent 8 >> keys.yaml && shoal serve --api-keys-file keys.yaml",
        run_key,
    )
    parser.add_argument("name", help="name of the key, for logs and limits")
    parser.add_argument("--tier", default="", help="tier of all its requests")
    parser.add_argument("--max-concurrent", type=int, metavar="N", help="most requests at once; 0: no limit")
    parser.add_argument("--tokens-per-minute", type=int, metavar="N", help="most tokens per minute; 0: no limit")
    parser.add_argument("--admin", action="store_true", help="may see all requests, at /debug/requests")
    parser.add_argument("--may-set-priority", action="store_true", help="may set the priority of its requests")
    parser.add_argument(
        "--stdin", action="store_true", help="read an existing key from standard input instead of creating one"
    )
    parser.add_argument("--json", action="store_true", help="print key and entry as one JSON object")


def run_key(args: argparse.Namespace) -> int:
    for what, name in (("name", args.name), ("tier", args.tier)):
        if not (NAME.fullmatch(name) or (what == "tier" and not name)):
            raise BadConfig(f"the {what} must have at most 64 letters, digits and any of _.-, not be {name!r}")
    for limit in ("max_concurrent", "tokens_per_minute"):
        if getattr(args, limit) is not None and getattr(args, limit) < 0:
            raise BadConfig(f"--{limit.replace('_', '-')} must be at least 0, not {getattr(args, limit)}")
    key = read_key() if args.stdin else new_key()
    line = line_of(
        ApiKey(
            name=args.name,
            digest=digest_of(key),
            tier=args.tier,
            max_concurrent=args.max_concurrent,
            tokens_per_minute=args.tokens_per_minute,
            admin=args.admin,
            may_set_priority=args.may_set_priority,
        )
    )
    if args.json:
        print(json.dumps({"key": None if args.stdin else key, "line": line}))
        return 0
    print(line)
    if not args.stdin:
        sys.stdout.flush()
        print(f"the key of {args.name}, shown only once: {key}", file=sys.stderr)
    return 0


def read_key() -> str:
    """An existing key; not echoed when typed."""
    if sys.stdin.isatty():
        import getpass

        key = getpass.getpass("key: ")
    else:
        key = sys.stdin.readline().rstrip("\r\n")
    if len(key) < SHORTEST:
        raise BadConfig(f"an API key must have at least {SHORTEST} characters")
    return key
