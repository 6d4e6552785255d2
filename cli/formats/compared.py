"""The summary of a comparison, and of a run that was saved and went on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tensortrace.cli.formats import findings
from tensortrace.cli.formats.summary import Notice, Section, Summary
from tensortrace.cli.render import resumed as resumed_text
from tensortrace.cli.render import text
from tensortrace.cli.render.finding import POLICIES
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.page import Look
from tensortrace.diff.result import Finding, Result

if TYPE_CHECKING:
    from tensortrace.diff.resume import ResumeResult

NEXT = "next: "


def of_comparison(result: Result) -> Summary:
    """Return the summary of ``trace diff``."""
    origins = _origins(result)
    lost = findings.missing_lines(result.coverage.missing)
    shown = text.render(result)
    checks = findings.kind_checks(
        result.coverage.by_kind, origins, result.headline, shown, follow=_following(result)
    )
    told = [*findings.notices(origins, result.headline, result.causes), *findings.lost_notices(lost)]
    hints = text.hints(result)
    return Summary(
        tool="trace diff",
        subject=f"{result.a.path} against {result.b.path}",
        verdict=result.verdict,
        holds=bool(result),
        headline=result.headline,
        sections=_sections(result, origins, lost),
        checks=(*checks, findings.coverage_check(lost)),
        notices=tuple(told) or (Notice("notice", result.verdict, (result.headline,)),),
        commands=tuple(hint.removeprefix(NEXT) for hint in hints if hint.startswith(NEXT)),
        text=shown,
    )


def of_resume(result: ResumeResult) -> Summary:
    """Return the summary of ``trace diff --resume``: that of the comparison which the headline speaks of."""
    parts = {"before": of_comparison(result.before), "after": of_comparison(result.after)}
    told = parts["after" if resumed_text.told(result) is result.after else "before"]
    return replace(
        told,
        tool="trace diff --resume",
        verdict=result.verdict,
        holds=bool(result),
        headline=result.headline,
        checks=tuple(
            replace(check, name=f"{name} the interruption: {check.name}")
            for name, part in parts.items()
            for check in part.checks
        ),
        sections=(*told.sections, Section("", tuple(result.notes))),
        text=resumed_text.render(result, look=Look()),
    )


def _origins(result: Result) -> tuple[Finding, ...]:
    first = result.first_divergent
    return () if first is None else (first, *(each for each in result.origins if each != first))


def _following(result: Result) -> set[str]:
    """Return the kinds that differ because of an origin; of receivers that are not listed by error."""
    found = {finding.where.kind for finding in result.receivers}
    if result.receivers_total > len(result.receivers):
        found |= {each.where.kind for each in result.boundaries if each.judgement.ratio > 1}
    return found


def _sections(result: Result, origins: tuple[Finding, ...], lost: list[str]) -> tuple[Section, ...]:
    found = []
    if origins:
        found += [
            Section("", findings.cause_lines(result.causes, result.headline)),
            findings.table_of(f"First divergent boundary: {findings.place(origins[0])}", origins),
            findings.evidence(origins[0], result.causes),
        ]
    hints = tuple(hint for hint in text.hints(result) if not hint.startswith(NEXT))
    sides = tuple(f"{name}: {text.summary(side)}" for name, side in (("a", result.a), ("b", result.b)))
    return (*found, _coverage(result, lost), Section("Traces", (*sides, *result.notes, *hints)))


def _coverage(result: Result, lost: list[str]) -> Section:
    coverage = result.coverage
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in coverage.by_kind.items())
    compared = f"{counted(coverage.compared, 'boundary')}, {coverage.bitwise_equal:,} bitwise equal"
    lines = [f"{compared}: {kinds}" if kinds else compared]
    lines += [f"missing: {line}" for line in lost[: findings.ROWS]]
    unasked = sum(group.count for group in coverage.missing if not group.counts_as_incomplete)
    lines += [f"not compared: {counted(unasked, 'boundary')} that nobody promised"] if unasked else []
    if result.receivers_total:
        lines.append(f"{counted(result.receivers_total, 'boundary')} downstream of the divergent ones")
    for rule in result.declared.rules if result.declared else ():
        lines.append(f"declared: {rule.rule}: {rule.declared:,} of {rule.met:,} differ as declared")
    lines.append(f"policy: {POLICIES.get(result.policy, result.policy)}{text.power_words(result)}")
    return Section("Compared", tuple(lines))
