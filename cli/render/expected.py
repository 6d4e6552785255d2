"""What was declared with ``--expect`` in text: each rule, what it met, what follows from it."""

from __future__ import annotations

from tensortrace.cli.render.finding import SENTENCE, SHORT
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.page import Page
from tensortrace.cli.render.safe import safe
from tensortrace.diff.result import Declared, Expectation


def declared(page: Page, found: Declared, *, limit: int | None) -> None:
    """Write a line for each rule, those that met nothing first, then what was not judged because of them."""
    rules = sorted(found.rules, key=lambda rule: rule.met > 0)
    for rule in rules[:limit]:
        style = "bold" if rule.met else "bold yellow"
        reason = f" ({safe(rule.reason, limit=SENTENCE)})" if rule.reason else ""
        page.line(("declared:", style), f" {safe(rule.rule, limit=SHORT)}{reason}: {_met(rule)}")
    page.more(len(rules) - len(rules[:limit]))
    if found.downstream:
        page.line(
            ("downstream:", "bold"),
            f" {counted(found.downstream, 'boundary')} differ because of what was declared; "
            f"{found.unjudged:,} of these were not judged: nothing bounds how far they may be apart",
        )


def _met(rule: Expectation) -> str:
    if not rule.met:
        likely = f"; did you mean {safe(rule.likely, limit=SHORT)}?" if rule.likely else ""
        return f"matches no boundary{likely}"
    of = f"of {counted(rule.met, 'boundary')}"
    if not rule.declared and not rule.otherwise:
        return f"{of} none differs by itself: the rule is not needed"
    otherwise = f", {rule.otherwise:,} otherwise" if rule.otherwise else ""
    return f"{of} {rule.declared:,} differ as declared{otherwise}"
