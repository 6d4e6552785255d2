"""The ladder as a heat map: rungs in causal order, steps, and what became of each boundary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from tensortrace.cli.render.safe import safe
from tensortrace.diff.causality import Node
from tensortrace.diff.examined import Examined
from tensortrace.diff.result import Judgement, Where
from tensortrace.diff.survey import State, Surveyed, survey
from tensortrace.diff.verdict import where
from tensortrace.tracer.types import INIT_STEP

ROWS, CELLS = 2_000, 40_000
"""Most rungs and cells that a page holds: of more the worst rungs stay, in causal order."""

STEPS = 200
"""Most steps that a page holds: those that diverge first, then the first ones."""

NAME = 300
"""Characters of a name that a page holds; the middle of a longer one is left out."""

STATES: tuple[State, ...] = ("equal", "within", "receiver", "origin", "declared", "missing")
"""What a cell's first number means."""

Rung = tuple[int | None, str, str, str, str, int]
"""Microbatch, phase, kind, name, slot, call: a boundary in any step."""

Number = float | int | None


class LadderRow(Struct, frozen=True):
    """One rung. A cell is (step's place, state, ratio, error, allowed or the reason's place)."""

    microbatch: int | None
    kind: str
    name: str
    slot: str
    call: int
    cells: tuple[tuple[Number, ...], ...]


class Ladder(Struct, frozen=True, kw_only=True):
    """What the page's heat map draws. ``first`` are row and step's place of the first divergence.

    ``resumed`` is the place from which on the steps are those of a resumed run.
    """

    steps: tuple[int | str, ...]
    rows: tuple[LadderRow, ...]
    reasons: tuple[str, ...] = ()
    first: tuple[int, int] | None = None
    rows_left_out: int = 0
    steps_left_out: int = 0
    values: bool = False
    resumed: int | None = None


class Cell(NamedTuple):
    """What is known of one boundary; ``weight`` says how much it deserves a place."""

    numbers: tuple[Number, ...]
    weight: float


def rung_of(node: Node) -> Rung:
    """Return a boundary's key without its step."""
    slot = node.slot
    return node.microbatch, slot.phase, slot.kind.value, slot.name, slot.slot, slot.call


def ladder_of(found: Examined) -> Ladder:
    """Return the ladder of a comparison."""
    first = found.result.first_divergent
    reasons: dict[str, int] = {}
    cells = [(each.node, _cell(each, reasons)) for each in survey(found.execution, found.result)]
    return build(cells, first=first.where if first else None, reasons=reasons, values=False)


def _cell(each: Surveyed, reasons: dict[str, int]) -> Cell:
    state = STATES.index(each.state)
    if each.state == "missing":
        return Cell((state, reasons.setdefault(safe(each.reason, limit=300), len(reasons))), 0.5)
    if each.judgement is None:
        return Cell((state,), {"equal": 0.0, "within": 0.1}.get(each.state, 1e30))
    ratio, error, allowed = _judged(each.judgement)
    weight = 0.0 if each.state == "equal" else 1e30 if each.state == "origin" else ratio or 0.0
    return Cell((state, short(ratio), short(error), short(allowed)), weight)


def _judged(judgement: Judgement) -> tuple[float, float, float]:
    return judgement.ratio, judgement.error, judgement.allowed


def short(value: float | None) -> float | None:
    """Return a number with four figures, which is all that a page shows."""
    return None if value is None else float(f"{value:.4g}")


def build(
    cells: Sequence[tuple[Node, Cell]], *, first: Where | None, reasons: Iterable[str], values: bool
) -> Ladder:
    """Return the ladder of these boundaries, which come in causal order, step by step."""
    steps = _steps(cells, first)
    place = {step: number for number, step in enumerate(steps)}
    of_rung: dict[Rung, dict[int, Cell]] = {}
    starts: tuple[Rung, int] | None = None
    for node, cell in cells:
        if node.step in place:
            of_rung.setdefault(rung_of(node), {})[place[node.step]] = cell
            if first is not None and starts is None and where(node) == first:
                starts = rung_of(node), place[node.step]
    order = causal_order([node for node, _ in cells if node.step in place])
    kept = _worst(order, of_rung, min(ROWS, CELLS // max(len(steps), 1)), starts[0] if starts else None)
    return Ladder(
        steps=tuple("init" if step == INIT_STEP else step for step in steps),
        rows=tuple(_row(rung, of_rung[rung]) for rung in kept),
        reasons=tuple(reasons),
        first=(kept.index(starts[0]), starts[1]) if starts else None,
        rows_left_out=len(order) - len(kept),
        steps_left_out=len({node.step for node, _ in cells}) - len(steps),
        values=values,
    )


def _row(rung: Rung, cells: dict[int, Cell]) -> LadderRow:
    microbatch, _, kind, name, slot, call = rung
    found = tuple((step, *cell.numbers) for step, cell in sorted(cells.items()))
    return LadderRow(microbatch, kind, safe(name, limit=NAME), safe(slot, limit=NAME), call, found)


def _steps(cells: Iterable[tuple[Node, Cell]], first: Where | None) -> list[int]:
    """Return the steps to show: all, or the first ones and some around the first divergence."""
    steps = sorted({node.step for node, _ in cells})
    if len(steps) <= STEPS or first is None or first.step == "init":
        return steps[:STEPS]
    begin = max(0, min(steps.index(first.step) - STEPS // 4, len(steps) - STEPS))
    return steps[begin : begin + STEPS]


def causal_order(nodes: Iterable[Node]) -> list[Rung]:
    """Return each rung once; those that a later step has first come after what they follow there."""
    after: dict[Rung | None, Rung | None] = {None: None}  # a chain: each rung and the next
    previous: Rung | None = None
    step: int | None = None
    for node in nodes:
        rung = rung_of(node)
        if node.step != step:
            previous, step = None, node.step
        if rung not in after:
            after[rung] = after[previous]
            after[previous] = rung
        previous = rung
    order: list[Rung] = []
    at = after[None]
    while at is not None:
        order.append(at)
        at = after[at]
    return order


def _worst(
    order: Sequence[Rung], cells: dict[Rung, dict[int, Cell]], most: int, first: Rung | None
) -> list[Rung]:
    """Return the rungs that deserve a place most, in causal order."""
    if len(order) <= most:
        return list(order)

    def weight(rung: Rung) -> tuple[bool, float]:
        return rung == first, max(cell.weight for cell in cells[rung].values())

    kept = set(sorted(order, key=weight, reverse=True)[:most])
    return [rung for rung in order if rung in kept]
