"""Makes a report: compares, or opens one trace, and draws what was found while the traces are open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tensortrace.cli.report.html import draw
from tensortrace.cli.report.page import of_comparison, of_trace
from tensortrace.cli.report.resumed import Seen, of_resumed, seen
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.engine import CompareOptions, Progress, compare
from tensortrace.diff.examined import Examined
from tensortrace.diff.relaid import laid_out
from tensortrace.diff.result import Result
from tensortrace.diff.resume import ResumeResult, compare_resumed
from tensortrace.tracer.reader import Trace


class Made(NamedTuple):
    """A report, and the result that it shows; of one trace there is none."""

    html: str
    headline: str
    result: Result | ResumeResult | None


def make(a: Path, b: Path | None, options: CompareOptions, output: str, progress: Progress | None) -> Made:
    """Return the report of ``b`` against ``a``, or of ``a`` alone."""
    if b is None:
        with Trace.open(a, on_damage="salvage") as opened:
            trace, _ = laid_out(opened, options.layout_a)
            page = of_trace(Catalog(trace), output)
            return Made(draw(page), f"{page.place}: {page.claim}", None)
    drawn: list[str] = []

    def look(found: Examined) -> None:
        drawn.append(draw(of_comparison(found, list(given(options)), output)))

    result = compare(a, b, options=options, progress=progress, look=look)
    return Made(drawn[0], result.headline, result)


def make_resumed(
    full: Path, first: Path, resumed: Path, options: CompareOptions, output: str, progress: Progress | None
) -> Made:
    """Return the report of a run that was saved and went on, against one that was not interrupted."""
    options_given = list(given(options))
    parts: list[Seen] = []

    def look(found: Examined) -> None:
        parts.append(seen(found, options_given, output))

    whole = compare_resumed(full, first, resumed, options=options, progress=progress, look=look)
    before, after = parts
    return Made(draw(of_resumed(whole, before, after, options_given, output)), whole.headline, whole)


def given(options: CompareOptions) -> Iterator[str]:
    """Yield the options of a comparison as they are given on the command line."""
    if options.policy == "exact":
        yield "--exact"
    if options.kinds:
        yield from ("--kinds", ",".join(options.kinds))
    several = (
        ("--floor", map(str, options.floor)), ("--include", options.include), ("--exclude", options.exclude),
        ("--allow-missing", options.allow_missing), ("--expect", options.expect),
    )  # fmt: skip
    for option, values in several:
        for value in values:
            yield from (option, value)
    for option, one in (
        ("--align", options.align), ("--layout-a", options.layout_a), ("--layout", options.layout_b),
    ):  # fmt: skip
        if one is not None:
            yield from (option, str(one))
