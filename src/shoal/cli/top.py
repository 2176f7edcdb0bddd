"""shoal top: the running and waiting requests of a server, live in the terminal.

Polls GET /debug/requests and draws the answer. Knows the server only by its URL.
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
from shoal.cli.top_rates import ServerRates
from shoal.errors import BadConfig

CLEAR, HOME, HIDE, SHOW = "\x1b[2J", "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"
TIMEOUT_S = 10.0
BAR = 30  # characters
# heading, field, width; negative: right-aligned
COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("ENGINE", "engine", -6),  # only where there are several
    ("STATE", "state", 9),
    ("TENANT", "tenant", 12),
    ("TIER", "tier", 9),
    ("PROMPT", "prompt_tokens", -7),
    ("OUTPUT", "output_tokens", -7),
    ("MAX", "max_tokens", -7),
    ("CACHED", "cached_tokens", -7),
    ("BLOCKS", "blocks", -6),
    ("LOST", "preemptions", -4),
    ("DRAFTED", "draft_tokens", -7),
    ("RIGHT", "draft_tokens_accepted", -6),
    ("AGE", "age_s", -8),
    ("SLACK", "slack_s", -8),
    ("ID", "id", 28),
    ("WHY", "why", 40),
)


def add_top(commands: Any) -> None:
    parser = new_command(
        commands,
        "top",
        "show the running and waiting requests of a server, live",
        "shoal top --url http://127.0.0.1:8000",
        run_top,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="an admin key, if the server has keys; -: prompt for it")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    parser.add_argument("--json", action="store_true", help="print one snapshot as a JSON object")


def run_top(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        raise BadConfig(f"--interval must be between 0.1 and 3600 seconds, not {args.interval}")
    key = ask_for_key() if args.api_key == "-" else args.api_key
    if args.json:
        print(json.dumps(fetch(args.url, key, args.insecure)))
        return 0
    rates = ServerRates(args.url, key, args.insecure)
    if args.once:
        lines = screen(fetch(args.url, key, args.insecure), args.url, *shutil.get_terminal_size((200, 1000)))
        print("\n".join([lines[0], *rates.lines(), *lines[1:]]))
        return 0
    fetch(args.url, key, args.insecure)  # an error at the start is printed plainly
    try:
        sys.stdout.write(CLEAR + HIDE)
        while True:
            lines = now(args.url, key, args.insecure)
            sys.stdout.write(HOME + "\n".join([lines[0], *rates.lines(), *lines[1:]]))
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
    """The lines of the screen now; shows the error while the server does not answer."""
    width, height = shutil.get_terminal_size((160, 50))
    try:
        return screen(fetch(url, key, insecure), url, width, height)
    except BadConfig as error:
        return [f"shoal top · {url} · {time.strftime('%H:%M:%S')}", "", str(error)[: width * 3]]


# ---- fetching -------------------------------------------------------------------------------------------------------


def fetch(url: str, key: str | None = None, insecure: bool = False) -> dict[str, Any]:
    """The server's snapshot of its requests."""
    return get(url, "/debug/requests", key, insecure, "requests")


def get(url: str, path: str, key: str | None, insecure: bool, field: str) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise BadConfig(f"--url must begin with http:// or https://, not be {url!r}")
    return call(urllib.request.Request(f"{url.rstrip('/')}{path}"), url, key, insecure, field)


def ask_server(args: argparse.Namespace, path: str, field: str) -> dict[str, Any]:
    """For commands with --url, --api-key and --insecure."""
    key = ask_for_key() if args.api_key == "-" else args.api_key
    return get(args.url, path, key, args.insecure, field)


