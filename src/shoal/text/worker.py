"""A process that renders chat templates within limits: `python -m shoal.text.worker`.

A template comes with the model, and its messages from anybody: two nested loops or `9**(9**9)` would occupy a front
for ever. Here a rendering that uses too much CPU time ends the process, and one that uses too much memory or writes too
much text has an answer of its own. Owns those limits and the frames on both pipes:

    in    length (4 bytes) · JSON: first the template (TemplateSetup), then one object for each chat
    out   length (4 bytes) · kind (1 byte, see Kind) · UTF-8

Ends when its input does, so it does not outlive the process that started it. Knows no tokenizer and no event loop.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shoal.errors import BadChat
from shoal.text.chat import ChatRenderer
from shoal.text.special import SecretNames
from shoal.text.template import OutputTooLong

CPU_LIMIT_S = 2.0  # of CPU time for one chat; what else the machine computes does not count
MEMORY_LIMIT_BYTES = 512 * 2**20  # beyond what the process needs by itself
OUTPUT_CHARACTERS = 2**20  # that a template may add to …
OUTPUT_FACTOR = 4  # … this many times the size of the request
LENGTH_BYTES = 4
TIMED_OUT = signal.SIGPROF  # ends the process where the limit of CPU time is exceeded


class Kind:
    """The first byte of an answer."""

    READY = b"R"  # the setup was read
    TEXT = b"T"
    HIDDEN = b"H"  # text with special tokens under their secret names
    REFUSED = b"E"  # the messages do not fit the template; the text says why
    TOO_LARGE = b"L"  # too much memory or text


@dataclass(frozen=True)
class TemplateSetup:
    """The template of a model, and what every chat is rendered with."""

    source: str
    special: Mapping[str, str]
    tokens: list[str] | None  # the special tokens that messages cannot write; None: they can
    nonce: str | None
    cpu_limit_s: float

    @classmethod
    def of(cls, renderer: ChatRenderer, special: Mapping[str, str], cpu_limit_s: float) -> "TemplateSetup":
        names = renderer.names
        tokens, nonce = (None, None) if names is None else (names.tokens, names.nonce)
        return cls(renderer.plain.source, dict(special), tokens, nonce, cpu_limit_s)

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def renderer(self) -> ChatRenderer:
        names = None if self.tokens is None else SecretNames(self.tokens, self.nonce)
        return ChatRenderer(self.source, self.special, names)


def answer(renderer: ChatRenderer, data: bytes) -> tuple[bytes, str]:
    """(kind, text) for one chat."""
    try:
        asked: dict[str, Any] = json.loads(data)
        most = OUTPUT_CHARACTERS + OUTPUT_FACTOR * len(data)
        done = renderer.render(asked["messages"], asked["add_generation_prompt"], asked["variables"], most)
        return (Kind.HIDDEN if done.hidden else Kind.TEXT), done.text
    except (MemoryError, OutputTooLong):
        return Kind.TOO_LARGE, ""
    except BadChat as error:
        return Kind.REFUSED, str(error)
    except RecursionError:
        return Kind.REFUSED, "the messages are nested too deeply; make them flatter"


def read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    length = pipe.read(LENGTH_BYTES)
    return pipe.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else None


def write(pipe: BinaryIO, kind: bytes, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        kind, data = Kind.REFUSED, b"the text of the messages is not valid Unicode; send it without lone surrogates"
    pipe.write((1 + len(data)).to_bytes(LENGTH_BYTES, "big") + kind)
    pipe.write(data)
    pipe.flush()


def limit_memory() -> None:
    """A template that needs more gets a MemoryError."""
    with contextlib.suppress(OSError, ValueError):  # where the system has no such limit, or a lower one
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # sent to a whole group of processes; the front decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(TIMED_OUT, signal.SIG_DFL)
    pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer
    first = read(pipe_in)
    if first is None:
        return
    setup = TemplateSetup(**json.loads(first))
    renderer = setup.renderer()
    limit_memory()
    write(pipe_out, Kind.READY, "")
    while True:
        data = read(pipe_in)
        if data is None:
            return
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_limit_s)
        kind, text = answer(renderer, data)
        write(pipe_out, kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
    os._exit(0)
