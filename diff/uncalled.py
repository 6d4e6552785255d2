"""Boundaries that one run lacks and on which the first divergence depends: a module that was not called."""

from __future__ import annotations

from dataclasses import replace

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution, Outcome
from tensortrace.diff.plan.comparison import OneSided
from tensortrace.tracer.types import Kind

_CALLS = frozenset({Kind.ACTIVATION, Kind.LOSS})


def uncalled(origin: Outcome, execution: Execution, a: Catalog, b: Catalog) -> Outcome | None:
    """Return the first call that only one run makes and from which a divergence was computed there.

    A call that the other run promised to record and did not make is no difference by itself: programs compute
    the same in other ways. Where what it was given agrees and what was computed from it doesn't, it is the
    first. None where there is no such call.
    """
    gaps = {node: entry for node, entry in execution.gaps if _counts(node, entry, a, b)}
    found: dict[Node, OneSided] = {}
    waiting = [p for p in execution.graph.parents(origin.node) if p in gaps]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = gaps[node]
            waiting += [p for p in execution.graph.parents(node) if p in gaps]
    if not found:
        return None
    node = min(found, key=execution.graph.order_key)
    entry = found[node]
    side = entry.side
    others = sum(n.slot.name == node.slot.name for n in found) - 1
    entry = replace(entry, reason=f"{node.slot.name} is called only in {side}", diverges=True)
    text = f"{entry.reason}, and what is computed from it differs"
    text += f" ({others} more of its tensors)" if others else ""
    return Outcome(node, entry, "origin", None, None, text, None, origin.pair)


def _counts(node: Node, entry: OneSided, a: Catalog, b: Catalog) -> bool:
    """Tell whether a gap is a call that the run which lacks it would have recorded."""
    lacking = b if entry.side == "a" else a
    whole = not lacking.lossy and not lacking.cut_at(node.step)
    asked = entry.counts and not entry.diverges and entry.side != "both"
    return (
        asked
        and whole
        and node.slot.kind in _CALLS
        and lacking.promised(node.slot.kind, node.slot.name, node.step)
    )
