"""Measures a loaded comparison, and judges it by what is known of what it was computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.causality import Node
from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import EPS, measure_blocks
from tensortrace.diff.estimating import measure_loaded, measured_estimates
from tensortrace.diff.floors import Floor
from tensortrace.diff.holders import stored_eps
from tensortrace.diff.inherit import Known
from tensortrace.diff.kinds import GRADIENTS, PASSES
from tensortrace.diff.logical import Unkept
from tensortrace.diff.partial import growth
from tensortrace.diff.plan.comparison import Comparison, coarser_eps
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.steps import judge_update
from tensortrace.diff.quick import Given, far_inside, is_one
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.silent import without_shift
from tensortrace.diff.stream import Same, Streamed, finite_of, norm_of, whole
from tensortrace.diff.tolerance import Measured, judge_exact, judge_model, measure_peak, own_error
from tensortrace.tracer.types import Kind

BLIND = 2.0
"""Times what round-off allows from which on a gradient is held against its own run's rung before as well."""

SHIFTED = 4.0
"""Times what it inherits by which a boundary may be shifted: scores are smaller than what they sum."""


@dataclass(frozen=True)
class Judge:
    """Knows the policy, exact or not, the floors of runs of identical code, and what was compared so far."""

    exact: bool = False
    floors: Mapping[Node, Floor] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def eps(self, node: Node, entry: Comparison, run_eps: float) -> float:
        """Return the spacing at which a boundary was computed, 0 where it must be equal."""
        if entry.exact:
            return 0.0
        if entry.eps and (entry.summed or entry.slot.slot == "weight" or self.known.has_values(node)):
            return entry.eps
        eps = coarser_eps((*entry.items_a, *entry.items_b))
        if entry.slot.kind in PASSES and eps:
            return max(run_eps, eps)
        if entry.slot.kind == Kind.CLIPPED_GRAD:
            if not any(p.slot.kind in GRADIENTS for p in self.known.graph.parents(node)):
                return max(run_eps, eps)  # of a copy that no module owns, cast from gradients of the model
            return max(eps, EPS["float32"])  # scalars are kept in float64, computed in the gradients' dtype
        return eps

    def noise(self, node: Node, entry: Comparison) -> float:
        """Return the relative error that a boundary may have beside round-off."""
        return entry.noise + (entry.of_error * self.known.worst_activation(node) if entry.of_error else 0.0)

    def measure(
        self, node: Node, entry: Comparison, loaded: Assembled | Streamed, pair: StepPair, eps: float
    ) -> tuple[Measured, Assembled | Streamed, bool]:
        """Return what is measured of a pair, the pair, read if need be, and whether it was measured quickly.

        Its extremes are left out then.
        """
        terms = max(self.known.terms(node, entry, loaded.shape, pair), entry.terms)
        if (same := _by_statistics(entry, loaded)) is not None:
            return Measured(same, 0.0, terms), loaded, False
        spacing, exact = max(eps, stored_eps(entry)), entry.exact or self.exact or not eps
        norm = _recorded_norm(entry, loaded)
        given = Given(eps, spacing, terms, self.noise(node, entry), self.floors.get(node), norm)
        quick = None if exact or entry.summed else far_inside(node, loaded, self.known, given)
        if quick is not None:
            return quick, loaded, True
        loaded = whole(loaded)
        return self._exactly(node, entry, loaded, given), loaded, False

    def _exactly(self, node: Node, entry: Comparison, loaded: Assembled | Streamed, given: Given) -> Measured:
        metrics = measure_loaded(loaded, given.eps or EPS["float64"], exact=self.exact)
        if entry.exact and metrics.equal and loaded.exact:  # beyond 2^53 float64 cannot tell
            same = all(np.array_equal(a, b) for a, b in loaded.blocks())
            metrics = metrics if same else Metrics(metrics.elements, False, rel_l2=2.0**-53)
        return self._measured(node, loaded, metrics, given.terms, given.spacing, entry.summed)

    def _measured(
        self, node: Node, loaded: Assembled | Streamed, metrics: Metrics, terms: float, eps: float,
        summed: int = 0,
    ) -> Measured:  # fmt: skip
        """Return everything that is measured of a pair; equal tensors need no second look."""
        if metrics.equal:
            return Measured(metrics, 0.0, terms)
        if metrics.estimated:
            return measured_estimates(metrics, terms, self.known.length(node), eps)
        peak = measure_peak(loaded.blocks(), metrics, terms)
        coherence = measure_coherence(loaded.shape, loaded.blocks(), metrics.projection, eps)
        return Measured(metrics, peak, terms, summed or self.known.length(node), coherence)

    def judge(
        self, node: Node, entry: Comparison, measured: Measured, eps: float, pair: StepPair | None
    ) -> tuple[Judgement, Literal["own", "inputs", "unknown"]]:
        """Return the judgement, and where the error comes from as far as a formula can tell."""
        derived = node.slot.slot == "weight"  # measured, so never equal in every bit
        floor = self.floors.get(node)
        if entry.exact or not eps or (self.exact and not derived):
            return judge_exact(measured.metrics, floor), "unknown"
        parents = [] if entry.summed else self.known.inherits(node, measured.size)
        agreeing = [e for e in parents if not e.diverges]
        plain = judge_model(measured, eps, agreeing, noise=self.noise(node, entry), floor=floor)
        if entry.summed:
            return plain, "own" if plain.ratio > 1 else "inputs"
        own, by_formula = judge_update(entry, pair, measured.metrics, eps)
        if own is None or not by_formula:
            return own or plain, "unknown"
        if own.ratio > 1:
            return own, "own"
        return (plain if any(e.diverges for e in parents) else own), "inputs"

    def is_blind(self, node: Node, judgement: Judgement, measured: Measured, eps: float) -> bool:
        """Tell whether comparing the runs may hide a mistake: what was given differs, or noise is allowed.

        A divergence of agreeing inputs needs no more, nor does an agreement to round-off.
        """
        if self.exact or not eps or judgement.ratio > 1:
            return bool(eps) and not self.exact and any(e.diverges for e in self.known.of_parents(node))
        return judgement.allowed > BLIND * own_error(eps, measured.length)

    def but_for_silent(
        self, node: Node, entry: Comparison, loaded: Assembled | Streamed, measured: Measured,
        judged: Judgement, eps: float,
    ) -> Judgement:  # fmt: skip
        """Judge as if the parameters without effect agreed; ``judged`` is the judgement of all that differs.

        What lies before the point where their effect is lost differs by a shift: it is judged without.
        """
        effective = self.known.effective(node, measured.size)
        if effective is None or judged.ratio > SHIFTED:
            return judged
        loaded = whole(loaded)
        if not isinstance(loaded, Assembled | Same):
            return judged
        agreeing = [e for e in effective if not e.diverges]
        noise, floor = self.noise(node, entry), self.floors.get(node)
        judgement = judge_model(measured, eps, agreeing, noise=noise, floor=floor)
        if judgement.ratio <= 1 or isinstance(loaded, Same):
            return judgement
        quiet = without_shift(loaded)
        if quiet is None:
            return judged if judged.ratio > 1 else judgement
        metrics = measure_blocks(quiet.shape, quiet.blocks(), eps=eps)
        left = self._measured(node, quiet, metrics, measured.terms, eps)
        judgement = judge_model(left, eps, agreeing, noise=noise, floor=floor)
        if judgement.ratio <= 1:
            self.known.note_without(node, quiet, measured)
        return judged if judgement.ratio > 1 and judged.ratio > 1 else judgement

    def in_order(
        self, node: Node, entry: Comparison, shape: tuple[int, ...], measured: Measured, whole: Judgement,
        eps: float, pair: StepPair,
    ) -> Judgement:  # fmt: skip
        """Judge a gradient that diverges by what its partial sums may round off, where they are larger."""
        if whole.ratio**2 > measured.length or not measured.size or self.exact:
            return whole  # however its terms are ordered
        larger = growth(entry, shape, pair) * min(measured.terms / measured.size, 1.0)
        if larger <= 1:
            return whole
        summed = replace(measured, length=math.ceil(measured.length * larger**2))
        agreeing = [e for e in self.known.inherits(node, measured.size) if not e.diverges]
        noise, floor = self.noise(node, entry), self.floors.get(node)
        return judge_model(summed, eps, agreeing, noise=noise, floor=floor)

    def without_noise(self, node: Node, entry: Comparison, loaded: Assembled, eps: float) -> Judgement | None:
        """Judge what is left without elements that are given only round-off; None if that diverges too."""
        quiet = None
        with suppress(Unkept):  # of a gradient that is known by its sketch
            quiet = entry.quiet(loaded) if entry.quiet else None
        if quiet is None:
            return None
        metrics = measure_blocks(quiet.shape, quiet.blocks(), eps=eps or EPS["float64"])
        measured = self._measured(node, quiet, metrics, 0.0, eps)
        judgement, _ = self.judge(node, entry, measured, eps, None)
        return judgement if judgement.ratio <= 1 else None


