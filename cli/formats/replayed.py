"""The summary of a replay: of a trace, of a packed case, of a live run on recorded values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tensortrace.cli.formats import findings
from tensortrace.cli.formats.compared import NEXT, of_comparison
from tensortrace.cli.formats.summary import Check, Notice, Section, Summary, Table
from tensortrace.cli.render import case as case_text
from tensortrace.cli.render import forced as forced_text
from tensortrace.cli.render import replayed as text
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.page import Look
from tensortrace.cli.render.text import summary
from tensortrace.diff.result import Result

if TYPE_CHECKING:
    from tensortrace.replay.forced import Faulty, Forced
    from tensortrace.replay.packed import CaseReplay
    from tensortrace.replay.result import Replay


def of_replay(result: Replay) -> Summary:
    """Return the summary of ``trace replay``."""
    wrong, shown = result.mismatches, text.render(result)
    checks = findings.kind_checks(result.replayed, wrong, result.headline, shown, follow=set())
    told = [*findings.notices(wrong, result.headline, result.causes), *findings.lost_notices(result.lost)]
    sections = [Section("", findings.cause_lines(result.causes, result.headline))] if wrong else []
    if wrong:
        sections.append(findings.table_of(f"First mismatch: {findings.place(wrong[0])}", wrong))
        sections.append(findings.evidence(wrong[0], result.causes))
    hints = text.hints(result)
    return Summary(
        tool="trace replay",
        subject=result.run.path,
        verdict=result.verdict,
        holds=bool(result),
        headline=result.headline,
        sections=(*sections, _coverage(result), Section("Trace", (summary(result.run), *result.notes))),
        checks=(*checks, findings.coverage_check(result.lost)),
        notices=tuple(told) or (Notice("notice", result.verdict, (result.headline,)),),
        commands=tuple(hint.removeprefix(NEXT) for hint in hints if hint.startswith(NEXT)),
        text=shown,
    )


def of_case(result: CaseReplay) -> Summary:
    """Return the summary of a packed case: whether it is as stated, and what its traces say."""
    outcome = result.outcome
    told = of_comparison(outcome) if isinstance(outcome, Result) else of_replay(outcome)
    headline = "the case gives the stated verdict" if result else "the case gives another verdict"
    shown = case_text.render(result, look=Look(), detail="normal")
    deviations = "; ".join(result.deviations)
    return replace(
        told,
        tool="trace replay",
        verdict="as stated" if result else "not as stated",
        holds=bool(result),
        headline=headline,
        sections=(
            Section("", result.deviations),
            Section(f"Its traces are {told.verdict}", (told.headline,)),
            *told.sections,
        ),
        checks=(Check("as stated", "passed") if result else Check("as stated", "failed", deviations, shown),),
        notices=(Notice("notice" if result else "error", headline, (*result.deviations, told.headline)),),
        commands=(),
        text=shown,
    )


def of_forced(result: Forced) -> Summary:
    """Return the summary of a live run: a check for each place that errs by itself."""
    lost = findings.missing_lines(result.missing)
    checks = [Check(_name(f), "failed", _told(f), findings.place(f.first)) for f in result.faulty]
    passed = () if checks else (Check("every module", "passed"),)
    told = [
        Notice("error", _name(faulty), (_told(faulty), findings.place(faulty.first)), faulty.first.source)
        for faulty in result.faulty
    ]
    told += findings.lost_notices(lost)
    rows = tuple(
        (_name(faulty), ", ".join(faulty.wrong_in), findings.place(faulty.first), _told(faulty))
        for faulty in result.faulty
    )
    table = Table(("place", "wrong in", "first boundary", "cause"), rows[: findings.ROWS], _left_out(rows))
    compared = f"{counted(result.compared, 'boundary')} compared, {result.bitwise_equal:,} bitwise equal"
    return Summary(
        tool="trace replay",
        subject=f"{result.live.path} on the values of {result.recorded.path}",
        verdict=result.verdict,
        holds=bool(result),
        headline=result.headline,
        sections=(
            Section("Faulty by themselves", table=table if rows else None),
            Section("Compared", (compared, *lost, *result.notes)),
        ),
        checks=(*checks, *passed, findings.coverage_check(lost)),
        notices=tuple(told) or (Notice("notice", result.verdict, (result.headline,)),),
        commands=(),
        text=forced_text.render(result),
    )


def _left_out(rows: tuple[tuple[str, ...], ...]) -> int:
    return max(0, len(rows) - findings.ROWS)


def _name(faulty: Faulty) -> str:
    return f"{faulty.name} (between modules)" if faulty.part == "between" else faulty.name


def _told(faulty: Faulty) -> str:
    if not faulty.causes:
        return f"unexplained; {faulty.first.text}"
    return f"{faulty.causes[0].text} ({faulty.causes[0].code})"


def _coverage(result: Replay) -> Section:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result.replayed.items())
    lines = [f"{counted(result.count, 'boundary')}, {result.bitwise_equal:,} bitwise equal: {kinds}"]
    left = sum(group.count for group in result.not_replayed)
    lines += [f"not replayed: {counted(left, 'boundary')}"] if left else []
    lines += [f"objective: {result.objective.text}"] if result.objective else []
    return Section("Replayed", (*lines, *(f"missing: {line}" for line in result.lost[: findings.ROWS])))
