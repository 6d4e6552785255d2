"""What a gradient was computed from: of code between modules, everything that it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tensortrace.diff.catalog import Catalog, Slot
from tensortrace.diff.plan.edges import Edges, is_last_state
from tensortrace.diff.plan.pair import StepPair
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind, Meta
from tests.synthetic import Tensor, write_trace


def _record(kind: Kind, name: str, slot: str, *producers: int, value: float = 1.0) -> Tensor:
    fields: dict[str, Any] = {
        "step": 0, "microbatch": 0, "kind": kind, "name": name, "slot": slot, "call": 0,
        "producers": producers, "meta": Meta(training=True, grad_enabled=True),
    }  # fmt: skip
    return fields, np.full((2, 3), value, np.float32)


def _parents(tmp_path: Path, records: list[Tensor], name: str) -> set[tuple[str, str, str]]:
    with Trace.open(write_trace(tmp_path / "trace", [records])) as trace:
        catalog = Catalog(trace)
        view = catalog.view(0)
        pair = StepPair(view, view, catalog.view(-1), catalog.view(-1))
        found, _ = Edges(pair).of(Slot("train", Kind.ACTIVATION_GRAD, name, "out", 0), 0)
    return {(str(ref.kind), ref.name, ref.slot) for _, ref in found if ref.kind in Kind}


def test_a_gradient_through_attention_depends_on_queries_keys_and_what_they_made(tmp_path: Path) -> None:
    records = [
        _record(Kind.ACTIVATION, "q", "out", value=2.0),
        _record(Kind.ACTIVATION, "k", "out", value=3.0),
        _record(Kind.ACTIVATION, "proj", "in.0", 0, 1, value=6.0),
        _record(Kind.ACTIVATION_GRAD, "proj", "in.0"),
        *(_record(Kind.ACTIVATION_GRAD, name, "out") for name in ("q", "k")),
    ]
    expected = {
        ("activation_grad", "proj", "in.0"),
        ("activation", "proj", "in.0"), ("activation", "q", "out"), ("activation", "k", "out"),
    }  # fmt: skip
    assert expected <= _parents(tmp_path, records, "q")


def test_a_gradient_through_an_activation_function_depends_on_what_it_was_given(tmp_path: Path) -> None:
    records = [
        _record(Kind.ACTIVATION, "up", "out", value=2.0),
        _record(Kind.ACTIVATION, "down", "in.0", 0, value=1.5),
        _record(Kind.ACTIVATION_GRAD, "down", "in.0"),
        _record(Kind.ACTIVATION_GRAD, "up", "out"),
    ]
    expected = {("activation_grad", "down", "in.0"), ("activation", "up", "out")}
    assert expected <= _parents(tmp_path, records, "up")


def test_last_states_of_a_recurrent_layer_are_told_by_their_shape() -> None:
    """Eight rows of ten positions, rows or positions first; what a model returns second is no such state."""
    assert is_last_state((1, 8, 12), (8, 10, 12))
    assert is_last_state((2, 8, 12), (10, 8, 24))
    assert not is_last_state((8, 10, 30), (8, 10, 12))
    assert not is_last_state((8, 12), (8, 10, 12))
    assert not is_last_state((1, 7, 12), (8, 10, 12))
