"""Boundaries that one run lacks and on which the first divergence depends: a module that was not called."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import OneSided
from tensortrace.diff.plan.weights import UNKNOWN_LOSS
from tensortrace.tracer.types import INIT_STEP, Kind

_CALLS = frozenset({Kind.ACTIVATION, Kind.LOSS})
_SHOWN = 4


def uncalled(origin: Outcome, execution: Execution, a: Catalog, b: Catalog) -> Outcome | None:
    """Return the first call that only one run makes, and from which a divergence was computed there.

    A call that the other run promised to record and did not make is no difference by itself: programs compute
    the same in other ways. Where what it was given agrees and what was computed from it doesn't, it is the
    first. None where there is no such call. So with the gradient of what a module returned that comes back
    to it in one run only: in the other the way was cut off.
    """
    gaps = {n: e for n, e in execution.gaps if _counts(n, e, a, b) or _is_cut_off(n, e, execution, a, b)}
    sides = {entry.side for entry in gaps.values() if entry.reason == UNKNOWN_LOSS}
    if origin.node.slot.kind != Kind.ACTIVATION_GRAD or len(sides) < 2:  # one is what the other does by hand
        gaps = {node: entry for node, entry in gaps.items() if entry.reason != UNKNOWN_LOSS}
    if isinstance(origin.comparison, OneSided):
        return _unknown_parameter(origin, gaps)
    parents = set(execution.graph.parents(origin.node))
    waiting = [p for p in parents if p in gaps]
    if origin.node.slot.kind == Kind.ACTIVATION_GRAD:  # which a loss computes from what it was given
        losses = (n for n in gaps if n.slot.kind == Kind.LOSS and n.microbatch == origin.node.microbatch)
        waiting += [n for n in losses if parents.intersection(execution.graph.parents(n))]
    waiting += [n for n in gaps if _takes_the_same(n, gaps[n].side, origin)]
    found: dict[Node, OneSided] = {}
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = gaps[node]
            waiting += [p for p in execution.graph.parents(node) if p in gaps]
    if not found or _harmless(found, gaps, execution):
        return None
    common = _common_calls(execution)
    calls = [n for n in found if not _is_argument(n, common)] or list(found)
    first = min(calls, key=execution.graph.order_key)
    cut = first.slot.kind == Kind.ACTIVATION_GRAD
    alike = [(n, e) for n, e in found.items() if (n.slot.kind == Kind.ACTIVATION_GRAD) == cut]
    called = dict.fromkeys((n.slot.name, e.side) for n, e in sorted(alike, key=lambda f: f[0] != first))
    words = "a gradient comes to {} only in {}" if cut else "{} is called only in {}"
    if _is_argument(first, common):
        words = f"{{}} is given {first.slot.slot} only in {{}}"
    reason = ", ".join(words.format(*call) for call in list(called)[: 1 if cut else _SHOWN])
    entry = replace(found[first], reason=reason, diverges=True)
    text = f"{reason}, and what is computed from it differs"
    return Outcome(first, entry, "origin", None, None, text, None, origin.pair)


def _takes_the_same(node: Node, side: str, origin: Outcome) -> bool:
    """Tell whether a gradient that one run lacks is of the tensor whose gradient diverges elsewhere.

    The gradient at an input is that of all modules that take the tensor: each lacks what one cuts off.
    """
    at, pair = origin.node, origin.pair
    if at.slot.kind != Kind.ACTIVATION_GRAD or node.slot.kind != Kind.ACTIVATION_GRAD or pair is None:
        return False
    if node[:2] != at[:2] or not (node.slot.slot.startswith("in") and at.slot.slot.startswith("in")):
        return False
    view = pair.a if side == "a" else pair.b
    given = [
        {item.entry.digest for item in view.items.get(slot._replace(kind=Kind.ACTIVATION), ())}
        for slot in (node.slot, at.slot)
    ]
    return bool(given[0]) and given[0] == given[1]


def _is_argument(node: Node, common: Set[Node]) -> bool:
    """Tell whether a gap is an argument, such as a mask, of a call that both runs make."""
    slot = node.slot
    return slot.kind == Kind.ACTIVATION and slot.slot.startswith("in") and _call(node) in common


def _common_calls(execution: Execution) -> set[Node]:
    """Return the calls that both runs make: those of which something returned was compared."""
    gone = {node for node, _ in execution.gaps}
    return {_call(n) for n in execution.errors if n.slot.slot.startswith("out") and n not in gone}


def _call(node: Node) -> Node:
    """Return the call that a boundary belongs to, whatever it is of it."""
    return node._replace(slot=node.slot._replace(slot=""))


def _harmless(found: dict[Node, OneSided], gaps: dict[Node, OneSided], execution: Execution) -> bool:
    """Tell whether such a call is lacking in another layer or step too, and what follows agrees there.

    Then the other run computes the same in another way.
    """
    leaves = {(n.slot.name.rpartition(".")[2], e.side) for n, e in found.items()}
    alike = {n for n, e in gaps.items() if (n.slot.name.rpartition(".")[2], e.side) in leaves}
    alike = {n for n in alike if n.slot.kind == Kind.ACTIVATION}
    return any(
        not error.diverges and node not in gaps and alike.intersection(execution.graph.parents(node))
        for node, error in execution.errors.items()
        if node.slot.kind == Kind.ACTIVATION
    )


def _unknown_parameter(origin: Outcome, gaps: dict[Node, OneSided]) -> Outcome | None:
    """Return the parameter with which only one run starts, where what only one run has is made of it."""
    starts = {n: e for n, e in gaps.items() if n.step == INIT_STEP and n.slot.kind == Kind.PARAM}
    node = next((n for n in starts if n.slot.name == origin.node.slot.name), None)
    if node is None:
        return None
    entry = starts[node]
    others = [n.slot.name for n, e in starts.items() if e.side != entry.side]
    other = "b" if entry.side == "a" else "a"
    reason = f"only {entry.side} has a parameter {node.slot.name}"
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
        reason += f", and only {other} has {shown}: if they are the same, rename them in a layout file"
    entry = replace(entry, reason=reason, diverges=True)
    return Outcome(node, entry, "origin", None, None, reason, None, origin.pair)


def _is_cut_off(node: Node, entry: OneSided, execution: Execution, a: Catalog, b: Catalog) -> bool:
    """Tell whether a module gave or was given the same in both runs, and only one has a gradient of it."""
    lacking, slot = b if entry.side == "a" else a, node.slot
    if slot.kind != Kind.ACTIVATION_GRAD or entry.side == "both":
        return False
    given = execution.errors.get(node._replace(slot=slot._replace(kind=Kind.ACTIVATION)))
    expected = entry.counts and lacking.would_hold(slot.kind, slot.name, node.step)
    return expected and given is not None and not given.diverges


def _counts(node: Node, entry: OneSided, a: Catalog, b: Catalog) -> bool:
    """Tell whether a gap is a call that the run which lacks it would have recorded."""
    lacking = b if entry.side == "a" else a
    asked = (entry.counts or entry.reason == UNKNOWN_LOSS) and not entry.diverges and entry.side != "both"
    kind, name = node.slot.kind, node.slot.name
    wanted = kind in _CALLS or (kind == Kind.PARAM and node.step == INIT_STEP)
    return asked and wanted and lacking.would_hold(kind, name, node.step)
