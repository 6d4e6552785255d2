"""Whether the number that backward began with differs where gradients alone would be accused.

The value of an objective is no difference by itself: it may hold constants, and a surrogate has the gradient
of what it stands for but another value. Where everything forward agrees, and gradients that come from no
other gradient do not, it is the first boundary at which the runs part: a term of the objective is another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.causality import Node
from tensortrace.diff.compare import EPS, measure_blocks
from tensortrace.diff.execute import Execution, Outcome
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPair, coarser_eps
from tensortrace.diff.tolerance import Measured, judge_model
from tensortrace.tracer.types import ROOT, Kind

_GRADIENTS = frozenset({Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD})
_BEGAN = "backward"


def at_the_objective(origins: Sequence[Outcome], execution: Execution) -> list[Outcome]:
    """Return the origins with the objective's value in the place of the gradients of its pass.

    Only where the first of them is one: what comes before it has causes of its own.
    """
    found: dict[Node, Outcome] = {}
    for outcome in origins:
        value = _value_apart(outcome, execution)
        found |= {} if value is None else {value.node: value}
        if not found:
            return list(origins)
    passes = {(node.step, number) for node in found for number in (node.microbatch, None)}
    of_them = [o for o in origins if o.node.slot.kind in _GRADIENTS and o.node[:2] in passes]
    return [*found.values(), *(o for o in origins if o not in of_them)]


def _value_apart(origin: Outcome, execution: Execution) -> Outcome | None:
    """Return the objective's value if it differs and a gradient comes from nothing but the objective."""
    pair, node = origin.pair, origin.node
    if pair is None or node.slot.kind not in _GRADIENTS or isinstance(origin.comparison, OneSided):
        return None
    if not pair.same_scheme or _scales(pair.a) != _scales(pair.b) or _is_scaled(pair):
        return None
    if any(_agrees(parent, execution) for parent in execution.graph.parents(node)):
        return None
    values = [v for v in _values(pair) if node.microbatch in (None, v[1])]
    apart = (_judge(slot, microbatch, a, b, origin, execution) for slot, microbatch, a, b in values)
    return next((outcome for outcome in apart if outcome is not None), None)


def _agrees(parent: Node, execution: Execution) -> bool:
    """Tell whether a gradient that another one is computed from agrees: then the objective does, too."""
    error = execution.errors.get(parent)
    return parent.slot.kind == Kind.ACTIVATION_GRAD and error is not None and not error.diverges


def _scales(view: StepView) -> list[float]:
    """Return the loss scales of a step."""
    return [float(i[0].read()) for s, i in sorted(view.find(Kind.SCHEDULE)) if s.slot == "scale"]


def _is_scaled(pair: StepPair) -> bool:
    """Tell whether the runs weigh their losses differently, and make up for it later."""
    factors = pair.scale.by_row.values() if pair.scale.observed else ()
    return any(not math.isclose(f, 1.0, rel_tol=1e-6) for f in factors)


def _values(pair: StepPair) -> Iterator[tuple[Slot, int | None, tuple[Item, ...], tuple[Item, ...]]]:
    """Yield what backward began with in both runs, by microbatch."""
    for slot, items in sorted(pair.a.find(Kind.LOSS, phase="train")):
        if (slot.name, slot.slot) != (_BEGAN, "value") or slot not in pair.b.items:
            continue
        sides = [
            {i.part: i for i in side if i.part is not None and i.entry.local_shape == ()}
            for side in (items, pair.b.items[slot])
        ]
        if sides[0].keys() != sides[1].keys():
            continue
        for number in sorted({part.number for part in sides[0]}):
            parts = sorted(part for part in sides[0] if part.number == number)
            a, b = (tuple(side[part] for part in parts) for side in sides)
            yield slot, pair.group(parts[0]), a, b


def _judge(
    slot: Slot, microbatch: int | None, a: Sequence[Item], b: Sequence[Item], origin: Outcome,
    execution: Execution,
) -> Outcome | None:  # fmt: skip
    """Return the values as an origin if they differ by more than what the models returned explains."""
    left, right = (np.array([float(i.read()) for i in side]) for side in (a, b))
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return None
    loaded = Assembled(left, right) if len(a) > 1 else Assembled(left[0], right[0])
    node = Node(origin.node.step, microbatch, slot)
    returned = [n for n in execution.errors if _is_returned(n, node)]
    errors = [execution.errors[n] for n in returned]
    if any(error.diverges for error in errors):
        return None
    eps = max(coarser_eps((*a, *b)), EPS["float32"])
    metrics = measure_blocks(loaded.shape, loaded.blocks(), eps=eps)
    measured = Measured(metrics, 0.0, math.sqrt(sum(error.norm**2 for error in errors)))
    judgement = judge_model(measured, eps, errors)
    if judgement.ratio <= 1:
        return None
    wrong = np.atleast_1d(np.abs(right - left) > judgement.allowed * measured.size / math.sqrt(len(a)))
    ranks = tuple(sorted({i.source.rank for i, is_wrong in zip(b, wrong, strict=True) if is_wrong}))
    assert isinstance(origin.comparison, Comparison)
    entry = replace(
        origin.comparison, slot=slot, microbatch=microbatch, load=lambda: loaded, items_a=tuple(a),
        items_b=tuple(b), parents=(), earlier=(), own=None, quiet=None, rung=None, copies_a=(), copies_b=(),
        text="the number that backward began with",
    )  # fmt: skip
    return Outcome(
        node, entry, "origin", metrics, judgement, judgement.reason, loaded, origin.pair, ranks=ranks,
        shape=loaded.shape,
    )  # fmt: skip


def _is_returned(node: Node, value: Node) -> bool:
    """Tell whether a boundary is what a model returned in the pass that backward began from."""
    slot = node.slot
    same = (node.step, node.microbatch) == (value.step, value.microbatch) and slot.phase == "train"
    whole = slot.name == ROOT or "." not in slot.name
    return same and slot.kind == Kind.ACTIVATION and whole and slot.slot.startswith("out")
