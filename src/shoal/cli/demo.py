"""shoal demo: a server on the default model with made-up traffic, and the live page with captions.

Starts `shoal serve` as a process of its own, with a key for each of some tenants, and sends requests as they would.
Owns what they send and when. Knows the server by its URL, and the engine's process by its name, which it may kill.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.cli.common import new_command
from shoal.errors import BadConfig
from shoal.keys.api_key import ApiKey, digest_of
from shoal.keys.file import line_of, new_key

CHATTERS = ("ada", "bob", "cleo")
TENANTS = {**dict.fromkeys(CHATTERS, "chat"), "giant": "batch", "flood": "batch"}  # → their tiers
TIERS = {"chat": {"ttft": 2.0, "itl": 0.3, "weight": 4}, "batch": {"weight": 1}}
QUESTIONS = (
    "Why do fish swim in shoals?",
    "Write a short story about a lighthouse keeper who befriends a whale.",
    "Explain photosynthesis to a child.",
    "List five ideas for a rainy afternoon, with a sentence about each.",
    "What is the difference between a river and a stream?",
    "Describe a market in the morning.",
)
GIANT_S, FLOOD_S, ROUND_S = 12.0, 26.0, 45.0  # when they come, and how long until they come again
FLOOD = 24  # requests at once
KEYS = "keys: c kills the engine, g sends a giant prompt, f begins a flood, q ends (then Enter)"


def add_demo(commands: Any) -> None:
    parser = new_command(
        commands,
        "demo",
        "serve the default model with made-up traffic and watch the batch in the browser",
        "shoal demo",
        run_demo,
    )
    parser.add_argument("model", nargs="?", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument("--no-open", action="store_true", help="do not open a browser")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="end after so long; 0: never")
    parser.add_argument("--crash-at", type=float, default=0.0, metavar="S", help="kill the engine at this second, too")
    parser.add_argument("--giant-tokens", type=int, default=1200, metavar="N", help="of a giant prompt (default: 1200)")
    parser.add_argument("--record", metavar="FILE", help="write a recording, for shoal live")


def run_demo(args: argparse.Namespace) -> int:
    if args.giant_tokens < 1 or args.seconds < 0 or args.crash_at < 0:
        raise BadConfig("--giant-tokens must be at least 1, --seconds and --crash-at at least 0")
    keys = {name: new_key() for name in (*TENANTS, "demo")}
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        server = start_server(args, write_keys(Path(folder), keys))
        try:
            url = wait_for_url(server)
            page = url.replace("://", f"://demo:{keys['demo']}@", 1) + "/live#demo"
            print(f"watch the batch: {page}\n{KEYS}", flush=True)
            if not args.no_open:
                webbrowser.open(page)
            traffic = Traffic(url, keys, args.giant_tokens, lambda: kill_engine(server.pid))
            traffic.run(args.seconds, args.crash_at)
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()
    return 0


def write_keys(folder: Path, keys: dict[str, str]) -> Path:
    path = folder / "keys.yaml"
    lines = [
        line_of(ApiKey(name=name, digest=digest_of(key), tier=TENANTS.get(name, ""), admin=name == "demo"))
        for name, key in keys.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def start_server(args: argparse.Namespace, keys: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "shoal", "serve", *([args.model] if args.model else []), "--json"]
    command += ["--port", str(args.port), "--api-keys-file", str(keys), "--log-level", "error", "--order", "fair"]
    command += ["--max-num-seqs", "12", "--max-num-batched-tokens", "128", "--kv-memory", "192MiB"]
    command += ["--tiers", json.dumps(TIERS), "--drain-timeout", "1"]
    command += ["--record", args.record] if args.record else []
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def wait_for_url(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise BadConfig(f"the server did not start and ended with code {server.wait()}; its messages are above")
    return str(json.loads(line)["url"])


class Traffic:
    """What the tenants send."""

    def __init__(self, url: str, keys: dict[str, str], giant_tokens: int, crash: Callable[[], str]) -> None:
        self.url, self.keys, self.giant_tokens, self.crash = url, keys, giant_tokens, crash
        self.ended = threading.Event()
        self.chance = random.Random(3)
        self.answered = self.failed = 0
        self._lock = threading.Lock()

    def run(self, seconds: float, crash_at_s: float) -> None:
        for number, name in enumerate((*CHATTERS, *CHATTERS)):
            self._begin(self._chat, name, 0.7 * number)
        self._begin(self._read_keys)
        begun_s, due = time.monotonic(), [(GIANT_S, self.giant), (FLOOD_S, self.flood)]
        if crash_at_s:
            due.append((crash_at_s, self._crash))
        while not self.ended.wait(0.2):
            now_s = time.monotonic() - begun_s
            for at_s, act in [one for one in due if one[0] <= now_s]:
                due.remove((at_s, act))
                act()
                if act != self._crash:
                    due.append((at_s + ROUND_S, act))
            if seconds and now_s >= seconds:
                self.ended.set()
        print(f"{self.answered} requests were answered, {self.failed} failed", flush=True)

    def _begin(self, what: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=what, args=given, daemon=True).start()

    def _read_keys(self) -> None:
        acts = {"c": self._crash, "g": self.giant, "f": self.flood, "q": self.ended.set}
        for line in sys.stdin:
            acts.get(line.strip().lower()[:1], lambda: print(KEYS, flush=True))()

    def _crash(self) -> None:
        print(self.crash(), flush=True)

    def giant(self) -> None:
        ids = [self.chance.randrange(5, 250) for _ in range(self.giant_tokens)]  # of any model
        self._begin(self._ask, "giant", ids, 40)

    def flood(self) -> None:
        for _ in range(FLOOD):
            self._begin(self._ask, "flood", self.chance.choice(QUESTIONS), self.chance.randrange(30, 80))

    def _chat(self, name: str, wait_s: float) -> None:
        """One user, who reads each answer and thinks a moment."""
        while not self.ended.wait(wait_s):
            self._ask(name, self.chance.choice(QUESTIONS), self.chance.randrange(40, 160))
            wait_s = self.chance.uniform(0.2, 1.5)

    def _ask(self, name: str, prompt: str | list[int], most: int) -> None:
        body = {"prompt": prompt, "max_tokens": most, "stream": True, "ignore_eos": True, "temperature": 0.8}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.keys[name]}"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        whole = False
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                for line in answer:
                    whole = whole or line.startswith(b"data: [DONE]")
        except (OSError, urllib.error.URLError) as error:
            if not self.ended.is_set():
                print(f"a request of {name} failed: {error}", flush=True)
        with self._lock:
            self.answered += whole
            self.failed += not whole and not self.ended.is_set()


def kill_engine(server: int) -> str:
    """Kill the engine's process, as a crash would; returns what to say."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server and (entry / "comm").read_text().strip() == "shoal-engine":
                os.kill(int(entry.name), signal.SIGKILL)
                return f"the engine (process {entry.name}) was killed; the streams go on when it is back"
    return "no engine's process was found: it is starting, or this is not Linux; kill it by hand"
