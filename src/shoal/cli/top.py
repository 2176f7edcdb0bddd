"""shoal top: who runs and who waits in a server, live in the terminal.

Asks GET /debug/requests and draws what it says. Knows the server only by its URL.
"""

import argparse
import json
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cli.common import new_command
from shoal.errors import BadConfig

CLEAR, HOME, HIDE, SHOW = "\x1b[2J", "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"
PATIENCE_S = 10.0
BAR = 30  # characters
# heading, field, width; a number stands to the right
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("STATE", "state", 9),
    ("TENANT", "tenant", 12),
    ("TIER", "tier", 9),
    ("PROMPT", "prompt_tokens", -7),
    ("OUTPUT", "output_tokens", -7),
    ("MAX", "max_tokens", -7),
    ("CACHED", "cached_tokens", -7),
    ("BLOCKS", "blocks", -6),
    ("LOST", "preemptions", -4),
    ("AGE", "age_s", -8),
    ("SLACK", "slack_s", -8),
    ("ID", "id", 28),
    ("WHY", "why", 40),
)


def add_top(commands: Any) -> None:
    parser = new_command(
        commands,
        "top",
        "show who runs and who waits in a server, live",
        "shoal top --url http://127.0.0.1:8000",
        run_top,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="an admin key, where the server has keys; -: ask for it")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--once", action="store_true", help="look once, print and end")
    parser.add_argument("--json", action="store_true", help="look once and print all of it as one JSON object")


def run_top(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        raise BadConfig(f"--interval must be between 0.1 and 3600 seconds, not {args.interval}")
    key = ask_for_key() if args.api_key == "-" else args.api_key
    if args.json:
        print(json.dumps(look(args.url, key, args.insecure)))
        return 0
    if args.once:
        print("\n".join(screen(look(args.url, key, args.insecure), args.url, *shutil.get_terminal_size((200, 1000)))))
        return 0
    look(args.url, key, args.insecure)  # what is wrong at once is said plainly
    try:
        sys.stdout.write(CLEAR + HIDE)
        while True:
            sys.stdout.write(HOME + "\n".join(now(args.url, key, args.insecure)))
            sys.stdout.flush()
            time.sleep(args.interval)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(SHOW + "\n")
        sys.stdout.flush()


def ask_for_key() -> str:
    import getpass

    return getpass.getpass("admin key: ")


def now(url: str, key: str | None, insecure: bool) -> list[str]:
    """What stands on the screen now; a server that does not answer is waited for."""
    width, height = shutil.get_terminal_size((160, 50))
    try:
        return screen(look(url, key, insecure), url, width, height)
    except BadConfig as error:
        return [f"shoal top · {url} · {time.strftime('%H:%M:%S')}", "", str(error)[: width * 3]]


# ---- asking ---------------------------------------------------------------------------------------------------------


def look(url: str, key: str | None = None, insecure: bool = False) -> dict[str, Any]:
    """What the server says about its requests."""
    if not url.startswith(("http://", "https://")):
        raise BadConfig(f"--url must begin with http:// or https://, not be {url!r}")
    asked = urllib.request.Request(f"{url.rstrip('/')}/debug/requests")
    if key:
        asked.add_header("Authorization", f"Bearer {key}")
    context = ssl._create_unverified_context() if insecure else None
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S, context=context) as answer:
            told = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            said = message_of(error)
        raise BadConfig(f"{url} answered {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise BadConfig(f"{url} does not answer ({reason}); is it a Shoal server, and does it run?") from None
    if not isinstance(told, dict) or "requests" not in told:
        raise BadConfig(f"{url} is not a Shoal server")
    return told


def message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "it is no Shoal server, or an older one"


# ---- drawing --------------------------------------------------------------------------------------------------------


def screen(told: Mapping[str, Any], url: str, width: int, height: int) -> list[str]:
    """The lines of one look."""
    engine, requests = told.get("engine", {}), told["requests"]
    blocks = engine.get("blocks", {})
    held, total = blocks.get("held", 0), blocks.get("total", 0)
    share = held / total if total else 0.0
    full = round(share * BAR)
    lines = [
        f"shoal top · {url} · {time.strftime('%H:%M:%S')} · engine started {engine.get('epoch', 0) + 1} times",
        f"running {engine.get('running', 0)}/{engine.get('places', '?')}   waiting {engine.get('waiting', 0)}   "
        f"compiling {engine.get('compiling', 0)}   passes in flight {engine.get('in_flight', 0)}   "
        f"fronts {len(engine.get('fronts', ()))}",
        f"KV blocks [{'#' * full}{'.' * (BAR - full)}] {share:.0%}   held {held}   "
        f"cached {blocks.get('cached', 0)}   of {total}",
        "",
        row([heading for heading, _, _ in COLUMNS]),
    ]
    room = max(1, height - len(lines) - 2)
    lines += [row([cell(request.get(field)) for _, field, _ in COLUMNS]) for request in requests[:room]]
    if len(requests) > room:
        lines.append(f"… and {len(requests) - room} more")
    return [line[:width].rstrip() for line in lines]


def cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def row(cells: Sequence[str]) -> str:
    parts = []
    for text, (_, _, width) in zip(cells, COLUMNS, strict=True):
        cut = text if len(text) <= abs(width) else f"{text[: abs(width) - 1]}…"
        parts.append(cut.rjust(-width) if width < 0 else cut.ljust(width))
    return " ".join(parts)
