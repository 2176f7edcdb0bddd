"""The argument parser of all commands: usage on one line, and mistakes that name what was probably meant.

Owns the form of argparse's messages. Knows no command.
"""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are two lines: the usage, and what to change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def format_usage(self) -> str:
        """On one line: a command has dozens of flags, which --help lists.

        >>> parser = CommandParser(prog="shoal swim")
        >>> _ = parser.add_argument("--deep", action="store_true"), parser.add_argument("where", nargs="?")
        >>> parser.format_usage()
        'usage: shoal swim [options] [where]\\n'
        """
        return f"usage: {self.prog} {self._arguments()}\n"

    def format_help(self) -> str:
        self.usage = f"%(prog)s {self._arguments()}"
        return super().format_help()

    def _arguments(self) -> str:
        shown = ["[options]"]
        for action in self._actions:
            name = str(action.metavar or action.dest)
            if action.option_strings:
                shown += [f"{action.option_strings[0]} {name}"] if action.required else []
            elif isinstance(action, argparse._SubParsersAction):
                shown.append(f"{name} …")
            else:
                shown.append(f"[{name}]" if action.nargs == "?" else name)
        return " ".join(shown)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what is left over here, where the flags of the command are known, not in the parent parser."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest))
        return found, rest

    def _unknown(self, rest: Sequence[str]) -> str:
        """
        >>> parser = CommandParser()
        >>> _ = parser.add_argument("--max-num-seqs")
        >>> parser._unknown(["--max-num-seq", "8"]), parser._unknown(["8"])
        ('unknown flag --max-num-seq (did you mean --max-num-seqs?)', "unexpected argument '8'")
        """
        flag = next((one.partition("=")[0] for one in rest if one.startswith("-")), "")
        if not flag:
            return f"unexpected argument {rest[0]!r}"
        return f"unknown flag {flag}{hint(flag, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(one) for one in action.choices]
        said = f"{value!r} is not known{hint(str(value), known)}; choose from: {', '.join(known)}"
        raise argparse.ArgumentError(action, said)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}; see {self.prog} --help\n")


def hint(name: str, known: Any) -> str:
    """What was probably meant.

    >>> hint("fcsf", ["fcfs", "fair"]), hint("x", ["fcfs"])
    (' (did you mean fcfs?)', '')
    """
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