def _recorded_norm(entry: Comparison, loaded: Assembled | Streamed) -> float | None:
    """Return the norm of what a recorded, by its statistics; None where a part of it tells none."""
    norms = [norm_of(item) for item in entry.items_a]
    elements = sum(math.prod(item.entry.local_shape) for item in entry.items_a)
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if len(known) == len(norms) and elements == math.prod(loaded.shape) else None


def _by_statistics(entry: Comparison, loaded: Assembled | Streamed) -> Metrics | None:
    """Return the metrics of two sides that are one recorded tensor, all of it, by its statistics."""
    if isinstance(loaded, Same):
        norm, bad = loaded.norm, loaded.nonfinite
    elif isinstance(loaded, Assembled) and entry.same_bytes and is_one(loaded.a, loaded.b):
        item = entry.items_a[0]
        found, size = norm_of(item), math.prod(item.entry.local_shape)
        if found is None or loaded.a.size != size:
            return None
        norm, bad = found, size - finite_of(item)
    else:
        return None
    return Metrics(
        elements=math.prod(loaded.shape), equal=True, rel_l2=0.0, abs_l2=0.0, norm_a=norm, norm_b=norm,
        max_abs=0.0, nonfinite_a=bad, nonfinite_b=bad,
    )  # fmt: skip
