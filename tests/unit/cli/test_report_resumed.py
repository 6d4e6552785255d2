"""The ladder of a resume check: both comparisons, one after the other."""

from __future__ import annotations

from tensortrace.cli.report.ladder import Ladder, LadderRow, Number
from tensortrace.cli.report.resumed import joined

EQUAL, WITHIN, RECEIVER, ORIGIN, DECLARED, MISSING = range(6)
Cells = tuple[tuple[Number, ...], ...]


def row(name: str, *cells: tuple[Number, ...]) -> LadderRow:
    return LadderRow(None, "param", name, "model", 0, cells)


BEFORE = Ladder(
    steps=("init", 0, 1, 2), reasons=("no layout",),
    rows=(
        row("u", (1, EQUAL), (2, EQUAL), (3, EQUAL)),
        row("w", (0, EQUAL), (1, MISSING, 0), (2, EQUAL), (3, EQUAL)),
    ),
)  # fmt: skip
AFTER = Ladder(
    steps=("init", 2, 3), reasons=("its shapes differ",), first=(1, 0),
    rows=(row("u", (1, EQUAL)), row("v", (0, ORIGIN)), row("w", (1, EQUAL), (2, MISSING, 0))),
)  # fmt: skip


def test_the_resumed_run_follows_the_steps_that_it_does_not_do_again() -> None:
    found = joined(BEFORE, AFTER, from_after=True)
    assert found.steps == ("init", 0, 1, "resumed", 2, 3)
    assert found.resumed == 3
    assert [each.name for each in found.rows] == ["u", "v", "w"]
    assert found.rows[0].cells == ((1, EQUAL), (2, EQUAL), (4, EQUAL))


def test_the_first_divergence_lies_where_the_comparison_that_is_told_has_it() -> None:
    assert joined(BEFORE, AFTER, from_after=True).first == (1, 3)
    assert joined(BEFORE, AFTER, from_after=False).first is None


def test_reasons_are_those_of_both() -> None:
    found = joined(BEFORE, AFTER, from_after=True)
    told = {found.steps[int(cell[0] or 0)]: found.reasons[int(cell[2] or 0)]
            for cell in found.rows[2].cells if cell[1] == MISSING}  # fmt: skip
    assert told == {0: "no layout", 3: "its shapes differ"}
