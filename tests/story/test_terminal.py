"""In a terminal: shoal chat with line editing, a history, commands and figures; shoal serve as it loads."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytest.importorskip("readline")
pytestmark = pytest.mark.timeout(900)
PATIENCE_S = 200.0
UP = "\x1b[A"


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 200))
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True)
        os.close(slave)
        self.seen = ""

    def until(self, pattern: str) -> str:
        """Read until this matches; returns what came since the last call."""
        end_s = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end_s, f"never seen: {pattern}\n{self.seen}"
            if select.select([self.master], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self.master, 4096).decode(errors="replace")
                except OSError as error:  # its end
                    raise AssertionError(f"it ended before {pattern}\n{self.seen}") from error
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def close(self) -> int:
        """Ctrl-D at the prompt; returns the exit code."""
        try:
            self.until("> ")
            self.send("\x04")
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()  # nothing, if it has ended
            self.process.wait()
            os.close(self.master)


def chat(model: Path, state: Path) -> Terminal:
    flags = ["--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--threads", "1", "--kv-memory", "8MiB"]
    env = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm", "COLUMNS": "200"}
    return Terminal([sys.executable, "-m", "shoal", "chat", "--model", str(model), *flags], env)


def test_a_chat_in_a_terminal(model: Path, tmp_path: Path) -> None:
    terminal = chat(model, tmp_path)
    terminal.until("> ")
    terminal.send("/help\n")
    shown = terminal.until(r"/exit +quit.*\n")
    assert "/again" in shown
    terminal.until("> ")
    terminal.send("hello\n")
    assert re.search(r"\(6 tokens, first after [\d.]+ s, then [\d,.]+ tok/s\)", terminal.until(r"tok/s\)"))
    terminal.until("> ")
    terminal.send("/again\n")
    terminal.until(r"\(6 tokens")
    terminal.until("> ")
    terminal.send("/system be brief\n")
    terminal.until("new conversation")
    terminal.until("> ")
    terminal.send("/again\n")
    terminal.until("there is no answer yet")
    assert terminal.close() == 0
    (history,) = tmp_path.rglob("chat_history")
    assert history.stat().st_mode & 0o077 == 0
    assert history.read_text().splitlines()[:2] == ["/help", "hello"]

    again = chat(model, tmp_path)
    again.until("> ")
    again.send(UP * 4 + "!\n")  # hello, as it was typed in the session before
    again.until("hello!")
    again.until(r"\(6 tokens")
    assert again.close() == 0


def test_a_server_shows_what_it_loads(model: Path) -> None:
    flags = ["--port", "0", "--threads", "1", "--kv-memory", "8MiB", "--no-spare-engine"]
    terminal = Terminal([sys.executable, "-m", "shoal", "serve", str(model), *flags], {**os.environ, "TERM": "xterm"})
    try:
        assert "starting: loading torch" in terminal.until(rf"loading {model.name}: .* weights, on cpu")
        terminal.until(r"weights: 100%.* \d+/\d+ ")
        terminal.until("Shoal is ready")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
