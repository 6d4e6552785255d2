"""How the error grows along the network: forward over activations, backward over their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from tensortrace.cli.render import words
from tensortrace.cli.render.numbers import number
from tensortrace.cli.report.chart import Chart, Line, chart
from tensortrace.diff.result import Finding, StepLabel
from tensortrace.diff.survey import Surveyed
from tensortrace.diff.verdict import where
from tensortrace.tracer.types import Kind

Points = list[tuple[float, float | None, str]]


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
    lines: list[Line] = []
    for number_, step in enumerate(steps):
        found = _of_step(surveyed, kind, step, microbatch)
        style = ("b", "later")[number_]
        lines.append(Line(f"error, {words.step(_label(step))}", style, _points(found, "error")))
        if number_ == 0:
            lines.insert(0, Line("allowed", "allowed", _points(found, "allowed")))
    return chart(
        title, lines, log=True, x_title="modules in causal order",
        note="relative error on a log scale; what is equal lies on the floor",
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


def _points(found: Sequence[Surveyed], what: str) -> Points:
    points: Points = []
    for place, each in enumerate(found):
        value: float | None = getattr(each.judgement, what) if each.judgement else None
        if each.state == "equal" and what == "error":
            value = 0.0
        points.append((place, value, f"{words.key(where(each.node))}: {number(value)}"))
    return points
