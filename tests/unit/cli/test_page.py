"""Pages are drawn for a terminal or a log file."""

from __future__ import annotations

import io

import pytest

from tensortrace.cli.render.page import Look, Page, look_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def test_a_log_file_gets_eighty_columns_without_colour() -> None:
    assert look_of(io.StringIO()) == Look(80, color=False)


def test_a_wide_terminal_gets_eighty_columns_with_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert look_of(Terminal()) == Look(80, color=True)


def test_a_narrow_terminal_gets_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert look_of(Terminal()).width == 60


def test_no_color_wins_over_force_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not look_of(Terminal()).color


def test_force_color_colours_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert look_of(io.StringIO()).color


def test_a_dumb_terminal_gets_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not look_of(Terminal()).color


def test_without_colour_there_is_no_escape_in_a_styled_line() -> None:
    page = Page(Look(80, color=False))
    page.line(("bad", "bold red"), " news")
    assert page.text() == "bad news\n"


def test_with_colour_the_style_is_an_ansi_sequence() -> None:
    page = Page(Look(80, color=True))
    page.line(("bad", "bold red"))
    assert page.text() == "\x1b[1;31mbad\x1b[0m\n"


def test_markup_is_text() -> None:
    page = Page(Look())
    page.line("[red]x[/red] :smile:")
    assert page.text() == "[red]x[/red] :smile:\n"


def test_a_long_line_is_wrapped_with_a_hanging_indent() -> None:
    page = Page(Look(20))
    page.line("aaaa bbbb cccc dddd eeee", indent=2)
    assert page.text() == "  aaaa bbbb cccc\n    dddd eeee\n"


def test_wide_characters_count_as_two_cells() -> None:
    page = Page(Look(20))
    page.line("大" * 6 + " " + "小" * 6)
    assert page.text() == "大大大大大大\n  小小小小小小\n"


def test_a_table_keeps_long_names_whole_by_folding_them() -> None:
    page = Page(Look(40))
    name = "transformer.layers.11.attention.query_key_value.weight"
    page.table(["n", "name"], [["1", name]], right="n")
    lines = page.text().splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(line[5:].strip() for line in lines[1:]) == name


def test_a_list_says_how_many_lines_it_leaves_out() -> None:
    page = Page(Look())
    page.bullets(["x", "y", "z"], limit=1)
    assert page.text() == "  - x\n  … 2 more with -v or in --json\n"
