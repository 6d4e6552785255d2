"""What is inherited of boundaries that were not stored, or are known by their sketches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.causality import Graph, Node
from tensortrace.diff.estimating import measured_estimates
from tensortrace.diff.inherit import Known
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Metrics
from tensortrace.diff.stream import Sketched
from tensortrace.tracer.types import Kind, Stats


def node(kind: Kind, name: str, slot: str) -> Node:
    return Node(0, None, Slot("train", kind, name, slot, 0))


def item(shape: tuple[int, ...], l2: float | None) -> Item:
    stats = Stats(finite=1, nan=0, inf=0, l2=l2)
    held = SimpleNamespace(stats=stats)
    return cast(Item, SimpleNamespace(entry=SimpleNamespace(local_shape=shape), members=((0, held),)))


def compared(slot: Slot, a: list[Item], b: list[Item]) -> Comparison:
    return Comparison(slot, None, lambda: pytest.fail("nothing is read"), tuple(a), tuple(b))


def test_the_terms_of_a_gradient_are_known_by_the_statistics_of_what_was_not_stored() -> None:
    flows, gradient = node(Kind.ACTIVATION_GRAD, "k", "out"), node(Kind.LOCAL_GRAD, "k.bias", "grad")
    known = Known()
    parts = [item((2, 6, 4), 3.0), item((2, 6, 4), 4.0)]  # rows of two ranks: of norm 5 together
    known.note_unstored(flows, compared(flows.slot, [item((4, 6, 4), 5.0)], parts))
    entry = replace(compared(gradient.slot, [], []), magnitude_of=((None, flows.slot),))
    assert known.terms(gradient, entry, (4,), cast(StepPair, None)) == pytest.approx(5.0)


def test_what_has_no_statistics_has_no_size() -> None:
    flows = node(Kind.ACTIVATION_GRAD, "k", "out")
    known = Known()
    known.note_unstored(flows, compared(flows.slot, [item((4,), None)], [item((4,), None)]))
    assert known.errors[flows].norm == 0.0
    assert flows not in known.shapes


def test_a_state_inherits_the_error_of_a_sketched_gradient_and_not_that_of_its_terms() -> None:
    gradient, state = node(Kind.CLIPPED_GRAD, "w", "grad"), node(Kind.OPTIMIZER_STATE, "w", "exp_avg")
    graph = Graph()
    graph.add(gradient, ())
    graph.add(state, (gradient,))
    known = Known(graph)
    metrics = Metrics(
        elements=400, equal=False, rel_l2=0.01, abs_l2=0.01, norm_a=1.0, norm_b=1.0, estimated=True
    )  # fmt: skip
    sketch = SimpleNamespace(shape=(20, 20))
    measured = measured_estimates(metrics, terms=10.0, length=1, eps=2.0**-23)
    known.note(gradient, measured, cast(Sketched, sketch))
    (inherited,) = known.inherits(state, 1.0)
    assert known.errors[gradient].rel == pytest.approx(0.001)
    assert inherited.rel == pytest.approx(0.01)
