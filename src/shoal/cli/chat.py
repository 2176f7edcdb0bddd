"""shoal chat: chat with a model in the terminal."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from shoal.cli.common import add_sampling, new_command, open_llm, sampling_from
from shoal.cli.generate import print_stream
from shoal.config.engine import add_flags
from shoal.errors import RequestFailed, ShoalError

if TYPE_CHECKING:
    from shoal.llm.llm import LLM


def add_chat(commands: Any) -> None:
    parser = new_command(
        commands,
        "chat",
        "chat with a model; /reset starts a new conversation, /exit quits",
        "shoal chat --temperature 0.7 --system 'Answer briefly.'",
        run_chat,
    )
    parser.add_argument("--model", "-m", default=None, help="folder, .gguf file or hub name (default: SmolLM2)")
    parser.add_argument("--system", help="system message")
    add_sampling(parser, max_tokens=512)
    add_flags(parser)


def run_chat(args: argparse.Namespace) -> int:
    with open_llm(args) as llm:
        opening = [{"role": "system", "content": args.system}] if args.system else []
        messages = list(opening)
        print("Type a message. /reset starts a new conversation, /exit or Ctrl-D quits.", file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
                print("(new conversation)", file=sys.stderr)
            elif line.startswith("/"):
                print(f"unknown command {line}; known: /reset, /exit", file=sys.stderr)
            elif line:
                answer(args, llm, messages, line)


def answer(args: argparse.Namespace, llm: "LLM", messages: list[dict[str, str]], line: str) -> None:
    """One exchange; if it fails, the conversation is unchanged."""
    messages.append({"role": "user", "content": line})
    try:
        ids = llm.encode(messages)
        text, errors = print_stream(llm, ids, sampling_from(args, llm, len(ids)))
        if any(errors):
            raise RequestFailed(f"the request failed: {''.join(errors)}")
    except KeyboardInterrupt:
        messages.pop()
        print("\n(stopped; your message was dropped)", file=sys.stderr)
    except ShoalError as error:
        messages.pop()
        print(f"shoal: {error} (/reset starts a new conversation)", file=sys.stderr)
    else:
        messages.append({"role": "assistant", "content": text})
