"""shoal restart: restart the engines of a running server, one by one, without losing a request.

Asks with POST /admin/restart and follows GET /debug/requests. Knows the server only by its URL.
"""

import argparse
import time
import urllib.request
from typing import Any

from shoal.cli.common import new_command
from shoal.cli.top import ask_for_key, call, fetch
from shoal.errors import BadConfig

LOOK_S = 0.25


def add_restart(commands: Any) -> None:
    parser = new_command(
        commands,
        "restart",
        "restart the engines of a server one by one; requests move to the others and none is lost",
        "shoal restart --url http://127.0.0.1:8000",
        run_restart,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="an admin key, if the server has keys; -: prompt for it")
    parser.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest wait (default: 600)")
    parser.add_argument("--no-wait", action="store_true", help="end as soon as the server has begun")


def run_restart(args: argparse.Namespace) -> int:
    key = ask_for_key() if args.api_key == "-" else args.api_key
    until_s = time.monotonic() + args.timeout
    before = starts_of(fetch(args.url, key, args.insecure))
    while None in before.values():  # the server would wait for it, too
        wait(until_s, f"engine {min(number for number, start in before.items() if start is None)} is down")
        before = starts_of(fetch(args.url, key, args.insecure))
    request = urllib.request.Request(
        f"{args.url.rstrip('/')}/admin/restart", b"{}", {"Content-Type": "application/json"}, method="POST"
    )
    call(request, args.url, key, args.insecure, "restarting")
    restarted: set[int] = set()
    while len(restarted) < len(before) and not args.no_wait:
        wait(until_s, f"only {len(restarted)} of {len(before)} engines were restarted")
        try:
            now = starts_of(fetch(args.url, key, args.insecure))
        except BadConfig:
            continue  # the only engine is down at the moment
        for number, start in sorted(now.items()):
            if number not in restarted and start is not None and start != before.get(number):
                restarted.add(number)
                print(f"engine {number} was restarted ({len(restarted)} of {len(before)})", flush=True)
    return 0


def wait(until_s: float, state: str) -> None:
    """A moment; raises BadConfig when the time is over."""
    if time.monotonic() > until_s:
        raise BadConfig(f"{state} when the time was over; see the server's log, or raise --timeout")
    time.sleep(LOOK_S)


def starts_of(snapshot: dict[str, Any]) -> dict[int, int | None]:
    """Engine → the number of its start; None while it is down.

    >>> starts_of({"engine": {"epoch": 3}})
    {0: 3}
    """
    if "engines" in snapshot:
        return {one["engine"]: one.get("epoch") if one["up"] else None for one in snapshot["engines"]}
    return {0: snapshot["engine"]["epoch"]}
