"""What became of every boundary of a comparison, in causal order: equal, within, beyond, or not compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution
from tensortrace.diff.result import Judgement, Result
from tensortrace.diff.verdict import where

State = Literal["equal", "within", "receiver", "origin", "declared", "missing"]


class Surveyed(NamedTuple):
    """One boundary: there is a ``judgement`` where values were judged, a ``reason`` where not compared."""

    node: Node
    state: State
    judgement: Judgement | None = None
    reason: str = ""


def survey(execution: Execution, result: Result) -> Iterator[Surveyed]:
    """Yield every boundary that is told of, parents before children, step by step."""
    equal, judged = set(execution.equal), dict(execution.judged)
    missing = dict(execution.not_comparable) | {node: entry.reason for node, entry in execution.gaps}
    states = _states(execution, result)
    for node in execution.errors:
        judgement = judged.get(node)
        if node in states:
            yield Surveyed(node, states[node], judgement)
        elif node in missing:
            yield Surveyed(node, "missing", None, missing[node])
        elif node in equal:
            yield Surveyed(node, "equal", judgement)
        elif judgement is not None:
            yield Surveyed(node, "within", judgement)


def _states(execution: Execution, result: Result) -> dict[Node, State]:
    """Return what became of what diverges: an origin is what the result calls one."""
    origins = {finding.where for finding in result.origins}
    told: dict[Node, State] = {}
    for outcome in execution.outcomes:
        if where(outcome.node) in origins:
            told[outcome.node] = "origin"
        else:
            told[outcome.node] = "declared" if outcome.role == "declared" else "receiver"
    return told
