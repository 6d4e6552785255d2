"""The tensors that differ most, each with where its error lies: read again after the verdict, one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tensortrace.cli.render.numbers import exactly, number, times
from tensortrace.cli.report.ladder import short
from tensortrace.diff.assemble import NotComparable
from tensortrace.diff.causality import Node
from tensortrace.diff.compare import EPS
from tensortrace.diff.error_map import ErrorMap, error_map
from tensortrace.diff.estimate import is_estimate
from tensortrace.diff.estimating import measure_loaded
from tensortrace.diff.examined import Examined, Near
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import Comparison, coarser_eps
from tensortrace.diff.result import Finding, Judgement, Metrics
from tensortrace.diff.stream import Streamed, whole
from tensortrace.diff.verdict import finding, where
from tensortrace.tracer.errors import TraceError

MOST = 12
"""Tensors that are shown."""

OF_A_KIND = 2
"""Tensors of one kind among those that an origin only led to."""

NEAR_ZERO = 2.0**64
"""Units of the last place that say no more than that one of two numbers is 0, or nearly."""

_DIMS = 8


class Fact(NamedTuple):
    """A number of a tensor, and what it is."""

    name: str
    value: str


class Tensor(NamedTuple):
    """One of the worst tensors. ``why_no_map`` says why there is no map, where there is none."""

    node: Node
    told: Finding
    role: str
    facts: tuple[Fact, ...]
    map: ErrorMap | None
    why_no_map: str


def worst_tensors(found: Examined) -> list[Tensor]:
    """Return the worst tensors, the first divergence first: of equivalent runs those nearest to a limit."""
    outcomes = list(_picked(found))
    if outcomes:
        return [_tensor(found, outcome, role) for outcome, role in outcomes]
    return [_tensor(found, _agreeing(near), "within") for near in found.nearest.found()]


def _picked(found: Examined) -> Iterator[tuple[Outcome, str]]:
    """Yield origins, each boundary once, then what they lead to in the first's step, a few of each kind."""
    of_where = {where(outcome.node): outcome for outcome in found.execution.outcomes}
    origins = [of_where[origin.where] for origin in found.result.origins if origin.where in of_where]
    origins = list({(o.node.microbatch, o.node.slot): o for o in reversed(origins)}.values())[::-1]
    yield from ((outcome, "origin") for outcome in origins[: MOST // 2])
    if not origins:
        return
    told = set(map(id, origins))
    step = origins[0].node.step
    others = [o for o in found.execution.outcomes if id(o) not in told and o.node.step == step and o.metrics]
    places: Counter[str] = Counter()
    ranked: list[tuple[int, float, Outcome]] = []
    for outcome in sorted(others, key=lambda o: -_ratio(o.judgement)):
        kind = outcome.node.slot.kind.value
        ranked.append((places[kind], -_ratio(outcome.judgement), outcome))
        places[kind] += 1
    ranked = [one for one in ranked if one[0] < OF_A_KIND]  # the worst of each kind, then the second of each
    for _, _, outcome in sorted(ranked, key=lambda r: r[:2])[: MOST - len(origins[: MOST // 2])]:
        yield outcome, "declared" if outcome.role == "declared" else "receiver"


def _ratio(judgement: Judgement | None) -> float:
    return judgement.ratio if judgement and not math.isnan(judgement.ratio) else -1.0


def _agreeing(near: Near) -> Outcome:
    """Return a comparison that agrees as an outcome; it is measured when its map is made."""
    return Outcome(near.node, near.entry, "receiver", None, near.judgement, "", pair=near.pair)


def _tensor(found: Examined, outcome: Outcome, role: str) -> Tensor:
    map_, metrics, shape, why = _map(outcome)
    told = finding(outcome, "origin" if role == "origin" else "receiver", found.execution)
    metrics = outcome.metrics or metrics
    facts = tuple(_facts(metrics, outcome.judgement, shape or told.shape))
    return Tensor(outcome.node, told, role, facts, map_, why)


def _map(outcome: Outcome) -> tuple[ErrorMap | None, Metrics | None, tuple[int, ...], str]:
    """Read both sides again; return the map, the metrics, the shape, and why there is no map."""
    entry = outcome.comparison
    if not isinstance(entry, Comparison):
        return None, None, (), "only one run has it"
    try:
        loaded = whole(entry.load())
    except (NotComparable, TraceError) as error:
        return None, None, (), str(error)
    if not isinstance(loaded, Streamed) and (is_estimate(loaded.a) or is_estimate(loaded.b)):
        return None, None, loaded.shape, "its values were not stored, only a sketch"
    if loaded.a.shape != loaded.b.shape:
        return None, None, loaded.a.shape, "its shapes differ"
    eps = coarser_eps((*entry.items_a, *entry.items_b)) or EPS["float64"]
    metrics = measure_loaded(loaded, eps)
    if metrics.estimated:
        return None, metrics, loaded.shape, "its values were not stored, only a sketch"
    found = error_map(loaded, entry.items_a, entry.items_b, eps)
    return found, metrics, loaded.shape, "" if found else "it is a single number"


def _facts(metrics: Metrics | None, judgement: Judgement | None, shape: tuple[int, ...]) -> Iterator[Fact]:
    if judgement is not None:
        yield Fact("error", number(short(judgement.error)))
        yield Fact("allowed", number(short(judgement.allowed)))
        yield Fact("× allowed", times(judgement.ratio))
    if metrics is None:
        return
    yield Fact("elements", f"{metrics.elements:,}" + (f" {index(shape)}" if shape else ""))
    yield Fact("relative L2", number(metrics.rel_l2))
    if metrics.max_abs is not None and not metrics.equal:
        yield Fact("greatest |a−b|", f"{number(metrics.max_abs)}{_at(metrics.max_abs_at)}")
        yield Fact("there", f"a {_exact(metrics.max_abs_a)}, b {_exact(metrics.max_abs_b)}")
    if metrics.max_rel is not None:
        yield Fact("greatest relative", f"{number(metrics.max_rel)}{_at(metrics.max_rel_at)}")
    if metrics.max_ulp is not None:
        yield Fact(
            "greatest ULP", number(short(metrics.max_ulp)) if metrics.max_ulp < NEAR_ZERO else "a is 0 there"
        )
    if metrics.projection is not None:
        spread = "" if metrics.projection_error is None else f" ± {number(short(metrics.projection_error))}"
        yield Fact("b over a", f"{metrics.projection:.6g}{spread}")
    if metrics.cosine is not None:
        yield Fact("cosine", f"{metrics.cosine:.6g}")
    if metrics.nonfinite_a or metrics.nonfinite_b:
        yield Fact("NaN or Inf", f"{metrics.nonfinite_a:,} in a, {metrics.nonfinite_b:,} in b")


def _exact(value: float | None) -> str:
    return "?" if value is None else exactly(short(value) or 0.0) if math.isfinite(value) else str(value)


def _at(place: tuple[int, ...]) -> str:
    return f" at {index(place)}" if place else ""


def index(numbers: tuple[int, ...]) -> str:
    """Return a shape or an index in brackets."""
    return "[" + ", ".join(map(str, numbers[:_DIMS])) + (", …" if len(numbers) > _DIMS else "") + "]"
