"""shoal chat: chat with a model in the terminal.

Owns the commands that begin with a slash, line editing and its history. The engine is an LLM's.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.common import add_sampling, new_command, open_llm, sampling_from
from shoal.config.engine import add_flags
from shoal.core.params import SamplingParams
from shoal.errors import RequestFailed, ShoalError

if TYPE_CHECKING:
    from shoal.llm.llm import LLM

COMMANDS = {
    "/help": "this list",
    "/reset": "start a new conversation",
    "/again": "answer the last message again",
    "/system TEXT": "set the system message and start a new conversation; without a text: none",
    "/exit": "quit, as Ctrl-D",
}
KEPT_LINES = 1000


def add_chat(commands: Any) -> None:
    parser = new_command(
        commands,
        "chat",
        "chat with a model; /help lists the commands",
        "shoal chat --temperature 0.7 --system 'Answer briefly.'",
        run_chat,
    )
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--system", help="system message")
    add_sampling(parser, max_tokens=512)
    add_flags(parser)


def run_chat(args: argparse.Namespace) -> int:
    with open_llm(args) as llm, line_editing():
        chat = TerminalChat(args, llm)
        print("Type a message; /help lists commands, Ctrl-D quits.", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            if line == "/exit":
                return 0
            if line:
                chat.take(line)


class TerminalChat:
    """The messages so far, and what a line does to them."""

    def __init__(self, args: argparse.Namespace, llm: "LLM") -> None:
        self.args, self.llm = args, llm
        self.system = args.system or ""
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def take(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/help":
            wide = max(map(len, COMMANDS))
            tell("\n".join(f"{name:<{wide}}  {about}" for name, about in COMMANDS.items()))
        elif command == "/reset":
            self.reset()
            tell("(new conversation)")
        elif command == "/system":
            self.system = rest.strip()
            self.reset()
            tell("(new conversation)")
        elif command == "/again":
            self.again()
        elif line.startswith("/"):
            known = ", ".join(name.split()[0] for name in COMMANDS)
            tell(f"unknown command {command}; known: {known}")
        else:
            self.answer(line)

    def again(self) -> None:
        """The last answer is replaced; if that fails, it stays."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            tell("there is no answer yet")
            return
        before = list(self.messages)
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self.answer(question)
        if len(self.messages) < len(before):
            self.messages = before

    def answer(self, line: str) -> None:
        """One exchange; if it fails, the conversation is unchanged."""
        self.messages.append({"role": "user", "content": line})
        try:
            ids = self.llm.encode(self.messages)
            text, errors = print_answer(self.llm, ids, sampling_from(self.args, self.llm, len(ids)))
            if any(errors):
                raise RequestFailed(f"the request failed: {''.join(errors)}")
        except KeyboardInterrupt:
            self.messages.pop()
            tell("\n(stopped; your message was dropped)")
        except ShoalError as error:
            self.messages.pop()
            tell(f"shoal: {error} (/reset starts a new conversation)")
        else:
            self.messages.append({"role": "assistant", "content": text})


def print_answer(llm: "LLM", ids: list[int], params: SamplingParams) -> tuple[str, list[str]]:
    """Print an answer as it streams, then its figures on standard error; returns its text and errors."""
    texts, errors, tokens = [], [], 0
    asked_s = first_s = time.perf_counter()
    for chunk in llm.stream(ids, params):
        if not tokens:
            first_s = time.perf_counter()
        tokens += len(chunk.token_ids)
        print(chunk.text, end="", flush=True)
        texts.append(chunk.text)
        errors.append(chunk.error)
    print(flush=True)
    if sys.stderr.isatty():
        tell(figures(tokens, first_s - asked_s, time.perf_counter() - first_s))
    return "".join(texts), errors


def figures(tokens: int, first_s: float, rest_s: float) -> str:
    """
    >>> figures(41, 0.25, 2.0)
    '(41 tokens, first after 0.25 s, then 20.0 tok/s)'
    """
    speed = f", then {(tokens - 1) / rest_s:,.1f} tok/s" if tokens > 1 and rest_s > 0 else ""
    return f"({tokens} {'token' if tokens == 1 else 'tokens'}, first after {first_s:.2f} s{speed})"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "shoal" / "chat_history"


@contextmanager
def line_editing() -> Iterator[None]:
    """Arrow keys, a history over sessions and completion of commands, where input is a terminal and has readline."""
    try:
        if not sys.stdin.isatty():
            raise ImportError
        import readline
    except ImportError:
        yield
        return
    path, words = history_file(), [name.split()[0] for name in COMMANDS]
    readline.set_completer(lambda text, state: [*(one for one in words if one.startswith(text)), None][state])
    readline.set_completer_delims(" ")
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(KEPT_LINES)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):  # a home that cannot be written: the history ends with the session
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
