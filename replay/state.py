"""States the outcome of a replay: verdict, headline, mismatches in causal order, what was not replayed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tensortrace.diff.causality import Node
from tensortrace.diff.causes import name_causes
from tensortrace.diff.result import Cause, Finding, Judged
from tensortrace.diff.verdict import (
    MAX_EXAMPLES,
    MAX_ORIGINS,
    finding,
    lost_records,
    power_of,
    side_of,
    where,
)
from tensortrace.replay.found import Replaying
from tensortrace.replay.objective import Objective
from tensortrace.replay.result import NotReplayed, Replay, Stated, Verdict
from tensortrace.tracer.types import LADDER, Kind

_SHOWN = 12
"""Lines that say what tokens weigh."""


def state_replay(found: Replaying, objective: Objective, steps: Sequence[int]) -> Replay:
    """Return the outcome of a replay that has run through its steps."""
    execution, catalog = found.execution, found.catalog
    outcomes = sorted(execution.outcomes, key=lambda o: execution.graph.order_key(o.node))
    origins = [o for o in outcomes if o.role in ("origin", "further")] or outcomes
    causes: tuple[Cause, ...] = ()
    failed: tuple[str, ...] = ()
    if origins:
        causes, failed = name_causes(origins[0], execution, found.oracle, catalog, 0)
    findings = tuple(finding(o, "origin", execution) for o in origins[:MAX_ORIGINS])
    lost = (*dict.fromkeys(found.lost), *(missing.reason for missing in lost_records(catalog, "b")))
    replayed = {
        kind.value: execution.compared[kind] for kind in (*LADDER, Kind.BUFFER) if kind in execution.compared
    }
    count = sum(replayed.values())
    verdict: Verdict = "mismatch" if origins else "incomplete" if lost or not count else "agrees"
    first = findings[0] if findings else None
    not_replayed = _not_replayed(found)
    return Replay(
        verdict=verdict,
        headline=_headline(verdict, first, causes, count + found.recomputed, not_replayed),
        run=side_of(catalog, steps),
        objective=_stated(found, objective),
        first_mismatch=first,
        causes=causes,
        mismatches=findings,
        replayed=replayed,
        bitwise_equal=execution.bitwise_equal,
        recomputed=found.recomputed,
        not_replayed=not_replayed,
        lost=lost,
        notes=tuple(dict.fromkeys((*found.notes, *failed))),
        hints=_hints(first, objective),
        power=power_of(execution),
        boundaries=tuple(Judged(where(node), judgement) for node, judgement in execution.judged),
    )


def _headline(
    verdict: Verdict,
    first: Finding | None,
    causes: Sequence[Cause],
    count: int,
    not_replayed: Sequence[NotReplayed],
) -> str:
    left = sum(group.count for group in not_replayed)
    if first is None:
        why = (
            ""
            if verdict == "agrees"
            else "nothing disagrees in what was replayed, but the trace is not whole: "
        )
        return f"{verdict}: {why}{count} boundaries replayed, {left} not replayed"
    at = first.where
    window = f", microbatch {at.microbatch}" if at.microbatch is not None else ""
    place = f"step {at.step}{window}: {at.kind} {at.name} {at.slot}"
    return f"mismatch at {place}: {causes[0].text if causes else f'unexplained; {first.text}'}"


def _stated(found: Replaying, objective: Objective) -> Stated | None:
    if not found.said:
        return None
    return Stated(objective.name, objective.text, objective.declared, tuple(found.said[:_SHOWN]))


def _not_replayed(found: Replaying) -> tuple[NotReplayed, ...]:
    """Return everything that was recorded and not replayed, by kind and reason."""
    groups: dict[tuple[Kind, str], list[Node]] = defaultdict(list)
    for step, gap in found.gaps:
        groups[gap.slot.kind, gap.reason].append(Node(step, gap.microbatch, gap.slot))
    for node, reason in found.execution.not_comparable:
        groups[node.slot.kind, reason].append(node)
    for node, entry in found.execution.gaps:
        groups[node.slot.kind, entry.reason].append(node)
    order = {kind: number for number, kind in enumerate(Kind)}
    return tuple(
        NotReplayed(kind.value, reason, len(nodes), tuple(where(node) for node in nodes[:MAX_EXAMPLES]))
        for (kind, reason), nodes in sorted(groups.items(), key=lambda g: (order[g[0][0]], -len(g[1])))
    )


def _hints(first: Finding | None, objective: Objective) -> tuple[str, ...]:
    if first is None or first.where.slot != "weight" or objective.declared:
        return ()
    return (
        "if another objective is meant, say so: trace replay --objective sum, or --objective sequence-mean",
    )
