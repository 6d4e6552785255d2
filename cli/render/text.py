"""The outcome of a diff as text that an engineer would paste into an issue."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

from tensortrace.cli.render import spark, words
from tensortrace.cli.render.boundaries import boundaries
from tensortrace.cli.render.expected import declared
from tensortrace.cli.render.finding import POLICIES, SENTENCE, SHORT, first, further, only_in_a
from tensortrace.cli.render.numbers import counted, number
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.safe import safe
from tensortrace.diff.result import Cause, Missing, Operation, Power, Result, Side, Where

Detail = Literal["quiet", "normal", "verbose"]

WEAK = 0.01
"""Relative error above which a boundary that is seen no better is named."""

ROWS = 8
"""Rows of a table, and lines of evidence, unless the detail is ``verbose``."""

_PLAIN = Look()

_STYLES = {"equivalent": "bold green", "divergent": "bold red", "incomplete": "bold yellow"}


def render(result: Result, *, look: Look = _PLAIN, detail: Detail = "normal") -> str:
    """Return the result as text; ``quiet`` is the headline alone, ``verbose`` leaves nothing out.

    Every string of the result is made safe to print; lines hold ``look.width`` cells.
    """
    page = Page(look)
    _headline(page, result)
    if detail == "quiet":
        return page.text()
    limit = None if detail == "verbose" else ROWS
    spark.along(page, result)
    if result.first_divergent:
        first(page, result.first_divergent, limit=limit, said=result.headline)
    if result.operation:
        _operation(page, result.operation, limit, said=result.headline)
    if result.causes:
        page.blank()
    for cause in result.causes:
        tell_cause(page, cause, limit, said=result.headline)
    if result.first_divergent and not result.causes and not result.operation:
        page.blank()
        page.line(("cause:", "bold"), " unexplained: no known mistake accounts for the difference")
    if result.first_divergent:
        _others(page, result, limit)
        page.blank()
    if result.declared:
        declared(page, result.declared, limit=limit)
    _coverage(page, result, limit)
    _context(page, result)
    if detail == "verbose":
        boundaries(page, result)
    return page.text()


def hints(result: Result) -> tuple[str, ...]:
    """Return what is said on stderr after a result: the engine's hints, then the next useful command."""
    command = _next_command(result)
    said = tuple(safe(hint, limit=SENTENCE) for hint in result.hints)
    return said if command is None else (*said, f"next: {command}")


def _next_command(result: Result) -> str | None:
    """Return what tells more of the outcome; None where runs are equivalent and there is no more to tell."""
    finding = result.first_divergent
    if finding is None:
        damaged = next((side for side in (result.a, result.b) if side.problems), None)
        if damaged is not None:
            return f"trace check {_quoted(damaged.path)}"
        if result.verdict == "equivalent":
            return None
        return f"trace diff {_quoted(result.a.path)} {_quoted(result.b.path)} -v  # lists what is missing"
    side = result.a if only_in_a(finding) else result.b
    where = finding.where
    number_there = where.step if side is result.a or where.step == "init" else where.step - result.step_offset
    return show_command(side, where, number_there)


def show_command(side: Side, where: Where, step: int | str) -> str:
    """Return the command that shows the values of a boundary, in this step of a recording."""
    chosen = f"--step {step} --kind {safe(where.kind, limit=20)} --name {_quoted(where.name)}"
    return f"trace show {_quoted(side.path)} {chosen} --values"


def _quoted(text: str) -> str:
    return shlex.quote(safe(text, limit=SENTENCE))


def _headline(page: Page, result: Result) -> None:
    """Write the verdict in capitals, then the headline; one that begins with the verdict goes on from it."""
    headline = safe(result.headline, limit=SENTENCE)
    begun = headline.lower().startswith(result.verdict)
    rest = headline[len(result.verdict) :] if begun else f": {headline}"
    page.line((result.verdict.upper(), _STYLES[result.verdict]), rest)


def tell_cause(page: Page, cause: Cause, limit: int | None, *, said: str) -> None:
    """Write a tested cause: its code and sentence, the number, what is left with the mistake applied."""
    text = " as the headline says" if cause.text in said else f" {safe(cause.text, limit=SENTENCE)}"
    page.line((f"cause {safe(cause.code, limit=60)}:", "bold"), text)
    if cause.number is not None:
        known = f" = {safe(cause.equals, limit=SHORT)}" if cause.equals else ""
        page.line(f"measured {cause.number:.7g}{known}", indent=2)
    page.line(
        f"with this mistake applied to a, the relative L2 error falls from "
        f"{number(cause.residual_before)} to {number(cause.residual_after)} (floor {number(cause.floor)})",
        indent=2,
    )
    page.bullets([safe(line, limit=SENTENCE) for line in cause.evidence], limit=limit)


