"""The outcome of a replay as text that an engineer would paste into an issue."""

from __future__ import annotations

from tensortrace.cli.render import words
from tensortrace.cli.render.finding import SENTENCE, first, further
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import ROWS, Detail, show_command, summary, tell_cause
from tensortrace.diff.result import Finding
from tensortrace.replay.result import NotReplayed, Replay

_STYLES = {"agrees": "bold green", "mismatch": "bold red", "incomplete": "bold yellow"}


def render(result: Replay, *, look: Look | None = None, detail: Detail = "normal") -> str:
    """Return the result as text; ``quiet`` is the headline alone, ``verbose`` leaves nothing out."""
    page = Page(look or Look())
    headline = safe(result.headline, limit=SENTENCE)
    page.line((result.verdict.upper(), _STYLES[result.verdict]), headline.removeprefix(result.verdict))
    if detail == "quiet":
        return page.text()
    limit = None if detail == "verbose" else ROWS
    if result.first_mismatch:
        _mismatches(page, result, result.first_mismatch, limit)
    _coverage(page, result, limit)
    _context(page, result, limit)
    return page.text()


def hints(result: Replay) -> tuple[str, ...]:
    """Return what is said on stderr after a result: the engine's hints, then the next useful command."""
    said = tuple(safe(hint, limit=SENTENCE) for hint in result.hints)
    if result.first_mismatch is None:
        return said
    where = result.first_mismatch.where
    return (*said, f"next: {show_command(result.run, where, where.step)}")


def _mismatches(page: Page, result: Replay, finding: Finding, limit: int | None) -> None:
    first(page, finding, limit=limit, said=result.headline, what="first mismatch")
    page.blank()
    for cause in result.causes:
        tell_cause(page, cause, limit, said=result.headline)
    if not result.causes:
        page.line(("cause:", "bold"), " unexplained: no known mistake accounts for the difference")
    others = result.mismatches[1:]
    if others:
        page.blank()
        page.line((f"{counted(len(others), 'further mismatch')}:", "bold"))
        further(page, others, limit=limit)
    page.blank()


def _coverage(page: Page, result: Replay, limit: int | None) -> None:
    kinds = ", ".join(f"{count:,} {safe(kind, limit=20)}" for kind, count in result.replayed.items())
    again = f", {result.recomputed:,} recomputed" if result.recomputed else ""
    count = f" {counted(result.count, 'boundary')}, {result.bitwise_equal:,} bitwise equal"
    page.line(("replayed:", "bold"), f"{count}: {kinds}{again}")
    groups = sorted(result.not_replayed, key=lambda group: -group.count) if limit else result.not_replayed
    for group in groups[:limit]:
        page.line(("not replayed:", "bold"), f" {_group(group)}")
    page.more(len(groups) - len(groups[:limit]))


def _group(group: NotReplayed) -> str:
    example = f"{words.moment(group.examples[0])}: {words.key(group.examples[0])}"
    reason = safe(group.reason, limit=SENTENCE)
    return f"{group.count:,} {safe(group.kind, limit=20)}: {reason} (e.g. {example})"


def _context(page: Page, result: Replay, limit: int | None) -> None:
    if result.objective:
        page.line(("objective:", "bold"), f" {safe(result.objective.text, limit=SENTENCE)}")
        page.bullets([safe(line, limit=SENTENCE) for line in result.objective.weights], limit=limit and 3)
    for note in result.notes:
        page.line(("note:", "bold"), f" {safe(note, limit=SENTENCE)}")
    for lost in result.lost:
        page.line(("missing:", "bold yellow"), f" {safe(lost, limit=SENTENCE)}")
    page.line(("a:", "bold"), " what the recorded inputs give, in float64")
    page.line(("b:", "bold"), f" {summary(result.run)}")
    for problem in result.run.problems[:limit]:
        page.line(safe(problem, limit=SENTENCE), indent=2)
