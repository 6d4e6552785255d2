"""Strings from traces cannot drive a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensortrace.cli.render.safe import safe


def test_escape_sequences_lose_their_escape() -> None:
    assert safe("fc\x1b[31m.weight\x07") == "fc\ufffd[31m.weight\ufffd"


def test_newlines_and_tabs_become_single_spaces() -> None:
    assert safe(" a\r\n\tb  c ") == "a b c"


@pytest.mark.parametrize("char", ["\u202e", "\u2066", "\u200b", "\ud800", "\x9b", "\ue000"])
def test_characters_that_reorder_or_hide_text_are_replaced(char: str) -> None:
    assert safe(f"a{char}b") == "a\ufffdb"


def test_letters_of_any_script_are_kept() -> None:
    assert safe("Größe 大きさ é") == "Größe 大きさ é"


def test_a_stack_of_combining_marks_is_cut_to_two() -> None:
    assert safe("a" + "\u0301" * 50 + "b") == "a\u0301\u0301b"


def test_the_middle_of_a_long_text_is_left_out_and_both_ends_stay() -> None:
    assert safe("abcdefghij", limit=5) == "ab…ij"


def test_a_text_at_the_limit_is_whole() -> None:
    assert safe("abcde", limit=5) == "abcde"


def test_a_huge_text_is_cut_without_being_read_through() -> None:
    assert safe("a" * 50_000_000 + "z", limit=7) == "aaa…aaz"


@given(st.text(max_size=3000), st.integers(3, 300))
def test_any_text_comes_out_on_one_short_line_of_printable_characters(text: str, limit: int) -> None:
    out = safe(text, limit=limit)
    assert len(out) <= limit
    assert not [c for c in out if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    out.encode()
