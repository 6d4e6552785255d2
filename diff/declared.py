"""What of the divergences was declared, and what follows from that alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution
from tensortrace.diff.leftovers import OVERWRITTEN, is_overwritten
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.result import Cause, Expectation


class Settled(NamedTuple):
    """All divergences in causal order, with what was found of those that were declared with their cause."""

    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...]

    @property
    def declared(self) -> tuple[Outcome, ...]:
        """Those that differ as was declared."""
        return tuple(o for o in self.outcomes if o.role == "declared")


def causes_of(
    origin: Outcome, execution: Execution, a: Catalog, b: Catalog, offset: int
) -> tuple[tuple[Cause, ...], tuple[str, ...]]:
    """Return what ``causes.name_causes`` does.

    They are imported only here: most comparisons find no divergence, and detectors are a tenth of the code.
    """
    from tensortrace.diff.causes import name_causes

    return name_causes(origin, execution, a, b, offset)


def settle(execution: Execution, a: Catalog, b: Catalog, offset: int) -> Settled:
    """Return the divergences; those declared with a cause are declared where that cause is found."""
    found: list[Outcome] = []
    notes: list[str] = []
    for outcome in sorted(execution.outcomes, key=lambda o: execution.graph.order_key(o.node)):
        if is_overwritten(outcome, execution):
            notes.append(OVERWRITTEN)
            continue
        rule = outcome.rule
        if rule is None or rule.cause is None or outcome.role == "declared":
            found.append(outcome)
            continue
        causes, failed = causes_of(outcome, execution, a, b, offset)
        notes += failed
        tally = execution.ledger.tally(rule)
        if any(cause.code == rule.cause for cause in causes):
            tally.declared += 1
            found.append(replace(outcome, role="declared", assembled=None))
            continue
        tally.otherwise += 1
        names = ", ".join(cause.code for cause in causes) or "unexplained"
        text = f"{outcome.text}; not as declared by {rule.title}: {names}"
        found.append(replace(outcome, rule=None, text=text))
    return Settled(tuple(found), tuple(dict.fromkeys(notes)))


def downstream(execution: Execution, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the receivers that have a declared difference among what they were computed from."""
    roles = {outcome.node: outcome for outcome in outcomes}
    reached: set[Node] = set()
    found = []
    for node, error in execution.errors.items():  # in the order of execution: parents come first
        if not error.diverges:
            continue
        outcome = roles.get(node)
        if outcome is not None and outcome.role != "receiver":
            reached |= {node} if outcome.role == "declared" else set()
        elif any(parent in reached for parent in execution.graph.parents(node)):
            reached.add(node)
            if outcome is not None:
                found.append(outcome)
    return tuple(found)


def expectations(execution: Execution) -> tuple[Expectation, ...]:
    """Return every rule with what it met."""
    ledger = execution.ledger
    return tuple(
        Expectation(
            rule.text, rule.place, rule.reason, tally.met, tally.declared, tally.otherwise,
            "" if tally.met else ledger.likely(rule),
        )
        for rule, tally in zip(ledger.rules, ledger.tallies, strict=True)
    )  # fmt: skip
