"""Everything that a report shows, gathered from a finished comparison or from one trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from tensortrace.cli.contents import Contents, contents_of
from tensortrace.cli.render import words
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import hints
from tensortrace.cli.report.chart import Chart
from tensortrace.cli.report.commands import LONG, NEXT, Command, commands
from tensortrace.cli.report.growth import growth
from tensortrace.cli.report.history import History, history, thinned
from tensortrace.cli.report.ladder import Ladder, ladder_of
from tensortrace.cli.report.norms import norms_of, out_of_range
from tensortrace.cli.report.surroundings import Setting, settings
from tensortrace.cli.report.tensors import Tensor, worst_tensors
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.examined import Examined
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Finding, Result
from tensortrace.diff.series import series_of
from tensortrace.diff.shares import Share, shares
from tensortrace.diff.survey import survey

MOST_FINDINGS = 100
"""Divergent boundaries that are listed."""


class Weights(NamedTuple):
    """What tokens weigh in one step, in each run."""

    step: int
    a: tuple[Share, ...]
    b: tuple[Share, ...]

    @property
    def greatest(self) -> float:
        """The greatest weight of all, by which bars are scaled."""
        return max((abs(s.effective or 0.0) for s in (*self.a, *self.b)), default=0.0)


class Side(NamedTuple):
    """A trace as the page's head shows it; ``style`` is a class of the style sheet."""

    label: str
    style: str
    contents: Contents


class Recording(Struct, frozen=True):
    """Where the values of a cell lie, from step ``begins`` on: that step less ``offset`` of a trace."""

    path: str
    begins: int | None = None
    offset: int = 0


class Half(NamedTuple):
    """One of the comparisons of a resume check; ``told`` is that of which the page shows the details."""

    name: str
    result: Result
    told: bool


class Page(NamedTuple):
    """What the template draws; ``result`` is None where the page is about one trace.

    ``halves`` are there where a run was resumed, ``init`` is what the ladder calls the state that a run began
    with.
    """

    title: str
    verdict: str
    place: str
    claim: str
    result: Result | None
    ladder: Ladder
    findings: tuple[Finding, ...]
    tensors: tuple[Tensor, ...]
    growth: tuple[Chart, ...]
    weights: Weights | None
    history: History
    sides: tuple[Side, ...]
    settings: tuple[Setting, ...]
    commands: tuple[Command, ...]
    hints: tuple[str, ...]
    recordings: tuple[Recording, ...]
    broken: tuple[str, ...] = ()
    halves: tuple[Half, ...] = ()
    init: str = "init"


def of_comparison(found: Examined, options: Sequence[str], output: str) -> Page:
    """Return the page of a comparison; call it while the traces are open."""
    result = found.result
    place, claim = _said(result)
    contents = contents_of(found.a.trace), contents_of(found.b.trace)
    steps = thinned(found.steps)
    series = series_of(found.a, steps), series_of(found.b, [step - found.offset for step in steps])
    return Page(
        title=f"{result.verdict}: {result.a.path} and {result.b.path}",
        verdict=result.verdict,
        place=place,
        claim=claim,
        result=result,
        ladder=ladder_of(found),
        findings=(*result.origins, *result.receivers)[:MOST_FINDINGS],
        tensors=tuple(worst_tensors(found)),
        growth=tuple(growth(list(survey(found.execution, result)), result.first_divergent)),
        weights=_weights(found),
        history=history(steps, *series, offset=found.offset),
        sides=(Side("a, the reference", "a", contents[0]), Side("b, the candidate", "b", contents[1])),
        settings=tuple(settings(*contents)),
        commands=tuple(commands(contents, options, output, hints=hints(result))),
        hints=tuple(hint for hint in hints(result) if not hint.startswith(NEXT)),
        recordings=(Recording(safe(contents[1].path, limit=LONG), offset=found.offset),),
    )


def _said(result: Result) -> tuple[str, str]:
    """Return where the runs part, and what the matter is, as far as it is known."""
    first = result.first_divergent
    if first is None:
        return "", _agreeing(result)
    place = words.moment(first.where)
    if result.causes:
        return place, result.causes[0].text
    return place, result.operation.text if result.operation else f"the {words.boundary(first.where)} diverges"


def _agreeing(result: Result) -> str:
    """Return the headline of runs that do not part, with what it counts set apart."""
    compared, equal = result.coverage.compared, result.coverage.bitwise_equal
    if result.verdict == "equivalent" and result.declared is None and compared:
        if compared == equal:
            return f"every bit of {counted(compared, 'boundary')} is equal"
        return f"no boundary diverges: {compared:,} compared, {equal:,} equal in every bit"
    _, _, rest = result.headline.partition(": ")
    return rest or result.headline


def _weights(found: Examined) -> Weights | None:
    """Return what tokens weigh in the first divergence's step, or in one that was judged."""
    outcomes = [o for o in found.execution.outcomes if o.pair is not None and o.node.step >= 0]
    near = [n for n in found.nearest.found() if n.node.step >= 0]
    pair: StepPair | None = outcomes[0].pair if outcomes else near[0].pair if near else None
    if pair is None:
        return None
    a, b = shares(pair)
    return Weights(pair.a.step, a, b) if a or b else None


def of_trace(catalog: Catalog, output: str) -> Page:
    """Return the page of one trace."""
    contents = contents_of(catalog.trace)
    steps = thinned(catalog.steps)
    broken = out_of_range(catalog)
    finished = all(rank.ended == "finished" for rank in contents.ranks)
    ended = "finished" if finished and not contents.problems else "not finished or damaged"
    claim = f"{counted(contents.total.boundaries, 'tensor')} of {counted(len(contents.ranks), 'rank')}"
    if broken:
        claim = f"NaN or Inf first in {broken[0]}"
    weights = None
    if steps:
        view, before = catalog.view(steps[0]), catalog.view(steps[0] - 1)
        own, _ = shares(StepPair(view, view, before, before))
        weights = Weights(steps[0], own, ()) if own else None
    return Page(
        title=contents.path,
        verdict="trace",
        place=f"{counted(len(contents.steps), 'step')}, {ended}",
        claim=claim,
        result=None,
        ladder=norms_of(catalog),
        findings=(),
        tensors=(),
        growth=(),
        weights=weights,
        history=history(steps, series_of(catalog, steps), None),
        sides=(Side("trace", "a", contents),),
        settings=tuple(settings(contents, None)),
        commands=tuple(commands([contents], (), output)),
        hints=(),
        recordings=(Recording(safe(contents.path, limit=LONG)),),
        broken=tuple(broken),
    )