def call(request: urllib.request.Request, url: str, key: str | None, insecure: bool, field: str) -> dict[str, Any]:
    """What the server at this URL answers, which must be a JSON object with this field."""
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    context = ssl._create_unverified_context() if insecure else None
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            message = message_of(error)
        raise BadConfig(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise BadConfig(f"{url} does not answer ({reason}); is a Shoal server running there?") from None
    if not isinstance(found, dict) or field not in found:
        raise BadConfig(f"{url} is not a Shoal server")
    return found


def message_of(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return "it is not a Shoal server, or an older one"


# ---- drawing --------------------------------------------------------------------------------------------------------


def screen(snapshot: Mapping[str, Any], url: str, width: int, height: int) -> list[str]:
    """The lines of one snapshot."""
    engine, requests = snapshot.get("engine", {}), snapshot["requests"]
    blocks = engine.get("blocks", {})
    held, total = blocks.get("held", 0), blocks.get("total", 0)
    share = held / total if total else 0.0
    full = round(share * BAR)
    columns = [one for one in COLUMNS if one[1] != "engine" or "engines" in snapshot]
    lines = [
        f"shoal top · {url} · {time.strftime('%H:%M:%S')} · {starts(snapshot)}",
        f"running {engine.get('running', 0)}/{engine.get('places', '?')}   waiting {engine.get('waiting', 0)}   "
        f"compiling {engine.get('compiling', 0)}   passes in flight {engine.get('in_flight', 0)}   "
        f"fronts {len(engine.get('fronts', ()))}",
        f"KV blocks [{'#' * full}{'.' * (BAR - full)}] {share:.0%}   held {held}   "
        f"cached {blocks.get('cached', 0)}   of {total}",
        *utilisation_lines(snapshot),
        *map(engine_line, snapshot.get("engines", ())),
        "",
        row([heading for heading, _, _ in columns], columns),
    ]
    visible = max(1, height - len(lines) - 3)  # the last line, the one below, and that of the rates
    lines += [row([cell(request.get(field)) for _, field, _ in columns], columns) for request in requests[:visible]]
    if len(requests) > visible:
        lines.append(f"… and {len(requests) - visible} more")
    return [line[:width].rstrip() for line in lines]


def starts(snapshot: Mapping[str, Any]) -> str:
    """How often the engine was started, or how many engines are up."""
    if "engines" in snapshot:
        up = sum(one["up"] for one in snapshot["engines"])
        return f"{up} of {len(snapshot['engines'])} engines up"
    return f"engine started {snapshot.get('engine', {}).get('epoch', 0) + 1} times"


def utilisation_lines(snapshot: Mapping[str, Any]) -> list[str]:
    """What passes compute and move, as shares of what the device reaches; the mean of several engines.

    >>> utilisation_lines({"engine": {"utilisation": {"mfu": 0.4, "mbu": 0.123, "useful": 1.0}}})
    ['device    MFU 40%   MBU 12%   useful work 100%']
    """
    found = snapshot.get("engine", {}).get("utilisation", {})
    engines = max(1, sum("utilisation" in one for one in snapshot.get("engines", ())))
    names = {"mfu": "MFU", "mbu": "MBU", "useful": "useful work"}
    shown = [f"{word} {found[name] / engines:.0%}" for name, word in names.items() if name in found]
    return [f"device    {'   '.join(shown)}"] if shown else []


def engine_line(one: Mapping[str, Any]) -> str:
    """One of several engines."""
    if not one["up"]:
        return f"  engine {one['engine']}  down"
    blocks = one.get("blocks", {})
    return (
        f"  engine {one['engine']}  running {one.get('running', 0)}/{one.get('places', '?')}   "
        f"waiting {one.get('waiting', 0)}   blocks held {blocks.get('held', 0)} of {blocks.get('total', 0)}   "
        f"started {one.get('epoch', 0) + 1} times"
    )


def cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def row(cells: Sequence[str], columns: Sequence[tuple[str, str, int]]) -> str:
    parts = []
    for text, (_, _, width) in zip(cells, columns, strict=True):
        short = text if len(text) <= abs(width) else f"{text[: abs(width) - 1]}…"
        parts.append(short.rjust(-width) if width < 0 else short.ljust(width))
    return " ".join(parts)
