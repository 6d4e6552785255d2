"""Divergent boundaries and their causes as parts of a summary; what every kind of result shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensortrace.cli.formats.summary import Check, Notice, Section, Table
from tensortrace.cli.render import words
from tensortrace.cli.render.finding import HEADER, SENTENCE, difference, row, tolerance, without_numbers
from tensortrace.cli.render.numbers import counted, number
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import group_words
from tensortrace.diff.result import Cause, Finding, Missing

ROWS = 10
"""Rows of a table, and notices: what a reader looks at before the whole result."""

_HEADER = (*HEADER, "called at")


def place(finding: Finding) -> str:
    """Return when and where a boundary is, on one line."""
    return f"{words.moment(finding.where)}: {words.key(finding.where)}"


def cause_lines(causes: Sequence[Cause], headline: str) -> tuple[str, ...]:
    """Return a line for each tested cause, and what was measured; not again what the headline says."""
    lines = []
    for cause in causes:
        known = f" = {cause.equals}" if cause.equals else ""
        measured = "" if cause.number is None else f"; measured {cause.number:.7g}{known}"
        text = "as the headline says" if cause.text in headline else cause.text
        lines.append(f"cause {cause.code}: {text}{measured}")
        lines.append(
            f"with this mistake applied to the reference, the relative L2 error falls from "
            f"{number(cause.residual_before)} to {number(cause.residual_after)} (floor {number(cause.floor)})"
        )
    return tuple(lines) or ("cause: unexplained, no known mistake accounts for the difference",)


def table_of(title: str, findings: Sequence[Finding]) -> Section:
    """Return a table of the first boundaries, a row each."""
    rows = tuple((*row(finding), finding.source or "-") for finding in findings[:ROWS])
    return Section(title, table=Table(_HEADER, rows, left_out=len(findings) - len(rows)))


def evidence(finding: Finding, causes: Sequence[Cause]) -> Section:
    """Return what tells of the first divergent boundary how it differs, and what else was seen."""
    lines = [words.boundary(finding.where), without_numbers(finding)]
    lines += [*difference(finding), *tolerance(finding)]
    lines += [finding.location.text] if finding.location else []
    lines += [f"computed from {', '.join(finding.inputs[:ROWS])}"] if finding.inputs else []
    lines += [*finding.unseen, *finding.evidence, *(line for cause in causes for line in cause.evidence)]
    return Section("Evidence", tuple(line for line in lines if line)[: 2 * ROWS])


def notices(findings: Sequence[Finding], headline: str, causes: Sequence[Cause]) -> list[Notice]:
    """Return an error for each boundary: the first with the headline and its cause."""
    found = []
    for count, finding in enumerate(findings[:ROWS]):
        lines = [headline, *cause_lines(causes, headline)] if count == 0 else [without_numbers(finding)]
        lines += [*difference(finding)] if count else []
        if count == 0 and len(findings) > ROWS:
            lines.append(f"{counted(len(findings) - 1, 'further origin')}; GitHub shows {ROWS - 1} of them")
        found.append(Notice("error", place(finding), tuple(line for line in lines if line), finding.source))
    return found


def kind_checks(
    kinds: Iterable[str], findings: Sequence[Finding], headline: str, text: str, *, follow: set[str]
) -> list[Check]:
    """Return a check for each kind of boundary: failed where one is in ``findings``.

    ``follow`` are kinds that differ because of these: that says nothing of them, so they are skipped.
    """
    checks = []
    for kind in dict.fromkeys([*kinds, *(finding.where.kind for finding in findings)]):
        own = [finding for finding in findings if finding.where.kind == kind]
        if own:
            first = own[0] is findings[0]
            message = headline if first else f"{place(own[0])}: {without_numbers(own[0])}"
            details = "\n".join(place(finding) for finding in own[:ROWS])
            checks.append(Check(kind, "failed", message, text if first else details))
        elif kind in follow:
            checks.append(Check(kind, "skipped", "differs because of what failed"))
        else:
            checks.append(Check(kind, "passed"))
    return checks


def missing_lines(groups: Iterable[Missing]) -> list[str]:
    """Return what is missing where it was promised, a line for each group."""
    return [f"{group_words(group)}: {group.reason}" for group in groups if group.counts_as_incomplete]


def coverage_check(lost: Sequence[str]) -> Check:
    """Return the check that all that was promised was compared."""
    if not lost:
        return Check("coverage", "passed")
    details = "\n".join(safe(line, limit=SENTENCE) for line in lost[: 2 * ROWS])
    return Check("coverage", "failed", lost[0], details)


def lost_notices(lost: Sequence[str]) -> list[Notice]:
    """Return a warning for each thing that is missing."""
    return [Notice("warning", "not compared", (line,)) for line in lost[:ROWS]]
