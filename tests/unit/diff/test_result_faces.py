"""How a result is shown in a notebook, iterated over, and made a table."""

from __future__ import annotations

import builtins
import math
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from tensortrace.diff.result import Judged, Judgement, Where
from tests.unit.cli.samples import DIVERGENT, EQUIVALENT

WHERE = Where(step=2, microbatch=1, kind="activation", name="fc", slot="out", call=0)
JUDGEMENT = Judgement(
    policy="error-model", allowed=1e-6, error=3e-6, ratio=3.0, reason="as much", power_coherent=2e-6
)
INIT = Where(step="init", microbatch=None, kind="param", name="w", slot="model", call=0)


class Reader(HTMLParser):
    """Collects tags and text; fails on what cannot stand in a notebook's cell."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all(name == "style" for name, _ in attrs), attrs
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_shows_headline_cause_origin_and_coverage() -> None:
    shown = Reader(DIVERGENT._repr_html_())
    assert shown.tags <= {"div", "b", "table", "tr", "td", "th", "details", "summary", "ul", "li"}
    first = DIVERGENT.first_divergent
    assert first is not None
    for part in (
        DIVERGENT.headline, DIVERGENT.causes[0].code, first.where.name, f"{DIVERGENT.coverage.compared:,}",
    ):  # fmt: skip
        assert part in shown.text


def test_text_of_a_trace_is_no_markup_and_drives_no_terminal() -> None:
    hostile = replace(EQUIVALENT, headline="<script>alert(1)</script>\x1b[2J\u202e")
    shown = Reader(hostile._repr_html_())
    assert "script" not in shown.tags
    assert "<script>alert(1)</script>" in shown.text
    assert not {"\x1b", "\u202e"} & {*shown.text, *repr(hostile)}


def test_a_result_iterates_over_what_diverges() -> None:
    assert list(DIVERGENT) == [*DIVERGENT.origins, *DIVERGENT.receivers]
    assert list(EQUIVALENT) == []


def test_a_table_has_a_row_for_each_judged_boundary() -> None:
    pytest.importorskip("pandas")
    finding = replace(DIVERGENT.origins[0], where=WHERE)
    judged = (Judged(INIT, replace(JUDGEMENT, error=math.inf)), Judged(WHERE, JUDGEMENT))
    table = replace(DIVERGENT, origins=(finding,), receivers=(), boundaries=judged).to_pandas()
    assert table["step"].tolist() == [-1, 2]
    assert table["microbatch"].isna().tolist() == [True, False]
    assert table["error"].tolist() == [math.inf, 3e-6]
    assert table["role"].tolist() == ["", "origin"]
    row = table.iloc[1]
    assert (row["kind"], row["name"], row["slot"], row["ratio"]) == ("activation", "fc", "out", 3.0)


def test_a_table_of_nothing_has_its_columns() -> None:
    pytest.importorskip("pandas")
    table = replace(EQUIVALENT, boundaries=()).to_pandas()
    assert len(table) == 0
    assert {"step", "name", "error", "allowed", "ratio", "power_coherent", "role"} <= set(table.columns)


def test_without_pandas_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name == "pandas":
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'tensortrace\[pandas\]'"):
        EQUIVALENT.to_pandas()
