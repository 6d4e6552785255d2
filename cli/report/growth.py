"""How the error grows along the network: forward over activations, backward over their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from tensortrace.cli.render import words
from tensortrace.cli.render.safe import safe
from tensortrace.cli.report.chart import Chart, Line, Point, chart
from tensortrace.cli.report.ladder import Rung, causal_order, rung_of
from tensortrace.diff.result import Finding, StepLabel
from tensortrace.diff.survey import Surveyed
from tensortrace.diff.verdict import where
from tensortrace.tracer.types import Kind

BLOCK = 18
"""Characters of a block's name below a chart."""


def growth(surveyed: Sequence[Surveyed], first: Finding | None) -> list[Chart]:
    """Return the charts of the step in which the runs part, or of the first, and of the one after it."""
    steps = sorted({each.node.step for each in surveyed if each.node.slot.kind == Kind.ACTIVATION})
    if not steps:
        return []
    begin = first.where.step if first and isinstance(first.where.step, int) else steps[0]
    shown = [step for step in steps if step >= begin][:2] or steps[-1:]
    microbatch = first.where.microbatch if first else None
    charts = (
        _chart("Forward: outputs of modules", surveyed, Kind.ACTIVATION, shown, microbatch),
        _chart("Backward: gradients, from the loss down", surveyed, Kind.ACTIVATION_GRAD, shown, microbatch),
    )
    return [found for found in charts if found is not None]


def _chart(
    title: str, surveyed: Sequence[Surveyed], kind: Kind, steps: Sequence[int], microbatch: int | None
) -> Chart | None:
    passes = [_of_step(surveyed, kind, step, microbatch) for step in steps]
    order = causal_order([each.node for found in passes for each in found])
    lines = [Line("allowed", "allowed", _points(order, passes[0], "allowed"))]
    for style, step, found in zip(("b", "later"), steps, passes, strict=False):
        lines.append(Line(f"error, {words.step(_label(step))}", style, _points(order, found, "error")))
    if not any(point.y for line in lines[1:] for point in line.points):
        return None  # all is equal
    return chart(
        title, lines, log=True, x_title="modules in causal order", x_ticks=_blocks(order),
        note="relative error on a log scale; what is equal lies at 0",
    )  # fmt: skip


def _label(step: int) -> StepLabel:
    return step if step >= 0 else "init"


def _of_step(surveyed: Sequence[Surveyed], kind: Kind, step: int, microbatch: int | None) -> list[Surveyed]:
    """Return one pass's boundaries, in causal order: of the microbatch, else of the first."""
    found = [
        each
        for each in surveyed
        if each.node.step == step
        and each.node.slot.kind == kind
        and each.node.slot.phase == "train"
        and each.node.slot.slot.startswith("out")
    ]
    numbers = {each.node.microbatch for each in found}
    wanted = microbatch if microbatch in numbers else min(numbers, key=lambda n: n or 0, default=None)
    return [each for each in found if each.node.microbatch == wanted]


def _points(order: Sequence[Rung], found: Sequence[Surveyed], what: str) -> list[Point]:
    """Return a point for each rung, without a value where this step has none."""
    of_rung = {rung_of(each.node): each for each in found}
    return [_point(place, of_rung.get(rung), what) for place, rung in enumerate(order)]


def _point(place: int, each: Surveyed | None, what: str) -> Point:
    if each is None:
        return Point(place, None)
    value: float | None = getattr(each.judgement, what) if each.judgement else None
    if each.state == "equal" and what == "error":
        value = 0.0
    at = where(each.node)
    return Point(place, value, words.key(at), at)


def _blocks(order: Sequence[Rung]) -> list[tuple[float, str]]:
    """Return the middle and the name of each block of the network, the longest first."""
    blocks: list[tuple[int, float, str]] = []
    for name, places in groupby(enumerate(order), lambda each: _block(each[1][3])):
        found = [place for place, _ in places]
        blocks.append((len(found), (found[0] + found[-1]) / 2, name))
    blocks.sort(key=lambda block: -block[0])
    return [(middle, name) for _, middle, name in blocks if not name.startswith("(")]


def _block(module: str) -> str:
    """Return ``blocks.3`` of ``blocks.3.mlp.up``: up to the first number, else the first word."""
    parts = module.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdecimal()), 0)
    return safe(".".join(parts[: number + 1]), limit=BLOCK)
