"""The pages of commands, as Sphinx is given them."""

from __future__ import annotations

import click

from docs.commands_pages import command_page, ending, pages, plain
from tensortrace.cli.main import COMMANDS
from tensortrace.cli.manual import Manual


def test_there_is_a_page_of_every_command_and_one_of_all() -> None:
    assert set(pages()) == {"index", *COMMANDS}


def test_an_option_is_an_entry_with_its_help_as_it_stands() -> None:
    @click.command("env", help="Does it.\n\nOr not.")
    @click.option("--kinds", metavar="K,…", help="Of *these* `a_b` alone (docs/json.md).")
    def command(kinds: str) -> None:
        """Never called."""

    page = command_page("env", command)
    assert page.startswith("# trace env\n\n```text\ntrace env [OPTIONS]\n```\n\nDoes it.\n\nOr not.\n")
    assert "`--kinds K,…`\n: Of \\*these\\* `a_b` alone ([docs/json.md](../json.md)).\n" in page


def test_examples_are_a_block_and_exit_codes_a_table() -> None:
    manual = Manual("\n    # why\n    trace it a_b\n    ", {"0": "it holds", "1": "it *doesn't*"})
    assert list(ending(manual)) == [
        "## Examples\n\n```sh\n# why\ntrace it a_b\n```\n",
        "## Exit codes\n\n| code | |\n|---|---|\n| 0 | it holds |\n| 1 | it \\*doesn't\\* |\n",
    ]


def test_text_is_escaped_but_for_code() -> None:
    assert plain("a*b `c*d` [e]") == "a\\*b `c*d` \\[e\\]"
