"""Each command that a page shows is one that exists, with options that it has: parsed, not run."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from docs.generate import CASE, outputs_of
from tensortrace.cli.main import COMMANDS
from tests.unit.docs import shown

Line = shown.Line

LINES = list(shown.lines())
OF_SHELLS = {".", "bash", "cd", "echo", "python3", "mkdir", "source"}
MODULES = {"pip", "pytest", "venv", "sphinx"}
"""Run with ``python -m``; their options are theirs."""

QUOTED = re.compile(r'"--[a-z][a-z-]*"')


def of(*programs: str) -> list[Line]:
    return [line for line in LINES if line.words[0] in programs]


@pytest.mark.parametrize("line", of("trace"), ids=str)
def test_a_shown_command_line_is_parsed(line: Line) -> None:
    name, *given = line.words[1:]
    shown.parse(name, [word.strip("[]") for word in given if word != "…"])


@pytest.mark.parametrize("line", of("python"), ids=str)
def test_a_shown_program_exists_with_the_options_shown(line: Line) -> None:
    program, *given = line.words[1:]
    if program == "-m":
        program, *given = given
        if program in MODULES:
            return
        path = shown.ROOT.joinpath(*program.split("."))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    else:
        path = shown.ROOT / program
    assert path.is_file()
    source = path.read_text(encoding="utf-8")
    unknown = [word for word in given if word.startswith("--") and f'"{word}"' not in source]
    assert unknown in ([], ["--help"])


def test_every_shown_line_is_of_a_program_that_is_known() -> None:
    known = {"trace", "python", *OF_SHELLS}
    assert [str(line) for line in LINES if line.words[0] not in known] == []


def test_the_commands_that_the_text_names_exist_with_the_options_named() -> None:
    wrong = []
    for page, text in shown.inline():
        program, _, rest = text.partition(" ")
        name = rest.split(" ")[0]
        if program != "trace" or not name.islower():
            continue
        if name not in COMMANDS:
            wrong.append(f"{page}: {text}")
            continue
        ours = rest.partition(" -- ")[0]
        wrong += [
            f"{page}: {text}: {option}"
            for option in shown.OPTION.findall(ours)
            if option not in shown.options(name)
        ]
    assert wrong == []


def test_an_option_that_the_text_names_alone_is_one_of_some_command() -> None:
    known = {option for name in COMMANDS for option in shown.options(name)} | of_programs()
    named = {
        (page, text.split()[0].partition("=")[0]) for page, text in shown.inline() if text.startswith("--")
    }
    assert {pair for pair in named if pair[1] not in known} == set()


def of_programs() -> set[str]:
    """Return the options of the other programs that pages speak of, as their sources have them."""
    paths = [shown.ROOT / "cli" / "pytest_plugin.py", shown.ROOT / "tests" / "zoo" / "__main__.py"]
    for folder in ("benchmarks", "docs", "examples"):
        paths += sorted((shown.ROOT / folder).glob("*.py"))
    return {
        option.strip('"') for path in paths for option in QUOTED.findall(path.read_text(encoding="utf-8"))
    }


def test_an_option_that_a_command_does_not_have_is_told() -> None:
    with pytest.raises(click.NoSuchOption):
        shown.parse("diff", ["a", "b", "--flor", "c"])


def test_an_output_is_of_a_command_that_the_same_page_shows() -> None:
    shown_by_page = {(line.page, shlex.join(line.words)) for line in LINES}
    made = [
        (output.path.name, shlex.join(shlex.split(output.command)))
        for page in shown.PAGES
        for output in outputs_of(page)
        if not output.command.startswith(CASE)
    ]
    assert len(made) >= 2
    assert [pair for pair in made if pair not in shown_by_page] == []
