"""shoal bench hostile: requests made to hurt a server, sent to one of its own; what the others notice meanwhile."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.bench.hostile_bodies import Attack, attacks, template
from shoal.cli.common import new_command
from shoal.errors import BadConfig, EngineError

AIM_MS, AIM_MB = 100, 300
STOP_S = 60


def add_hostile(kinds: Any) -> None:
    parser = new_command(
        kinds,
        "hostile",
        "start a server, send it hostile requests, and print how long /health took and the memory of its front",
        "shoal bench hostile\n"
        "  shoal bench hostile --model DIR --only template --only letter\n"
        "  shoal bench hostile --body /v1/chat/completions=mine.json --copies 20 -- --max-model-len 2048",
        run_hostile,
    )
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="only attacks with this word in their name"
    )
    parser.add_argument(
        "--body", action="append", default=[], metavar="PATH=FILE", help="send this body, instead of the built-in ones"
    )
    parser.add_argument("--copies", type=int, default=4, help="of each --body, sent at once (default: 4)")
    parser.add_argument("--idle", type=float, default=5.0, metavar="S", help="length of the idle phase (default: 5)")
    parser.add_argument("--limit", type=float, default=15.0, metavar="S", help="longest attack (default: 15)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags for `shoal serve`")


def run_hostile(args: argparse.Namespace) -> int:
    from shoal.bench.cpu_noise import banner, noise_in
    from shoal.bench.hostile import HEADER, attack_all

    if sys.platform != "linux":
        raise BadConfig("shoal bench hostile reads the server's memory from /proc, so it needs Linux")
    if args.idle <= 0 or args.limit <= 0 or args.copies < 1:
        raise BadConfig("--idle, --limit and --copies must be above 0")
    chosen = choose(args)
    results = []
    with own_server(args.model, args.flags) as (process, url):
        host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 0
        if not args.json:
            print(line_of(HEADER))
        for result in attack_all(host, port, process.pid, chosen, args.idle, args.limit):
            results.append(result)
            if not args.json:
                print(line_of(result.row()), flush=True)
    if args.json:
        print(json.dumps([asdict(one) for one in results]))
        return 0
    headline = banner([noise_in(asdict(one)) for one in results])
    idle, *others = results
    worst = max(others, key=lambda one: one.health_ms["p100"])
    largest = max(others, key=lambda one: one.front_mb)
    print(
        (f"\n{headline}" if headline else "")
        + f"\n/health took {worst.health_ms['p100']:.0f} ms at most ({worst.name}; aim: below {AIM_MS}), "
        f"{worst.health_ms['p100'] / idle.health_ms['p100']:.1f} times the idle {idle.health_ms['p100']:.0f} ms; "
        f"the front took {largest.front_mb:.0f} MB at most ({largest.name}; aim: below {AIM_MB})"
    )
    return 0


def choose(args: argparse.Namespace) -> list[Attack]:
    """The attacks to run."""
    if args.body:
        return [own_body(text, args.copies) for text in args.body]
    known = attacks()
    for word in args.only:
        if not any(word in attack.name for attack in known):
            raise BadConfig(f"no attack has {word!r} in its name; there are: {', '.join(one.name for one in known)}")
    return [one for one in known if not args.only or any(word in one.name for word in args.only)]


def own_body(text: str, copies: int) -> Attack:
    path, sign, name = text.partition("=")
    if not sign or not path.startswith("/"):
        raise BadConfig(f"--body must be PATH=FILE, such as /v1/completions=mine.json, not {text!r}")
    try:
        body = Path(name).read_bytes()
    except OSError as error:
        raise BadConfig(f"cannot read {name}: {error.strerror}") from error
    return Attack(f"{Path(name).name} to {path}", path, lambda: body, copies)


@contextmanager
def own_server(model: str | None, flags: list[str]) -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """A `shoal serve` whose chat template is one of the attacks, and its address."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-hostile-")))
        (folder / "template.jinja").write_text(template())
        command = [sys.executable, "-m", "shoal", "serve", *([model] if model else []), "--port", "0", "--json"]
        command += ["--log-level", "error", "--chat-template", str(folder / "template.jinja"), *flags]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        stack.callback(end, process)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EngineError("the server did not start")
        yield process, json.loads(line)["url"]


def end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def line_of(cells: list[str]) -> str:
    name, answers, *numbers = cells
    return f"{name:<34}{answers:<24}" + "".join(f"{cell:>{max(len(cell), 8) + 1}}" for cell in numbers)
