"""shoal live: the live page on a recording, of shoal serve --record, shoal compare or shoal simulate.

Serves the page and the recording on this machine and opens a browser. Knows the lines of a recording only by their
first one, which names their format and their panes.
"""

import argparse
import json
import webbrowser
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from shoal.cli.common import new_command
from shoal.errors import BadConfig
from shoal.obs.live import FORMAT

MOST_PANES = 4
KINDS = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def add_live(commands: Any) -> None:
    parser = new_command(
        commands,
        "live",
        "watch a recording of passes in the browser, or up to four side by side",
        "shoal live shoal-compare/live.jsonl --panes fastertransformer,shoal",
        run_live,
    )
    parser.add_argument("recordings", nargs="+", metavar="FILE", help="recordings; each of their runs is a pane")
    parser.add_argument("--panes", metavar="NAMES", help=f"which runs to show, by name, at most {MOST_PANES}")
    parser.add_argument("--port", type=int, default=0, help="port to serve the page on (default: any free one)")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")


def run_live(args: argparse.Namespace) -> int:
    body = "\n".join(joined(args.recordings, args.panes.split(",") if args.panes else None)).encode()
    try:
        server = ThreadingHTTPServer(("127.0.0.1", args.port), make_handler(body))
    except (OSError, OverflowError) as error:
        raise BadConfig(f"cannot listen on port {args.port}: {error}; choose another --port") from error
    url = f"http://127.0.0.1:{server.server_address[1]}/live#replay"
    print(f"the recording is shown at {url}; end with Ctrl-C", flush=True)
    if not args.no_open:
        webbrowser.open(url)
    with server:
        server.serve_forever()
    return 0


def joined(paths: Sequence[str], wanted: Sequence[str] | None = None) -> Iterator[str]:
    """One recording of the panes of all files, or of those that are wanted, in that order."""
    panes: list[tuple[str, list[dict[str, Any]]]] = []
    facts: dict[str, Any] = {}
    for path in paths:
        first, lines = read(path)
        facts = facts or {name: value for name, value in first.items() if name not in ("shoal_live", "panes")}
        found: list[list[dict[str, Any]]] = [[] for _ in first["panes"]]
        for line in lines:
            found[line.pop("pane", 0)].append(line)
        panes += zip(first["panes"] if len(first["panes"]) > 1 else [named(first, path)], found, strict=True)
    chosen = panes if wanted is None else [pick(panes, name) for name in wanted]
    if len(chosen) > MOST_PANES:
        names = ", ".join(name for name, _ in panes)
        raise BadConfig(f"there are {len(chosen)} runs: {names}; choose at most {MOST_PANES} of them with --panes")
    yield json.dumps({"shoal_live": FORMAT, "panes": [name for name, _ in chosen], **facts})
    for number, (_, kept) in enumerate(chosen):
        for line in kept:
            yield json.dumps({"pane": number, **line}, separators=(",", ":"))


def named(first: dict[str, Any], path: str) -> str:
    name = str(first["panes"][0])
    return name if name != "live" else path.rpartition("/")[2].removesuffix(".jsonl")


def pick(panes: Sequence[tuple[str, list[dict[str, Any]]]], name: str) -> tuple[str, list[dict[str, Any]]]:
    """The pane of this name, or the first one whose name begins with it."""
    found = [pane for pane in panes if pane[0] == name] + [pane for pane in panes if pane[0].startswith(name)]
    if found:
        return found[0]
    raise BadConfig(f"no run is called {name!r}; known are: {', '.join(pane for pane, _ in panes)}")


def read(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first line, and the others."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"cannot read the recording {path}: {error}") from error
    lines: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        try:
            line = json.loads(row)
        except json.JSONDecodeError:
            if number == len(rows):
                break  # it is still being written
            raise BadConfig(f"line {number} of {path} is not JSON; give a recording of shoal serve --record") from None
        if not isinstance(line, dict):
            raise BadConfig(f"line {number} of {path} is not an object; give a recording of shoal serve --record")
        if lines and "shoal_live" in line:
            break  # the front was restarted: what follows has a clock of its own
        lines.append(line)
    if not lines or "shoal_live" not in lines[0] or not lines[0].get("panes"):
        raise BadConfig(f"{path} is not a recording: its first line has no field 'shoal_live'; use serve --record FILE")
    if lines[0]["shoal_live"] != FORMAT:
        raise BadConfig(f"{path} has format {lines[0]['shoal_live']}, and this program reads {FORMAT}; update Shoal")
    return lines[0], lines[1:]


def make_handler(recording: bytes) -> type[BaseHTTPRequestHandler]:
    """Serves the page's files and the recording, and nothing else."""
    folder = files("shoal.server") / "static"
    pages = {f"/static/{file.name}": file for file in folder.iterdir() if file.name.rpartition(".")[2] in KINDS}
    pages["/live"] = pages["/"] = folder / "live.html"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name that http.server calls
            path = self.path.partition("?")[0]
            if path == "/live/recording":
                self._answer(recording, "application/jsonl")
            elif path in pages:
                self._answer(pages[path].read_bytes(), KINDS[pages[path].name.rpartition(".")[2]])
            else:
                self.send_error(404)

        def _answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Content-Security-Policy", POLICY),
                ("X-Content-Type-Options", "nosniff"),
                ("Cache-Control", "no-store"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: it serves one person."""

    return Handler
