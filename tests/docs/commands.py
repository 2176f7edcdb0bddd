"""The commands in README and docs: found in fenced blocks, and run in a fresh checkout.

A block of commands is labelled `sh`, a program `python`. It is run, unless the line before it is a comment that says
otherwise:

    <!-- not run: needs a GPU -->      the reason is free; the flags of `shoal` are checked all the same
    <!-- with a server -->             `shoal serve` runs meanwhile

Commands run as they are written, except that a free port stands for 8000. `shoal serve` and `make serve` run until they
are ready and then while the rest of the block runs; `shoal top`, which would run for ever, gets an interrupt.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^( *)```(\w*) *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (not run: [^\n]+|with a server) -->\n\Z")
PROGRAMS = "shoal|curl|make|python3?|pip|docker|kubectl|ray|systemctl|taskset|openssl"
COMMAND = re.compile(rf"^(?:\$ )?(?:{PROGRAMS}) ", re.MULTILINE)
READY_S = 300.0
WATCH_S = 5.0


@dataclass(frozen=True)
class Block:
    """One fenced block with commands or a program."""

    page: Path
    line: int
    kind: str  # sh or python
    text: str
    not_run: str  # why; empty: it is run
    server: bool  # it needs one

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """One line each, without comments."""
        joined: list[str] = []
        inside = False  # a here-document
        for line in self.text.splitlines():
            open_quote = bool(joined) and joined[-1].count("'") % 2 == 1
            if inside or open_quote:
                joined[-1] += "\n" + line
                inside = inside and line != "END"
            elif joined and joined[-1].endswith("\\"):
                joined[-1] = joined[-1].removesuffix("\\") + without_comment(line)
            elif line.startswith("cat > ") and "<<END" in line:
                joined.append(without_comment(line))
                inside = True
            elif plain := without_comment(line):
                joined.append(plain)
        return [line.strip() for line in joined]


def without_comment(line: str) -> str:
    for found in re.finditer(r"(^|\s)#\s", line):
        before = line[: found.start()]
        if before.count("'") % 2 == 0 and before.count('"') % 2 == 0:
            return before.rstrip()
    return line.rstrip()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        kind, body = found[2], found[3]
        line = text.count("\n", 0, found.start()) + 1
        if not kind and COMMAND.search(body):
            kind = "unlabelled"
        if kind not in ("sh", "python", "unlabelled"):
            continue
        mark = MARK.search(text, 0, found.start())
        said = mark[1] if mark else ""
        reason = said.removeprefix("not run: ") if said.startswith("not run") else ""
        yield Block(page, line, kind, body, reason, said == "with a server")


ALL = [block for page in PAGES for block in blocks(page)]
TO_RUN = [block for block in ALL if not block.not_run]


def shoal_arguments(command: str) -> list[str] | None:
    """The arguments of a `shoal` command, up to a pipe or a redirection; None for other programs."""
    words = shlex.split(command, posix=True)
    for at, word in enumerate(words):
        if word in (">", ">>", "|", "&&", "2>"):
            words = words[:at]
            break
    return words[1:] if words and words[0] == "shoal" else None


class Checkout:
    """A fresh copy of the project's tracked files, with this interpreter, to run commands in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shoal"
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, self.folder], check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (self.folder / ".venv").symlink_to(sys.prefix)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "PYTHONPATH": str(self.folder / "src"), "SHOAL_PORT": str(self.port)}
        self.server: subprocess.Popen[bytes] | None = None
        self.scheme = "http"

    def here(self, command: str) -> str:
        """The command with this checkout's port."""
        command = re.sub(r"(?<=localhost:|127\.0\.0\.1:)8000\b", str(self.port), command)
        command = re.sub(r"--port \d+", f"--port {self.port}", command)
        words = command.split()
        if words[:2] in (["shoal", "top"], ["shoal", "restart"]) and "--url" not in words:
            command += f" --url http://127.0.0.1:{self.port}"
        if words[0] == "make":
            command += " -o install"  # the environment is this interpreter's
        return command

    def run_block(self, block: Block) -> None:
        try:
            if block.server:
                self.start("shoal serve")
            if block.kind == "python":
                self.run_python(block)
            set_before = ""
            for command in block.commands() if block.kind == "sh" else ():
                if re.match(r"\w+=", command):
                    set_before += command + "\n"  # a variable of the shell, for the commands after it
                else:
                    self.run(command, set_before)
        finally:
            self.stop()

    def run(self, command: str, set_before: str = "") -> None:
        if re.match(r"(shoal|make) serve\b", command):
            self.start(command)
        elif re.match(r"shoal top(?!.*--(once|json))", command):
            self.watch(command)
        else:
            done = subprocess.run(
                ["bash", "-c", set_before + self.here(command)],
                cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            if command.startswith("curl"):
                assert '"error": {' not in done.stdout, f"{command}\n{done.stdout}"

    def run_python(self, block: Block) -> None:
        """Programs of one page share their names, as in a notebook; so those before this one run as well."""
        before = [one for one in ALL if one.page == block.page and one.kind == "python" and one.line <= block.line]
        text = "\n".join(one.text for one in before if not one.not_run and one.server == block.server)
        text = text.replace(":8000", f":{self.port}")
        runner = (
            "import ast, asyncio, inspect, sys, types\n"
            "code = compile(sys.stdin.read(), 'block', 'exec', flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)\n"
            "made = types.FunctionType(code, {'__name__': '__main__'})()\n"
            "if inspect.iscoroutine(made): asyncio.run(made)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", runner],
            cwd=self.folder, env=self.env, input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.name}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    def watch(self, command: str) -> None:
        """Something that runs until it is interrupted."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {self.here(command)}"],
            cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(WATCH_S)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert process.returncode in (0, 130), f"{command}\n{told.decode()}"

    def start(self, command: str) -> None:
        """A server; the one before it ends."""
        self.stop()
        self.scheme = "https" if "--ssl-certfile" in command else "http"
        log = self.folder / "server.log"
        with log.open("wb") as out:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(command)}"],
                cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        end_s = time.monotonic() + READY_S
        while not self.ready():
            assert self.server.poll() is None, f"{command} ended with {self.server.returncode}\n{log.read_text()}"
            assert time.monotonic() < end_s, f"{command} is not ready after {READY_S:.0f} s\n{log.read_text()}"
            time.sleep(0.3)

    def ready(self) -> bool:
        import ssl

        context = ssl._create_unverified_context() if self.scheme == "https" else None
        try:
            with urllib.request.urlopen(f"{self.scheme}://127.0.0.1:{self.port}/health", context=context) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.terminate()
            server.wait(120)


def main() -> None:
    """List what is run, and why the rest is not; or run what the names of blocks contain."""
    import tempfile

    parser = argparse.ArgumentParser(description="Run the commands of README and docs in a fresh checkout.")
    parser.add_argument("--only", default="", metavar="TEXT", help="blocks whose file:line contains it")
    parser.add_argument("--list", action="store_true", help="print the commands, and why some are not run")
    args = parser.parse_args()
    for block in ALL:
        if args.only not in block.name:
            continue
        print(f"{block.name}: {'not run: ' + block.not_run if block.not_run else 'run'}", flush=True)
        if args.list:
            print("".join(f"    {line}\n" for line in block.commands()), end="")
        elif not block.not_run:
            begun_s = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                Checkout(Path(folder)).run_block(block)
            print(f"    {time.monotonic() - begun_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