def _operation(page: Page, operation: Operation, limit: int | None, *, said: str) -> None:
    text = " as the headline says" if operation.text in said else f" {safe(operation.text, limit=SENTENCE)}"
    page.blank()
    page.line(("first divergent operation:", "bold"), text)
    inside = safe(operation.call_of, limit=SHORT)
    again = f", call {operation.call}" if operation.call else ""
    module = safe(operation.module, limit=SHORT)
    page.line(f"in {module}; the operations of {inside}{again} were compared", indent=2)
    if operation.judgement:
        page.line(safe(operation.judgement.reason, limit=SENTENCE), indent=2)
    page.bullets([safe(line, limit=SENTENCE) for line in operation.evidence], limit=limit)


def _others(page: Page, result: Result, limit: int | None) -> None:
    others = [finding for finding in result.origins if finding != result.first_divergent]
    if others:
        page.blank()
        count = counted(len(others), "further origin")
        page.line((f"{count}:", "bold"), " more than what they were computed from explains")
        further(page, others, limit=limit)
    if result.receivers_total:
        count = counted(result.receivers_total, "boundary")
        page.line(("receivers:", "bold"), f" {count} downstream of these")


def _coverage(page: Page, result: Result, limit: int | None) -> None:
    coverage = result.coverage
    brief = limit is not None and result.verdict == "equivalent"
    kinds = ", ".join(f"{count:,} {safe(kind, limit=20)}" for kind, count in coverage.by_kind.items())
    counts = f" {counted(coverage.compared, 'boundary')}, {coverage.bitwise_equal:,} bitwise equal"
    page.line(("compared:", "bold"), counts, f": {kinds}" if kinds and not brief else "")
    groups = sorted(coverage.missing, key=lambda group: (not group.counts_as_incomplete, -group.count))
    if brief:
        _missing_in_brief(page, groups)
        return
    for group in groups[:limit]:
        _missing(page, group, examples=1 if limit else len(group.examples))
    page.more(len(groups) - len(groups[:limit]))


def _missing_in_brief(page: Page, groups: Sequence[Missing]) -> None:
    if groups:
        total = sum(group.count for group in groups)
        text = f" {counted(total, 'boundary')} in {counted(len(groups), 'group')}, listed with -v"
        page.line(("not compared:", "bold"), text)


def _missing(page: Page, group: Missing, *, examples: int) -> None:
    style = "bold yellow" if group.counts_as_incomplete else "bold"
    label = "missing" if group.counts_as_incomplete else "not compared"
    text = f" {group_words(group)}: {safe(group.reason, limit=SENTENCE)}"
    shown = "; ".join(f"{words.moment(where)}: {words.key(where)}" for where in group.examples[:examples])
    page.line((label + ":", style), text, f" (e.g. {shown})" if shown else "")


def group_words(group: Missing) -> str:
    """Return how many boundaries of which kind are on one side only: ``24 param only in a``."""
    if group.kind == "any":  # said of a whole recording
        return f"in {group.side}"
    side = "in both" if group.side == "both" else f"only in {group.side}"
    return f"{group.count:,} {safe(group.kind, limit=20)} {side}"


def _context(page: Page, result: Result) -> None:
    policy = safe(result.policy, limit=SHORT)
    page.line(("policy:", "bold"), f" {POLICIES.get(policy, policy)}{power_words(result)}")
    spark.nearest_to_limit(page, result)
    for note in result.notes:
        page.line(("note:", "bold"), f" {safe(note, limit=SENTENCE)}")
    for name, side in (("a", result.a), ("b", result.b)):
        page.line((f"{name}:", "bold"), f" {summary(side)}")
        for problem in side.problems[:ROWS]:
            page.line(safe(problem, limit=SENTENCE), indent=2)
        page.more(len(side.problems) - ROWS)


def power_words(result: Result) -> str:
    """Return the smallest errors that would have been flagged: of the whole comparison, else of the first."""
    power, finding = result.power, result.first_divergent
    if power is None and finding and finding.judgement:
        power = Power(finding.judgement.power_coherent, finding.judgement.power_incoherent)
    found = [
        f"{number(float(f'{value:.1e}'))} ({name})"
        for name, value in (
            ("coherent", power.coherent if power else None),
            ("incoherent", power.incoherent if power else None),
        )
        if value is not None
    ]
    if not found:
        return ""
    place = " at the first divergent boundary"
    if result.power:
        least = max(result.power.incoherent or 0.0, result.power.coherent or 0.0)
        at = result.power.weakest if least > WEAK else None
        place = f" at {safe(f'{at.kind} {at.name} {at.slot}', limit=SHORT)}" if at else ""
        usual = result.power.typical_incoherent
        place += f"; at most boundaries {number(float(f'{usual:.1e}'))}" if place and usual else ""
    return f"; flags errors above {', '.join(found)}{place}"


def summary(side: Side) -> str:
    """Return a recording in one line: its path, how much there is of it, how it ended."""
    return ", ".join(
        (
            f"{safe(side.path, limit=SHORT)}: {counted(side.ranks, 'rank')}",
            counted(side.steps, "step"),
            f"{counted(side.microbatches, 'microbatch')} a step",
            safe(side.ended, limit=SHORT),
        )
    )
