"""The command line: one file per command.

Owns flags, printing and exit codes. Every command has --help with an example, and --json if its output is parseable.
"""

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence

from shoal import __version__
from shoal.cli.bench import add_bench
from shoal.cli.calibrate import add_calibrate
from shoal.cli.chat import add_chat
from shoal.cli.common import Command
from shoal.cli.compare import add_compare
from shoal.cli.demo import add_demo
from shoal.cli.doctor import add_doctor
from shoal.cli.generate import add_generate
from shoal.cli.key import add_key
from shoal.cli.live import add_live
from shoal.cli.parser import CommandParser
from shoal.cli.plan import add_plan
from shoal.cli.restart import add_restart
from shoal.cli.serve import add_serve
from shoal.cli.simulate import add_simulate
from shoal.cli.top import add_top
from shoal.cli.tune import add_tune
from shoal.config.options import as_flags
from shoal.config.serve import TABLE
from shoal.core.params import PARAMS
from shoal.errors import ShoalError, one_line

FLAGS = [*TABLE, *(name for name, param in PARAMS.items() if param.flag and len(name) > 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user error is one line on stderr and exit code 2."""
    parser = make_parser()
    try:
        args = parser.parse_args(argv)
        level = getattr(args, "log_level", "warning").upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        run: Command = args.run
        code = run(args)
        sys.stdout.flush()  # here, where a closed pipe is handled
        return code
    except ShoalError as error:
        print(f"shoal: {as_flags(one_line(error), FLAGS)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not stdout_closed():
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that the interpreter's flush at exit does not fail as well
        return 141  # as a shell reports a program ended by SIGPIPE


def stdout_closed() -> bool:
    """Whether the reading end of standard output is closed, as in `shoal top | head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="shoal", description="An engine for large language models that rebuilds the batch at every forward pass."
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_serve(commands)
    add_generate(commands)
    add_chat(commands)
    add_bench(commands)
    add_compare(commands)
    add_simulate(commands)
    add_calibrate(commands)
    add_plan(commands)
    add_tune(commands)
    add_key(commands)
    add_live(commands)
    add_demo(commands)
    add_top(commands)
    add_restart(commands)
    add_doctor(commands)
    return parser
