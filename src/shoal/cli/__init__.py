"""The command line: one file per command.

Owns flags, printing and exit codes. Every command has --help with an example and --json where a machine may read it.
"""

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence

from shoal import __version__
from shoal.cli.bench import add_bench
from shoal.cli.chat import add_chat
from shoal.cli.common import Command
from shoal.cli.compare import add_compare
from shoal.cli.doctor import add_doctor
from shoal.cli.generate import add_generate
from shoal.cli.key import add_key
from shoal.cli.serve import add_serve
from shoal.cli.top import add_top
from shoal.errors import ShoalError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        level = getattr(args, "log_level", "warning").upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        run: Command = args.run
        code = run(args)
        sys.stdout.flush()  # here, where a reader that has left is no surprise
        return code
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not reader_has_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest is not written at the end either
        return 141  # what a shell shows for a program that the same mishap ends


def reader_has_left() -> bool:
    """Whether nobody reads standard output any more, as in `shoal top | head`."""
    look = select.poll()
    look.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in look.poll(0))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal", description="An engine for large language models that rebuilds the batch at every forward pass."
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve(commands)
    add_generate(commands)
    add_chat(commands)
    add_bench(commands)
    add_compare(commands)
    add_key(commands)
    add_top(commands)
    add_doctor(commands)
    return parser
