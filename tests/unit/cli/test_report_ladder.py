"""The ladder of a report: causal order over steps, and which rungs stay of many."""

from __future__ import annotations

from tensortrace.cli.report.ladder import CELLS, ROWS, STEPS, Cell, build, causal_order
from tensortrace.diff.catalog import Slot
from tensortrace.diff.causality import Node
from tensortrace.diff.verdict import where
from tensortrace.tracer.types import INIT_STEP, Kind


def node(step: int, name: str, kind: Kind = Kind.ACTIVATION) -> Node:
    return Node(step, 0 if kind == Kind.ACTIVATION else None, Slot("train", kind, name, "out", 0))


def names(nodes: list[Node]) -> list[str]:
    return [rung[3] for rung in causal_order(nodes)]


def test_state_before_the_first_step_stays_behind_the_pass_that_uses_it() -> None:
    begin = [node(INIT_STEP, "w", Kind.PARAM)]
    step = [node(0, "x"), node(0, "y"), node(0, "w", Kind.PARAM)]
    assert names([*begin, *step]) == ["x", "y", "w"]


def test_what_only_a_later_step_has_comes_after_what_it_follows_there() -> None:
    steps = [node(0, "x"), node(0, "z"), node(1, "x"), node(1, "y"), node(1, "z"), node(1, "end")]
    assert names(steps) == ["x", "y", "z", "end"]


def test_a_boundary_that_begins_a_later_step_comes_first() -> None:
    assert names([node(0, "x"), node(1, "start"), node(1, "x")]) == ["start", "x"]


def test_of_a_hundred_thousand_boundaries_the_worst_rungs_stay_in_causal_order() -> None:
    cells = []
    for step in range(5):
        for n in range(20_000):
            worst = n % 10 == 7 and n < 15_000
            cells.append((node(step, f"m{n}"), Cell((2 if worst else 0, 5.0), 5.0 if worst else 0.0)))
    first = node(3, "m19999")
    found = build(cells, first=where(first), reasons=(), values=False)
    assert len(found.rows) == ROWS
    assert found.rows_left_out == 18_000
    kept = [int(row.name[1:]) for row in found.rows]
    assert kept == sorted(kept)
    assert {n for n in range(15_000) if n % 10 == 7} <= set(kept)
    assert found.first == (kept.index(19_999), 3)  # it stays though it is not among the worst
    assert all([cell[0] for cell in row.cells] == [0, 1, 2, 3, 4] for row in found.rows)


def test_of_many_steps_those_around_the_first_divergence_stay() -> None:
    cells = [(node(step, "m"), Cell((1, 0.5), 0.1)) for step in range(1000)]
    found = build(cells, first=where(node(700, "m")), reasons=(), values=False)
    assert len(found.steps) == STEPS
    assert found.steps_left_out == 800
    assert found.first is not None
    assert found.steps[found.first[1]] == 700
    assert STEPS * len(found.rows) <= CELLS


def test_a_long_name_keeps_its_ends() -> None:
    found = build([(node(0, "a" * 500 + "end"), Cell((0,), 0.0))], first=None, reasons=(), values=False)
    assert len(found.rows[0].name) == 300
    assert found.rows[0].name.endswith("end")
