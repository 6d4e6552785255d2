"""The pages of commands, as Sphinx is given them."""

from __future__ import annotations

import click

from docs.commands_pages import command_page, pages, plain
from tensortrace.cli.main import COMMANDS


def test_there_is_a_page_of_every_command_and_one_of_all() -> None:
    assert set(pages()) == {"index", *COMMANDS}


def test_an_option_is_an_entry_with_its_help_as_it_stands() -> None:
    @click.command(help="Does it.\n\ntrace it -o a/ -- x\n\nOr not.")
    @click.option("--kinds", metavar="K,…", help="Of *these* `a_b` alone (docs/json.md).")
    def command(kinds: str) -> None:
        """Never called."""

    page = command_page("it", command)
    assert page.startswith("# trace it\n\n```text\ntrace it [OPTIONS]\n```\n\nDoes it.\n")
    assert "```sh\ntrace it -o a/ -- x\n```" in page
    assert "`--kinds K,…`\n: Of \\*these\\* `a_b` alone ([docs/json.md](../json.md)).\n" in page


def test_text_is_escaped_but_for_code() -> None:
    assert plain("a*b `c*d` [e]") == "a\\*b `c*d` \\[e\\]"
