"""Every command of README and docs: its flags exist, it is run or says why not, and it works in a fresh checkout."""

from pathlib import Path

import pytest

from shoal.cli import make_parser
from tests.docs.commands import ALL, ROOT, TO_RUN, Block, Checkout, shoal_arguments

COMMANDS = [
    pytest.param(arguments, id=f"{block.name} {' '.join(arguments)[:60]}")
    for block in ALL
    if block.kind == "sh"
    for command in block.commands()
    if (arguments := shoal_arguments(command)) is not None
]


def test_blocks_of_commands_are_labelled() -> None:
    """A command in a block without a label would not be run."""
    assert [block.name for block in ALL if block.kind == "unlabelled"] == []


@pytest.mark.parametrize("arguments", COMMANDS)
def test_flags_exist(arguments: list[str]) -> None:
    make_parser().parse_args(arguments)


def test_what_is_not_run_says_why() -> None:
    reasons = ("needs", "installs", "runs the tests", "measured")
    for block in ALL:
        assert not block.not_run or block.not_run.startswith(reasons), f"{block.name}: {block.not_run}"
    assert len(TO_RUN) > len(ALL) / 2, "most commands are run"


def test_commands_are_read_as_a_shell_does() -> None:
    text = "# first\nshoal serve \\\n  --port 1   # a server\ncurl x -d '{\n  \"a\": 1}'\nshoal key a >> keys.yaml\n"
    found = Block(ROOT / "README.md", 1, "sh", text, "", False).commands()
    assert found == ["shoal serve   --port 1", "curl x -d '{\n  \"a\": 1}'", "shoal key a >> keys.yaml"]
    assert shoal_arguments(found[2]) == ["key", "a"]
    assert shoal_arguments(found[1]) is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", TO_RUN, ids=[block.name for block in TO_RUN])
def test_it_runs_in_a_fresh_checkout(block: Block, tmp_path: Path) -> None:
    Checkout(tmp_path).run_block(block)
