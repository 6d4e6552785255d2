"""The help of every command: eighty columns, examples that the command takes, exit codes."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from tensortrace.cli import main
from tensortrace.cli.manual import MANUALS

COMMANDS = list(main.COMMANDS)


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.run(["--help"] if name == "trace" else [name, "--help"]) == 0
    return capsys.readouterr().out


def examples_in(text: str) -> list[list[str]]:
    """Return the words of each ``trace`` command in a help text, a continued line joined to the next."""
    section = re.search(r"^Examples:\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    lines = section[1].replace("\\\n", "").splitlines()
    commands = [part for line in lines for part in re.split(r"&&|>", line)]
    return [words for part in commands if (words := shlex.split(part, comments=True))[:1] == ["trace"]]


@pytest.mark.parametrize("name", ["trace", *COMMANDS])
def test_every_help_fits_eighty_columns_and_ends_with_exit_codes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(name, capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert "\nExit codes:\n" in text[text.index("\nExamples:\n") :]


@pytest.mark.parametrize("name", ["trace", *COMMANDS])
def test_every_example_is_one_that_the_command_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = examples_in(help_of(name, capsys))
    assert name == "trace" or any(words[1] == name for words in found)
    for words in found:
        with click.Context(main.group, info_name="trace") as above:
            command = main.group.get_command(above, words[1])
            assert command is not None
            command.make_context(words[1], words[2:], parent=above)  # raises where it takes them not


def test_there_is_an_end_of_the_help_for_every_command_and_no_other() -> None:
    assert set(MANUALS) == {"trace", *COMMANDS}
